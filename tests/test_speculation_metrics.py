"""What a step reports of its speculation, by value: from counts made by hand, from what the engine said, by a hand-made clock."""

import itertools
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_run_ahead import LIMIT, MAX_LENGTH, PARAMS, PROMPTS, SEED, BoardWithSlowRank, fixed_cost, new_model
from test_speculation import make, make_config

from bubblespec.engine.generator import Generator
from bubblespec.engine.runner import ModelRunner
from bubblespec.idle.speculation import speculation_metrics
from bubblespec.ranks.collectives import Ranks
from bubblespec.records import Draft
from bubblespec.rollout.loop import RolloutStats, RunAhead, rollout
from bubblespec.rollout.placement import make_rows
from bubblespec.speculate.proposer import RowSpeculator, SpeculationStats
from bubblespec.speculate.store import DraftStore
from bubblespec.speculate.windows import WINDOWS

ALONE = Ranks(torch.device("cpu"))
EMPTY = {"store": DraftStore(10), "accepted_by_age": {}}


def histogram(**counts: int) -> np.ndarray:
    """Verifications by bin: `of_4=2` are two with 4 or 5 accepted tokens."""
    found = np.zeros(len(WINDOWS), np.int64)
    for name, count in counts.items():
        found[WINDOWS.tolist().index(int(name.removeprefix("of_")))] = count
    return found


def metrics_of(ranks, stats: RolloutStats, counts: SpeculationStats) -> dict:
    speculation = make(make_config())
    speculation.speculator.stats = counts
    speculation.accepted_by_age = {3: 0.4, 1: 0.9}
    speculation.store.put((9, 1, 0), Draft(np.zeros(11, np.int32), False, 0))
    speculation.store.put((9, 1, 1), Draft(np.zeros(6, np.int32), True, 0))
    return speculation_metrics(ranks, stats, speculation, num_response_tokens=200)


def test_metrics_of_two_ranks_by_hand():
    """This rank takes longer over its rows, in fewer forwards, and is the one that others wait for."""
    exchanges = [("exchange", 1.0, 1.25), ("decode", 1.25, 3.0), ("exchange", 3.0, 3.5)]
    here = RolloutStats(30, 5, 8.0, 0.5, 8.5, 40, 17, exchanges)
    there = RolloutStats(45, 2, 6.0, 2.0, 10.5, 30, 17, [("exchange", 0.0, 9.0)])
    sources = {"aligned": [40, 25], "self": [20, 5]}
    counts = SpeculationStats(50, 80, 60, 30, 45, 99, by_source=sources, accepted_lengths=histogram(of_0=3, of_4=2), seconds=0.5)
    sources = {"aligned": [10, 9], "history": [30, 3]}
    others = SpeculationStats(
        25, 40, 40, 12, 15, 88, by_source=sources, accepted_lengths=histogram(of_4=1, of_128=6), seconds=0.25
    )
    sent: list[np.ndarray] = []
    metrics_of(SimpleNamespace(gather=lambda array: (sent.append(array), array[None])[1]), there, others)
    found = metrics_of(SimpleNamespace(gather=lambda array: np.stack((array, sent.pop(0)))), here, counts)
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
        "drafts/history/accept_rate": 3 / 30,
        "drafts/history/tokens": 30,
        "drafts/accept_rate/age_1": 0.9,
        "drafts/accept_rate/age_3": 0.4,
    }


def test_metrics_of_a_rank_that_had_nothing_to_do():
    found = metrics_of(ALONE, RolloutStats(), SpeculationStats())
    rates = ["rollout/spec_accept_length", "rollout/spec_accept_rate", "rollout/spec_coverage", "bubble/overrun_s"]
    assert [found[key] for key in rates] == [0.0, 0.0, 0.0, 0.0] and "drafts/aligned/tokens" not in found


