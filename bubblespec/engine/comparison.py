"""One comparison for all forwards: two ways to compute the same of a model's random tokens.

Packed training and generation (model_checks.py), kernels, graphs and shards are compared so.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.ops import ops_for, torch_ops
from bubblespec.engine.packing import LANES, PAGE, CachePacking, pack_rows
from bubblespec.engine.pages import Pages

Compute = Callable[[torch.Tensor], torch.Tensor]  # hidden states or logits of token ids int64 [N]
Hidden = Callable[[torch.Tensor, CachePacking], torch.Tensor]  # see `ModelForward.hidden`
CHECKED = 12  # positions compared in each check


def difference(
    model: PreTrainedModel, length: int, got: Compute, wanted: Compute, in_float32: bool = True
) -> str | None:
    """Return by how much two ways to compute the same of random tokens differ beyond rounding.

    in_float32: whether a float64 model may compute parts in float32."""
    ids = random_tokens(model, length)
    found, reference = got(ids), wanted(ids)
    scale = reference.abs().max().clamp(min=torch.finfo(reference.dtype).tiny)
    size = ((found - reference).abs().max() / scale).item()
    tolerance = {torch.float64: 1e-6 if in_float32 else 1e-9, torch.float32: 2e-3}
    is_rounding = size <= tolerance.get(model.dtype, 0.1)
    return None if is_rounding else f"{size:.1e} of their size"


def random_tokens(model: PreTrainedModel, length: int) -> torch.Tensor:
    """Return token ids [length] to check a model on, the same at every call."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (length,), generator=generator).to(model.device)


def cache_for(model: PreTrainedModel, length: int) -> KVCache:
    """Create a cache of two rows, as the engine's: on a GPU with pages, and a spare one."""
    if ops_for(model.device, model.dtype) is torch_ops:
        return KVCache(2, -(-length // LANES) * LANES)
    pages = Pages.for_rows(2, length, PAGE)
    return KVCache(2, pages.slot_length, 1, pages)


@torch.inference_mode()
def over_cache(hidden: Hidden, cache: KVCache, ids: torch.Tensor) -> torch.Tensor:
    """Return hidden states [2, N, width] of two rows of the same tokens, fed as an engine does.

    Rows are ragged and come in two chunks; at last one token of one row is fed."""
    counts = [len(ids) - 3, 1], [2, len(ids) - 1], [1]
    fed = list(feed(hidden, cache, ids.expand(2, -1), counts))
    index = np.concatenate([packing.index for packing, _ in fed], axis=1)
    order = torch.from_numpy(np.lexsort(index[::-1]))  # by rows, then positions
    return torch.cat([states for _, states in fed])[order].view(2, len(ids), -1)


def feed(
    hidden: Hidden, cache: KVCache, ids: torch.Tensor, counts: Sequence
) -> Iterator[tuple[CachePacking, torch.Tensor]]:
    """Feed rows of ids [R, L] from their beginning; yield each forward and its hidden states.

    counts: how many tokens each forward feeds of the first rows."""
    start = np.zeros(len(ids), np.int64)
    for count in counts:
        packing = pack_rows(cache, start[: len(count)].copy(), np.asarray(count), ids.device)
        tokens = ids[tuple(torch.from_numpy(packing.index).to(ids.device))]
        # A replayed graph pads its states, and the next one overwrites them.
        yield packing, hidden(tokens, packing)[: len(tokens)].clone()
        start[: len(count)] += count
