"""Drafting ahead (BubbleSpec, arXiv 2605.08862): samples of coming steps, generated early with the
noise that their own step will use.

On a rank that waits, free slots fill with drafts. On one that still decodes, co-scheduled drafts
join the forwards of its own rows, as long as they at most double what these cost. Drafts come from
the global batches of coming steps, whoever will generate those. At the last tick they stop where
they are, and go on from their tokens in later idle time.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.proposer import Proposer
from bubblespec.draft.store import DraftStore, exchange
from bubblespec.idle.task import IdleTask, Job
from bubblespec.planner.costs import CostModel
from bubblespec.types import Draft, Row, SampleId

MAX_SLOWDOWN = 1.0  # of a forward with own rows, by co-scheduled drafts, unless told otherwise
# On a rank that waits a forward takes no longer than so many of a single row, or than this share of
# the rollout so far: the others wait for its end.
MAX_IDLE_FORWARDS, MAX_IDLE_SHARE = 2.0, 0.02


class DraftAhead(IdleTask):
    """Drafting in one rollout on one rank."""

    name = "draft_ahead"

    def __init__(
        self,
        plans: list[Job],
        store: DraftStore,
        proposer: Proposer,
        cost: CostModel,
        *,
        version: int,
        max_new_tokens: int,
        max_slowdown: float = MAX_SLOWDOWN,
    ):
        """plans: everything to draft, most urgent first, the same on every rank; version: updates
        of the current weights; max_slowdown: by how much co-scheduled drafts may slow forwards."""
        self.store, self.proposer, self.cost = store, proposer, cost
        self.version, self.max_new_tokens = version, max_new_tokens
        self.max_slowdown = max_slowdown
        self._order = [job.key for job in plans]
        self._open = {job.key: job for job in plans}
        self._given: deque[Job] = deque()  # to this rank, not yet in its engine
        self._rows: set[Row] = set()  # those that are drafting
        self.drafts: dict[SampleId, Draft] = {}  # that this rank has made or taken further

    def jobs(self) -> Iterable[Job]:
        """What no rank has been given yet."""
        return self._open.values()

    def capacity(self) -> int:
        """Twice what fits now: the next tick is some forwards away."""
        return 0 if self.view.engine.queue else max(0, 2 * self._num_free() - len(self._given))

    def accept(self, job: Job, rank: int) -> None:
        """Put it in line for the engine of the rank that has been given it."""
        del self._open[job.key]
        if rank == self.view.rank:
            self._given.append(job)

    def run_slice(self) -> bool:
        """Put jobs in line into free slots. Alongside own rows their prompts are fed a little at a
        time, and not before those of own rows, which would have to keep to the same limit."""
        view, engine = self.view, self.view.engine
        prefilling = [*engine.queue, *engine.prefilling()]
        if any(row in view.unfinished for row in prefilling):
            view.max_prefill_tokens = None
            return False
        if prefilling or self._given:
            tokens = min(self._spare_s() / self.cost.coefficients[2], engine.max_num_batched_tokens)
            view.max_prefill_tokens = max(int(tokens), 1)
        if self._given and not engine.queue:
            for _ in range(min(self._num_free(), len(self._given))):
                self._start(self._given.popleft())
        return False

    def _start(self, job: Job) -> None:
        row, draft = Row(job.key, job.prompt, self.max_new_tokens), self.store.get(job.key)
        if draft is not None and self.view.begin is None:
            row.tokens, draft = draft.tokens.astype(np.int64), None
        self._rows.add(row)
        # An environment of its own has to be led to where the draft ends, so it is verified.
        self.proposer.track(row, draft, self.version, is_counted=False)
        self.view.add(row)

    def on_finished(self, row: Row) -> None:
        """Note the finished draft."""
        if row in self._rows:
            self._rows.remove(row)
            self._note(row, is_finished=True)

    def end(self) -> None:
        """Note the unfinished drafts, and what all of them took."""
        self.view.engine.collect()
        for row in self._rows:
            self._note(row, is_finished=False)
        use, cost = self.view.record.idle[self.name], self.cost.coefficients
        for forward in self.view.record.forwards:
            if forward.ahead_rows and forward.own_rows:
                row_s = cost[1] + cost[2] + cost[4] * forward.positions / forward.rows
                use.seconds += forward.ahead_rows * row_s + cost[2] * forward.prompt_tokens
            elif forward.ahead_rows:
                use.seconds += forward.end_s - forward.begin_s

    def finish(self, ranks: Ranks) -> None:
        """Put all ranks' drafts into all ranks' stores."""
        record = self.view.record
        record.idle[self.name].saved_s = record.saved_s
        most_urgent_first = (sample for sample in self._order if sample in self.drafts)
        exchange(self.store, {sample: self.drafts[sample] for sample in most_urgent_first}, ranks)

    def _note(self, row: Row, is_finished: bool) -> None:
        """A row's tokens as a draft, unless the store has it as it is."""
        old = self.store.get(row.id)
        grown = len(row.tokens) - (0 if old is None else len(old.tokens))
        if grown > 0:
            self.view.record.drafted_tokens += grown
            tokens = row.tokens.astype(np.int32)
            self.drafts[row.id] = Draft(tokens, is_finished, self.version)

    def _spare_s(self) -> float:
        """Seconds that drafts may add to a forward."""
        engine, unfinished = self.view.engine, self.view.unfinished
        if unfinished:
            lengths = zip(engine.rows, engine.lengths.tolist(), strict=True)
            kv_tokens = sum(length for row, length in lengths if row in unfinished)
            count = len(unfinished)
            return self.max_slowdown * float(self.cost.seconds(count, count, 0, kv_tokens))
        forwards, record = self.view.record.forwards, self.view.record
        elapsed_s = forwards[-1].end_s - record.began_s if forwards else 0.0
        single_s = float(self.cost.coefficients[0])
        return max(MAX_IDLE_FORWARDS * single_s, MAX_IDLE_SHARE * elapsed_s) - single_s

    def _num_free(self) -> int:
        """How many more draft rows may join the next forwards."""
        engine = self.view.engine
        drafting = len(self._rows)
        free = engine.num_slots - len(self.view.unfinished) - drafting
        if free <= 0:
            return 0
        _, row_s, token_s, _, kv_s = self.cost.coefficients.tolist()
        one_s = row_s + token_s + kv_s * (float(engine.lengths.mean()) if engine.rows else 0.0)
        return max(0, int(min(free + drafting, self._spare_s() / one_s)) - drafting)
