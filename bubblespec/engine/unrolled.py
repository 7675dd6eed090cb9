"""The drafter's attention in training, where it goes on from its own estimates at all positions at
once.

In a chain the drafter's first token comes from the policy's hidden states alone, its second from
one estimate behind them, and so on. Pass j over S sequences of T positions computes token j of the
chains that begin j - 1 positions earlier: a query at position i sees the keys of pass 1 up to i -
(j - 1), and then one key of each pass after it, up to its own (the training-time test of EAGLE-3,
arXiv 2503.01840)."""

import torch
from torch.nn.functional import scaled_dot_product_attention


class UnrolledPacking:
    """Of S sequences, each padded to T positions, one after the other. Each forward with it is the
    next pass."""

    def __init__(self, num_sequences: int, length: int, device: torch.device):
        self.shape = (num_sequences, length)
        self.position = torch.arange(length, device=device).repeat(num_sequences)
        self._keys: list[torch.Tensor] = []  # [S, heads, T, D] of each pass, and their values
        self._values: list[torch.Tensor] = []

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float
    ) -> torch.Tensor:
        """query: [N, heads, D]; key, value: [N, key/value heads, D], N = S * T. Returns [N, heads,
        D]."""
        fold = query.shape[1] // key.shape[1]
        query, key, value = (
            t.unflatten(0, self.shape).transpose(1, 2) for t in (query, key, value)
        )
        self._keys.append(key.repeat_interleave(fold, dim=1))
        self._values.append(value.repeat_interleave(fold, dim=1))
        keys, values = torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)
        out = scaled_dot_product_attention(
            query, keys, values, attn_mask=self._mask(query.device), scale=scaling
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, device: torch.device) -> torch.Tensor:
        """bool [T, passes * T]: which keys each query of the latest pass sees."""
        position, passes = torch.arange(self.shape[1], device=device), len(self._keys)
        distance = position[:, None] - position
        # A query in the first positions of a sequence has no chain that began so much earlier; it
        # sees its own key all the same.
        parts = [distance >= passes - 1] + [
            distance == passes - number for number in range(2, passes + 1)
        ]
        return torch.cat(parts, dim=1)
