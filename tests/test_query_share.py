"""The share of time that queries of draft sources may take, by a clock that only sleeping moves."""

import numpy as np

from bubblespec.draft.proposer import Proposer
from bubblespec.draft.sources import DraftSource, OwnDrafts, Proposals
from bubblespec.planner.costs import CostModel
from bubblespec.types import Row
from tests.helpers.clocks import Clock
from tests.helpers.proposals import STEP, cost, draft, forward, row


class Slow(DraftSource):
    """Proposes a token for each row, after some seconds."""

    kinds = (("slow",),)
    seconds = 0.035

    def propose(self, numbers, limits):
        self.proposer.clock.sleep(self.seconds)
        counts = np.ones(len(numbers), np.int64)
        return Proposals(counts + 6, counts * 0, counts, counts * 0)


def rationed(costs: CostModel, *sources: DraftSource) -> tuple[Proposer, Slow]:
    slow = Slow()
    slow.proposer = proposer = Proposer((*sources, slow), costs, clock=Clock())
    proposer.begin()
    return proposer, slow


def looks(proposer: Proposer, own: Row, num_forwards: int) -> list[int]:
    """Return the forwards, of a second each, before which the slow source is queried."""
    looked = []
    for number in range(num_forwards):
        before = proposer.clock.perf_counter()
        forward(proposer, [own], [range(1000)])
        if proposer.clock.perf_counter() - before > 0.9 * Slow.seconds:
            looked.append(number)
        proposer.clock.sleep(1.0)
    return looked


DEAR = cost(1e-9, 0.0, 1.0)  # a token costs what it brings at best


def test_queries_that_do_not_pay_take_their_share_of_time():
    """At most LOOK_SHARE, over all rollouts; none is left out once they pay."""
    proposer, _ = rationed(DEAR)
    proposer.track(own := row(), None, STEP)
    assert looks(proposer, own, 12) == [0, 4, 8]
    proposer.begin()
    proposer.track(own := row(), None, STEP)
    assert looks(proposer, own, 6) == [1, 5], "the debt of the last query is not paid yet"
    proposer.cost = cost()
    assert looks(proposer, own, 6) == [3, 4, 5]


def test_own_drafts_are_used_while_other_sources_wait():
    proposer, _ = rationed(DEAR, OwnDrafts())
    proposer.track(own := row(), None, STEP)
    assert looks(proposer, own, 1) == [0]
    proposer.cost = cost()
    proposer.begin()
    proposer.track(own := row(), draft(range(30)), STEP)
    assert forward(proposer, [own], [range(1000)]) == [[0, 1, 2]]
    proposer.cost = DEAR
    spent = [forward(proposer, [own], [range(1000)]) and proposer.take_spent()[1] for _ in "abc"]
    assert spent == [2, 0, 0], "rows of a query since the last look; then none, as it did not pay"


def test_found_drafts_are_used_whatever_the_query_took():
    """A pause follows, except where the source weighs its own time."""
    proposer, slow = rationed(cost())
    proposer.track(own := row(), None, STEP)
    slow.seconds = 100.0  # a forward takes one
    assert forward(proposer, [own], [range(1000)]) == [[7]]
    proposer._overhead_s = 100.0
    assert forward(proposer, [own], [range(1000)]) == [[7]]
    assert not any(forward(proposer, [own], [range(1000)])[0] for _ in range(99))
    slow.weighs_its_time = True
    proposer._overhead_s = proposer._debt_s = 0.0
    assert all(forward(proposer, [own], [range(1000)])[0] for _ in range(9))
    assert proposer._overhead_s < 1e-3 and proposer.take_spent()[0] >= 9 * slow.seconds
