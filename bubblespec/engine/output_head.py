"""The output head, from hidden states to logits, for sampling, training, drafter and shards.

Between the product with the head's weight and the logits, models multiply by a constant (Cohere,
Granite) and cap by a tanh (Gemma): cap * tanh(factor * product / cap). The names of these constants
differ between families, and Granite divides by the constant by which HyperCLOVAX multiplies. So
they are found by trial (find_head.py), and a model that does anything else there is refused.

The first `num_tokens` columns are the policy's vocabulary. Further rows of the weight, which make
their number a multiple, have no token. They are cut from the product, not from the weight: all
kernels keep their shapes.

Shape legend: N positions, V rows of the weight.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class OutputHead:
    """Logits [N, num_tokens] of hidden states [N, hidden]."""

    linear: Any  # the model's, or of a copy: a product with a weight [V, hidden]
    num_tokens: int  # size of the policy's vocabulary, at most V
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
    return cast(OutputHead, model.to_logits)
