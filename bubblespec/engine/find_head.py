"""What a model makes of its output head's product, found by handing its forward a product.

Shape legend: N positions, V rows of the weight, T tokens checked.
"""

import torch
from transformers import PreTrainedModel

from bubblespec.engine.output_head import OutputHead

SMALL, LARGE = 2.0**-40, 2.0**60  # products that no cap changes, and that every cap does
ROUNDING = 1e-5  # some models compute logits in float32, whatever their type


def own_forward(model: PreTrainedModel, part: torch.nn.Module, tokens: torch.Tensor):
    """Return the output of `part`'s own forward on tokens [T]; raise ValueError if it fails."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
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
