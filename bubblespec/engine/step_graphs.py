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
from functools import partial

import numpy as np
import torch

from bubblespec.engine.arrays import ragged, staged
from bubblespec.engine.batch import Plan, RowUpdates, SamplingParams
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.graphs import GraphPool
from bubblespec.engine.kv_cache import KVCache, pieces
from bubblespec.engine.ops.view import AttentionMetadata, RowState
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

    def __init__(self, cache: KVCache, max_length: int, max_tokens: int, device: torch.device):
        self.cache, self.max_length, self.max_tokens = cache, max_length, max_tokens
        self.device = device
        self._state: RowState | None = None

    @property
    def state(self) -> RowState:
        """The tensors, made at the first use after `clear`; the plan then feeds nothing."""
        if self._state is None:
            slots, tokens = self.cache.num_slots, self.max_tokens
            # Proposals have as many tokens as are fed, and as many as may be gained in flight.
            plan = HEADER + ROW_FIELDS * slots + 6 * tokens + 1
            zeros = partial(torch.zeros, dtype=torch.int32, device=self.device)
            self._state = RowState(
                tokens=zeros(slots, self.max_length),
                state=zeros(4, slots),
                counters=zeros(slots, 4),
                plan=zeros(plan),
                standing=zeros(3, slots),
                behind=zeros(tokens),
                words=zeros(tokens, 4),
                generated=zeros(tokens),
                drawn=zeros(2 * tokens, dtype=torch.float64),
            )
        return self._state

    def clear(self) -> None:
        """Free the memory."""
        self._state = None

    def write(self, texts: RowUpdates, ids: np.ndarray) -> None:
        """Write texts, and the ids int64 [W, 3] of their samples."""
        if not len(texts.slots):
            return
        state = self.state
        prompt_id, draw_index, sample = ids.T
        nothing = np.zeros_like(prompt_id)
        counters = stream_counters(prompt_id, draw_index, sample, nothing).view(np.int32)
        lengths = np.array((texts.length, texts.prompt_length, texts.total, texts.length * 0))
        row, offset = ragged(texts.length)
        place = texts.slots[row] * self.max_length + offset
        parts = texts.slots, lengths.ravel(), counters.ravel().astype(np.int64), place, texts.tokens
        sizes = [len(part) for part in parts]
        sent = staged(np.concatenate(parts), self.device).split(sizes)
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

    def send(self, plan: Plan, max_q: int) -> None:
        """Send a plan to the device."""
        sent = packed(plan, max_q)
        self.state.plan[: len(sent)].copy_(staged(sent, self.device), non_blocking=True)

    def fill(self, ids: torch.Tensor, view: AttentionMetadata) -> None:
        """Write the token ids [B] and the view of the plan that was sent."""
        from bubblespec.engine.ops import triton_rows as ops

        ops.stand(self.state)
        ops.fill(self.state, ids, view, self.cache.page_size, self.cache.spare)


class StepGraphs:
    """Graphs of forwards with their sampling, whose inputs are made of rows kept on the device."""

    def __init__(
        self, forward: ModelForward, cache: KVCache, max_num_batched_tokens: int, max_length: int
    ):
        most = max(max_num_batched_tokens, forward.min_tokens)
        self.of, self.rows = forward, DeviceRows(cache, max_length, most, forward.weight().device)
        self.pool = GraphPool(forward, cache, max_num_batched_tokens, fill=self.rows.fill)
        self._stops: dict[tuple[int, ...], torch.Tensor] = {}

    def step(
        self, plan: Plan, texts: RowUpdates, ids: np.ndarray, params: SamplingParams, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a step; return hidden states [B, hidden], and float64 [2, T], see `sample`.

        Both are valid until the next step. ids: int64 [W, 3], of the samples of `texts`."""
        shape = self.pool.shape_of(plan.count)
        assert shape is not None, "a graph has room for each plan"
        self.rows.write(texts, ids)
        self.rows.send(plan, shape.max_q)
        hidden = self.pool.replay(shape)
        count, sizes = int(plan.num_sampled.sum()), self.pool.sizes
        if not count:
            return hidden, self._drawn(0)
        key = sizes[bisect_left(sizes, count)], params, seed
        if params.truncates or not self.of.samples_alone or key[0] > MAX_SAMPLED:
            return hidden, self._sample(hidden, count, params, seed)
        if key not in self.pool.graphs:
            self._capture_sampling(params, seed)
        if key not in self.pool.graphs:
            return hidden, self._sample(hidden, count, params, seed)
        self.pool.graphs[key]()
        return hidden, self._drawn(key[0])[:, :count]

    def _capture_sampling(self, params: SamplingParams, seed: int) -> None:
        self._stops_of(params)
        hidden, plan = self.pool.results, self.rows.state.plan
        assert hidden is not None
        given = plan.clone()  # of the step that is about to sample
        plan.zero_()  # feeds nothing
        keys = [(size, params, seed) for size in self.pool.sizes[::-1] if size <= MAX_SAMPLED]
        self.pool.capture(
            {key: partial(self._sample, hidden, *key, out=self._drawn(key[0])) for key in keys}
        )
        plan.copy_(given)

    def _drawn(self, count: int) -> torch.Tensor:
        """Return where the graph that samples at `count` positions puts its results, [2, count]."""
        return self.rows.state.drawn[: 2 * count].view(2, count)

    def _sample(
        self,
        hidden: torch.Tensor,
        count: int,
        params: SamplingParams,
        seed: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sample behind a forward, append what rows gain, and return float64 [2, count]."""
        from bubblespec.engine.ops import triton_rows as ops

        state = self.rows.state
        ops.sampled(state, count)
        behind, words, generated = (
            of[:count] for of in (state.behind, state.words, state.generated)
        )
        logits = self.of.logits(hidden.index_select(0, behind))
        token, logprob = self.of.sample(logits, Noise(words, seed), generated, params)
        ops.accept(state, token, self._stops_of(params))
        return torch.stack((token.double(), logprob.double()), out=out)

    def _stops_of(self, params: SamplingParams) -> torch.Tensor:
        ids = params.stop_token_ids
        if ids not in self._stops:
            self._stops[ids] = staged(np.array(ids, np.int32), self.rows.device)
        return self._stops[ids]

    def clear(self) -> None:
        """Give graphs, rows and their memory back; the next step makes them again."""
        self.pool.clear()
        self.rows.clear()
        self._stops.clear()
