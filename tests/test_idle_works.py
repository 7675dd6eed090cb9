"""Several uses of idle time in one rollout: the arbiter against its rules, and a made-up use beside
drafting ahead.

The made-up one, `Slices`, needs no forwards: its pieces are done a slice at a time between those of
the engine. Two ranks run against each other in virtual time, so all that happens is a function of
the inputs alone.
"""

import copy
import itertools
from collections import deque

import numpy as np
import pytest
from test_rollout_loop import (
    FOUR_PROMPTS,
    LIMIT,
    PARAMS,
    World,
    as_dict,
    groups_of,
    new_model,
    pass_time,
    plain,
    rows_of,
)

from bubblespec.dist.ranks import Ranks
from bubblespec.idle.arbiter import Arbiter
from bubblespec.idle.draft_ahead import DraftAhead
from bubblespec.idle.work import Offer, RankView
from bubblespec.rollout.board import ProgressBoard, RankState
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.simulate.world import SimulatedRanks, SimulatedTicks
from bubblespec.simulate.world import World as VirtualTime
from bubblespec.types import Row
from tests.helpers.rows import run_loop

SLICE_S = 1e-3


def arbiter_of(*offers: list[Offer]) -> Arbiter:
    arbiter = Arbiter(len(offers))
    for work, of_work in enumerate(offers):
        arbiter.update(work, of_work)
    return arbiter


def test_a_rank_with_rows_gets_what_is_worth_slowing_them_down_for():
    """The most urgent offers of all works by what they save; none overtakes those before it in its
    own work."""
    first = [
        Offer("a", 3.0, 1.0, True),
        Offer("b", 9.0, 1.0, True),
        Offer("c", 8.0, 1.0, False),
        Offer("d", 1.0, 1.0, True),
    ]
    second = [Offer("a", 5.0, 9.0, True), Offer("b", 7.0, 1.0, False), Offer("c", 1.0, 1.0, True)]
    arbiter, decoding = arbiter_of(first, second), RankState(4, (2, 1))
    assert arbiter.assign([decoding, RankState(0)]) == [
        [(1, second[0]), (0, first[0]), (0, first[1])],
        [],
    ]
    assert arbiter.assign([decoding]) == [[(0, first[3]), (1, second[2])]]
    assert arbiter.assign([decoding]) == [[]]


def test_a_rank_that_waits_does_one_thing_at_a_time():
    """The one whose next offer saves most in a second; where that wants nothing now, it is at
    it."""
    drafts = [Offer("x", 4.0, 8.0, True), Offer("y", 2.0, 1.0, False), Offer("z", 1.0, 8.0, False)]
    slices = [Offer(n, 1.0, 1.25, False, rank=n) for n in (0, 1, 0)]
    arbiter, waiting = arbiter_of(drafts, slices), RankState(0, (1, 1))
    assert arbiter.assign([waiting, waiting]) == [[(1, slices[0])], [(1, slices[1])]], (
        "0.8 against 0.5 a second"
    )
    assert arbiter.assign([RankState(0, (1, 0)), waiting]) == [[], [(0, drafts[0])]], (
        "rank 0 has a slice to do still"
    )
    assert arbiter.assign([waiting, RankState(3, (1, 1))]) == [[(0, drafts[1])], []]
    arbiter.update(1, [])
    assert arbiter.assign([RankState(0, (5, 5))]) == [[(0, drafts[2])]]


def test_offers_replace_those_made_before():
    arbiter = arbiter_of([Offer("a", 1.0, 1.0, True), Offer("b", 1.0, 1.0, True)])
    arbiter.update(0, None)
    assert arbiter.assign([RankState(1, (1,))]) == [[(0, Offer("a", 1.0, 1.0, True))]]
    arbiter.update(0, [Offer("c", 1.0, 1.0, False)])
    assert arbiter.assign([RankState(1, (9,)), RankState(0, (9,))]) == [
        [],
        [(0, Offer("c", 1.0, 1.0, False))],
    ]


