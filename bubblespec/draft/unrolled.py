"""Attention of the unrolled drafter: all chains of a batch, one token of each per forward.

Shape legend: S sequences, T their padded positions, N = S * T, D size of a head.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


class UnrolledPacking:
    """S sequences, each padded to T positions, one after the other. Each forward with it is the
    next pass.

    Pass j computes token j of the chains that began j - 1 positions earlier: a query at position i
    sees the keys of pass 1 up to i - (j - 1), and then one key of each later pass up to its own
    (training-time test of EAGLE-3, arXiv 2503.01840).
    """

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
        # Queries at the start of a sequence, whose chain would have begun before it, see their own
        # key only.
        position, passes = torch.arange(self.shape[1], device=query.device), len(self._keys)
        distance = position[:, None] - position
        later = [distance == passes - number for number in range(2, passes + 1)]
        mask = torch.cat([distance >= passes - 1, *later], dim=1)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1)
