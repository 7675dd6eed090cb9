"""What the operations of a decoder take and return, on every device.

Shape legend: N tokens, S sequences, T positions to sample.
"""

from typing import NamedTuple

import torch

TILE = 64  # most rows, tokens times query heads of a key/value head, that a GPU attends together


class Norm(NamedTuple):
    """An RMSNorm: x / sqrt(mean(x^2) + eps) in at least float32, rounded, times the weight.

    With an offset the factor is 1 + weight, and only the result is rounded (Gemma, Qwen3.5)."""

    weight: torch.Tensor
    eps: float
    epsilon: torch.Tensor  # eps, float32 or float64 []: a CPU converts numbers slowly
    has_offset: bool = False


class AttentionMetadata(NamedTuple):
    """Where the N new tokens of S sequences belong in the cache.

    A row with more than `max_q` tokens is several sequences. A token sees the keys up to its
    position, and tokens behind the last sequence get arbitrary results."""

    place: torch.Tensor  # int32 or int64 [N], page * page_size + offset of each token's key
    position: torch.Tensor  # int64 or int32 [N], of each token in its row
    first: torch.Tensor  # int32 [S + 1], offset of each sequence's new tokens
    slot: torch.Tensor  # int32 [S], row of `table` of each sequence
    table: torch.Tensor  # int32 [slots + 1, pages of a slot + 1], the last column is spare
    max_q: int  # bounds on the new tokens of a sequence, and on its keys
    max_keys: int
    split: int  # keys that are summed at once; like max_q it may change a token's last bits


class RowState(NamedTuple):
    """Rows on a device, and what a step's kernels exchange; int32, at fixed addresses."""

    tokens: torch.Tensor  # [slots, max_length]
    state: torch.Tensor  # [4, slots]: tokens, of the prompt, and at the row's end; whether it ended
    counters: torch.Tensor  # [slots, 4], of the noise at a row's first response position
    plan: torch.Tensor  # see `step_graphs.packed`
    standing: torch.Tensor  # [3, slots], of each row fed: first position, draft tokens, tokens fed
    behind: torch.Tensor  # [T or more], tokens of the forward behind which it samples
    words: torch.Tensor  # [T or more, 4], counters of the noise there
    generated: torch.Tensor  # [T or more], response tokens before
    drawn: torch.Tensor  # float64 [2 * T or more], results of graphs of sampling
