"""Prompts that rows share: who gets which keys and values, and in how many operations."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bubblespec.engine.kv_cache import SPLIT, KVCache
from bubblespec.engine.pages import Pages

NUM_LAYERS, PAGE, LENGTHS = 3, 8, np.array([19, 5, 16])


def filled(num_slots: int, has_pages: bool) -> KVCache:
    pages = Pages(num_slots, 4 * PAGE, 4 * num_slots, PAGE) if has_pages else None
    cache, generator = KVCache(num_slots, 4 * PAGE, 1, pages), torch.Generator().manual_seed(0)
    if has_pages:
        pages.grow(LENGTHS)
    slot = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    position = np.concatenate([np.arange(length) for length in LENGTHS])
    place = torch.from_numpy(cache.places(slot, position))
    with torch.inference_mode():
        for layer in range(NUM_LAYERS):
            cache.write(layer, place, *torch.randn(2, len(slot), 2, 4, generator=generator))
    return cache


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_pages", [False, True])
def test_shared_positions_equal_the_source(has_pages):
    cache = filled(12, has_pages)
    target = np.array([10, 3, 7, 5])
    source = np.array([0, 1, 2, 0])
    cache.share(source, target, LENGTHS[source])
    for layer in range(NUM_LAYERS):
        for cached in (cache.layers[layer].keys, cache.layers[layer].values):
            for one, other in zip(source.tolist(), target.tolist(), strict=True):
                wanted, got = (
                    cache.read(cached, slice(slot, slot + 1), int(LENGTHS[one]))
                    for slot in (one, other)
                )
                assert wanted.any() and torch.equal(got, wanted)
    if has_pages:  # what a prompt fills is not copied, and what follows it is a row's own
        table, whole = cache.pages.table, LENGTHS[source] // PAGE
        for one, other, count in zip(source, target, whole, strict=True):
            assert (table[one, :count] == table[other, :count]).all()
            assert table[one, count] != table[other, count] or LENGTHS[one] % PAGE == 0


@pytest.mark.parametrize("has_pages", [False, True])
def test_sharing_takes_the_same_operations_for_any_rows(has_pages):
    counts = []
    for num_rows in (1, 60):
        cache = filled(num_rows + len(LENGTHS), has_pages)
        source = np.zeros(num_rows, np.int64)
        with Operations() as operations:
            cache.share(source, source + np.arange(3, num_rows + 3), LENGTHS[source])
        counts.append(len(operations.names))
    assert counts[0] == counts[1] <= 2 * 2 * NUM_LAYERS + 2, operations.names
    if has_pages:  # whole pages are shared without a copy
        with Operations() as operations:
            cache.share(np.array([2]), np.array([4]), np.array([16]))
        assert operations.names == []


def test_invariant_sums_are_split_alike_for_any_tokens():
    cache = KVCache(2, 8, 1)
    assert cache.split_of(1, 5 * SPLIT) == SPLIT < cache.split_of(1000, 5 * SPLIT)
    cache.fixed_q = 4
    assert cache.split_of(1000, 5 * SPLIT) == SPLIT


def test_block_table_is_renewed_at_its_address():
    pages = Pages(2, 8, 6, 2)
    cache = KVCache(2, 8, 1, pages)
    cache._table = cache.block_table(torch.device("cpu")).clone()  # as on a GPU
    for lengths in ([1, 3], [5, 3], [5, 3]):
        pages.grow(np.array(lengths))
        table = cache.block_table(torch.device("cpu"))
        assert table is cache._table and np.array_equal(table.numpy(), pages.table)
        assert not np.shares_memory(table.numpy(), pages.table)
