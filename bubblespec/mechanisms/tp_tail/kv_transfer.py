"""Transfer of keys and values from single ranks to all ranks together, instead of a new prefill.

Each rank has the keys and values of its own rows, of all heads; in a forward in shards it reads
some heads, but of all rows. Layer by layer the ranks exchange what they have, and each keeps its
heads. They exchange a limited number of positions at a time, as memory is full by then.

Shape legend: R rows of all ranks, n positions of one rank's rows, P ranks.
"""

from typing import cast

import numpy as np
import torch

from bubblespec.engine.arrays import ragged, to_device
from bubblespec.engine.runner import ModelRunner
from bubblespec.mechanisms.tp_tail.shards import ShardedForward

PIECE_BYTES = 1 << 26  # received by a rank at a time from all ranks


def can_transfer_kv(source: ModelRunner, target: ModelRunner) -> bool:
    """Whether the cache has the key/value heads that shards are cut from; not before a forward."""
    shards, layers = cast(ShardedForward, target.forward), source.cache.layers.values()
    counts = {of.shape[2] for own in layers for of in (own.keys, own.values)}
    return counts == {shards.num_key_heads}


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
    layers = source.cache.layers
    largest = max(of[0, 0].nbytes for own in layers.values() for of in (own.keys, own.values))
    at_once = max(PIECE_BYTES // (tp.size * largest), 1)
    width = min(at_once, int(sizes.max()))  # positions of each rank in a piece
    piece = ragged(sizes)[1] // width
    there = to_device(places[np.argsort(piece, kind="stable")], device).split(
        np.bincount(piece).tolist()
    )

    def of_all_ranks(cached: torch.Tensor, heads: slice, begin: int) -> torch.Tensor:
        """Gather the piece at this position of every rank, [positions, own heads, dimension]."""
        own = cached[source.cache.locate(here[begin : begin + width])]
        part = cached.new_zeros(width, *cached.shape[2:])
        part[: len(own)] = own
        parts = zip(tp.gather(part), (sizes - begin).clip(0).tolist(), strict=True)
        return torch.cat([of_rank[:left, heads] for of_rank, left in parts])

    for layer, own_cache in layers.items():
        both = own_cache.keys, own_cache.values
        for number, of_piece in enumerate(there):
            pair = (of_all_ranks(of, shards.key_heads, number * width) for of in both)
            target.cache.write(layer, of_piece, *pair)
