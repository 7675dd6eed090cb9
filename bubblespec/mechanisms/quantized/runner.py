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

from bubblespec.engine.decoder import Decoder
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward, SlotFollower
from bubblespec.engine.graphs import ForwardGraphs
from bubblespec.engine.noise import add_gumbel
from bubblespec.engine.output_head import OutputHead, output_head
from bubblespec.engine.packing import CachePacking, pack_rows, to_device, to_host
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams, widen
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


class CopyRunner(SlotFollower):
    """The copy's part of an engine; with graphs a follower of its runner."""

    reads_states = False

    def __init__(self, copy: Copy, engine: Engine, params: SamplingParams):
        """params: of the engine's rows."""
        self.copy, self.engine, self.params = copy, engine, params
        self.num_candidates = min(CANDIDATES, copy.head.num_tokens)
        self.runner = runner = cast(ModelRunner, engine.runner)
        policy = cast(ModelForward, runner.forward)
        self.forward = CopyForward(copy, enforce_eager=policy.is_eager, memory=policy.memory)
        self.graphs: ForwardGraphs | None = None
        if runner.graphs is not None:
            self.graphs = ForwardGraphs(self.forward, runner.cache, runner.num_slots)

    def release(self) -> None:
        """Forget the graphs, which know the cache by its addresses."""
        if self.graphs is not None:
            self.graphs.clear()

    @torch.inference_mode()
    def draw(
        self, slots: np.ndarray, start: np.ndarray, tokens: np.ndarray, generated: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Feed a token to each of some rows, and draw the next; all int64 [M], slots ascending.

        Returns the tokens drawn, int64 [M], and by how much each has won, float [M], in units of
        logits over the temperature. start: positions before the token; generated: response tokens
        up to it. The host waits for the device once. Raises ValueError for what is no number."""
        runner = self.runner
        starts, counts = np.zeros((2, int(slots[-1]) + 1), np.int64)
        starts[slots], counts[slots] = start, 1
        packing = pack_rows(runner.cache, starts, counts, runner.device)
        try:
            found, by = to_host(*self._draw(packing, slots, tokens, generated))
            if np.isnan(by).any():
                raise ValueError("its logits are not numbers")
        except Exception:  # what was written is masked, but must be finite: see `KVCache`
            runner.cache.erase(packing.place)
            raise
        return found.astype(np.int64), by

    def _draw(
        self, packing: CachePacking, slots: np.ndarray, tokens: np.ndarray, generated: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        runner = self.runner
        hidden = self.graphs.forward(tokens, packing) if self.graphs is not None else None
        if hidden is None:
            hidden = self.forward.hidden(to_device(tokens, runner.device), packing)
        hidden = hidden[: len(tokens)]
        ids = widen(self.forward.logits(hidden)).topk(self.num_candidates).indices
        logits = exact_logits(output_head(runner.model), hidden, ids)
        position = to_device(generated, runner.device)
        keys = runner.noise_keys(slots, generated)
        return draw_among(logits, ids, keys, position, self.params)


def exact_logits(head: OutputHead, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the policy's own logits [M, C] of the tokens int64 [M, C] for states [M, hidden]."""
    linear = linear_of(head.linear)
    product = torch.bmm(linear.weight[ids], hidden[:, :, None])[:, :, 0]
    return widen(head.finish(product if linear.bias is None else product + linear.bias[ids]))


def draw_among(
    logits: torch.Tensor,
    ids: torch.Tensor,
    keys: torch.Tensor,
    num_generated: torch.Tensor,
    params: SamplingParams,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from each row of C tokens with its noise, int64 [M], as `sampling.sample` does from all.

    Also return by how much the token wins against the second, float [M]. logits, ids: [M, C]; keys:
    int32 [M, 4]; num_generated: int64 [M], response tokens before."""
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    if params.stop_token_ids and params.min_length > 0:
        is_stop = torch.isin(ids, to_device(np.array(params.stop_token_ids), ids.device))
        too_early = num_generated[:, None] < params.min_length
        logits = logits.masked_fill(is_stop & too_early, float("-inf"))
    if params.top_k or params.top_p < 1.0:
        logits, order = logits.sort(descending=True)
        ids = ids.gather(-1, order)
        dropped = torch.zeros_like(logits, dtype=torch.bool)
        if params.top_k:
            dropped[:, params.top_k :] = True
        chance = logits.masked_fill(dropped, float("-inf")).softmax(-1)
        dropped |= chance.cumsum(-1) - chance >= params.top_p
        logits = logits.masked_fill(dropped, float("-inf"))
    if params.temperature > 0.0:
        logits = add_gumbel(logits, keys, ids.int())
    best = logits.topk(2)
    return ids.gather(-1, best.indices[:, :1])[:, 0], best.values[:, 0] - best.values[:, 1]
