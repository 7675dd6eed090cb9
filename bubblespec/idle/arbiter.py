"""Who does what in idle time: the offers of all works, given to ranks tick by tick.

Its answers depend on the offers and the ticks so far alone, which are the same on every rank: no offer is given twice, and nobody
has to agree on anything.
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

    def has_offers(self, work: int, is_done: bool) -> bool:
        """Whether a use of idle time, by its number, has anything for a rank. is_done: the rank has finished its rows, so that
        all offers are for it."""
        return bool(self._beside_rows[work]) or (is_done and bool(self._idle_only[work]))

    def assign(self, states: list[RankState]) -> list[list[tuple[int, Offer]]]:
        """The offers that each rank gets for its wishes in a tick, by rank; each with the number of its work. Those worth slowing
        down rows for go first; of several works' most urgent offers the one that saves most."""
        return [self._take(list(state.wanted_offers), state.is_done) for state in states]

    def _take(self, wanted: list[int], is_done: bool) -> list[tuple[int, Offer]]:
        given = []
        for queues in (self._beside_rows, self._idle_only if is_done else []):
            while works := [work for work, (queue, count) in enumerate(zip(queues, wanted, strict=False)) if queue and count > 0]:
                work = max(works, key=lambda work, queues=queues: queues[work][0].saves_s)
                given.append((work, queues[work].popleft()))
                wanted[work] -= 1
        return given
