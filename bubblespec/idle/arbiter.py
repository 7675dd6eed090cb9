"""Who does what in idle time: the offers of all works, given to ranks tick by tick.

A pure function of the ticks, which are the same on every rank: no offer is given twice, and nobody has to agree on anything.
"""

from collections import deque
from collections.abc import Sequence

from bubblespec.idle.work import Offer
from bubblespec.ranks.progress import RankState


class Arbiter:
    """The offers of one rollout that nobody has been given yet."""

    def __init__(self, offers: Sequence[list[Offer]]):
        """offers: one list for each use of idle time, each most urgent first."""
        self._beside_rows = [deque(offer for offer in of_work if offer.beside_rows) for of_work in offers]
        self._idle_only = [deque(offer for offer in of_work if not offer.beside_rows) for of_work in offers]

    def has_offers(self, is_done: bool) -> bool:
        """Whether there is anything for a rank; is_done: it has no rows of its own, so that all offers are for it."""
        return any(self._beside_rows) or (is_done and any(self._idle_only))

    def assign(self, states: list[RankState]) -> list[list[tuple[int, Offer]]]:
        """The offers that each rank gets for its wish in a tick, by rank; each with the place of its work. Those worth slowing
        down rows for go first; of several works' most urgent offers the one that saves most."""
        given = []
        for state in states:
            given.append([])
            while len(given[-1]) < state.wanted_offers and self.has_offers(state.is_done):
                queues = self._beside_rows if any(self._beside_rows) else self._idle_only
                work = max((work for work, queue in enumerate(queues) if queue), key=lambda work: queues[work][0].saves_s)
                given[-1].append((work, queues[work].popleft()))
        return given
