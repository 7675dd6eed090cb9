"""Transfer of keys and values: what each rank has afterwards, and how much is exchanged at a
time."""

import copy
import math

import numpy as np
import pytest
import torch
from test_tensor_parallel import LONGEST, build

from bubblespec.engine.model import layer_heads
from bubblespec.engine.runner import ModelRunner
from bubblespec.mechanisms.tp_tail import tail
from bubblespec.mechanisms.tp_tail.tail import can_transfer_kv, transfer_kv
from tests.helpers.generation import make_runner
from tests.helpers.tp import run_together

# Rows of three ranks: their ranks, their slots there, and how many positions of each are known.
RANK_OF = np.array([0, 2, 0, 0, 2])
SLOTS = np.array([3, 1, 0, 2, 0])
COUNTS = np.array([17, 40, 1, 0, 5])


def fill(runner: ModelRunner, shapes: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(runner.cache.num_pages * runner.cache.page_size)
    for layer, shape in enumerate(shapes):
        pair = torch.randn(2, len(place), *shape, generator=generator, dtype=torch.float64)
        runner.cache.write(layer, place, *pair)


@pytest.mark.parametrize("name", ["llama", "uneven, tied", "one key/value head"])
@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("piece_bytes", [1 << 26, 3000, 1])
def test_each_rank_gets_own_heads_of_all_rows(monkeypatch, name, page_size, piece_bytes):
    monkeypatch.setattr(tail, "PIECE_BYTES", piece_bytes)
    model = build(name)
    shapes = [(heads.num_keys, heads.key_size) for heads in layer_heads(model.config)]
    position_bytes = 3 * max(map(math.prod, shapes)) * 8  # of three ranks

    def of_rank(tp):
        gathered, gather = [], tp.gather
        own_model = copy.deepcopy(model)
        source = make_runner(own_model, 4, LONGEST, 0, page_size=page_size)
        target = make_runner(own_model, 5, LONGEST, 0, tp=tp, page_size=page_size)
        for runner in (source, target):
            if runner.pages is not None:
                runner.pages.grow(np.full(runner.num_slots, runner.cache.slot_length))
        fill(source, shapes, tp.rank)
        tp.gather = lambda tensor: gathered.append(gather(tensor)) or gathered[-1]
        assert can_transfer_kv(source, target)
        transfer_kv(source, target, np.where(tp.rank == RANK_OF, SLOTS, -1), COUNTS, RANK_OF)
        largest = max(tensor.nbytes for tensor in gathered)
        return source, target, largest, len(gathered)

    ranks = run_together(3, of_rank)
    for _, target, largest, count in ranks:
        assert largest <= max(piece_bytes, position_bytes)
        pieces = -(-45 // max(piece_bytes // position_bytes, 1))  # of rank 2, which has the most
        assert count == 2 * len(shapes) * pieces
        for row, (rank, slot, length) in enumerate(zip(RANK_OF, SLOTS, COUNTS, strict=True)):
            owner = ranks[rank][0].cache
            for layer in owner.layers:
                heads = target.forward.key_heads
                for kind in ("keys", "values"):
                    there, here = (getattr(of.layers[layer], kind) for of in (target.cache, owner))
                    got = target.cache.read(there, slice(row, row + 1), int(length))[0]
                    wanted = owner.read(here, slice(slot, slot + 1), int(length))[0, :, heads]
                    assert torch.equal(got, wanted)
