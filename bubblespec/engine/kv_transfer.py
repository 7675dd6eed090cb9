"""Transfer of keys and values from the engines of single ranks to that of all ranks together, so
that rows need not be prefilled again.

Each rank has the keys and values of its own rows, of all heads; in a forward in shards it looks at
some heads, but at all rows. Layer by layer the ranks exchange what they have, and each keeps its
heads.

Shape legend: R rows of all ranks, n positions of one rank's rows, P ranks.
"""

import numpy as np
import torch

from bubblespec.engine.packing import to_device
from bubblespec.engine.ragged import ragged
from bubblespec.engine.runner import ModelRunner


def can_transfer_kv(source: ModelRunner, target: ModelRunner) -> bool:
    """Whether all layers in shards have cached the key/value heads that their shards are cut from.
    False before the source's first forward, too."""
    shards, cache = target.shards, source.cache
    cut = [
        of[layer] for of in (cache.keys, cache.values) for layer in of if layer in shards.key_heads
    ]
    return bool(cache.keys) and all(t.shape[2] == shards.num_key_heads for t in cut)


@torch.inference_mode()
def transfer_kv(
    source: ModelRunner,
    target: ModelRunner,
    slots: np.ndarray,
    counts: np.ndarray,
    rank_of: np.ndarray,
) -> None:
    """The keys and values of the first positions of rows into the first R slots of the target. All
    ranks call it together.

    slots: int64 [R], in the source, of rows that this rank owns; counts: int64 [R], positions, for
    which the target has room; rank_of: int64 [R], whose row each is.
    """
    tp, device = target.shards.tp, source.device
    own = np.flatnonzero(rank_of == tp.rank)
    row, position = ragged(counts[own])
    here = to_device(source.cache.places(slots[own][row], position), device)
    by_rank = np.argsort(rank_of, kind="stable")  # the order of what is exchanged
    row, position = ragged(counts[by_rank])
    there = to_device(target.cache.places(by_rank[row], position), device)
    sizes = np.bincount(rank_of, counts, tp.size).astype(np.int64).tolist()

    def of_all_ranks(cached: torch.Tensor, heads: slice) -> torch.Tensor:
        """[all positions, own heads, dimension] from [pages, page size, heads, dimension]."""
        part = cached.new_zeros(max(sizes), *cached.shape[2:])
        part[: len(here)] = cached.flatten(0, 1)[here]
        parts = zip(tp.gather(part), sizes, strict=True)
        return torch.cat([of_rank[:size, heads] for of_rank, size in parts])

    for layer, keys in source.cache.keys.items():
        heads = target.shards.key_heads.get(layer, slice(None))
        pair = (of_all_ranks(of, heads) for of in (keys, source.cache.values[layer]))
        target.cache.write(layer, there, *pair)
