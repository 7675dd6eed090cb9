"""What a step reports of its speculation, by value: from counts made by hand, from what the engine
said, by a hand-made clock."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from bubblespec.idle.draft_planning import Item
from test_rollout_loop import (
    ALONE,
    LIMIT,
    MAX_LENGTH,
    PARAMS,
    PROMPTS,
    SEED,
    BoardWithSlowRank,
    fixed_cost,
    groups_of,
    new_model,
    rows_of,
)
from test_speculation import SamePrompts, learn, make, make_config, make_sampler, recorded

from bubblespec.draft.proposer import make_proposer
from bubblespec.draft.store import DraftStore
from bubblespec.draft.suffix import History
from bubblespec.engine.engine import Engine
from bubblespec.engine.runner import ModelRunner
from bubblespec.idle.draft_ahead import DraftAhead
from bubblespec.planner.windows import WINDOWS
from bubblespec.records import Acceptance, RolloutRecord, Span, StepRecord, total_s
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.telemetry.report import speculation_metrics
from bubblespec.types import Draft, Group, Prompt
from tests.helpers.rows import launch_of, run_loop, samples_of


def histogram(**counts: int) -> np.ndarray:
    """Verifications by bin: `of_4=2` are two with 4 or 5 accepted tokens."""
    found = np.zeros(len(WINDOWS), np.int64)
    for name, count in counts.items():
        found[WINDOWS.tolist().index(int(name.removeprefix("of_")))] = count
    return found


def metrics_of(ranks, rollouts: list[RolloutRecord], spans=(), num_tokens: int = 200) -> dict:
    """Of a step of these rollouts, with 17 tokens in the store."""
    samples = samples_of([Group(Prompt(1, "", (1,), {}), 0)], [np.zeros(num_tokens, np.int32)])
    rewards = np.zeros((1, 1))
    record = StepRecord(
        step=0,
        samples=samples,
        rewards=rewards,
        generated=samples,
        all_rewards=rewards,
        owners=np.zeros(1, np.int64),
        batch_sizes=[1] * len(rollouts),
        rollouts=rollouts,
        stages=[Span("gen", 0.0, 1.0)],
        spans=list(spans),
        drafts={},
        used=samples.groups,
    )
    return speculation_metrics(ranks, record, store_tokens=17, accepted_by_age={3: 0.4, 1: 0.9})


def test_metrics_of_two_ranks_by_hand():
    """This rank takes longer over its rows, in fewer forwards, and is the one that others wait
    for."""
    counts = Acceptance(50, 80, 60, 30, 45)
    counts.by_source, counts.accepted_lengths = (
        {"aligned": [40, 25], "self": [20, 5]},
        histogram(of_0=3, of_4=2),
    )
    seconds = {"own_s": 8.0, "wait_s": 0.5, "total_s": 8.5, "propose_s": 0.5}
    here = recorded(30, 5, **seconds, drafted_tokens=40, num_ticks=17, acceptance=counts)
    counts = Acceptance(25, 40, 40, 12, 15)
    counts.by_source, counts.accepted_lengths = (
        {"aligned": [10, 9], "history": [24, 3], "made up": [6, 0]},
        histogram(of_4=1, of_128=6),
    )
    seconds = {"own_s": 6.0, "wait_s": 2.0, "total_s": 10.5, "propose_s": 0.25}
    there = recorded(45, 2, **seconds, drafted_tokens=30, num_ticks=17, acceptance=counts)
    exchanges = [Span("exchange", 1.0, 1.25), Span("sync", 1.25, 3.0), Span("exchange", 3.0, 3.5)]
    sent: list[np.ndarray | str] = []
    first = SimpleNamespace(
        gather=lambda array: (sent.append(array), array[None])[1],
        gather_text=lambda text: (sent.append(text), [text])[1],
    )
    metrics_of(first, [there], [Span("exchange", 0.0, 9.0)])
    second = SimpleNamespace(
        gather=lambda array: np.stack((array, sent.pop(0))),
        gather_text=lambda text: [text, sent.pop(0)],
    )
    found = metrics_of(second, [here], exchanges)
    assert not sent
    assert found == {
        "rollout/forwards": 30,
        "rollout/spec_accept_length": 120 / 75,
        "rollout/spec_accept_rate": 42 / 100,
        "rollout/spec_coverage": 60 / 200,
        "rollout/spec_accepted_tokens": 42,
        "rollout/spec_wasted_tokens": 58,
        "rollout/spec_accepted_lengths": histogram(of_0=3, of_4=3, of_128=6).tolist(),
        "bubble/drafted_tokens": 70,
        "bubble/store_tokens": 17,
        "bubble/ratio_before_drafting": (0 + 2 / 8) / 2,
        "bubble/overrun_s": 2.5,
        "bubble/hard_forwards": 7,
        "progress/ticks": 17,
        "timing_s/propose": 0.375,
        "timing_s/exchange": 0.75,
        "drafts/aligned/accept_rate": 34 / 50,
        "drafts/aligned/tokens": 50,
        "drafts/self/accept_rate": 5 / 20,
        "drafts/self/tokens": 20,
        "drafts/history/accept_rate": 3 / 24,
        "drafts/history/tokens": 24,
        "drafts/made up/accept_rate": 0.0,
        "drafts/made up/tokens": 6,
        "drafts/accept_rate/age_1": 0.9,
        "drafts/accept_rate/age_3": 0.4,
    }


def test_metrics_of_a_rank_that_had_nothing_to_do():
    found = metrics_of(ALONE, [RolloutRecord()])
    rates = [
        "rollout/spec_accept_length",
        "rollout/spec_accept_rate",
        "rollout/spec_coverage",
        "bubble/overrun_s",
    ]
    assert [found[key] for key in rates] == [
        0.0,
        0.0,
        0.0,
        0.0,
    ] and "drafts/aligned/tokens" not in found


def test_rollouts_of_a_step_are_counted_together(monkeypatch):
    """Dynamic sampling generates several batches a step. Against what the engine tells the
    proposer, forward by forward."""
    model, config = new_model(), make_config(lookahead=1)
    config.rollout.dynamic_sampling = True
    engine = Engine(ModelRunner(model, 24, MAX_LENGTH, SEED))
    speculation = make(config, BoardWithSlowRank(90))
    proposer = speculation.proposer
    seen, observe, grown, merge = [], proposer.observe, [], DraftAhead.merge

    def listening(rows, tokens, num_draft, num_accepted):
        for row, gained, drafted, accepted in zip(
            rows, tokens, num_draft.tolist(), num_accepted.tolist(), strict=True
        ):
            seen.append((row.id.visit, len(gained), drafted, accepted))
        observe(rows, tokens, num_draft, num_accepted)

    def noted_merge(work, ranks):
        for sample, draft in work.drafts.items():
            old = work.store.get(sample)
            grown.append(len(draft.tokens) - (len(old.tokens) if old else 0))
        merge(work, ranks)

    class TwoBatches(SamePrompts):
        """Step 1 starts two prompts, and as all rewards are the same, goes on to the third."""

        def launch(self, step):
            return launch_of(groups_of(step, PROMPTS[:2] if step == 1 else PROMPTS), 2)

        def replacements(self, step, count, used):
            return groups_of(step, PROMPTS[2:]) if len(used) == 2 else []

    proposer.observe = listening
    monkeypatch.setattr(DraftAhead, "merge", noted_merge)
    sampler = make_sampler(speculation, engine, TwoBatches())
    for step in range(3):
        seen.clear()
        grown.clear()
        forwards_before = engine.num_forwards
        record = sampler.sample(step)
        assert len(record.rollouts) == 1 + (step == 1) and len(record.generated) == 6
        num_forwards = engine.num_forwards - forwards_before
        num_tokens = int(record.generated.lengths.sum())
        counted = [entry[1:] for entry in seen if entry[0] == step]
        gained, drafted, accepted = (sum(column) for column in zip(*counted, strict=True))
        assert gained == num_tokens and (drafted > 10 or not step)
        found = speculation_metrics(
            ALONE, record, store_tokens=speculation.store.num_tokens, accepted_by_age={}
        )
        verified = [n for _, length, n in counted if length]
        bins = np.searchsorted(WINDOWS, verified, side="right") - 1
        wanted = {
            "rollout/forwards": num_forwards
            - sum(rollout.hard_forwards for rollout in record.rollouts),
            "rollout/spec_accept_length": gained / len(counted),
            "rollout/spec_accept_rate": accepted / max(drafted, 1),
            "rollout/spec_coverage": sum(min(n + 1, length) for _, length, n in counted)
            / num_tokens,
            "rollout/spec_accepted_tokens": accepted,
            "rollout/spec_wasted_tokens": drafted - accepted,
            "rollout/spec_accepted_lengths": np.bincount(bins, minlength=len(WINDOWS)).tolist(),
            "bubble/drafted_tokens": sum(grown),
            "bubble/store_tokens": sum(
                len(draft.tokens) for draft in speculation.store._drafts.values()
            ),
        }
        assert {key: found[key] for key in wanted} == wanted
        assert (
            sum(
                value
                for key, value in found.items()
                if key.startswith("drafts/") and key.endswith("tokens")
            )
            == drafted
        )


def test_shares_by_age_take_in_each_rollout_of_a_step_once():
    """Each rollout has counts of its own: 100 tokens with 80 accepted, then 50 with 10."""
    speculation = make(make_config())
    for counts in ([100, 80], [50, 10]):
        speculation.begin({}, step=1)
        speculation.proposer.acceptance.by_age[1] = counts
        learn(speculation, RolloutRecord(acceptance=speculation.proposer.acceptance))
    assert speculation.accepted_by_age == {1: pytest.approx(0.7 * 0.8 + 0.3 * 0.2)}


class Clock:
    """Moved by hand."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


