"""What a model computes, found out by trial: at the start of a run, or of a mechanism.

Two ways to compute the same of random tokens are compared here, all of them: packed training and
generation (model_checks.py), kernels, graphs and shards. What a model makes of its output head's
product is found by handing its forward a product.

Shape legend: N positions, V rows of the head's weight, T tokens checked.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.attention import own_modules
from bubblespec.engine.kv_cache import LANES, PAGE, CachePacking, KVCache, pack_rows
from bubblespec.engine.model import OutputHead, state_layers
from bubblespec.engine.ops import ops_for, torch_ops
from bubblespec.engine.pages import Pages
from bubblespec.engine.states import StateCache

Compute = Callable[[torch.Tensor], torch.Tensor]  # hidden states or logits of token ids int64 [N]
Hidden = Callable[[torch.Tensor, CachePacking], torch.Tensor]  # see `ModelForward.hidden`
CHECKED = 12  # positions compared in each check
SMALL, LARGE = 2.0**-40, 2.0**60  # products that no cap changes, and that every cap does
ROUNDING = 1e-5  # some models compute logits in float32, whatever their type


def difference(
    model: PreTrainedModel, length: int, got: Compute, wanted: Compute, in_float32: bool = True
) -> str | None:
    """Return by how much two ways to compute the same of random tokens differ beyond rounding.

    in_float32: whether a float64 model may compute parts in float32."""
    ids = random_tokens(model, length)
    found, reference = got(ids), wanted(ids)
    scale = reference.abs().max().clamp(min=torch.finfo(reference.dtype).tiny)
    size = ((found - reference).abs().max() / scale).item()
    in_double = 1e-9 if not in_float32 else 1e-5 if state_layers(model) else 1e-6
    tolerance = {torch.float64: in_double, torch.float32: 2e-3}
    is_rounding = size <= tolerance.get(model.dtype, 0.1)
    return None if is_rounding else f"{size:.1e} of their size"


def random_tokens(model: PreTrainedModel, length: int) -> torch.Tensor:
    """Return token ids [length] to check a model on, the same at every call."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (length,), generator=generator).to(model.device)


def cache_for(model: PreTrainedModel, length: int) -> KVCache:
    """Create a cache of two rows, as the engine's: on a GPU with pages, and a spare one."""
    states = StateCache.of_layers(state_layers(model), 2, model.device, model.dtype)
    if ops_for(model.device, model.dtype) is torch_ops:
        return KVCache(2, -(-length // LANES) * LANES, states=states)
    pages = Pages.for_rows(2, length, PAGE)
    return KVCache(2, pages.slot_length, 1, pages, states=states)


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


def own_forward(model: PreTrainedModel, part: torch.nn.Module, tokens: torch.Tensor):
    """Return the output of `part`'s own forward on tokens [T]; raise ValueError if it fails."""
    try:
        with own_modules(model):
            return part(input_ids=tokens[None], use_cache=False)
    except Exception as error:
        raise ValueError(f"its own forward fails even without the engine: {error}") from error


@torch.no_grad()
def find_head(
    model: PreTrainedModel, tokens: torch.Tensor, num_tokens: int | None = None
) -> OutputHead:
    """Find out what the model makes of its head's product, for its first num_tokens of V columns.

    tokens: [T] to run its own forward on. Raises ValueError for what is no `OutputHead`."""
    linear, products, calls = model.get_output_embeddings(), list[torch.Tensor](), []

    def replace(module, args, output: torch.Tensor) -> torch.Tensor:
        calls.append(output)
        if not products:
            products.append(_probe(output.shape[-2:]).to(output.device))
        return products[0].expand(output.shape).clone()

    handle = linear.register_forward_hook(replace)
    try:
        logits = own_forward(model, model, tokens).logits[0]
    finally:
        handle.remove()
    if len(calls) != 1:
        raise ValueError(
            "its forward does not call its output head exactly once, so the engine cannot "
            "reproduce its logits"
        )
    (product,), logits = products, logits.double()
    if logits.shape == product.shape:
        factor, largest = logits[0, 0].item() / SMALL, logits[1, 0].abs().item()
        head = OutputHead(
            linear,
            min(num_tokens or product.shape[1], product.shape[1]),
            1.0 if abs(factor - 1.0) < ROUNDING else factor,
            largest if largest < 0.5 * abs(factor) * LARGE else None,
        )
        if torch.isclose(head.finish(product), logits, rtol=ROUNDING, atol=0.0).all():
            return head
    raise ValueError(
        "its logits are not its output head's product times a constant, optionally capped by "
        "tanh; the engine computes nothing else there"
    )


def _probe(shape: torch.Size) -> torch.Tensor:
    """Products float64 [T, V]: SMALL ones, LARGE ones, then of all sizes and both signs."""
    generator, count = torch.Generator().manual_seed(0), shape[1]
    uniform = torch.rand(shape[0] - 2, count, generator=generator, dtype=torch.float64)
    sign = 1.0 - 2.0 * torch.randint(2, uniform.shape, generator=generator)
    rows = [torch.full((1, count), size, dtype=torch.float64) for size in (SMALL, LARGE)]
    return torch.cat((*rows, sign * torch.exp2(32.0 * uniform - 20.0)))
