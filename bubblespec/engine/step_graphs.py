"""CUDA graphs of an engine's steps, each launched before the results of the one before are read.

A step is two graphs. The first finds out where the plan's rows stand by then and computes the
forward; the second samples, and appends what the rows gain. The host sends the plan, and begins a
copy of what was drawn. Graphs of sampling are captured when a distribution is first sampled from;
distributions that bar tokens, and ranks that sample together, sample without.

The rows' tokens, and where they stand, are at fixed addresses on the GPU, which the host only
writes. A row is written when it begins or an environment has continued it. From then on forwards
append to it: the host plans them by bounds, and learns of a forward's tokens when it reads its
results.

Shape legend: B tokens of a graph, T positions sampled; the others: see ops/triton_rows.py.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bubblespec.engine.arrays import ragged, staged
from bubblespec.engine.batch import Plan, SamplingParams, Texts
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.graphs import ForwardGraphs, Shape, capture, rehearse
from bubblespec.engine.kv_cache import KVCache, pieces
from bubblespec.engine.ops.view import RowState, View
from bubblespec.engine.sampling import Noise, stream_counters

MAX_SAMPLED = 1024  # positions of a graph, whose logits take memory
HEADER, ROW_FIELDS = 4, 8  # numbers in a plan, see `packed`


def packed(plan: Plan, max_q: int) -> np.ndarray:
    """Return a plan for ops/triton_rows.py, int32.

    R, N, S and T; of the R rows fed their slots, known tokens, first positions, new tokens, first
    token of the N, begin and length of the proposal, and first position sampled or -1, each [R];
    each token's row, [N]; each sequence's row, [S], and its first token, [S + 1]; each sampled
    position's row, [T]; proposals."""
    fed = plan.count.nonzero()[0]
    count, start, known = plan.count[fed], plan.start[fed], plan.known[fed]
    num_proposed, first_sampled = np.zeros_like(fed), np.full(len(fed), -1)
    where, sampled = fed.searchsorted(plan.slots), plan.num_sampled
    num_proposed[where], first_sampled[where] = plan.num_proposed, sampled.cumsum() - sampled
    proposal, first = num_proposed.cumsum() - num_proposed, count.cumsum() - count
    of_rows = fed, known, start, count, first, proposal, num_proposed, first_sampled
    sequence, width = pieces(count, max_q)
    header = len(fed), int(count.sum()), len(sequence), int(sampled.sum())
    row = np.arange(len(fed))
    of_tokens = row.repeat(count), sequence, (0,), width.cumsum()
    behind = row[where].repeat(sampled), plan.proposals
    return np.concatenate((header, *of_rows, *of_tokens, *behind)).astype(np.int32)


class DeviceRows:
    """The rows in the slots of a runner, for graphs of up to `max_tokens` tokens."""

    def __init__(self, cache: KVCache, max_length: int, max_tokens: int, max_sequences: int):
        self.cache, self.max_length = cache, max_length
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self._state: RowState | None = None

    def make(self, device: torch.device) -> RowState:
        """Return the tensors, made at the first call after `clear`."""
        if self._state is None:
            slots, tokens, sequences = self.cache.num_slots, self.max_tokens, self.max_sequences
            # Proposals have as many tokens as are fed, and as many as may be gained in flight.
            plan = HEADER + ROW_FIELDS * slots + 4 * tokens + 2 * sequences + 1
            shapes = [(slots, self.max_length), (4, slots), (slots, 4), (plan,), (3, slots)]
            shapes += [(tokens,)] * 3 + [(sequences + 1,), (sequences,)]
            shapes += [(tokens,), (tokens, 4), (tokens,)]
            made = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]
            self._state = RowState(*made)
        return self._state

    def clear(self) -> None:
        """Free the memory."""
        self._state = None

    def state(self, num_tokens: int, num_sequences: int) -> RowState:
        """Return the tensors, the fields of a forward cut to its graph's size."""
        state = self._state
        assert state is not None
        return state._replace(
            ids=state.ids[:num_tokens],
            place=state.place[:num_tokens],
            position=state.position[:num_tokens],
            first=state.first[: num_sequences + 1],
            slot=state.slot[:num_sequences],
        )

    def write(self, texts: Texts, ids: np.ndarray) -> None:
        """Write texts, and the ids int64 [W, 3] of their samples."""
        state = self._state
        assert state is not None
        if not len(texts.slots):
            return
        uid, visit, sample = ids.T
        counters = stream_counters(uid, visit, sample, np.zeros_like(uid)).view(np.int32)
        lengths = np.array((texts.length, texts.prompt_length, texts.total, texts.length * 0))
        row, offset = ragged(texts.length)
        place = texts.slots[row] * self.max_length + offset
        parts = texts.slots, lengths.ravel(), counters.ravel().astype(np.int64), place, texts.tokens
        sizes = [len(part) for part in parts]
        sent = staged(np.concatenate(parts), state.tokens.device).split(sizes)
        slots, of_rows, words, place, tokens = sent
        state.state.index_copy_(1, slots, of_rows.view(4, -1).int())
        state.counters.index_copy_(0, slots, words.view(-1, 4).int())
        state.tokens.view(-1).index_copy_(0, place, tokens.int())

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Continue the row of slot `source` in slot `target`."""
        if (state := self._state) is not None:
            state.tokens[target] = state.tokens[source]
            state.state[:, target] = state.state[:, source]
            state.counters[target] = state.counters[source]

    def send(self, plan: Plan | None, max_q: int) -> None:
        """Send a plan to the device; None feeds nothing."""
        state = self._state
        assert state is not None
        sent = np.zeros(HEADER + 1, np.int32) if plan is None else packed(plan, max_q)
        state.plan[: len(sent)].copy_(staged(sent, state.plan.device), non_blocking=True)

    def fill(self, ops, num_tokens: int, num_sequences: int, max_q: int) -> tuple:
        """Return token ids [B] and the view of the plan that was sent; ops: triton_rows."""
        state, cache = self.state(num_tokens, num_sequences), self.cache
        length, table = cache.slot_length, cache.block_table(state.ids.device)
        ops.stand(state)
        ops.fill(state, table, cache.page_size, cache.num_pages * cache.page_size)
        sizes = max_q, length, cache.split_of(num_tokens, length)
        fields = state.place, state.position, state.first, state.slot, table
        return state.ids, View(*fields, *sizes)


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
        """Launch a step; return hidden states [B, hidden], and float64 [2, T], see `sample`.

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
        """Sample behind a forward, append what rows gain, and return float64 [2, count]."""
        from bubblespec.engine.ops import triton_rows as ops

        state = self.rows.state(0, 0)
        ops.sampled(state, count)
        behind, words, generated = (
            of[:count] for of in (state.behind, state.words, state.generated)
        )
        logits = self.of.logits(hidden.index_select(0, behind))
        token, logprob = self.of.sample(logits, Noise(words, seed), generated, params)
        ops.accept(state, token, self._stops_of(params))
        return torch.stack((token.double(), logprob.double()))

    def _stops_of(self, params: SamplingParams) -> torch.Tensor:
        ids = params.stop_token_ids
        if ids not in self._stops:
            self._stops[ids] = staged(np.array(ids, np.int32), self.of.weight().device)
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
