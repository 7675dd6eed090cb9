"""The rollout with run-ahead: a rank whose rows are done, or few, drafts rows of coming steps until the slowest rank ends.

Hard bubbles: a rank has finished its rows and waits; its slots fill with drafts. Soft bubbles: a rank still decodes, but few
rows, and drafts join its forwards as long as they slow them by at most `max_slowdown`. Drafts come from the *global* coming
batches, whoever will own the prompt. Which rank drafts which item is settled by the ticks of the progress board: a rank asks for
items in its state, and every rank grants all requests of a tick in the same order, so no item is drafted twice and no one
has to agree on anything further. All ranks leave at the same tick; drafts stop where they are, and are continued later.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bubblespec.drafts.bubble import Draft, DraftStore, Key
from bubblespec.engine.generator import Generator
from bubblespec.engine.sampling import SamplingParams
from bubblespec.forward_log import ForwardLog
from bubblespec.records import Row, SampleId
from bubblespec.schedule.priority import Item
from bubblespec.schedule.progress import ProgressBoard, RankState
from bubblespec.schedule.speculator import RowSpeculator
from bubblespec.schedule.windows import CostModel
from bubblespec.timeline import Event, forward_kind, note


@dataclass
class RunAhead:
    """What a rank needs to draft ahead in one rollout.

    items, idle_items: to draft, most urgent first, the same on every rank; the second only by ranks without rows of their own.
    held: items that this rank alone goes on with, from the rollout before. max_slowdown: see `BubbleConfig`.
    """

    items: deque[Item]
    idle_items: deque[Item]
    held: list[Item]
    store: DraftStore
    version: int
    max_new_tokens: int
    max_slowdown: float

    def has_items(self, takes_all: bool) -> bool:
        """Whether there is something to draft; takes_all: also what pays only on a rank that has nothing else to do."""
        return bool(self.items or (takes_all and self.idle_items))

    def grant(self, states: list[RankState]) -> list[list[Item]]:
        """The items that each rank gets for its request in a tick: a pure function of the tick, the same on all ranks."""
        granted = []
        for state in states:
            granted.append([])
            while len(granted[-1]) < state.wanted_items and self.has_items(state.is_done):
                granted[-1].append((self.items or self.idle_items).popleft())
        return granted


@dataclass
class RolloutStats:
    """One rollout on one rank. Seconds of wall time; forwards while own rows were left, and after."""

    own_forwards: int = 0
    hard_forwards: int = 0
    own_s: float = 0.0  # until this rank's rows were done
    wait_s: float = 0.0  # with nothing to do
    total_s: float = 0.0
    drafted_tokens: int = 0
    num_ticks: int = 0
    events: list[Event] = field(default_factory=list)

    def __add__(self, other: "RolloutStats") -> "RolloutStats":
        return RolloutStats(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def rollout(
    engine: Generator,
    rows: list[Row],
    params: SamplingParams,
    board: ProgressBoard,
    speculator: RowSpeculator,
    ahead: RunAhead | None,
    on_finished: Callable[[Row], None] | None = None,
    log: ForwardLog | None = None,
) -> tuple[RolloutStats, dict[Key, Draft]]:
    """Generate this rank's rows to their end, and draft ahead until all ranks have. Returns counts and this rank's drafts.

    With `ahead` None nothing is drafted. Rows must be known to the speculator (`track`). on_finished: called with each of `rows`
    as it is done; log: where forwards are noted. Drafts that are not finished stay in the engine where they can, and go on in
    the next rollout over the keys and values they have. If a rank is told to stop, all leave with their rows unfinished.
    """
    stats, drafts, clock = RolloutStats(), {}, board.ranks.clock
    own = {id(row) for row in rows}
    granted: deque[Item] = deque()  # items to draft, not yet in the engine
    held = {item.key: item for item in ahead.held} if ahead is not None else {}
    kept = [row for row in engine.rows if (row.id.visit, row.id.uid, row.id.sample) in held]
    if rows and kept:
        num_kept = _affordable_beside(rows, kept, ahead, speculator.cost)
        kept = sorted(kept, key=lambda row: len(row.tokens), reverse=True)[:num_kept]
    engine.reset(kept)
    max_prefill_tokens = None  # until drafts are admitted
    for row in kept:
        speculator.track(row, None, ahead.version)
        del held[row.id.visit, row.id.uid, row.id.sample]
    granted.extend(held.values())  # the engine has been used for something else in between
    engine.add(rows)
    started = clock.perf_counter()
    if log is not None:
        log.begin()

    def state() -> RankState:
        wanted = 0
        if ahead.has_items(not own) and not engine.queue:
            wanted = max(0, 2 * _free_rows(engine, own, ahead, speculator.cost) - len(granted))
        return RankState(len(own), wanted, board.ranks.must_stop)

    def forward() -> None:
        begin, own_before, aside_before = clock.perf_counter(), len(own), speculator.stats.seconds
        looked_up_before = speculator.stats.num_looked_up
        num_ahead = len(engine.rows) + len(engine.queue) - own_before
        finished, load = engine.step(params, speculator, max_prefill_tokens)
        end = clock.perf_counter()
        aside_s = speculator.stats.seconds - aside_before
        speculator.cost.observe(*load[:4], end - begin - aside_s)
        if log is not None:
            log.add(begin, end, load, own_before, num_ahead, aside_s, speculator.stats.num_looked_up - looked_up_before)
        for row in finished:
            if id(row) in own:
                own.discard(id(row))
                if on_finished is not None:
                    on_finished(row)
            else:
                _keep(drafts, row, ahead, stats)
        if own_before:
            stats.own_forwards += 1
            if not own:
                stats.own_s = end - started
        else:
            stats.hard_forwards += 1
        note(stats.events, forward_kind(own_before, num_ahead, load), begin, end)

    if ahead is None:  # nobody needs to know how far anyone is
        while own and not board.ranks.must_stop:
            forward()
        stats.total_s = clock.perf_counter() - started
        return stats, drafts
    board.begin()
    while True:
        while (states := board.poll(state, is_urgent=not own)) is not None:
            granted.extend(ahead.grant(states)[board.ranks.rank])
        if board.is_over:
            break
        if granted and not engine.queue and not _is_prefilling(engine, own):
            max_prefill_tokens = _admit(engine, own, granted, ahead, speculator)
        if engine.is_idle or (not own and board.are_others_done):  # the last tick is about to complete: start no forward
            begin = clock.perf_counter()
            if (states := board.wait(state)) is not None:
                granted.extend(ahead.grant(states)[board.ranks.rank])
            stats.wait_s += clock.perf_counter() - begin
            note(stats.events, "wait", begin, clock.perf_counter())
            if log is not None:
                log.waited()
        else:
            forward()
    unfinished = sorted(engine.collect(), key=lambda row: len(row.tokens), reverse=True)
    # Rows of the next step are about to be verified, by whoever owns them; the next step's own rows need slots.
    decoding = {id(row) for row in engine.decoding()}
    may_stay = [id(row) for row in unfinished if row.id.visit > ahead.version + 1 and id(row) in decoding]
    staying = set(may_stay[: max(engine.num_slots - len(rows), 0)])
    for row in unfinished:
        _keep(drafts, row, ahead, stats, board.ranks.rank if id(row) in staying else -1)
    stats.num_ticks, stats.total_s = board.num_ticks, clock.perf_counter() - started
    return stats, drafts


def _is_prefilling(engine: Generator, own: set[int]) -> bool:
    """Whether own prompts are still being fed: the limit on prompts that comes with drafts would hold for them too."""
    return any(id(row) in own for row in engine.prefilling())


def _spare_s(engine: Generator, own: set[int], ahead: RunAhead, cost: CostModel) -> float:
    """Seconds that drafts may add to a forward."""
    if not own:
        return math.inf
    positions = sum(n for row, n in zip(engine.rows, engine.lengths.tolist(), strict=True) if id(row) in own)
    return ahead.max_slowdown * float(cost.seconds(len(own), len(own), 0, positions))


def _affordable_beside(rows: list[Row], kept: list[Row], ahead: RunAhead, cost: CostModel) -> int:
    """How many drafts of the rollout before may go on beside own rows from their first forward on."""
    own_s = cost.seconds(len(rows), len(rows), 0, sum(len(row.prompt) for row in rows))
    positions = float(np.mean([len(row.prompt) + len(row.tokens) for row in kept]))
    return int(ahead.max_slowdown * own_s / (cost.seconds(1, 1, 0, positions) - cost.coefficients[0]))


def _free_rows(engine: Generator, own: set[int], ahead: RunAhead, cost: CostModel) -> int:
    """How many more draft rows may join the next forwards."""
    active = len(engine.rows)
    free = engine.num_slots - active - len(engine.queue)
    if not own or free <= 0:
        return free
    positions = float(engine.lengths.mean()) if active else 0.0
    affordable = int(_spare_s(engine, own, ahead, cost) / (cost.seconds(1, 1, 0, positions) - cost.coefficients[0]))
    return max(0, min(free, affordable - (active - len(own))))


def _admit(engine: Generator, own: set[int], granted: deque[Item], ahead: RunAhead, speculator: RowSpeculator) -> int:
    """Put granted items into free rows. Returns how much of their prompts may be fed at a time: a little in a soft bubble."""
    free = _free_rows(engine, own, ahead, speculator.cost)
    prefill = min(_spare_s(engine, own, ahead, speculator.cost) / speculator.cost.coefficients[2], engine.max_batch_tokens)
    for _ in range(min(free, len(granted))):
        item = granted.popleft()
        draft = ahead.store.get(item.key)
        row = Row(SampleId(item.prompt.uid, item.step, item.sample), item.prompt.token_ids, ahead.max_new_tokens)
        if draft is not None:
            row.tokens = draft.tokens.astype(np.int64)
        speculator.track(row, None, ahead.version)
        engine.add([row])
    return int(prefill)


def _keep(drafts: dict[Key, Draft], row: Row, ahead: RunAhead, stats: RolloutStats, holder: int = -1) -> None:
    key = (row.id.visit, row.id.uid, row.id.sample)
    old = ahead.store.get(key)
    grown = len(row.tokens) - (len(old.tokens) if old else 0)
    stats.drafted_tokens += grown
    if grown > 0 or holder != (old.holder if old else -1):
        drafts[key] = Draft(row.tokens.astype(np.int32), row.finish is not None, ahead.version, holder)
