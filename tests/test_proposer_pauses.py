"""Costs decide: how long windows are, and whether a source is asked, pauses or is given up."""

import numpy as np
import pytest

from bubblespec.draft import proposer as module
from bubblespec.draft.proposer import Proposer
from bubblespec.draft.sources import OwnDrafts
from bubblespec.planner.costs import CostModel
from bubblespec.types import Draft, Row, SampleId
from tests.helpers.clocks import Clock
from tests.helpers.proposals import STEP, Guesses, cost, draft, forward, make, row, with_guess


@pytest.mark.parametrize(
    "always, costs, budget, wanted",
    [
        (False, cost(), 4000, 128),
        (False, cost(), 9, 8),
        (False, cost(1e-6, 0.0, 1.0), 4000, 0),
        (True, cost(1e-6, 1.0, 1.0), 5, module.ALWAYS_WINDOW),
    ],
)
def test_windows_follow_costs_and_budget_unless_fixed(always, costs, budget, wanted):
    proposer, own = make(always=always, costs=costs), row()
    own.draft = draft(range(1000))
    proposer.track(own, STEP)
    for _ in range(2 if always else 1):
        begin = len(own.tokens)
        proposed = forward(proposer, [own], [range(1000)], room=400, budget=budget)
        assert proposed == [list(range(begin, begin + wanted))]


def test_source_pauses_where_its_tokens_gain_less_than_its_query():
    """Until queries take LOOK_SHARE of the time, at most MAX_PAUSE forwards; none once they pay."""
    dear, cheap = cost(1e-9, 0.0, 1.0), cost()  # a token costs what it brings at best
    proposer, own = make("bubble", always=False, costs=dear), row()
    own.draft = draft(range(1000))
    proposer.track(own, STEP)

    def looked_at(num_forwards: int, query_s: float) -> list[int]:
        looked = []
        for number in range(num_forwards):
            proposer._query_s[:] = query_s
            assert forward(proposer, [own], [range(1000)]) == [[]]
            if proposer.take_spent()[1]:
                looked.append(number)
        return looked

    assert looked_at(4, 0.9 * module.LOOK_SHARE) == [0, 1, 2, 3]
    assert looked_at(12, 3.7 * module.LOOK_SHARE) == [0, 4, 8]
    assert looked_at(module.MAX_PAUSE + 4, 99 * module.LOOK_SHARE) == [0, module.MAX_PAUSE + 1]
    proposer.cost = cheap
    left = module.MAX_PAUSE - 2
    found = [bool(forward(proposer, [own], [range(1000)])[0]) for _ in range(left + 3)]
    assert found == [False] * left + [True] * 3


def test_pause_ends_once_half_of_the_rows_have():
    proposer, rows = make("bubble", always=False, costs=cost(1e-9, 0.0, 1.0)), [row(), row(1)]
    for each in rows:
        each.draft = draft(range(1000))
        proposer.track(each, STEP)
    proposer._query_s[:] = 100.0  # of a forward's second
    for some, is_asked in ((rows, True), (rows, False), (rows[:1], True), (rows[:1], False)):
        forward(proposer, some, [range(1000)] * len(some))
        assert bool(proposer.take_spent()[1]) == is_asked
    proposer._due, proposer._paused_rows = [proposer._forward + 9], 2
    assert proposer.rests(2) and not proposer.rests(1) and not proposer.rests(2), "it is over"


def test_found_drafts_are_used_whatever_the_query_took():
    """A pause of this source follows, except where it weighs its own time."""
    proposer, own = make("bubble", always=False, costs=cost()), row()
    own.draft = draft(range(1000))
    proposer.track(own, STEP)
    proposer._query_s[:] = 100.0  # of a forward's second
    found = [len(forward(proposer, [own], [range(1000)])[0]) for _ in range(module.MAX_PAUSE + 2)]
    assert found[0] and found[-1] and not any(found[1:-1])
    (source,), seconds = proposer.sources, 7.0
    propose = source.propose
    source.propose = lambda *of: proposer.clock.sleep(seconds) or propose(*of)
    source.weighs_its_time = True
    proposer.begin()
    own.draft = draft(range(1000))
    proposer.track(own, STEP)
    proposer._query_s[:] = 0.0
    assert all(len(forward(proposer, [own], [range(1000)])[0]) for _ in range(9))
    assert proposer._query_s[0] < 1e-3 and proposer.take_spent()[0] >= 9 * seconds


def test_dear_source_pauses_alone():
    """The draft goes on; what another source finds for other rows is not worth its query."""
    proposer = make("bubble+suffix", always=False, costs=cost())
    one, other = row(0), row(1, tokens=[1, 2, 3, 1, 2])
    one.draft = draft(range(1000))
    for each in (one, other):
        proposer.track(each, STEP)
    suffix = proposer.sources[1]
    propose, asked = suffix.propose, []
    suffix.propose = lambda *of: asked.append(1) or proposer.clock.sleep(50.0) or propose(*of)
    truths = [range(1000), [1, 2, 3, 1, 2, *range(50, 990)]]
    found = [forward(proposer, [one, other], truths)[0] for _ in range(20)]
    assert all(found) and len(asked) == 1


def test_nothing_is_planned_where_all_sources_pause_or_are_disabled():
    proposer, one, guesses = with_guess([1, 2, 9, 7, 7, 7], [1, 2, 3])
    guesses.is_enabled = False
    proposer._due[0] = 1
    assert forward(proposer, [one], [[1, 2, 9, 7, 7, 7]]) == [[]]
    assert proposer.take_spent()[1] == 0
    assert forward(proposer, [one], [[1, 2, 9, 7, 7, 7]]) != [[]]


def test_given_up_source_is_tried_again():
    """Guesses are wrong for many rows in the first rollout, and right from the second on."""
    rows, guesses = [row(number) for number in range(100)], Guesses({})
    proposer = Proposer([guesses], cost(), clock=Clock())
    accepted = []
    for rollout in range(9):
        proposer.begin()
        for each in rows:
            each.tokens = each.tokens[:0]
            proposer.track(each, STEP)
            guesses.guesses[each.id] = list(range(50, 550)) if rollout else [7] * 500
        for _ in range(8):
            forward(proposer, rows, [range(50, 600)] * len(rows))
        drafted, right = proposer.acceptance.by_source.get("guess", (0, 0))
        assert drafted or rollout, "it is tried before anything is known"
        accepted.append(right)
    assert accepted[:2] == [0, 0] and all(accepted[7:]), "given up, and tried again"
    unused = Proposer([guesses], cost(), clock=Clock())
    unused.survival.load_state_dict(proposer.survival.state_dict())
    unused.begin()
    assert unused.acceptance.by_source == {"guess": [0, 0]}, "in the metrics all the same"


def test_sources_that_need_results_are_not_asked_while_tokens_are_in_flight():
    class Waiting(OwnDrafts):
        needs_results = True

    proposer = Proposer([Waiting()], CostModel(), always=True)
    proposer.begin()
    row = Row(SampleId(0, 0, 0), (1,), 20, draft=Draft(np.arange(9, dtype=np.int32), True, 0))
    proposer.track(row, 1)
    one = np.array([1])
    given = [row], 0 * one, 15 * one, 64
    assert proposer.needs_results and proposer.propose(*given, ahead=0 * one)[1] == 6
    assert proposer.propose(*given, ahead=one)[1] == 0
