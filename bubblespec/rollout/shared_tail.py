"""The shared tail: when few rows are left on all ranks, all ranks decode them together, each with a
slice of the weights.

Entered at a tick, by what all ranks know. Each rank takes its unfinished rows out of its engine,
all ranks get the tokens of all of them, and the same engine on every rank (shared_runner.py) feeds
prompts and tokens again and goes on. Its forwards are in lockstep: whatever could differ between
ranks is exchanged. Tokens are the same by themselves, as every rank works them out from what all
have told; drafts, those of the learned drafter too, are proposed by the rank that owns the row,
which knows its text; a wish to stop is asked for every few forwards. When the last row is done,
each rank has its own rows' results, and the rollout ends with the next tick.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bubblespec.config import Config
from bubblespec.dist.joint import RankJoint
from bubblespec.dist.ranks import Ranks
from bubblespec.draft.learned import LearnedDrafts
from bubblespec.draft.windows import CostModel
from bubblespec.engine.chains import Chains
from bubblespec.engine.engine import Engine, Proposer
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.engine.shared_runner import SharedRunner
from bubblespec.engine.slices import CannotCut
from bubblespec.errors import log
from bubblespec.idle.speculation import Speculation
from bubblespec.records import RolloutRecord, Span
from bubblespec.rollout.balance import MIN_GAIN
from bubblespec.rollout.board import RankState
from bubblespec.rollout.forecast import OVERHEAD_TICKS, unfinished_rows
from bubblespec.rollout.shared_gain import pays
from bubblespec.rollout.standing import Standing
from bubblespec.types import Row, SampleId

NUMBERS_PER_TOKEN = 3  # its id and both log-probabilities, all exact as float64
ASK_EVERY = 8  # forwards between two questions whether any rank has been told to stop
MOST_DRAFT_TOKENS = 512  # of one rank's rows in a forward
TIMED = 3  # forwards of each kind that are timed at the start, after one that does not count


class SharedTail:
    """The engine of all ranks together, and when to use it. Made once a run, by all ranks
    together."""

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        most_rows: int,
        max_new_tokens: int,
        is_worth_it: Callable[[Standing], bool] | None = None,
    ):
        """most_rows: of all ranks, with which it is entered, at most the engine's slots;
        is_worth_it: a pure function of what all ranks know; None enters it with so many rows
        always."""
        self.engine, self.ranks, self.most_rows, self.max_new_tokens = (
            engine,
            ranks,
            most_rows,
            max_new_tokens,
        )
        self._drafter: tuple[LearnedDrafts, Chains] | None = None
        self._is_worth_it = is_worth_it

    def draft_with(self, source: LearnedDrafts, chains: Chains) -> None:
        """The learned drafter drafts for rows in here too. source: one of the proposer's; chains:
        of this engine."""
        self._drafter = source, chains

    def is_due(self, standing: Standing, states: list[RankState]) -> bool:
        """Whether all ranks enter it at this tick. Where some rows are not trained on, never: what
        is left of these is not finished anyway."""
        left = int((standing.told >= 0).sum())
        if (
            standing.selection is not None
            or any(state.must_stop for state in states)
            or not 0 < left <= self.most_rows
        ):
            return False
        return self._is_worth_it is None or self._is_worth_it(standing)

    def run(
        self,
        own: dict[int, Row],
        standing: Standing,
        params: SamplingParams,
        proposer: Proposer | None,
        *,
        on_finished: Callable[[Row], None],
        record: RolloutRecord,
    ) -> None:
        """Generate the unfinished rows of all ranks to their end, on all ranks together. If any
        rank has been told to stop, all leave, and the rows keep their tokens so far.

        own: this rank's, by place; proposer: on all ranks or on none; on_finished: called with each
        of the own rows.
        """
        clock, engine = self.ranks.clock, self.engine
        began_s = clock.perf_counter()
        rows = self._gather(own, standing)
        if not rows:  # all have ended since the tick
            return
        is_own = {id(row) for row in own.values()}
        drafts = None if proposer is None else OwnersPropose(proposer, is_own, self.ranks.gather)
        engine.reset()  # the weights have changed since the last time
        engine.add([rows[place] for place in sorted(rows)])
        before, num_steps = engine.num_forwards, 0
        with (
            contextlib.nullcontext()
            if self._drafter is None
            else self._drafter[0].elsewhere(self._drafter[1], engine)
        ):
            while not engine.is_idle:
                if (
                    num_steps % ASK_EVERY == 0
                    and self.ranks.gather(np.array([self.ranks.must_stop], np.uint8)).any()
                ):
                    break
                finished, _ = engine.step(params, drafts)
                num_steps += 1
                for row in finished:
                    if id(row) in is_own:
                        on_finished(row)
        engine.collect()
        # memory and graphs stay: they are few rows, and capturing may take as long as what is
        # gained
        engine.reset()
        record.shared.append(Span("shared", began_s, clock.perf_counter()))
        record.shared_rows += len(own)
        record.shared_forwards += engine.num_forwards - before

    def _gather(self, own: dict[int, Row], standing: Standing) -> dict[int, Row]:
        """The unfinished rows of all ranks, by place: the own ones as they are, of the others
        copies."""
        rows = dict(own)
        for rank, parcel in enumerate(self.ranks.gather_ragged(_pack(own))):
            for place, columns in _unpack(parcel) if rank != self.ranks.rank else ():
                row = standing.make_row(place, self.max_new_tokens)
                row.tokens, row.logprob = columns[0].astype(np.int64), columns[1].astype(np.float32)
                row.full_logprob = columns[2].astype(np.float32)
                rows[place] = row
        return rows


def _pack(rows: dict[int, Row]) -> np.ndarray:
    """Of each row its place, its length, and its tokens with their log-probabilities, float64."""
    parts = [np.empty(0)]
    for place, row in rows.items():
        columns = (row.tokens, row.logprob, row.full_logprob)
        parts.append(np.concatenate(((place, len(row.tokens)), *columns), dtype=np.float64))
    return np.concatenate(parts)


def _unpack(parcel: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Place, and [NUMBERS_PER_TOKEN, length], of each row."""
    rows, begin = [], 0
    while begin < len(parcel):
        place, length = parcel[begin : begin + 2].astype(np.int64).tolist()
        end = begin + 2 + NUMBERS_PER_TOKEN * length
        rows.append((place, parcel[begin + 2 : end].reshape(NUMBERS_PER_TOKEN, length)))
        begin = end
    return rows


