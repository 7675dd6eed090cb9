"""What to draft first: the plan against a transcription in plain Python, the outlook against
numpy's own fit. What drafts are worth is tested in test_rehearsal.py."""

import itertools
import math
import random
from dataclasses import astuple, replace
from functools import partial

import numpy as np
import pytest
from bubblespec.idle.draft_planning import (
    PATIENCE,
    PROBE_QUANTILE,
    Item,
    Outlook,
    afford,
    plan_items,
    undrafted,
)
from bubblespec.idle.rehearsal import NORMAL_QUANTILE, Coming, Worth, rehearse

from bubblespec.draft.store import DraftStore
from bubblespec.draft.suffix import History
from bubblespec.records import POSITIONS
from bubblespec.types import Draft, Group, Prompt, Row, SampleId

SAMPLES = 3
COST = np.array(
    [1e-2, 1e-5, 1e-5, 0.0, 1e-9]
)  # seconds of a forward, a row, a token, a wide row and a position


def prompt(uid: int, length: int) -> Prompt:
    return Prompt(uid, "", tuple(range(1, length + 1)), {})


def draft(length: int, finished: bool = False, holder: int = -1) -> Draft:
    return Draft(np.arange(1, length + 1, dtype=np.int32), finished, 0, holder)


def outlook(seed: int = 0, count: int = 50) -> Outlook:
    rng, outlook = np.random.default_rng(seed), Outlook()
    prompt_lengths = rng.integers(3, 40, count)
    outlook.learn(prompt_lengths, rng.integers(1, 60, count) + 2 * prompt_lengths)
    return outlook


def groups(visit: int, prompts: list[Prompt]) -> list[Group]:
    return [Group(p, visit) for p in prompts]


def ids(items: list[Item]) -> list[SampleId]:
    return [item.id for item in items]


def random_case(seed: int):
    """Batches of three steps, each of visits of its own, and drafts and histories of some of their
    prompts."""
    rng = np.random.default_rng(seed)
    store, history = DraftStore(10**6), History(10**6)
    batches = []
    for visit in (11, 12, 13):
        prompts = [
            prompt(int(uid), int(rng.integers(3, 40))) for uid in rng.choice(1000, 5, replace=False)
        ]
        batches.append(groups(visit, prompts))
        for p in prompts:
            for _ in range(int(rng.choice([0, 0, 2]))):
                history.add(p.uid, np.arange(int(rng.integers(1, 200))), 0.0, 3)
            for sample in range(SAMPLES):
                kind = rng.integers(6)
                if kind == 0:
                    store.put(
                        SampleId(p.uid, visit, sample), draft(int(rng.integers(1, 150)), True)
                    )
                elif kind == 1:
                    store.put(
                        SampleId(p.uid, visit, sample),
                        draft(int(rng.integers(0, 150)), False, int(rng.integers(-1, 4))),
                    )
    return batches, store, history


class MadeUpWorth:
    """Drafts pay by turns, and what they save and cost tells which they are. Remembers what it was
    asked."""

    def __init__(self):
        self.asked: list[Coming] = []

    def __call__(self, coming: Coming) -> Worth:
        self.asked.append(coming)
        return Worth(
            np.arange(len(coming.totals)) % 2 == 0, 2.0 * coming.totals, coming.drafted + 1.0
        )


