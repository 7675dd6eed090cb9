"""Transfer of keys and values from single ranks to all ranks together, instead of a new prefill.

Each rank has the keys and values of its own rows, of all heads; in a forward in shards it reads
some heads, but of all rows. Layer by layer the ranks exchange what they have, and each keeps its
heads. They exchange a limited number of positions at a time, as memory is full by then.

Shape legend: R rows of all ranks, n positions of one rank's rows, P ranks.
"""

from typing import cast

import numpy as np
import torch

from bubblespec.engine.packing import to_device
from bubblespec.engine.ragged import ragged
from bubblespec.engine.runner import ModelRunner
from bubblespec.mechanisms.tp_tail.shards import ShardedForward

PIECE_BYTES = 1 << 26  # received by a rank at a time from all ranks


def can_transfer_kv(source: ModelRunner, target: ModelRunner) -> bool:
    """Whether the cache has the key/value heads that shards are cut from; not before a forward."""
    shards, cache = cast(ShardedForward, target.forward), source.cache
    cached = [pair for of in (cache.keys, cache.values) for pair in of.items()]
    has_heads = (shards.num_key_heads[n] == t.shape[2] for n, t in cached if n in shards.key_heads)
    return bool(cached) and all(has_heads)


@torch.inference_mode()
def transfer_kv(
    source: ModelRunner,
    target: ModelRunner,
    slots: np.ndarray,
    counts: np.ndarray,
    rank_of: np.ndarray,
) -> None:
    """Send first positions of rows into the target's first R slots; all ranks call this together.

    slots: int64 [R], of this rank's rows in the source; counts: int64 [R], positions, for which the
    target has room; rank_of: int64 [R], owners of the rows.
    """
    shards, device = cast(ShardedForward, target.forward), source.device
    tp = shards.tp
    own = np.flatnonzero(rank_of == tp.rank)
    row, position = ragged(counts[own])
    here = to_device(source.cache.places(slots[own][row], position), device)
    by_rank = np.argsort(rank_of, kind="stable")  # the order of the exchange
    row, position = ragged(counts[by_rank])
    places = target.cache.places(by_rank[row], position)
    sizes = np.bincount(rank_of, counts, tp.size).astype(np.int64)
    cached = [t for of in (source.cache.keys, source.cache.values) for t in of.values()]
    at_once = max(PIECE_BYTES // (tp.size * max(t[0, 0].nbytes for t in cached)), 1)
    width = min(at_once, int(sizes.max()))  # positions of each rank in a piece
    piece = ragged(sizes)[1] // width
    there = to_device(places[np.argsort(piece, kind="stable")], device).split(
        np.bincount(piece).tolist()
    )

    def of_all_ranks(cached: torch.Tensor, heads: slice, begin: int) -> torch.Tensor:
        """Gather the piece at this position of every rank, [positions, own heads, dimension]."""
        own = cached.flatten(0, 1)[here[begin : begin + width]]
        part = cached.new_zeros(width, *cached.shape[2:])
        part[: len(own)] = own
        parts = zip(tp.gather(part), (sizes - begin).clip(0).tolist(), strict=True)
        return torch.cat([of_rank[:left, heads] for of_rank, left in parts])

    for layer, keys in source.cache.keys.items():
        heads = shards.key_heads.get(layer, slice(None))
        both = keys, source.cache.values[layer]
        for number, of_piece in enumerate(there):
            pair = (of_all_ranks(of, heads, number * width) for of in both)
            target.cache.write(layer, of_piece, *pair)
