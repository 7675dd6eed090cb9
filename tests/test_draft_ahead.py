"""What drafting ahead may cost and when it stops, in virtual time: allowances, plans made anew
within a rollout, forwards in hard bubbles. Which tokens drafts have is tested in
test_rollout_loop.py, and so is what an unlimited allowance does."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from bubblespec.idle.draft_planning import Item
from bubblespec.idle.work import Offer, RankView
from test_rollout_loop import (
    ALONE,
    FOUR_PROMPTS,
    LIMIT,
    PARAMS,
    BoardWithSlowRank,
    World,
    as_dict,
    fixed_cost,
    groups_of,
    new_model,
    pass_time,
    plain,
    rows_of,
)

from bubblespec.idle.draft_ahead import LONGEST_FORWARDS, LONGEST_SHARE, REPLAN_TOKENS, DraftAhead
from bubblespec.records import POSITIONS, RolloutRecord
from bubblespec.rollout.board import ProgressBoard
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.simulate.world import SimulatedRanks, SimulatedTicks
from bubblespec.simulate.world import World as VirtualTime
from bubblespec.types import Draft, Row
from tests.helpers.rows import run_loop

FORWARD_S, ROW_S = 1e-3, 5e-5  # of which half is the row's token


def make_world(num_ticks: int, num_slots: int = 24) -> World:
    return World(
        new_model(),
        num_slots,
        BoardWithSlowRank(num_ticks),
        cost=fixed_cost(FORWARD_S, ROW_S / 2, ROW_S / 2),
    )


def drafting(
    world: World, items: list[Item], step: int = 0, limit: int = LIMIT, **options
) -> DraftAhead:
    options = {"version": step, "max_new_tokens": limit, "max_slowdown": 10.0} | options
    return DraftAhead(lambda seen: items, world.store, world.proposer, **options)


def roll_out(
    world: World,
    ahead: DraftAhead,
    rows: list[Row],
    step: int = 0,
    drafts: dict | None = None,
    slow: float = 1.0,
):
    """The rollout's record, and how often each row has come into the engine. Forwards take what the
    cost model says, times `slow`."""
    world.proposer.begin()
    for row in rows:
        world.proposer.track(row, (drafts or {}).get(row.id), step)
    engine, added = world.engine, Counter()
    engine_step, engine_add = engine.step, engine.add

    def timed_step(*arguments):
        finished, load = engine_step(*arguments)
        world.board.ranks.clock.sleep(slow * float(world.proposer.cost.seconds(*load[:4])))
        return finished, load

    def counted_add(new_rows: list[Row]) -> None:
        added.update(row.id for row in new_rows)
        engine_add(new_rows)

    engine.step, engine.add = timed_step, counted_add
    loop = RolloutLoop(
        engine, world.board.ranks, PARAMS, proposer=world.proposer, board=world.board, works=[ahead]
    )
    record = run_loop(loop, rows)
    del engine.step, engine.add
    ahead.merge(ALONE)
    return record, added


def beside(record: RolloutRecord) -> list[int]:
    """Drafts in each forward with own rows."""
    return [forward.ahead_rows for forward in record.forwards if forward.own_rows]


def hard(record: RolloutRecord) -> list[int]:
    return [forward.ahead_rows for forward in record.forwards if not forward.own_rows]


def test_without_an_allowance_nothing_is_drafted_beside_own_rows():
    """Nor do drafts of the rollout before go on, though they are in the engine; the hard bubble is
    there for all of them."""
    world = make_world(num_ticks=25)
    roll_out(world, drafting(world, world.items(0, (4, 5)), limit=80), rows_of(0, limit=12))
    items = world.items(1, (4, 5))
    assert any(item.holder == 0 for item in items) and len(world.engine.rows) > 0
    world.board.last_tick, rows = 70, rows_of(1, limit=12)
    record, _ = roll_out(world, drafting(world, items, 1, limit=80, allowance_s=0.0), rows, 1)
    assert as_dict(rows) == plain(world.model, 1, limit=12)[0]
    assert not any(beside(record)) and sum(hard(record)) > 20
    assert record.idle["draft_ahead"].seconds == pytest.approx(
        sum(f.end_s - f.begin_s for f in record.forwards if f.ahead_rows)
    )


@pytest.mark.parametrize("allowance_forwards", [1, 4])
def test_drafts_pause_where_the_allowance_is_used_up_and_go_on_in_the_bubble(allowance_forwards):
    """They spend it to the end, and no more than one forward beyond it; then each comes into the
    engine once more."""
    world = make_world(num_ticks=70)
    items, rows = world.items(0, (1,)), rows_of(0, limit=30)
    allowance_s = allowance_forwards * len(items) * ROW_S
    ahead = drafting(world, items, allowance_s=allowance_s)
    record, added = roll_out(world, ahead, rows)
    assert as_dict(rows) == plain(world.model, 0, limit=30)[0]
    counts = beside(record)
    last = max(number for number, count in enumerate(counts) if count)
    assert last < len(counts) - 5 and all(
        counts[number] for number in range(counts.index(max(counts)), last + 1)
    )
    prompt_s = (
        ROW_S
        / 2
        * sum(
            forward.prompt_tokens
            for forward in record.forwards
            if forward.own_rows and forward.ahead_rows
        )
    )
    spent_s = ROW_S * sum(counts) + prompt_s
    assert ahead.spent_s == pytest.approx(spent_s)
    assert allowance_s <= spent_s <= allowance_s + prompt_s + ROW_S * max(counts)
    hard_s = sum(
        forward.end_s - forward.begin_s
        for forward in record.forwards
        if forward.ahead_rows and not forward.own_rows
    )
    assert record.idle["draft_ahead"].seconds == pytest.approx(spent_s + hard_s) and hard_s > 0
    assert max(added[item.id] for item in items) == 2, "it goes on once, from its tokens"
    wanted, _ = plain(world.model, 1)
    assert {key: draft.tokens.tolist() for key, draft in ahead.drafts.items()} == {
        key: wanted[key][0][: len(draft.tokens)] for key, draft in ahead.drafts.items()
    }
    assert record.drafted_tokens == sum(len(draft.tokens) for draft in ahead.drafts.values())
    assert any(draft.is_finished for draft in ahead.drafts.values())


def test_expected_and_spent_seconds_are_in_the_record():
    """What the given offers were to save; of the other rank's board, whose rank asks for nothing,
    all are this rank's."""
    world = make_world(num_ticks=60)
    items = [
        replace(item, saves_s=float(n + 1), pays=n % 2 == 0)
        for n, item in enumerate(world.items(0, (1,)))
    ]
    ahead = drafting(world, items)
    record, added = roll_out(world, ahead, rows_of(0, limit=12))
    begun = [item for item in items if added[item.id]]
    assert len(begun) == len(items) and record.idle["draft_ahead"].expected_s == sum(
        item.saves_s for item in items
    )
    assert record.idle["draft_ahead"].seconds > 0 and record.idle["draft_ahead"].brought_s == 0


