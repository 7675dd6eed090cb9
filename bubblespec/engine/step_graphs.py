"""CUDA graphs of an engine's steps, each launched before the results of the one before are read.

A step is two graphs. The first finds out where the plan's rows stand by then (device_rows.py) and
computes the forward; the second samples, and appends what the rows gain. The host sends the plan,
and begins a copy of what was drawn. Graphs of sampling are captured when a distribution is first
sampled from; distributions that bar tokens, and ranks that sample together, sample without.

Shape legend: B tokens of a graph, T positions sampled.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bubblespec.engine.batch import Plan, Texts
from bubblespec.engine.device_rows import DeviceRows
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.graphs import ForwardGraphs, Shape, capture, rehearse
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.noise import Noise
from bubblespec.engine.ops.view import View
from bubblespec.engine.sampling import SamplingParams

MAX_SAMPLED = 1024  # positions of a graph, whose logits take memory


class StepGraphs(ForwardGraphs):
    """Graphs of forwards with their sampling, whose inputs are made of rows kept on the device."""

    def __init__(
        self, forward: ModelForward, cache: KVCache, max_num_batched_tokens: int, max_length: int
    ):
        super().__init__(forward, cache, max_num_batched_tokens)
        most = self.shapes[0].tokens, max(shape.sequences for shape in self.shapes)
        self.rows = DeviceRows(cache, max_length, *most)
        self._samplers: dict[tuple[SamplingParams, int], dict[int, _Sampler]] = {}
        self._stops: dict[tuple[int, ...], torch.Tensor] = {}

    def step(
        self, plan: Plan, texts: Texts, ids: np.ndarray, params: SamplingParams, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch a step; return hidden states [B, hidden], and float64 [3, T], see `sample`.

        Both are valid until the next step; None where nothing is sampled. ids: int64 [W, 3], of the
        samples of `texts`."""
        shape = self.shape_of(plan.count)
        assert shape is not None, "a graph has room for each plan"
        self.rows.write(texts, ids)
        self.cache.block_table(self.of.weight().device)  # is up to date
        self.rows.send(plan, shape.max_q)
        hidden = self.replay(shape)
        if not len(plan.slots):
            return hidden, None
        count = int(plan.num_sampled.sum())
        sampler = self._sampler(count, params, seed)
        if sampler is None:
            return hidden, self._sample(hidden, count, params, seed)
        sampler.replay()
        return hidden, sampler.sampled[:, :count]

    def _sampler(self, count: int, params: SamplingParams, seed: int) -> "_Sampler | None":
        if params.truncates or not self.of.samples_alone or count > MAX_SAMPLED:
            return None
        key = params, seed
        if key not in self._samplers:
            self._samplers[key] = self._capture_sampling(*key)
        size = self.sizes[bisect_left(self.sizes, count)]
        return self._samplers[key].get(size)

    def _sample(
        self, hidden: torch.Tensor, count: int, params: SamplingParams, seed: int
    ) -> torch.Tensor:
        """Sample behind a forward, append what rows gain, and return float64 [3, count]."""
        from bubblespec.engine.ops import triton_rows as ops

        state = self.rows.state(0, 0)
        ops.sampled(state, count)
        behind, words, generated = (
            of[:count] for of in (state.behind, state.words, state.generated)
        )
        logits = self.of.logits(hidden.index_select(0, behind))
        token, *logprobs = self.of.sample(logits, Noise(words, seed), generated, params)
        ops.accept(state, token, self._stops_of(params))
        return torch.stack([of.double() for of in (token, *logprobs)])

    def _stops_of(self, params: SamplingParams) -> torch.Tensor:
        ids = params.stop_token_ids
        if ids not in self._stops:
            self._stops[ids] = self.rows.stops(params)
        return self._stops[ids]

    def _capture_sampling(self, params: SamplingParams, seed: int) -> "dict[int, _Sampler]":
        samplers: dict[int, _Sampler] = {}
        hidden = self._hidden
        assert hidden is not None
        self._stops_of(params)
        state = self.rows.state(0, 0)
        given = state.plan.clone()  # of the step that is about to sample

        def record() -> None:
            self.rows.send(None, 1)
            for count in [size for size in self.sizes if size <= MAX_SAMPLED][::-1]:
                run = partial(self._sample, hidden, count, params, seed)
                rehearse(run)
                sampler = _Sampler()
                replay, self.of.memory.pools[self] = capture(
                    partial(sampler.record, run), self.of.memory.pool
                )
                sampler.replay = replay
                samplers[count] = sampler

        # Without the forwards' graphs, which would be captured again and find no memory.
        if not self._on_all(record, forget=samplers.clear):
            samplers.clear()
        state.plan.copy_(given)
        return samplers

    def clear(self) -> None:
        """Give graphs, rows and their memory back; the next step makes them again."""
        super().clear()
        self.rows.clear()
        self._stops.clear()

    def _forget(self) -> None:
        self._samplers.clear()
        super()._forget()

    def _make_inputs(self, device: torch.device) -> None:
        self._samplers.clear()  # they know the old tensors
        self.rows.make(device)

    def _clear_inputs(self, shape: Shape) -> None:
        self.rows.send(None, shape.max_q)

    def _read(self, shape: Shape) -> tuple[torch.Tensor, View]:
        from bubblespec.engine.ops import triton_rows as ops

        return self.rows.fill(ops, shape.tokens, shape.sequences, shape.max_q)


class _Sampler:
    """A graph of sampling, and its results at fixed addresses."""

    replay: Callable[[], None]
    sampled: torch.Tensor

    def record(self, run: Callable[[], torch.Tensor]) -> None:
        self.sampled = run()