class OwnersPropose:
    """The engine's `Proposer` where all ranks have all rows: each asks its own one for its own
    rows, and all get all drafts."""

    def __init__(
        self, proposer: Proposer, is_own: set[int], gather: Callable[[np.ndarray], np.ndarray]
    ):
        """is_own: id() of the own rows; gather: see `Ranks`."""
        self.proposer, self.is_own, self.gather = proposer, is_own, gather

    def propose(
        self, rows: list[Row], lengths: np.ndarray, room: np.ndarray, budget: int
    ) -> list[np.ndarray | None]:
        """See `Proposer`. What is exchanged has one size on all ranks: the lengths of all drafts,
        and room for tokens."""
        own, drafts = self._own(rows), [None] * len(rows)
        numbers = np.zeros(len(rows) + MOST_DRAFT_TOKENS, np.int64)
        if own:
            budget = min(budget, MOST_DRAFT_TOKENS)
            begin = len(rows)
            for place, draft in zip(
                own,
                self.proposer.propose([rows[i] for i in own], lengths[own], room[own], budget),
                strict=True,
            ):
                if draft is not None:
                    count = min(len(draft), int(room[place]), len(numbers) - begin)
                    numbers[place], numbers[begin : begin + count] = count, draft[:count]
                    begin += count
        for told in self.gather(numbers):
            begin = len(rows)
            for place in np.flatnonzero(told[:begin]).tolist():
                drafts[place] = told[begin : begin + told[place]]
                begin += int(told[place])
        return drafts

    def observe(
        self,
        rows: list[Row],
        tokens: list[np.ndarray],
        num_draft: np.ndarray,
        num_accepted: np.ndarray,
    ) -> None:
        """See `Proposer`: of the own rows."""
        if own := self._own(rows):
            self.proposer.observe(
                [rows[i] for i in own], [tokens[i] for i in own], num_draft[own], num_accepted[own]
            )

    def _own(self, rows: list[Row]) -> list[int]:
        return [place for place, row in enumerate(rows) if id(row) in self.is_own]