def brute_force(
    batches, store, history, outlook, forwards, is_worth_known=True
) -> tuple[list[tuple[float, Item]], list[list]]:
    """(slack, item) of all that is to be drafted, in the order of steps, prompts and samples; and
    what is known of the steps for which something is due, as lists in the order of `Coming`."""
    lengths = [int(n) for n in outlook.seen[:, 1]]
    slope, intercept = np.polyfit(outlook.seen[:, 0], outlook.seen[:, 1], 1)
    rest = [y - slope * x - intercept for x, y in outlook.seen.tolist()]
    margin = max(float(np.quantile(rest, PROBE_QUANTILE)), 0.0)

    def expected_total(so_far: int) -> float:
        longer = [n for n in lengths if n > so_far]
        return sum(longer) / len(longer) if longer else 2.0 * so_far

    def length_of(d: Draft, guess: float) -> float:
        if d.is_finished:
            return len(d.tokens)
        return expected_total(len(d.tokens)) if len(d.tokens) >= guess else guess

    entries, known_of_steps = [], []
    for number, of_step in enumerate(batches):
        known_of_step, is_any_due = [[] for _ in range(6)], False
        for group_number, (p, visit) in enumerate(of_step):
            siblings = [store.get(SampleId(p.uid, visit, sample)) for sample in range(SAMPLES)]
            guess = max(intercept + slope * len(p.token_ids), 1.0)
            known = [length_of(d, guess) for d in siblings if d is not None]
            if not known:
                known = history.lengths(p.uid)
            earlier = history.lengths(p.uid)
            spread = NORMAL_QUANTILE * float(np.std(earlier)) if earlier else margin
            expected = sum(known) / len(known) if known else guess
            for sample, d in enumerate(siblings):
                drafted, is_whole = (0, False) if d is None else (len(d.tokens), d.is_finished)
                total = expected
                if d is not None and (drafted or is_whole):
                    total = (
                        length_of(d, expected)
                        if is_whole
                        else max(expected, length_of(d, expected))
                    )
                place = len(known_of_step[0])
                for values, value in zip(
                    known_of_step,
                    (total, spread, drafted, is_whole, group_number, len(p.token_ids)),
                    strict=True,
                ):
                    values.append(value)
                if is_whole:
                    continue
                slack = number * forwards - (
                    total + (margin if not known and sample == 0 else 0.0) - drafted
                )
                holder = d.holder if d is not None else -1
                is_due = holder >= 0 or slack < PATIENCE * forwards
                is_any_due |= is_due
                pays = is_due and place % 2 == 0
                name = SampleId(p.uid, visit, sample)
                entries.append(
                    (
                        slack,
                        number,
                        Item(
                            name, p.token_ids, number + 1, pays, holder, 2.0 * total, drafted + 1.0
                        ),
                    )
                )
        if is_any_due:
            known_of_steps.append(known_of_step)
        if not (is_any_due and is_worth_known):
            entries = [
                (
                    slack,
                    n,
                    replace(item, pays=False, saves_s=0.0, costs_s=0.0) if n == number else item,
                )
                for slack, n, item in entries
            ]
    return [(slack, item) for slack, _, item in entries], known_of_steps


@pytest.mark.parametrize("seed", range(8))
def test_plan_is_least_slack_first(seed):
    """All unfinished items with their holders and worth, in the order of slack; equally urgent ones
    keep theirs."""
    batches, store, history = random_case(seed)
    known, worth = outlook(seed), MadeUpWorth()
    planned = plan_items(
        batches, SAMPLES, store, history, outlook=known, forwards_per_step=70.0, worth=worth
    )
    entries, known_of_steps = brute_force(batches, store, history, known, 70.0)
    slack, wanted = {item.id: s for s, item in entries}, {item.id: item for _, item in entries}
    assert len(planned) == len(entries) == len({item.id for item in planned})
    for item in planned:
        expected = wanted[item.id]
        assert replace(item, saves_s=0.0) == replace(
            expected, saves_s=0.0
        ) and item.saves_s == pytest.approx(expected.saves_s)
    assert all(slack[a.id] <= slack[b.id] + 1e-6 for a, b in itertools.pairwise(planned))
    place = {item.id: n for n, (_, item) in enumerate(entries)}
    assert all(
        place[a.id] < place[b.id]
        for a, b in itertools.pairwise(planned)
        if slack[a.id] == slack[b.id]
    )
    assert {item.pays for item in planned} == {True, False} and {
        item.holder for item in planned
    } > {-1}
    assert len(worth.asked) == len(known_of_steps) > 1
    for found, expected in zip(worth.asked, known_of_steps, strict=True):
        for name, values, others in zip(
            Coming.__dataclass_fields__, astuple(found), expected, strict=True
        ):
            np.testing.assert_allclose(values, others, rtol=1e-9, atol=1e-9, err_msg=name)
    planned = plan_items(batches, SAMPLES, store, history, outlook=known, forwards_per_step=70.0)
    assert all(item.pays is False and item.saves_s == item.costs_s == 0 for item in planned)
    assert {item.id: item for item in planned} == {
        item.id: item
        for _, item in brute_force(batches, store, history, known, 70.0, is_worth_known=False)[0]
    }


def test_a_step_of_which_nothing_is_due_is_not_rehearsed():
    """Its drafts can wait: fresher weights make better ones."""
    known, worth = outlook(), MadeUpWorth()
    batches = [groups(visit, [prompt(visit, 5)]) for visit in (1, 2, 3, 4)]
    planned = plan_items(
        batches,
        2,
        DraftStore(10),
        History(10),
        outlook=known,
        forwards_per_step=1000.0,
        worth=worth,
    )
    assert len(worth.asked) == 2, "of the third step on there is time for more than another rollout"
    assert (
        {item.id.visit for item in planned if item.pays}
        == {item.id.visit for item in planned if item.saves_s}
        == {1, 2}
    )


