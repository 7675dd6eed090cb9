"""Transfer of keys and values from the engines of single ranks to the engine of the TP tail, so
that rows need not be prefilled again.

Each rank has the keys and values of its own rows, of all heads; a forward in shards needs some
heads, but of all rows. Layer by layer the ranks exchange keys and values, and each keeps its heads.
Memory is full by then, so they exchange a limited number of positions at a time.

Shape legend: R rows of all ranks, n positions of one rank's rows, P ranks.
"""

import numpy as np
import torch

from bubblespec.engine.batch import Runner
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.packing import to_device
from bubblespec.engine.ragged import ragged
from bubblespec.engine.runner import ModelRunner
from bubblespec.mechanisms.tp_tail.shards import ShardedForward

PIECE_BYTES = 1 << 26  # that a rank receives at a time from all ranks together


def _parts(source: Runner, target: Runner) -> tuple[KVCache, KVCache, ShardedForward]:
    """Return the caches of both runners, and the forward of the target."""
    assert isinstance(source, ModelRunner) and isinstance(target, ModelRunner)
    assert isinstance(target.forward, ShardedForward)
    return source.cache, target.cache, target.forward


def can_transfer_kv(source: Runner, target: Runner) -> bool:
    """Whether all layers in shards have cached the key/value heads that their shards are cut from.

    False before the source's first forward, too.
    """
    cache, _, shards = _parts(source, target)
    cut = [
        of[layer] for of in (cache.keys, cache.values) for layer in of if layer in shards.key_heads
    ]
    return bool(cache.keys) and all(t.shape[2] == shards.num_key_heads for t in cut)


@torch.inference_mode()
def transfer_kv(
    source: Runner,
    target: Runner,
    slots: np.ndarray,
    counts: np.ndarray,
    rank_of: np.ndarray,
) -> None:
    """Write keys and values of rows into the first R slots of the target, on all ranks together.

    slots: int64 [R], in the source, of rows that this rank owns; counts: int64 [R], positions of
    each row; rank_of: int64 [R], owner of each row.
    """
    own_cache, cache, shards = _parts(source, target)
    tp, device = shards.tp, shards.model.device
    own = np.flatnonzero(rank_of == tp.rank)
    row, position = ragged(counts[own])
    here = to_device(own_cache.places(slots[own][row], position), device)
    by_rank = np.argsort(rank_of, kind="stable")  # the order of the exchange
    row, position = ragged(counts[by_rank])
    places = cache.places(by_rank[row], position)
    sizes = np.bincount(rank_of, counts, tp.size).astype(np.int64)
    cached = [t for of in (own_cache.keys, own_cache.values) for t in of.values()]
    at_once = max(PIECE_BYTES // (tp.size * max(t[0, 0].nbytes for t in cached)), 1)
    width = min(at_once, int(sizes.max()))  # positions of each rank in a piece
    piece = ragged(sizes)[1] // width
    there = to_device(places[np.argsort(piece, kind="stable")], device).split(
        np.bincount(piece).tolist()
    )

    def of_all_ranks(cached: torch.Tensor, heads: slice, begin: int) -> torch.Tensor:
        """Gather the piece that begins at this position of every rank, [positions, own heads,
        dimension], from [pages, page size, heads, dimension]."""
        own = cached.flatten(0, 1)[here[begin : begin + width]]
        part = cached.new_zeros(width, *cached.shape[2:])
        part[: len(own)] = own
        parts = zip(tp.gather(part), (sizes - begin).clip(0).tolist(), strict=True)
        return torch.cat([of_rank[:left, heads] for of_rank, left in parts])

    for layer, keys in own_cache.keys.items():
        heads = shards.key_heads.get(layer, slice(None))
        both = keys, own_cache.values[layer]
        for number, of_piece in enumerate(there):
            pair = (of_all_ranks(of, heads, number * width) for of in both)
            cache.write(layer, of_piece, *pair)