@pytest.mark.parametrize("slow", [1.0, 100.0])
def test_a_forward_in_a_hard_bubble_is_short(slow):
    """All may wait for its end: LONGEST_FORWARDS of one, or LONGEST_SHARE of the rollout so far,
    which is far more where forwards have been slow. With rows that take more than a fifth of a
    forward, and less than a quarter."""
    world = make_world(num_ticks=80)
    row_s = FORWARD_S / 4.5
    world.proposer.cost.coefficients = np.array([FORWARD_S, row_s / 2, row_s / 2, 0.0, 0.0])
    record, _ = roll_out(
        world,
        drafting(world, world.items(0, (1, 2, 3)), allowance_s=0.0),
        rows_of(0, limit=20),
        slow=slow,
    )
    limits, before_s = [], record.began_s
    for forward in record.forwards:
        limits.append(
            max(LONGEST_FORWARDS * FORWARD_S, LONGEST_SHARE * (before_s - record.began_s))
        )
        before_s = forward.end_s
    in_bubble = [
        (f.ahead_rows, limit)
        for f, limit in zip(record.forwards, limits, strict=True)
        if not f.own_rows
    ]
    assert all(FORWARD_S + count * row_s <= limit + 1e-9 for count, limit in in_bubble)
    if slow == 1.0:
        assert (
            max(count for count, limit in in_bubble if limit == LONGEST_FORWARDS * FORWARD_S) == 4
        )
    else:
        assert max(count for count, _ in in_bubble) > 10


