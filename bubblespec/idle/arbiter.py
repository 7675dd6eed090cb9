"""Who does what in idle time: the offers of all works, given to ranks tick by tick.

Its answers depend on the offers and the ticks so far alone, which are the same on every rank: no
offer is given twice, and nobody has to agree on anything.
"""

from collections import deque

from bubblespec.idle.work import Offer
from bubblespec.rollout.board import RankState

NO_TIME_S = 1e-9


class Arbiter:
    """The offers of one rollout that nobody has been given yet."""

    def __init__(self, num_works: int):
        """num_works: uses of idle time, which are known here by their number."""
        self._beside_rows: list[deque[Offer]] = [deque() for _ in range(num_works)]
        self._idle_only: list[deque[Offer]] = [deque() for _ in range(num_works)]

    def update(self, work: int, offers: list[Offer] | None) -> None:
        """A work's offers from now on, most urgent first, in place of those that it has made
        before; None: they stay."""
        if offers is not None:
            self._beside_rows[work] = deque(offer for offer in offers if offer.beside_rows)
            self._idle_only[work] = deque(offer for offer in offers if not offer.beside_rows)

    def assign(self, states: list[RankState]) -> list[list[tuple[int, Offer]]]:
        """The offers that each rank gets for its wishes in a tick, by rank; each with the number of
        its work.

        A rank with rows of its own gets what is worth slowing them down for, most saved first. A
        rank without does one thing at a time: it gets offers of the work alone whose most urgent
        one saves most for a second spent; those worth slowing down rows for before others.
        """
        given: list[list[tuple[int, Offer]]] = []
        for rank, state in enumerate(states):
            given.append([])
            wanted = (*state.wanted_offers, *[0] * len(self._beside_rows))[: len(self._beside_rows)]
            if state.is_done:
                heads = {work: self._next(work, True, rank) for work in range(len(wanted))}
                saved = {work: _per_second(queue[place]) for work, (queue, place) in _there(heads)}
                wanted = [
                    count if work == max(saved, key=saved.get, default=None) else 0
                    for work, count in enumerate(wanted)
                ]
            self._give(given[rank], list(wanted), state.is_done, rank)
        return given

    def _give(
        self, given: list[tuple[int, Offer]], wanted: list[int], is_done: bool, rank: int
    ) -> None:
        while True:
            heads = {
                work: self._next(work, is_done, rank)
                for work, count in enumerate(wanted)
                if count > 0
            }
            there = dict(_there(heads))
            if not there:
                return
            work = max(there, key=lambda work: there[work][0][there[work][1]].saves_s)
            queue, place = there[work]
            given.append((work, queue[place]))
            del queue[place]
            wanted[work] -= 1

    def _next(self, work: int, is_done: bool, rank: int) -> tuple[deque[Offer], int] | None:
        """Where a work's most urgent offer for a rank is."""
        for queue in (
            (self._beside_rows[work], self._idle_only[work])
            if is_done
            else (self._beside_rows[work],)
        ):
            for place, offer in enumerate(queue):
                if offer.rank is None or offer.rank == rank:
                    return queue, place
        return None


def _there(heads: dict) -> list:
    return [(work, head) for work, head in heads.items() if head is not None]


def _per_second(offer: Offer) -> float:
    return offer.saves_s / max(offer.costs_s, NO_TIME_S)