def test_unknown_prompts_have_one_probe():
    """Of a prompt that nothing is known of, the first sample alone is taken to be long, and so
    comes before all others."""
    known = outlook()
    prompts = [prompt(n, 20) for n in range(4)]
    planned = plan_items(
        [groups(1, prompts)],
        SAMPLES,
        DraftStore(10),
        History(10),
        outlook=known,
        forwards_per_step=50.0,
    )
    assert ids(planned)[:4] == [(n, 1, 0) for n in range(4)]
    assert ids(planned)[4:] == [(n, 1, sample) for n in range(4) for sample in (1, 2)]
    history = History(100)
    history.add(2, np.arange(5), 0.0, 0)
    planned = plan_items(
        [groups(1, prompts)],
        SAMPLES,
        DraftStore(10),
        history,
        outlook=known,
        forwards_per_step=50.0,
    )
    assert ids(planned)[:3] == [(n, 1, 0) for n in (0, 1, 3)] and ids(planned)[-3:] == [
        (2, 1, n) for n in range(3)
    ]


def test_long_responses_of_far_steps_come_before_short_ones_of_near_steps():
    near, far = prompt(1, 5), prompt(2, 5)
    history = History(10**4)
    history.add(1, np.arange(10), 0.0, 0)
    history.add(2, np.arange(200), 0.0, 0)
    batches = [groups(1, [near]), groups(2, [far])]
    for forwards_per_step, first in ((100.0, (2, 2, 0)), (300.0, (1, 1, 0))):
        planned = plan_items(
            batches,
            2,
            DraftStore(10),
            history,
            outlook=Outlook(),
            forwards_per_step=forwards_per_step,
        )
        assert ids(planned)[0] == first


def test_the_plan_does_not_depend_on_the_order_of_what_is_known():
    """Ranks put drafts and histories into their tables in whatever order they come in."""
    batches, store, history = random_case(3)
    seen = np.zeros((len(POSITIONS) + 1, 2))
    worth = partial(rehearse, cost=COST, seen=seen, num_ranks=2, num_slots=8)
    wanted = plan_items(
        batches, SAMPLES, store, history, outlook=outlook(), forwards_per_step=70.0, worth=worth
    )
    assert {item.pays for item in wanted} == {True, False}
    mixed_store, mixed_history = DraftStore(10**6), History(10**6)
    samples = [
        group.sample(number)
        for of_step in batches
        for group in of_step
        for number in range(SAMPLES)
    ]
    random.Random(1).shuffle(samples)
    for sample in samples:
        if (found := store.get(sample)) is not None:
            mixed_store.put(sample, found)
    for uid in reversed(list(history.entries)):
        for tokens, reward, step in history.entries[uid]:
            mixed_history.add(uid, tokens, reward, step)
    assert (
        plan_items(
            batches,
            SAMPLES,
            mixed_store,
            mixed_history,
            outlook=outlook(),
            forwards_per_step=70.0,
            worth=worth,
        )
        == wanted
    )


@pytest.mark.parametrize("seed", range(3))
def test_guess_is_the_line_of_numpy(seed):
    known = outlook(seed)
    x, y = known.seen.T
    slope, intercept = np.polyfit(x, y, 1)
    asked = np.array([1, 10, 39, 100])
    line, margin = known.guess(asked)
    np.testing.assert_allclose(line, np.maximum(intercept + slope * asked, 1.0), rtol=1e-9)
    assert (
        margin == pytest.approx(np.quantile(y - slope * x - intercept, PROBE_QUANTILE))
        and margin > 0
    )


def test_guess_is_never_below_one_token():
    known = Outlook()
    known.learn(np.array([1, 2, 3, 4]), np.array([40, 30, 20, 10]))
    assert known.guess(np.array([2, 50]))[0].tolist() == pytest.approx([30, 1])


def test_total_is_the_mean_of_those_that_got_further():
    known = Outlook()
    known.learn(np.ones(4, np.int64), np.array([2, 4, 6, 9]))
    assert [known.total(n) for n in (0, 2, 4, 8)] == [
        pytest.approx(v) for v in (21 / 4, 19 / 3, 15 / 2, 9.0)
    ]
    assert known.total(9) == 18.0 and known.total(50) == 100.0


def test_the_outlook_keeps_the_latest():
    known = Outlook(num_kept=3)
    for n in range(5):
        known.learn(np.array([n]), np.array([10 * n + 1]))
    assert known.lengths.tolist() == [21, 31, 41]


