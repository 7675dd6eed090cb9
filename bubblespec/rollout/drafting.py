"""Drafting ahead (BubbleSpec, arXiv 2605.08862): samples of coming steps, generated early.

Drafts use the noise of their own step. On a rank that waits, drafts fill the free slots. On a rank
that still decodes, co-scheduled drafts join the forwards of its own rows, and at most double their
cost. Drafts are of the global batches of coming steps, whichever rank will generate these. At the
last tick drafts stop, and later idle time continues them.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.proposer import Proposer
from bubblespec.draft.store import TextStore, exchange
from bubblespec.planner.chooser import DRAFTS
from bubblespec.planner.costs import CostModel
from bubblespec.planner.drafts import DraftRequest, choose_lookahead, plan_drafts
from bubblespec.rollout.plan import LEAST_S, Mechanism, RankView, RolloutPlan
from bubblespec.rollout.sampler import Sampler
from bubblespec.types import Draft, Row, SampleId

MAX_SLOWDOWN = 1.0  # by which co-scheduled drafts may slow a forward with own rows, by default
# Longest forward on a rank that waits, in forwards of a single row, or as a share of the rollout so
# far: at the last tick the other ranks wait for its end.
MAX_IDLE_FORWARDS, MAX_IDLE_SHARE = 2.0, 0.02
MAX_WORTH_S = 1e3  # of a token, where nothing is weighed


class DraftAhead:
    """Drafting in one rollout on one rank."""

    name = "draft_ahead"
    """Name in metrics (`idle/NAME/...`)."""
    view: RankView

    def __init__(
        self,
        plans: Iterable[DraftRequest],
        store: TextStore,
        proposer: Proposer,
        cost: CostModel,
        *,
        version: int,
        max_new_tokens: int,
        max_slowdown: float = MAX_SLOWDOWN,
        worth_s: float = math.inf,
    ):
        """plans: drafts to make, most urgent first, the same on every rank; version: of weights.

        max_slowdown: factor on the time of forwards with co-scheduled drafts; worth_s: seconds that
        a co-scheduled token saves."""
        self.store, self.proposer, self.cost = store, proposer, cost
        self.version, self.max_new_tokens = version, max_new_tokens
        self.max_slowdown, self.worth_s = max_slowdown, min(worth_s, MAX_WORTH_S)
        self._plans = iter(plans)
        self._open = deque[DraftRequest]()  # unassigned, in front of those of `_plans`
        self._given: deque[DraftRequest] = deque()  # assigned to this rank, not yet in its engine
        self._accepted: list[DraftRequest] = []  # all that were assigned to this rank
        self._rows: set[Row] = set()  # unfinished drafts
        self.drafts: dict[SampleId, Draft] = {}  # made or continued by this rank

    def begin(self, view: RankView) -> None:
        """Start with a rollout."""
        self.view = view

    @property
    def rate(self) -> float:
        """Predicted seconds saved per second of the drafts that this rank makes, or could get."""
        jobs = self._accepted[-1:] if self._given or self._rows else []
        if not jobs and self.capacity() > 0:
            jobs = self.jobs(1)
        return jobs[0].saves_s / max(jobs[0].costs_s, LEAST_S) if jobs else 0.0

    def jobs(self, count: int | None = None) -> list[DraftRequest]:
        """Return the first `count` unassigned drafts, or all, co-scheduled ones before others.

        The same on every rank."""
        missing = None if count is None else max(count - len(self._open), 0)
        self._open.extend(islice(self._plans, missing))
        return list(islice(self._open, count))

    def capacity(self) -> int:
        """Return twice what fits now: the next tick is some forwards away."""
        if self.view.engine.queue or not (jobs := self.jobs(1)):
            return 0
        if self.view.unfinished and not jobs[0].co_scheduled:
            return 0
        return max(0, 2 * self._num_free() - len(self._given))

    def assign(self, capacities: Sequence[int], has_rows: list[bool]) -> bool:
        """Give drafts to ranks, see `assign`; return whether any was left to give."""
        given = assign(self.jobs(sum(capacities)), capacities, has_rows)
        for rank, jobs in enumerate(given):
            for job in jobs:
                self.accept(job, rank)
        return any(given)

    def accept(self, job: DraftRequest, rank: int) -> None:
        """Queue the job on its rank. Called on all ranks."""
        self._open.remove(job)
        if rank == self.view.rank:
            self._given.append(job)
            self._accepted.append(job)
            self.view.record.idle[self.name].expected_s += job.saves_s

    def fill(self) -> None:
        """Put queued jobs into free slots.

        Prompts of drafts are fed a little at a time, and only once all prompts of own rows are fed,
        which the same limit would slow down.
        """
        view, engine = self.view, self.view.engine
        if not (self._given or self._rows):
            view.max_prefill_tokens = None
            return
        prefilling = [*engine.queue, *engine.prefilling()]
        if any(row.number in view.unfinished for row in prefilling):
            view.max_prefill_tokens = None
            return
        if prefilling or self._given:
            tokens = min(self._spare_s() / self.cost.coefficients[2], engine.max_num_batched_tokens)
            view.max_prefill_tokens = max(int(tokens), 1)
        if self._given and not engine.queue:
            for _ in range(min(self._num_free(), len(self._given))):
                self._start(self._given.popleft())

    def _start(self, job: DraftRequest) -> None:
        assert isinstance(job.key, SampleId)
        view, begin, draft = self.view, self.view.begin, self.store.get(job.key)
        row = Row(job.key, job.prompt, self.max_new_tokens, number=view.num_rows)
        view.num_rows += 1
        if draft is not None and begin is None:
            row.tokens = draft.tokens.astype(np.int64)
        else:
            row.draft = draft
        self._rows.add(row)
        view.record.drafts_begun += bool(view.unfinished)
        # With an environment the row repeats the turns of its draft: tokens are verified, not kept.
        self.proposer.track(row, self.version, is_counted=False)
        if begin is None:
            view.engine.add([row])
        else:
            begin(row)

    def on_finished(self, row: Row) -> None:
        """Note the draft that a complete row of a coming step is."""
        if row in self._rows:
            self._rows.remove(row)
            self._note(row, is_finished=True)

    def end(self) -> None:
        """Note the unfinished drafts and the seconds of all, at the last tick: no forward comes."""
        self.view.engine.collect()
        for row in self._rows:
            self._note(row, is_finished=False)
        use, cost = self.view.record.idle[self.name], self.cost.coefficients
        for forward in self.view.record.forwards:
            if forward.ahead_rows and forward.own_rows:
                load = forward.load
                row_s = cost[1] + cost[2] + cost[4] * load.positions / load.rows
                use.seconds += forward.ahead_rows * row_s + cost[2] * load.prompt_tokens
            elif forward.ahead_rows:
                use.seconds += forward.end_s - forward.begin_s

    def finish(self, ranks: Ranks) -> None:
        """Put all ranks' drafts into all ranks' stores."""
        record = self.view.record
        record.idle[self.name].saved_s = record.saved_s
        made = [job.key for job in self._accepted if job.key in self.drafts]
        exchange(self.store, {sample: self.drafts[sample] for sample in made}, ranks)

    def _note(self, row: Row, is_finished: bool) -> None:
        """Keep a row's tokens as a draft, unless the store has as many.

        A complete one stands for a longer one that is not: an episode may have ended sooner."""
        old = self.store.get(row.id)
        grown = len(row.tokens) - (0 if old is None else len(old.tokens))
        is_complete = is_finished and old is not None and not old.is_finished
        if grown > 0 or is_complete:
            self.view.record.drafted_tokens += max(grown, 0)
            tokens = row.tokens.astype(np.int32)
            self.drafts[row.id] = Draft(tokens, is_finished, self.version)

    def _spare_s(self) -> float:
        """Return the seconds that drafts may add to a forward."""
        engine, unfinished = self.view.engine, self.view.unfinished
        if unfinished:
            lengths = zip(engine.rows, engine.lengths.tolist(), strict=True)
            positions = sum(length for row, length in lengths if row.number in unfinished)
            count = len(unfinished)
            return self.max_slowdown * float(self.cost.seconds(count, count, 0, positions))
        forwards, record = self.view.record.forwards, self.view.record
        elapsed_s = forwards[-1].end_s - record.began_s if forwards else 0.0
        single_s = float(self.cost.coefficients[0])
        return max(MAX_IDLE_FORWARDS * single_s, MAX_IDLE_SHARE * elapsed_s) - single_s

    def _num_free(self) -> int:
        """Return how many more draft rows may join the next forwards.

        Alongside own rows, as many as gain most: the cost of a forward has steps."""
        engine, own, drafting = self.view.engine, len(self.view.unfinished), len(self._rows)
        free = engine.num_slots - own - drafting
        if free <= 0:
            return 0
        counts = np.arange(drafting + free + 1)
        rows, mean_kv = own + counts, float(engine.lengths.mean()) if engine.rows else 0.0
        seconds = self.cost.seconds(rows, rows, 0, rows * mean_kv)
        more_s = seconds - seconds[0]
        gains_s = counts * (self.worth_s if own else MAX_WORTH_S) - more_s
        best = int(np.where(more_s <= self._spare_s(), gains_s, -np.inf).argmax())
        return max(best - drafting, 0)


class Drafting(Mechanism):
    """Adds a `DraftAhead` to each rollout in which something is left to draft."""

    name = "drafting"

    def __init__(self, sampler: Sampler, proposer: Proposer):
        self.sampler, self.proposer = sampler, proposer

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """Plan what to draft in a rollout of a step; nothing if this and the next lack drafts."""
        sampler, stats, step = self.sampler, self.sampler.stats, plan.step
        if step is None:
            return
        is_off, is_next_off = (DRAFTS in stats.chooser.off(of) for of in (step, step + 1))
        if is_off and is_next_off:
            return
        config, schedule, store = sampler.config, sampler.schedule, sampler.store
        depth = choose_lookahead(
            step,
            steps_left=config.run.max_steps - step - 1,
            steps_stored=store.max_tokens / max(stats.tokens_per_step, 1.0),
            accepted=stats.survival.by_age,
        )
        batches = schedule.upcoming(step, depth, plan.used) if depth else []
        if batches and is_next_off:
            batches[0] = []
        if not any(batches):
            return
        # Where the slowest groups are deferred, no tail is left that co-scheduled drafts could
        # shorten, and the time of a rollout without drafts must not be that of co-scheduled ones.
        idle_only = schedule.defers or is_off
        planning = "idle_only" if idle_only else config.speculative.planning
        drafts = plan_drafts(
            batches,
            config.rollout.num_generations,
            store.get,
            stats.lengths,
            cost=stats.cost_without(stats.chooser.off(step + 1)),
            rates=stats.survival.rates,
            prices=stats.pricing.prices,
            forwards_per_step=stats.forwards,
            num_ranks=sampler.ranks.world_size,
            num_slots=sampler.engine.num_slots,
            oldest_verified=max(stats.survival.by_age, default=None),
            planning=planning,
            deferred={group.name for group in schedule.deferred},
        )
        prices = stats.pricing.prices
        plan.idle_drafts = DraftAhead(
            drafts.jobs,
            store,
            self.proposer,
            stats.cost,
            version=step,
            max_new_tokens=config.rollout.max_completion_length,
            max_slowdown=math.inf if planning == "always" else MAX_SLOWDOWN,
            worth_s=math.inf if prices is None else prices.drafted_s * drafts.worth,
        )


def assign(
    jobs: Iterable[DraftRequest], capacities: Sequence[float], has_rows: list[bool]
) -> list[list[DraftRequest]]:
    """Return the jobs that a tick assigns to each rank, by rank.

    Round-robin, ranks that wait first: the others would wait for a rank that got all jobs. A rank
    with rows of its own gets co-scheduled jobs only. A pure function of shared data, so no job is
    assigned twice.

    jobs: most urgent first, co-scheduled ones before others; capacities, has_rows: by rank."""
    left, rooms = list(jobs), list(capacities)
    given: list[list[DraftRequest]] = [[] for _ in rooms]
    in_turn = sorted(range(len(rooms)), key=lambda rank: has_rows[rank])
    while in_turn:
        for rank in list(in_turn):
            if rooms[rank] <= 0 or not left or (has_rows[rank] and not left[0].co_scheduled):
                in_turn.remove(rank)
                continue
            given[rank].append(left.pop(0))
            rooms[rank] -= 1
    return given