def test_rollouts_of_a_step_are_counted_together():
    """Dynamic sampling generates several batches a step. Against what the engine tells the speculator, forward by forward."""
    model, config = new_model(), make_config(lookahead=1)
    engine = Generator(ModelRunner(model, 24, MAX_LENGTH, SEED))
    speculation = make(config, BoardWithSlowRank(90))
    speculator = speculation.speculator
    seen, observe = [], speculator.observe

    def listening(rows, tokens, num_draft, num_accepted):
        for row, gained, drafted, accepted in zip(rows, tokens, num_draft.tolist(), num_accepted.tolist(), strict=True):
            seen.append((row.id.visit, len(gained), drafted, accepted))
        observe(rows, tokens, num_draft, num_accepted)

    speculator.observe = listening
    for step, batches in enumerate([[PROMPTS], [PROMPTS[:1], PROMPTS[1:]], [PROMPTS]]):
        seen.clear()
        total, num_forwards, num_drafted, all_rows = None, 0, 0, []
        for prompts in batches:
            rows, forwards_before = make_rows(prompts, step, 2, LIMIT), engine.num_forwards
            stats, drafts = speculation.rollout(engine, list(rows), PARAMS, step, lambda s: PROMPTS)
            num_forwards += engine.num_forwards - forwards_before
            for key, draft in drafts.items():
                old = speculation.store.get(key)
                num_drafted += len(draft.tokens) - (len(old.tokens) if old else 0)
            speculation.exchange(drafts, stats)
            total = stats if total is None else total + stats
            all_rows += rows
        num_tokens = sum(len(row.tokens) for row in all_rows)
        counted = [entry[1:] for entry in seen if entry[0] == step]
        gained, drafted, accepted = (sum(column) for column in zip(*counted, strict=True))
        assert gained == num_tokens and (drafted > 10 or not step)
        found = speculation_metrics(ALONE, total, speculation, num_tokens)
        verified = [n for _, length, n in counted if length]
        bins = np.searchsorted(WINDOWS, verified, side="right") - 1
        wanted = {
            "rollout/forwards": num_forwards - total.hard_forwards,
            "rollout/spec_accept_length": gained / len(counted),
            "rollout/spec_accept_rate": accepted / max(drafted, 1),
            "rollout/spec_coverage": sum(min(n + 1, length) for _, length, n in counted) / num_tokens,
            "rollout/spec_accepted_tokens": accepted,
            "rollout/spec_wasted_tokens": drafted - accepted,
            "rollout/spec_accepted_lengths": np.bincount(bins, minlength=len(WINDOWS)).tolist(),
            "bubble/drafted_tokens": num_drafted,
            "bubble/store_tokens": sum(len(draft.tokens) for draft in speculation.store._drafts.values()),
        }
        assert {key: found[key] for key in wanted} == wanted
        assert sum(value for key, value in found.items() if key.startswith("drafts/") and key.endswith("tokens")) == drafted


def test_shares_by_age_take_in_each_rollout_of_a_step_once():
    """The counts go on after the first one's exchange: 100 tokens with 80 accepted, then 50 with 10."""
    speculation = make(make_config())
    for drafted, accepted in ((100, 80), (50, 10)):
        entry = speculation.speculator.stats.by_age.setdefault(1, [0, 0])
        entry[0] += drafted
        entry[1] += accepted
        speculation.exchange({}, RolloutStats())
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
    """A forward takes one second: `own_s` ends with the rank's last row, `total_s` with the rollout, and `wait_s` is neither."""
    clock = Clock()
    board, speculator = TimedBoard(60, clock), RowSpeculator("bubble", fixed_cost(), clock=clock)
    engine = Generator(ModelRunner(new_model(), 24, MAX_LENGTH, SEED))
    forward = engine.step

    def timed_forward(*arguments):
        clock.now += 1.0
        return forward(*arguments)

    engine.step = timed_forward
    rows = make_rows(PROMPTS, 0, 2, 12)
    speculator.begin(0)
    for row in rows:
        speculator.track(row, None, 0)
    ahead = None
    if what != "rows alone":
        speculation = make(make_config())
        plan = speculation._plan([(1, PROMPTS)], 0, 6, 24)
        items = plan.idle_items if "drafts" in what else deque()
        ahead = RunAhead(deque(), items, [], DraftStore(10**6), 0, LIMIT, 1.0)
    stats, drafts = rollout(engine, rows, PARAMS, board, speculator, ahead)
    own, hard = stats.own_forwards, stats.hard_forwards
    assert own + hard == engine.num_forwards and own >= 12 > 6 == len(rows)
    assert (hard > 5) == (what == "rows, drafts and waiting") == bool(drafts)
    assert (board.num_waits > 5 if ahead else board.num_waits == 0) if what != "rows, drafts and waiting" else True
    assert (stats.own_s, stats.wait_s, stats.total_s) == (own, board.num_waits / 4, own + hard + board.num_waits / 4)
    assert sum(end - begin for kind, begin, end in stats.events if kind == "wait") == stats.wait_s
    assert sum(end - begin for kind, begin, end in stats.events if kind == "draft hard") == hard
    assert stats.num_ticks == (board.num_ticks if ahead else 0)
    found = speculation_metrics(ALONE, stats, make(make_config()), 1)
    assert found["bubble/overrun_s"] == hard + board.num_waits / 4 and found["bubble/ratio_before_drafting"] == 0


@pytest.mark.parametrize("fixed_window", [None, 3])
def test_seconds_of_proposals_are_those_of_finding_and_of_learning_from_them(fixed_window):
    """Each look at the clock takes one second, so two looks are one second apart."""
    ticks = itertools.count()
    speculator = RowSpeculator("bubble", fixed_cost(), fixed_window, SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    speculator.begin(0)
    row, other = make_rows(PROMPTS[:1], 0, 2, LIMIT)
    speculator.track(row, Draft(np.arange(9, dtype=np.int32), True, 0), 0)
    draft, nothing = speculator.propose([row, other], np.zeros(2, np.int64), np.full(2, 20), 100)
    assert speculator.stats.seconds == 1.0 and speculator.stats.num_looked_up == 2 and len(draft) > 2 and nothing is None
    assert speculator._overhead_s == pytest.approx(0.1 if fixed_window is None else 0.0), "a tenth of the latest"
    speculator.observe([row, other], [draft[:2], draft[:1]], np.array([len(draft), 0]), np.array([1, 0]))
    assert speculator.stats.seconds == 2.0
    found = speculation_metrics(ALONE, RolloutStats(), SimpleNamespace(speculator=speculator, **EMPTY), 1)
    assert found["timing_s/propose"] == 2.0
