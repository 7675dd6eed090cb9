"""Forwards of the copy for rows of an engine, over the engine's own keys and values.

A draft token's keys and values are written where the row's next tokens belong. The policy's forward
that verifies the token writes them again, and nothing else reads them: so there is no second cache
and no prefill, and a rejected token leaves nothing behind (QSpec, Zhao et al. 2024, arXiv
2410.11305, shares the cache in the same way).

Tokens are drawn with the noise that the row itself will use, among the CANDIDATES best, whose
logits are computed by the policy's own head: in 8 bits it would cause a third of all wrong tokens.

Shape legend: M rows that draft, C candidates.
"""

from typing import cast

import numpy as np
import torch

from bubblespec.draft.chain_runner import ChainRunner
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.decoder import Decoder
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.model import OutputHead, output_head
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import widen
from bubblespec.engine.weights import linear_of
from bubblespec.mechanisms.quantized.copy import Copy

CANDIDATES = 256  # tokens, whose noise is computed: the others hardly ever win


class CopyForward(ModelForward):
    """The forward of a copy."""

    def __init__(self, copy: Copy, **options):
        self.copy = copy
        super().__init__(copy.model, **options)

    def make_decoder(self) -> Decoder:
        """Return the policy's decoder with the copy's products."""
        return Decoder(self.copy.model, self.copy.product_of)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the copy's logits [T, V] of hidden states [T, hidden]."""
        return self.copy.head(hidden)


class CopyRunner(ChainRunner):
    """The copy's part of an engine, in the cache of the policy."""

    reads_states = False

    def __init__(self, copy: Copy, engine: Engine, params: SamplingParams):
        """params: of the engine's rows."""
        runner = cast(ModelRunner, engine.runner)
        policy = runner.forward
        forward = CopyForward(copy, enforce_eager=policy.is_eager, memory=policy.memory)
        super().__init__(engine, params, forward, runner.cache, runner.num_slots)
        self.copy = copy
        self.num_candidates = min(CANDIDATES, copy.head.num_tokens)

    @torch.inference_mode()
    def draw(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        try:
            return super().draw(slots, number, tokens)
        except Exception:  # what was written is masked, but must be finite: see `KVCache`
            start = self.engine.length[slots] - 1 + number
            self.cache.erase(self.pack(slots, start, np.ones_like(start)).place)
            raise

    def candidates(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        start = self.engine.length[slots] - 1 + number
        hidden = self.feed(tokens, slots, start, np.ones_like(start))
        ids = widen(self.forward.logits(hidden)).topk(self.num_candidates).indices
        return exact_logits(output_head(self.runner.model), hidden, ids), ids, len(tokens)


def exact_logits(head: OutputHead, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the policy's own logits [M, C] of the tokens int64 [M, C] for states [M, hidden]."""
    linear = linear_of(head.linear)
    product = torch.bmm(linear.weight[ids], hidden[:, :, None])[:, :, 0]
    return widen(head.finish(product if linear.bias is None else product + linear.bias[ids]))