def test_nothing_seen_yet():
    """The first rollout plans too: all items, in the order of steps, and none of them pays."""
    known = Outlook()
    batches = [groups(visit, [prompt(1, 5), prompt(2, 9)]) for visit in (1, 2)]
    planned = plan_items(
        batches,
        2,
        DraftStore(10),
        History(10),
        outlook=known,
        forwards_per_step=0.0,
    )
    assert ids(planned) == [
        (uid, visit, sample) for visit in (1, 2) for uid in (1, 2) for sample in (0, 1)
    ]
    assert not any(item.pays for item in planned)
    line, margin = known.guess(np.array([3, 4]))
    assert line.tolist() == [1, 1] and margin == 0
    assert known.total(0) == 0 and known.total(7) == 14
    worth = partial(
        rehearse, cost=COST, seen=np.zeros((len(POSITIONS) + 1, 2)), num_ranks=3, num_slots=4
    )
    options = {"outlook": known, "forwards_per_step": 0.0, "worth": worth}
    found = plan_items(batches, 2, DraftStore(10), History(10), **options)
    assert ids(found) == ids(planned) and all(
        np.isfinite([item.saves_s, item.costs_s]).all() for item in found
    )
    assert (
        plan_items([], 2, DraftStore(10), History(10), outlook=known, forwards_per_step=10.0) == []
    )


def test_prompts_of_one_length_and_responses_of_one_length():
    """A line has no slope to fit then, and a response none that got further."""
    known = Outlook()
    known.learn(np.full(6, 7), np.array([1, 2, 3, 4, 5, 9]))
    line, margin = known.guess(np.array([7, 70]))
    assert line.tolist() == pytest.approx([4, 4]) and margin == pytest.approx(
        np.quantile([1, 2, 3, 4, 5, 9], 0.9) - 4
    )
    same = Outlook()
    same.learn(np.array([3, 5, 8]), np.full(3, 12))
    line, margin = same.guess(np.array([4, 100]))
    assert line.tolist() == pytest.approx([12, 12]) and margin == pytest.approx(0, abs=1e-9)
    assert same.total(11) == 12 and same.total(12) == 24


def test_what_is_begun_goes_on_but_only_while_it_pays():
    """Much slack keeps a draft from being begun beside own rows. One that a rank has begun goes on,
    unless drafts do not last."""
    known, store = outlook(), DraftStore(10**6)
    batches = [groups(visit, [prompt(visit, 5)]) for visit in (9, 10, 11, 12)]
    store.put(SampleId(12, 12, 0), Draft(np.ones(3, np.int32), False, 8, holder=1))
    for kept, wanted in ((1.0, True), (0.1, False)):
        seen = np.full((len(POSITIONS) + 1, 2), 1e6)
        seen[:, 1] *= kept * np.append(np.ones(len(POSITIONS)), 0.0)
        worth = partial(rehearse, cost=COST, seen=seen, num_ranks=1, num_slots=64)
        options = {"outlook": known, "forwards_per_step": 1000.0, "worth": worth}
        pays = {
            item.id: item.pays for item in plan_items(batches, 2, store, History(10), **options)
        }
        assert pays[12, 12, 0] == wanted and not pays[12, 12, 1]


def test_undrafted_counts_what_no_draft_has():
    known = Outlook()
    known.learn(np.array([2, 4, 6]), np.array([10, 20, 30]))
    rows = [Row(SampleId(n, 1, 0), (1,) * length, 50) for n, length in enumerate((4, 6, 4, 4, 4))]
    drafts, history = [None, None, draft(7, True), draft(15), draft(20)], History(1000)
    assert undrafted(rows, drafts, known, history).tolist() == pytest.approx([20, 30, 0, 5, 10])
    for uid, lengths in ((0, (90, 110)), (2, (50,)), (3, (40,))):
        for length in lengths:
            history.add(uid, np.zeros(length, np.int32), 0.0, 0)
    assert undrafted(rows, drafts, known, history).tolist() == pytest.approx([100, 30, 0, 25, 10])


def test_an_allowance_goes_to_the_nearest_steps():
    """In whatever order items come: those of a step pay while something is left behind the steps
    before it."""
    items = [
        Item(SampleId(0, ahead, n), (1,), ahead, pays=n < 2, costs_s=1.0)
        for n in range(3)
        for ahead in (3, 1, 2)
    ]

    def paying(allowance_s: float) -> set[int]:
        afforded = afford(items, allowance_s, num_ranks=2)  # each step costs each rank a second
        assert [(item.id, item.costs_s) for item in afforded] == [
            (item.id, item.costs_s) for item in items
        ]
        assert not any(
            item.pays for item, before in zip(afforded, items, strict=True) if not before.pays
        )
        ahead = {item.steps_ahead for item in afforded if item.pays}
        assert sum(item.pays for item in afforded) == 2 * len(ahead), (
            "all that pay in a step, or none"
        )
        return ahead

    assert [paying(s) for s in (0.0, 0.1, 1.0, 1.1, 2.5, math.inf)] == [
        set(),
        {1},
        {1},
        {1, 2},
        {1, 2, 3},
        {1, 2, 3},
    ]