class TimedBoard(BoardWithSlowRank):
    """Waiting for a tick takes a quarter of a second."""

    def __init__(self, num_ticks: int, clock: Clock):
        super().__init__(num_ticks)
        self.ranks.clock = self.clock = clock
        self.is_polling, self.num_waits = False, 0

    def poll(self, state, is_urgent: bool = True):
        self.is_polling = True
        try:
            return super().poll(state, is_urgent)
        finally:
            self.is_polling = False

    def wait(self, state):
        if not self.is_polling:
            self.num_waits += 1
            self.clock.now += 0.25
        return super().wait(state)


@pytest.mark.parametrize("what", ["rows alone", "rows and waiting", "rows, drafts and waiting"])
def test_seconds_of_a_rollout_by_a_clock_that_only_forwards_and_waiting_move(what):
    """A forward takes one second: `own_s` ends with the rank's last row, `total_s` with the
    rollout, and `wait_s` is neither."""
    clock = Clock()
    board = TimedBoard(60, clock)
    proposer = make_proposer("bubble", History(10), fixed_cost(), has_drafts=True, clock=clock)
    engine = Engine(ModelRunner(new_model(), 24, MAX_LENGTH, SEED))
    forward = engine.step

    def timed_forward(*arguments):
        clock.now += 1.0
        return forward(*arguments)

    engine.step = timed_forward
    rows, works = rows_of(0, limit=12), []
    proposer.begin()
    for row in rows:
        proposer.track(row, None, 0)
    if what != "rows alone":
        names = [
            (group.sample(number), group.prompt.token_ids)
            for group in groups_of(1)
            for number in range(2)
        ]
        items = [Item(*name, 1, pays=False) for name in names if "drafts" in what]
        options = {"version": 0, "max_new_tokens": LIMIT, "max_slowdown": 1.0}
        works = [DraftAhead(lambda seen: items, DraftStore(10**6), proposer, **options)]
    record = run_loop(
        RolloutLoop(engine, board.ranks, PARAMS, proposer=proposer, board=board, works=works), rows
    )
    own, hard = record.own_forwards, record.hard_forwards
    assert own + hard == engine.num_forwards and own >= 12 > 6 == len(rows)
    assert (hard > 5) == (what == "rows, drafts and waiting") == any(work.drafts for work in works)
    assert (
        (board.num_waits > 5 if works else board.num_waits == 0)
        if what != "rows, drafts and waiting"
        else True
    )
    assert (record.own_s, record.wait_s, record.total_s) == (
        own,
        board.num_waits / 4,
        own + hard + board.num_waits / 4,
    )
    assert total_s(record.spans, "wait") == record.wait_s
    assert total_s(record.spans, "draft hard") == hard
    assert record.num_ticks == (board.num_ticks if works else 0)
    found = metrics_of(ALONE, [record])
    assert (
        found["bubble/overrun_s"] == hard + board.num_waits / 4
        and found["bubble/ratio_before_drafting"] == 0
    )