def make_shared_tail(
    config: Config,
    ranks: Ranks,
    engine: Engine,
    params: SamplingParams,
    speculation: Speculation | None,
    *,
    most_rows: int,
) -> SharedTail | None:
    """None where there is one rank, the key says so, the model cannot be cut, or, with auto, it is
    measured not to pay. Computes forwards: all ranks must call it together. speculation: where a
    run has any; without it there are no ticks; most_rows: of `choose_shared_rows`."""
    wanted = config.rollout.shared_tail_rows
    if ranks.world_size == 1 or not most_rows or speculation is None:
        return None
    limit = config.rollout.max_completion_length
    runner: ModelRunner = engine.runner
    options = {
        "max_batch_tokens": max(runner.max_batch_tokens, most_rows),
        "kernel": runner.kernel,
        "rule": runner.rule,
    }
    options |= {"enforce_eager": runner.graphs is None, "beside": runner.graphs}
    ranks.place = "shared tail's set-up"
    try:
        shared = SharedRunner(
            runner.model, most_rows, runner.max_length, runner.seed, RankJoint(ranks), **options
        )
        shared.check()
    except CannotCut as error:
        if wanted != "auto" and ranks.is_main:
            log(
                f"warning: rollout.shared_tail_rows: {error}; the last rows are decoded by the ranks that have them"
            )
        return None
    together, is_worth_it = Engine(shared), None
    if wanted == "auto":
        shared_cost = measure(together, engine, params, ranks)
        if shared_cost is None:
            together.release()
            return None
        is_worth_it = expects_gain(
            speculation, shared_cost, num_ranks=ranks.world_size, num_slots=engine.num_slots
        )
    ranks.before_end.append(shared.release)
    return SharedTail(together, ranks, most_rows, limit, is_worth_it)


def expects_gain(
    speculation: Speculation, shared_cost: np.ndarray, *, num_ranks: int, num_slots: int
) -> Callable[[Standing], bool]:
    """Whether it is worth it by the costs of forwards, measured alone and together, and by what the
    rows are expected to need."""

    def is_worth_it(standing: Standing) -> bool:
        if standing.expected is None or speculation.shared_cost is None:
            return False
        _, rows = unfinished_rows(standing, standing.expected, speculation.outlook)
        shape = {"num_ranks": num_ranks, "num_slots": num_slots}
        overhead_s = OVERHEAD_TICKS * speculation.board.interval_s
        return pays(rows, speculation.shared_cost, shared_cost, overhead_s=overhead_s, **shape)

    return is_worth_it


def measure(
    together: Engine, alone: Engine, params: SamplingParams, ranks: Ranks
) -> np.ndarray | None:
    """The cost of shared forwards, coefficients of a `CostModel`, the same on all ranks; None where
    a forward of one row takes no less time together than alone, so that it cannot pay."""
    params = replace(params, stop_token_ids=())  # nothing is to end a row
    cost = CostModel()
    seconds = [
        np.median(time_forwards(engine, 1, 8, params, cost, ranks)) for engine in (alone, together)
    ]
    alone_s, together_s = ranks.gather(np.array(seconds)).max(axis=0).tolist()
    if together_s >= (1 - MIN_GAIN) * alone_s:
        return None
    cost = CostModel()
    for count in sorted({1, together.num_slots}):
        for length in sorted({8, min(512, together.max_length // 2)}):
            time_forwards(together, count, length, params, cost, ranks)
    return ranks.gather(cost.coefficients).mean(axis=0)


def time_forwards(
    engine: Engine,
    count: int,
    length: int,
    params: SamplingParams,
    cost: CostModel,
    ranks: Ranks,
) -> list[float]:
    """Seconds of plain forwards of so many rows behind so many tokens, of which `cost` learns too.
    The result of each has come back to the host."""
    length, seconds = max(min(length, engine.max_length - TIMED - 2), 1), []
    engine.reset()
    rows = [
        Row(SampleId(0, 0, sample), (1,) * length, engine.max_length - length)
        for sample in range(count)
    ]
    engine.add(rows)
    while engine.queue or (len(engine.rows) and (engine.lengths <= length).any()):
        engine.step(params)
    for number in range(1 + TIMED):
        began_s = ranks.clock.perf_counter()
        _, load = engine.step(params)
        if number and load is not None:
            seconds.append(ranks.clock.perf_counter() - began_s)
            cost.anchor(*load[:4], seconds[-1])
    engine.reset()
    return seconds or [float("inf")]
