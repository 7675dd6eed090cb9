"""Forwards of the copy for rows of an engine, over the engine's own keys and values.

A draft token's keys and values are written where the row's next tokens belong. The policy's forward
that verifies the token writes them again, and nothing else reads them: so there is no second cache
and no prefill, and a rejected token leaves nothing behind (QSpec, Zhao et al. 2024, arXiv
2410.11305, shares the cache in the same way).

Tokens are drawn with the noise that the row itself will use, among the CANDIDATES best.

Shape legend: M rows that draft, C candidates.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward, SlotFollower
from bubblespec.engine.graphs import ForwardGraphs
from bubblespec.engine.noise import add_gumbel
from bubblespec.engine.output_head import output_head
from bubblespec.engine.packing import pack_rows, to_device
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams, scale_and_restrict, widen
from bubblespec.mechanisms.quantized.copy import Copy
from bubblespec.mechanisms.quantized.lean import LeanForward, is_lean

CANDIDATES = 256  # tokens, whose noise is computed: the others hardly ever win


class CopyRunner(SlotFollower):
    """The copy's part of an engine."""

    def __init__(self, copy: Copy, engine: Engine, params: SamplingParams):
        """params: of the engine's rows."""
        self.copy, self.engine, self.params = copy, engine, params
        self.runner = runner = cast(ModelRunner, engine.runner)
        policy = cast(ModelForward, runner.forward)
        options: dict[str, Any] = {"kernel": policy.kernel, "enforce_eager": policy.is_eager}
        options["memory"] = policy.memory
        if runner.device.type == "cpu" and is_lean(runner.model, copy.parts):
            self.forward: ModelForward = LeanForward(
                runner.model, copy.parts, output_head(copy.model), **options
            )
        else:
            self.forward = ModelForward(copy.model, **options)
        self.graphs: ForwardGraphs | None = None
        if runner.graphs is not None:
            self.graphs = ForwardGraphs(self.forward, runner.cache, runner.num_slots)
            runner.followers.append(self)

    @contextlib.contextmanager
    def sampling(self, params: SamplingParams) -> Iterator[None]:
        """Context in which the rows are sampled with other parameters."""
        own, self.params = self.params, params
        try:
            yield
        finally:
            self.params = own

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
        up to it. The host waits for the device once."""
        runner = self.runner
        starts, counts = np.zeros((2, int(slots[-1]) + 1), np.int64)
        starts[slots], counts[slots] = start, 1
        packing = pack_rows(runner.cache, starts, counts, runner.device)
        hidden = self.graphs.forward(tokens, packing) if self.graphs is not None else None
        if hidden is None:
            hidden = self.forward.hidden(to_device(tokens, runner.device), packing)
        logits = widen(self.forward.logits(hidden[: len(tokens)]))
        position = to_device(generated, runner.device)
        keys = runner.noise_keys(slots, generated)
        token, lead = draw_among_best(logits, keys, position, self.params)
        return token.cpu().numpy(), lead.cpu().numpy()


def draw_among_best(
    logits: torch.Tensor, keys: torch.Tensor, num_generated: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token from each row of logits [M, V] with its noise, int64 [M], see `sampling.sample`.

    Also return by how much it wins against the second, float [M]. Only the CANDIDATES best of each
    row take part, and the nucleus is one of these."""
    bars = replace(params, top_k=0, top_p=1.0)
    _, allowed = scale_and_restrict(logits, num_generated, bars)
    best, ids = allowed.topk(min(CANDIDATES, allowed.shape[1]))
    if params.top_k:
        best[:, params.top_k :] = float("-inf")
    if params.top_p < 1.0:
        chance = best.softmax(-1)
        best.masked_fill_(chance.cumsum(-1) - chance >= params.top_p, float("-inf"))
    if params.temperature > 0.0:
        best = add_gumbel(best, keys, ids.int())
    (first, second), place = best.topk(2).values.unbind(-1), best.argmax(-1)
    return ids.gather(-1, place[:, None])[:, 0], first - second