def test_prompts_of_own_rows_are_fed_at_once_whatever_drafts_are_limited_to():
    """A row that comes from another rank finds the limit of the hard bubble, and drafts in the
    middle of their prompts."""
    world = make_world(num_ticks=10)
    items, view = world.items(0, (1,)), RankView(0, world.engine, {}, RolloutRecord())
    ahead = drafting(world, items)
    ahead.begin(view)
    for item in items[:3]:
        ahead.start(Offer(item.id, 0.0, 0.0, True), 0)
    ahead.advance()
    assert len(world.engine.queue) == 3 and view.max_prefill_tokens == int(FORWARD_S / (ROW_S / 2))
    own = rows_of(0)[0]
    view.unfinished[id(own)] = own
    world.engine.add([own])
    ahead.advance()
    assert view.max_prefill_tokens is None
    while not ahead.view.engine.decoding():
        world.engine.step(PARAMS, None, view.max_prefill_tokens)
    ahead.advance()
    assert view.max_prefill_tokens is None or own not in world.engine.prefilling()
    del view.unfinished[id(own)]
    ahead.start(Offer(items[3].id, 0.0, 0.0, True), 0)
    ahead.advance()
    assert view.max_prefill_tokens == int(FORWARD_S / (ROW_S / 2))


class Replanned:
    """A plan that notes what it was asked: everything pays, until the ranks have seen enough."""

    def __init__(self, items: list[Item], is_hopeless_later: bool = True):
        self.items, self.is_hopeless_later, self.asked = items, is_hopeless_later, []

    def __call__(self, seen: np.ndarray) -> list[Item]:
        self.asked.append(seen.copy())
        assert seen.shape == (len(POSITIONS) + 1, 2)
        pays = not (self.is_hopeless_later and len(self.asked) > 1)
        return [replace(item, pays=pays and n % 3 > 0) for n, item in enumerate(self.items)]


@pytest.mark.parametrize("is_hopeless_later", [True, False])
def test_what_does_not_pay_any_more_pauses(is_hopeless_later):
    """Own rows verify drafts; after REPLAN_TOKENS[0] of them the plan is made anew, once."""
    world = make_world(num_ticks=70)
    wanted, _ = plain(world.model, 0)
    drafts = {
        key: Draft(np.array(tokens, np.int32), True, 0) for key, (tokens, _) in wanted.items()
    }
    world.proposer.fixed_window = 1  # so that it takes a while
    plan = Replanned(world.items(0, (1,)), is_hopeless_later)
    ahead = DraftAhead(
        plan, world.store, world.proposer, version=0, max_new_tokens=LIMIT, max_slowdown=10.0
    )
    rows = rows_of(0)
    record, added = roll_out(world, ahead, rows, drafts=drafts)
    assert as_dict(rows) == wanted
    assert (
        REPLAN_TOKENS[0] <= record.acceptance.before_divergence[:, 0].sum() < REPLAN_TOKENS[1]
        and len(plan.asked) == 2
    )
    assert not plan.asked[0].any() and plan.asked[1][:-1, 0].sum() >= REPLAN_TOKENS[0]
    counts = beside(record)
    assert max(counts) == 4 and (counts[-1] == 0) == is_hopeless_later
    assert sum(hard(record)) > 0 and max(added.values()) <= 2
    coming, _ = plain(world.model, 1)
    assert all(
        draft.tokens.tolist() == coming[key][0][: len(draft.tokens)]
        for key, draft in ahead.drafts.items()
    )


def test_items_in_line_that_do_not_pay_any_more_are_no_reason_to_ask_for_less():
    world = make_world(num_ticks=10, num_slots=8)
    items, own = world.items(0, (1, 2)), rows_of(0)[0]
    plan = iter([items, [replace(item, pays=n >= 6) for n, item in enumerate(items)]])
    ahead = DraftAhead(
        lambda seen: next(plan),
        world.store,
        world.proposer,
        version=0,
        max_new_tokens=LIMIT,
        max_slowdown=10.0,
    )
    ahead.begin(RankView(0, world.engine, {id(own): own}, RolloutRecord()))
    ahead.offers([])
    asked_before = ahead.wanted()
    for item in items[:6]:
        ahead.start(Offer(item.id, 0.0, 0.0, True), 0)
    assert ahead.wanted() == asked_before - 6
    ahead.hear([np.ones((len(POSITIONS) + 1) * 2) * REPLAN_TOKENS[0]])
    offered = ahead.offers([None])
    assert [offer.key for offer in offered] == [
        item.id for item in items[6:]
    ] and ahead.wanted() == asked_before


