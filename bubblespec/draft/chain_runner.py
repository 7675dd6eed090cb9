"""The interface of the small models that draft chains, and their forwards over an engine's rows.

Shape legend: M rows that draft, C candidates, N packed tokens.
"""

from typing import Any, cast

import numpy as np
import torch

from bubblespec.engine.arrays import to_device, to_host
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward, SlotFollower
from bubblespec.engine.graphs import ForwardGraphs
from bubblespec.engine.kv_cache import CachePacking, KVCache, pack_rows
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import draw_among
from bubblespec.planner.costs import CostModel
from bubblespec.types import Load

TIMED_ROWS = (1, 4, 16)


class ChainRunner(SlotFollower):
    """A small model's part of an engine; with graphs a follower of its runner."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        forward: ModelForward,
        cache: KVCache,
        max_graph_tokens: int,
        state_size: int = 0,
    ):
        """params: of the engine's rows; the others: see `ForwardGraphs`."""
        self.engine, self.params, self.cache = engine, params, cache
        self.runner = cast(ModelRunner, engine.runner)
        self.forward: Any = forward  # one with states has a second input
        self.graphs: ForwardGraphs | None = None
        if self.runner.graphs is not None:
            self.graphs = ForwardGraphs(forward, cache, max_graph_tokens, state_size)

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        """Whether chains can begin in slots int64 [M], or -1: bool [M]."""
        return slots >= 0

    def candidates(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return logits [M, C] of what follows, their tokens, [C] or [M, C], and how many were fed.

        slots, number, tokens: see `draw`."""
        raise NotImplementedError

    @torch.inference_mode()
    def draw(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Draw the next token of some rows' chains, int64 [M], with the rows' own noise.

        Also return by how much each has won, float [M], in units of logits over the temperature,
        and the tokens that were fed. slots: int64 [M], ascending; number: tokens that each chain
        has; tokens: int64 [M], the last token of each. The host waits for the device once. Raises
        ValueError for what is no number."""
        generated = (self.engine.length - self.engine.prompt_length)[slots] + number
        logits, ids, fed = self.candidates(slots, number, tokens)
        keys = self.runner.noise_keys(slots, generated)
        position = to_device(generated, self.runner.device)
        token, lead = to_host(*draw_among(logits, ids, keys, position, self.params))
        if np.isnan(lead).any():
            raise ValueError("its logits are not numbers")
        return token.astype(np.int64), lead, fed

    def run_once(self, num_rows: int) -> None:
        """Draw a token for each of so many empty rows, to time it."""
        self.draw(np.arange(num_rows), 1, np.zeros(num_rows, np.int64))

    def feed(
        self, tokens: np.ndarray, slots: np.ndarray, start: np.ndarray, count: np.ndarray, *states
    ) -> torch.Tensor:
        """Return the hidden states [N, hidden] of `count` new positions of each slot from `start`.

        tokens: int64 [N]; states: of a forward that has them."""
        packing = self.pack(slots, start, count)
        if self.graphs is not None:
            hidden = self.graphs.forward(tokens, packing, *states)
            if hidden is not None:
                return hidden[: len(tokens)]
        fed = to_device(tokens, self.runner.device)
        return self.forward.hidden(fed, packing, *states)[: len(tokens)]

    def pack(self, slots: np.ndarray, start: np.ndarray, count: np.ndarray) -> CachePacking:
        """Return the packing of `count` new positions of each slot from `start`."""
        starts, counts = np.zeros((2, int(slots[-1]) + 1), np.int64)
        starts[slots], counts[slots] = start, count
        return pack_rows(self.cache, starts, counts, self.runner.device)

    def release(self) -> None:
        """Forget the graphs, which know the cache by its addresses."""
        if self.graphs is not None:
            self.graphs.clear()


def profile(runner: ChainRunner, clock, max_rows: int | None = None) -> CostModel:
    """Time forwards of few and many rows, while the engine has none; each is run once before."""
    cost, most = CostModel(), min(max_rows or runner.engine.num_slots, runner.engine.num_slots)
    for count in sorted({min(rows, most) for rows in (*TIMED_ROWS, most)}):
        runner.run_once(count)
        for _ in range(3):
            begin_s = clock.perf_counter()
            runner.run_once(count)
            cost.anchor(Load(count, count), clock.perf_counter() - begin_s)
    runner.engine.reset()
    return cost
