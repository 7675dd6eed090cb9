"""What the attention of a layer computes, and the softmax of it in torch.

Shape legend: R rows, H query heads, Q queries of a row, L keys of a row, D head dimension, E that
of values.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention


class AttentionOptions(NamedTuple):
    """Scores of queries and keys, and the keys up to a query's own that it sees."""

    scaling: float
    window: int | None = None  # positions that a query sees, its own included
    cap: float | None = None  # a score s becomes cap * tanh(s / cap) (Gemma 2)
    sinks: torch.Tensor | None = None  # [H], the score of a key without a value (gpt-oss)
    chunk: int | None = None  # queries see keys of their own chunk of so many positions (Llama 4)

    @property
    def has_plain_scores(self) -> bool:
        """Whether SDPA computes the softmax."""
        return self.cap is None and self.sinks is None

    @property
    def has_only_a_window(self) -> bool:
        """Whether the options are what kernels of training and written-out layers compute."""
        return self.has_plain_scores and self.chunk is None

    def first_key(self, position: torch.Tensor) -> torch.Tensor:
        """Return the first position that queries at these positions see; may be negative."""
        first = torch.zeros_like(position)
        if self.window is not None:
            first = position + 1 - self.window
        if self.chunk is not None:
            first = torch.maximum(first, position // self.chunk * self.chunk)
        return first


def attend_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return the attention [R, H, Q, E] of queries [R, H, Q, D] over as many heads of keys.

    mask: additive, or whether a query sees a key. SDPA computes what it can. Sinks of several query
    heads that are folded into the queries of one head lie one after another."""
    if options.has_plain_scores:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=options.scaling
        )
    score = query @ key.mT * options.scaling
    if options.cap is not None:
        score = options.cap * torch.tanh(score / options.cap)
    if is_causal:
        mask = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).tril()
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        score = score.masked_fill(~mask, float("-inf")) if is_bool else score + mask
    if options.sinks is not None:
        heads, queries = score.shape[1:3]
        folded = options.sinks.to(score.dtype).view(heads, -1, 1)
        sinks = folded.repeat_interleave(queries // folded.shape[1], 1)
        score = torch.cat((score, sinks.expand(*score.shape[:-1], 1)), -1)
    wide = torch.promote_types(score.dtype, torch.float32)
    weight = score.softmax(-1, dtype=wide).to(value.dtype)[..., : key.shape[-2]]
    return weight @ value