def play_two_ranks(num_rollouts: int) -> list[list[dict]]:
    """Two ranks with plans that change at random in each rollout, by what all have seen."""
    time, results = VirtualTime(2), [[], []]

    def work(rank: int) -> None:
        ranks = SimulatedRanks(time, rank)
        world = World(
            new_model(), 10, ProgressBoard(ranks, 120, SimulatedTicks(ranks), interval_s=0)
        )
        pass_time(world.engine, ranks)
        for step in range(num_rollouts):
            rows, asked, offered, given = (
                rows_of(step, FOUR_PROMPTS[1:] if rank else FOUR_PROMPTS[:1]),
                [],
                [],
                [],
            )
            world.proposer.begin()
            for row in rows:
                world.proposer.track(row, world.store.get(row.id), step)
            items = world.items(step, (step + 1, step + 2), FOUR_PROMPTS)

            def plan(seen: np.ndarray, items=items, asked=asked) -> list[Item]:
                asked.append(seen.tolist())
                rng = np.random.default_rng(int(seen.sum()) + len(asked))
                order = rng.permutation(len(items)).tolist()
                return [
                    replace(items[n], pays=bool(rng.integers(2)), saves_s=float(rng.uniform()))
                    for n in order
                ]

            options = {
                "version": step,
                "max_new_tokens": LIMIT,
                "max_slowdown": 1.0,
                "allowance_s": (math.inf, 0.005)[step % 2],
            }
            ahead = DraftAhead(plan, world.store, world.proposer, **options)
            offers, start = ahead.offers, ahead.start

            def noted_offers(states, offers=offers, offered=offered):
                made = offers(states)
                if made is not None:
                    offered.append(made)
                return made

            def noted_start(offer, to, start=start, given=given):
                given.append((offer.key, to))
                start(offer, to)

            ahead.offers, ahead.start = noted_offers, noted_start
            loop = RolloutLoop(
                world.engine,
                ranks,
                PARAMS,
                proposer=world.proposer,
                board=world.board,
                works=[ahead],
            )
            record = run_loop(loop, rows)
            world.store.drop(
                group.sample(number)
                for group in groups_of(step, FOUR_PROMPTS)
                for number in range(2)
            )
            made = {key: draft.tokens.tolist() for key, draft in ahead.drafts.items()}
            ahead.merge(ranks)
            results[rank].append(
                {
                    "rows": as_dict(rows),
                    "asked": asked,
                    "offered": offered,
                    "given": given,
                    "made": made,
                    "record": record,
                }
            )

    time.run(work)
    return results


def test_ranks_plan_anew_alike_and_no_offer_is_given_twice():
    wanted, num_plans = {}, Counter()
    for step in range(8):
        wanted |= plain(new_model(), step, FOUR_PROMPTS)[0]
    for both in zip(*play_two_ranks(6), strict=True):
        for name in ("asked", "offered", "given"):
            assert both[0][name] == both[1][name], name
        keys = [key for key, _ in both[0]["given"]]
        assert len(keys) == len(set(keys)) and not set(both[0]["made"]) & set(both[1]["made"])
        num_plans[len(both[0]["asked"])] += 1
        assert len(both[0]["asked"]) <= 1 + len(REPLAN_TOKENS) and len(both[0]["offered"]) == len(
            both[0]["asked"]
        )
        for result in both:
            assert all(result["rows"][key] == wanted[key] for key in result["rows"])
            assert all(
                tokens == wanted[key][0][: len(tokens)] for key, tokens in result["made"].items()
            )
    assert num_plans[2] > 1, "some rollouts verify enough"


def test_plans_are_made_anew_at_most_once_a_stretch_of_tokens():
    """Where much is seen at once, one plan takes it all in."""
    world, asked = make_world(num_ticks=10), []
    ahead = DraftAhead(
        lambda seen: asked.append(seen.sum()) or [],
        world.store,
        world.proposer,
        version=0,
        max_new_tokens=9,
        max_slowdown=1,
    )
    assert ahead.offers([]) == [] and len(asked) == 1
    for tokens, plans in (
        (REPLAN_TOKENS[0] - 1, 1),
        (REPLAN_TOKENS[0], 2),
        (REPLAN_TOKENS[1] - 1, 2),
        (REPLAN_TOKENS[1], 3),
        (10**6, 3),
    ):
        facts = np.zeros((len(POSITIONS) + 1, 2))
        facts[0, 0] = tokens
        ahead.hear([facts.ravel()])
        assert ahead.offers([None]) is None and len(asked) == plans, (
            "what is planned stays as it is"
        )
