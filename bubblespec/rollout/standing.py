"""How far every row of a rollout is, on all ranks, and which rank has it: what the ticks say of
rows.

A sample is known here by its place in the launch: by group, then by number. What a rank knows of
the others' rows is as old as the last tick; as rows only grow, whatever follows from a lower bound
of their lengths holds for good, and every rank may act on it as soon as it knows.
"""

import numpy as np

from bubblespec.data.selection import Selection
from bubblespec.rollout.balance import Expected
from bubblespec.types import Launch, Row


class Standing:
    """Of one rollout, as one rank sees it."""

    def __init__(
        self, launch: Launch, owners: np.ndarray, rank: int, expected: Expected | None = None
    ):
        """owners: int64 [S], the rank that generates each sample, to begin with; expected: what the
        rows need, where that is known."""
        self.launch, self.owners, self.rank, self.expected = launch, owners.copy(), rank, expected
        self.selection = Selection(launch) if launch.selects else None
        self.lengths = np.zeros(len(owners), np.int64)
        self.is_finished = np.zeros(len(owners), bool)
        self.told = np.zeros(
            len(owners), np.int64
        )  # lengths as of the last tick, the same on all ranks; -1 for finished rows
        self.judge()

    def make_rows(self, max_new_tokens: int) -> dict[int, Row]:
        """This rank's rows, by place, those of a group adjacent."""
        return {
            place: self.make_row(place, max_new_tokens)
            for place in np.flatnonzero(self.owners == self.rank).tolist()
        }

    def make_row(self, place: int, max_new_tokens: int) -> Row:
        """The row of a sample at its beginning."""
        group = self.launch.groups[place // self.launch.num_generations]
        return Row(
            group.sample(place % self.launch.num_generations),
            group.prompt.token_ids,
            max_new_tokens,
        )

    def note(self, place: int, length: int, is_finished: bool) -> None:
        """A row of this rank has so many tokens now."""
        self.lengths[place], self.is_finished[place] = length, is_finished

    def facts(self) -> np.ndarray:
        """What this rank tells the others in a tick, float64 [S]: twice the length, plus 1 once it
        is final; 0 elsewhere."""
        return np.where(self.owners == self.rank, 2.0 * self.lengths + self.is_finished, 0.0)

    def merge(self, facts: list[np.ndarray]) -> None:
        """Take in what all ranks have told in a tick, by rank."""
        told = np.maximum.reduce(facts).astype(np.int64)
        self.told = np.where(told & 1, -1, told >> 1)
        newest = np.maximum(
            told, 2 * self.lengths + self.is_finished
        )  # of own rows more is known than was told
        self.lengths, self.is_finished = newest >> 1, (newest & 1).astype(bool)

    def judge(self) -> None:
        """Work out what is sure by now, where there is a choice to make: `judgement`."""
        if self.selection is not None:
            self.judgement = self.selection.judge(self.lengths, self.is_finished)

    def deferred(self) -> np.ndarray:
        """The places of the samples whose turn comes in a later step, int64, once the rollout is
        over: those of whole groups. What has lost a race within its group, or would only have run
        for it, is not among them."""
        launch = self.launch
        is_deferred = np.ones(len(launch.groups), bool)
        is_deferred[self.chosen() // launch.num_generations] = False
        places = np.arange(len(self.owners))
        return places[
            is_deferred[places // launch.num_generations]
            & (places % launch.num_generations < launch.num_kept)
        ]

    def chosen(self) -> np.ndarray:
        """The places of the samples that are trained on, int64, once the rollout is over; with no
        choice to make all of them."""
        return (
            np.flatnonzero(self.judgement.is_in)
            if self.selection is not None
            else np.arange(len(self.owners))
        )