def test_offers_are_given_by_the_ticks_alone():
    """On every rank the same, each offer once, in its work's order, to ranks that may have it, and
    as many as wanted."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        world_size, num_works = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        ranks = [None, *range(world_size)]
        offers = [
            [
                Offer(
                    n,
                    float(rng.integers(6)),
                    float(rng.integers(1, 4)),
                    bool(rng.integers(2)),
                    ranks[rng.integers(len(ranks))],
                )
                for n in range(int(rng.integers(0, 30)))
            ]
            for _ in range(num_works)
        ]
        arbiter, elsewhere = arbiter_of(*offers), arbiter_of(*copy.deepcopy(offers))
        left = [list(of_work) for of_work in offers]

        def open_to(work: int, rank: int, is_done: bool, left=left) -> list[Offer]:
            """What a rank may have of a work, in the order in which it is given."""
            mine = [
                offer
                for offer in left[work]
                if offer.rank in (None, rank) and (is_done or offer.beside_rows)
            ]
            return sorted(mine, key=lambda offer: not offer.beside_rows)

        for _ in range(int(rng.integers(1, 12))):
            wishes = rng.integers(0, 6, (world_size, num_works)) * rng.integers(
                0, 2, (world_size, num_works)
            )
            states = [RankState(int(rng.integers(2)), tuple(wanted)) for wanted in wishes.tolist()]
            given = arbiter.assign(states)
            assert given == elsewhere.assign(states) and len(given) == world_size
            for rank, (state, got) in enumerate(zip(states, given, strict=True)):
                wanted, works = list(state.capacities), range(num_works)
                if state.is_done:
                    worth = {
                        work: there[0].saves_s / there[0].costs_s
                        for work in works
                        if (there := open_to(work, rank, True))
                    }
                    best = max(worth, key=worth.get, default=None)
                    wanted = [count if work == best else 0 for work, count in enumerate(wanted)]
                for work, offer in got:
                    heads = {
                        of: there[0]
                        for of in works
                        if wanted[of] and (there := open_to(of, rank, state.is_done))
                    }
                    assert heads[work] == offer and offer.saves_s == max(
                        head.saves_s for head in heads.values()
                    )
                    left[work].remove(offer)
                    wanted[work] -= 1
                assert not any(
                    wanted[work] and open_to(work, rank, state.is_done) for work in works
                ), "all that is wanted"


class Slices:
    """A made-up `IdleWork`: pieces of a few slices each, which take time but no forwards. Notes
    each call with its time."""

    name = "slices"

    def __init__(self, sizes: list[int], ranks: Ranks, stop_after: int | None = None):
        """sizes: slices of each piece; stop_after: slices after which this rank is told to stop."""
        self.sizes, self.ranks, self.stop_after = sizes, ranks, stop_after
        self.in_line: deque[int] = deque()  # the piece of each slice to do
        self.started: list[int] = []
        self.calls: list[tuple[str, float]] = []
        self.slices: list[tuple[float, float]] = []  # begin and end
        self.num_done = np.zeros(len(sizes), np.int64)  # by piece

    def _note(self, name: str) -> None:
        self.calls.append((name, self.ranks.clock.perf_counter()))

    def facts(self) -> np.ndarray:
        return np.array([len(self.slices), self.ranks.rank], np.float64)

    def hear(self, facts: list[np.ndarray]) -> None:
        assert [int(of[1]) for of in facts] == list(range(len(facts)))
        self.heard = [int(of[0]) for of in facts]

    def offers(self, states: list[RankState]) -> list[Offer] | None:
        """By turns worth slowing rows down for, and more and less urgent than drafts, which save 0
        here."""
        if states:
            return None
        return [
            Offer(piece, 1.0 if piece < 4 else -1.0, SLICE_S * size, piece % 2 == 0)
            for piece, size in enumerate(self.sizes)
        ]

    def begin(self, view: RankView) -> list[Row]:
        self._note("begin")
        self.view, self.own = view, set(view.unfinished)
        return []

    def wanted(self) -> int:
        return 0 if self.in_line else 1

    def start(self, offer: Offer, rank: int) -> None:
        if rank != self.view.rank:
            return
        self._note("start")
        assert offer.beside_rows or not self.view.unfinished
        self.started.append(offer.key)
        self.in_line.extend([offer.key] * self.sizes[offer.key])

    def advance(self) -> bool:
        self._note("advance")
        if self.in_line:
            begin_s = self.ranks.clock.perf_counter()
            self.ranks.clock.sleep(SLICE_S)
            self.slices.append((begin_s, self.ranks.clock.perf_counter()))
            self.num_done[self.in_line.popleft()] += 1
            self.ranks.must_stop |= len(self.slices) == self.stop_after
        return bool(self.in_line)

    def finish(self, row: Row) -> bool:
        self._note("finish")
        assert id(row) not in self.own, "rows of the step are the loop's"
        return False

    def make_room(self, count: int) -> int:
        return 0

    def end(self) -> None:
        self._note("end")

    def merge(self, ranks: Ranks) -> None:
        self._note("merge")
        self.by_rank = ranks.gather(self.num_done)


def play(
    num_rollouts: int, sizes: list[int], slices_first: bool = True, stop_after: int | None = None
) -> list[list[tuple]]:
    """Rank 0 has one of four prompts and rank 1 three; both draft two steps ahead and do slices.
    Returns of each rank and rollout its rows, both uses and the record."""
    time, results = VirtualTime(2), [[], []]

    def work(rank: int) -> None:
        ranks = SimulatedRanks(time, rank)
        world = World(
            new_model(), 10, ProgressBoard(ranks, 120, SimulatedTicks(ranks), interval_s=0)
        )
        pass_time(world.engine, ranks)
        for step in range(num_rollouts):
            rows = rows_of(step, FOUR_PROMPTS[1:] if rank else FOUR_PROMPTS[:1])
            world.proposer.begin()
            for row in rows:
                world.proposer.track(row, world.store.get(row.id), step)
            slices = Slices(sizes, ranks, stop_after if rank else None)
            items = world.items(step, (step + 1, step + 2), FOUR_PROMPTS)
            options = {"version": step, "max_new_tokens": LIMIT, "max_slowdown": 1.0}
            ahead = DraftAhead(
                lambda seen, items=items: items, world.store, world.proposer, **options
            )
            works = [slices, ahead] if slices_first else [ahead, slices]
            loop = RolloutLoop(
                world.engine, ranks, PARAMS, proposer=world.proposer, board=world.board, works=works
            )
            results[rank].append((rows, slices, ahead, run_loop(loop, rows)))
            world.store.drop(
                group.sample(number)
                for group in groups_of(step, FOUR_PROMPTS)
                for number in range(2)
            )
            for each in works:
                each.merge(ranks)

    time.run(work)
    return results


def check_protocol(slices: Slices, record) -> None:
    """That the loop called the work as it promises to, and that the record says what happened
    when."""
    names, times = zip(*slices.calls, strict=True)
    assert (
        names[0] == "begin"
        and names[-2:] == ("end", "merge")
        and all(names.count(name) == 1 for name in (names[0], *names[-2:]))
    )
    assert (
        list(times) == sorted(times) and times[0] <= record.began_s <= record.ended_s <= times[-1]
    )
    forwards_and_waits = len(record.forwards) + len(record.waits)
    assert len(record.forwards) <= names.count("advance") <= forwards_and_waits + len(slices.slices)
    assert times[names.index("end")] >= max(forward.end_s for forward in record.forwards)
    # In the engine, waiting, or in a slice: one at a time, and nothing is counted twice.
    spans = [(forward.end_s - forward.engine_s, forward.end_s) for forward in record.forwards]
    spans = sorted([*spans, *((wait.begin_s, wait.end_s) for wait in record.waits), *slices.slices])
    assert all(end <= begin + 1e-12 for (_, end), (begin, _) in itertools.pairwise(spans))
    assert record.began_s <= spans[0][0] and spans[-1][1] <= record.ended_s
    assert record.total_s >= sum(end - begin for begin, end in spans) - 1e-9


@pytest.mark.parametrize("slices_first", [True, False])
def test_a_second_use_of_idle_time_beside_drafting(slices_first):
    sizes = [3, 5, 2, 4, 6, 1, 4, 3, 2, 5]
    results = play(3, sizes, slices_first)
    model, wanted = new_model(), {}
    for step in range(5):
        wanted |= plain(model, step, FOUR_PROMPTS)[0]
    num_drafts = num_beside = num_idle = 0
    for both in zip(*results, strict=True):
        assert both[0][3].num_ticks == both[1][3].num_ticks > 1, "all ranks leave at the same tick"
        started = [slices.started for _, slices, _, _ in both]
        assert len({*started[0], *started[1]}) == len(started[0]) + len(started[1]), (
            "each piece on one rank"
        )
        for rows, slices, ahead, record in both:
            assert as_dict(rows) == {row.id: wanted[row.id] for row in rows}
            check_protocol(slices, record)
            for sample, draft in ahead.drafts.items():
                assert draft.tokens.tolist() == wanted[sample][0][: len(draft.tokens)]
            num_drafts += len(ahead.drafts)
            assert [name for name, _ in slices.calls].count("start") == len(slices.started)
            assert slices.num_done.sum() == len(slices.slices)
            assert all(
                done in (0, sizes[piece]) or piece == slices.in_line[0]
                for piece, done in enumerate(slices.num_done)
            )
            own_end_s = record.began_s + record.own_s
            num_beside += sum(begin_s < own_end_s for begin_s, _ in slices.slices)
            num_idle += sum(begin_s >= own_end_s for begin_s, _ in slices.slices)
        done = [slices.num_done.tolist() for _, slices, _, _ in both]
        assert all(slices.by_rank.tolist() == done for _, slices, _, _ in both)
    assert min(num_drafts, num_beside, num_idle) > 5
    calls = [name for of_rank in results for _, slices, _, _ in of_rank for name, _ in slices.calls]
    assert ("finish" in calls) == slices_first, (
        "a finished draft is offered to the works in turn, until one knows it"
    )


def test_two_uses_of_idle_time_in_virtual_time_repeat():
    """A function of the inputs alone: calls, their times, and all forwards."""

    def happened() -> list:
        return [
            [(s.calls, s.started, r.forwards, r.waits) for _, s, _, r in of_rank]
            for of_rank in play(2, [3, 5, 2, 4, 6, 1])
        ]

    assert happened() == happened()


def test_all_ranks_leave_when_one_is_told_to_stop():
    """In the middle of its slices: the others' uses of idle time end at the same tick, and rows
    stay unfinished."""
    results = play(1, [30] * 6, stop_after=4)
    (rows, slices, _, record), (other_rows, stopped, _, other_record) = results[0][0], results[1][0]
    assert record.num_ticks == other_record.num_ticks and any(
        row.finish is None for row in [*rows, *other_rows]
    )
    assert len(stopped.slices) >= 4 and stopped.in_line
    for work, of_rank in ((slices, record), (stopped, other_record)):
        check_protocol(work, of_rank)
