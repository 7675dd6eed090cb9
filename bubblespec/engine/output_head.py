"""The output head: from hidden states to logits, the same for sampling, training, drafter and
shards.

Between the product with the head's weight and the logits, models multiply by a constant (Cohere,
Granite) and cap by a tanh (Gemma): cap * tanh(factor * product / cap). The names of these constants
differ between families, and Granite divides by the constant by which HyperCLOVAX multiplies. So
`find_head` reads no names: it hands the model's own forward a product of its choice, sees what
logits become of it, and refuses a model that does anything else there.

The first `num_tokens` columns are the policy's vocabulary. The weight may have more rows, to make
their number a multiple, and without a token behind them they must be neither sampled nor learned.
They are cut from the product, not from the weight: all kernels keep their shapes, and it is free.

Shape legend: N positions, V rows of the weight, T tokens checked.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

SMALL, LARGE = 2.0**-40, 2.0**60  # products that no cap changes, and that every cap does
ROUNDING = 1e-5  # some models compute logits in float32, whatever their type


@dataclass(frozen=True)
class OutputHead:
    """Logits [N, num_tokens] of hidden states [N, hidden]."""

    linear: torch.nn.Module
    """Head of the model, a product with a weight [V, hidden]."""
    num_tokens: int
    """Size of the policy's vocabulary, at most V."""
    factor: float = 1.0
    cap: float | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(self.linear(hidden))

    def logits(self, product: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole product [N, V]."""
        if self.num_tokens < product.shape[-1]:
            product = product[..., : self.num_tokens]
        return self.finish(product)

    def finish(self, product: torch.Tensor) -> torch.Tensor:
        """Return the logits of some columns of the product."""
        if self.factor != 1.0:
            product = product * self.factor
        return product if self.cap is None else self.cap * torch.tanh(product / self.cap)


def output_head(model: PreTrainedModel) -> OutputHead:
    """Return the head that `prepare_model` has found."""
    return model.to_logits


def own_forward(model: PreTrainedModel, part: PreTrainedModel, tokens: torch.Tensor):
    """Return the output of the model's own forward of tokens [T], or of its base model's. part:
    which of the two. Raises ValueError if it fails."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        return part(input_ids=tokens[None], use_cache=False)
    except Exception as error:
        raise ValueError(f"its own forward fails even without the engine: {error}") from error


@torch.no_grad()
def find_head(
    model: PreTrainedModel, tokens: torch.Tensor, num_tokens: int | None = None
) -> OutputHead:
    """Find out what the model makes of its head's product. tokens: [T] to run its own forward on;
    num_tokens: None for all V. Raises ValueError for what is no `OutputHead`."""
    linear, products, calls = model.get_output_embeddings(), [], []

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