@pytest.mark.parametrize("fixed_window", [None, 3])
def test_seconds_of_proposals_are_those_of_finding_and_of_learning_from_them(fixed_window):
    """Each look at the clock takes one second, so two looks are one second apart."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    proposer = make_proposer(
        "bubble", History(10), fixed_cost(), has_drafts=True, fixed_window=fixed_window, clock=clock
    )
    proposer.begin()
    row, other = rows_of(0, PROMPTS[:1])
    proposer.track(row, Draft(np.arange(9, dtype=np.int32), True, 0), 0)
    draft, nothing = proposer.propose([row, other], np.zeros(2, np.int64), np.full(2, 20), 100)
    assert proposer.take_spent() == (1.0, 2) and len(draft) > 2 and nothing is None
    assert proposer._overhead_s == pytest.approx(0.1 if fixed_window is None else 0.0), (
        "a tenth of the latest"
    )
    proposer.observe(
        [row, other], [draft[:2], draft[:1]], np.array([len(draft), 0]), np.array([1, 0])
    )
    assert proposer.take_spent() == (1.0, 0)


def test_a_forward_is_timed_without_its_proposals():
    """Again each look takes a second: one for proposals, one for what came of them, and three
    between these in the engine."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    proposer = make_proposer(
        "bubble", History(10), fixed_cost(), has_drafts=True, fixed_window=3, clock=clock
    )
    engine = Engine(ModelRunner(new_model(), 24, MAX_LENGTH, SEED))
    proposer.begin()
    rows = rows_of(0)
    for row in rows:
        proposer.track(row, None, 0)
    ranks = SimpleNamespace(rank=0, must_stop=False, clock=clock)
    record = run_loop(RolloutLoop(engine, ranks, PARAMS, proposer=proposer), rows)
    decodes = [forward for forward in record.forwards if forward.looked_up_rows]
    assert len(decodes) > 10 and {(forward.propose_s, forward.engine_s) for forward in decodes} == {
        (2.0, 3.0)
    }
    assert all(
        forward.looked_up_rows == forward.rows for forward in decodes if not forward.prompt_tokens
    )
    found = metrics_of(ALONE, [record])
    assert (
        found["timing_s/propose"]
        == sum(forward.propose_s for forward in record.forwards)
        >= 2.0 * len(decodes)
    )
