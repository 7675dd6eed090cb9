"""The table of a rollout's rows: how far every row is, on all ranks, and which of them this step
trains on.

A sample is known here by its index in the launch: by group, then by number. What a rank knows of
the others' rows is as old as the last tick; as rows only grow, whatever follows from a lower bound
of their lengths holds for good, and every rank may act on it as soon as it knows.

Of G groups, a step trains on the P whose longest response is shortest (RollPacker's short round,
arXiv 2509.21009, section 4); ties go to the first in the data order. So what is trained on is a
function of the responses alone, not of a clock or a rank.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bubblespec.planner.rows import Rows
from bubblespec.types import Launch, Row

NO_LIMIT = 1 << 62


class Cutoff(NamedTuple):
    """What is certain by now."""

    is_in: np.ndarray
    """bool [S], trained on in this step."""
    is_out: np.ndarray
    """bool [S], not trained on in it."""
    limit: int
    """A group with an unfinished row of this many tokens is out; NO_LIMIT while too few are
    done."""


class RowTable:
    """Of one rollout, as one rank sees it."""

    def __init__(self, launch: Launch, rank_of: np.ndarray, rank: int, rows: Rows | None = None):
        """rank_of: int64 [S], the rank that generates each sample; rows: what they are expected to
        need, where that is known."""
        self.launch, self.rank_of, self.rank, self.rows = launch, rank_of, rank, rows
        self.generated = np.zeros(len(rank_of), np.int64)
        self.is_finished = np.zeros(len(rank_of), bool)
        # Lengths as of the last tick, the same on all ranks; -1 for finished rows.
        self.synced = np.zeros(len(rank_of), np.int64)

    def make_rows(self, max_new_tokens: int) -> dict[int, Row]:
        """This rank's rows, by index, those of a group adjacent."""
        own = np.flatnonzero(self.rank_of == self.rank).tolist()
        return {index: self.make_row(index, max_new_tokens) for index in own}

    def make_row(self, index: int, max_new_tokens: int) -> Row:
        """The row of a sample at its beginning."""
        group, number = divmod(index, self.launch.num_generations)
        group = self.launch.groups[group]
        return Row(group.sample(number), group.prompt.token_ids, max_new_tokens)

    def note(self, index: int, generated: int, is_finished: bool) -> None:
        """A row of this rank has this many tokens now."""
        self.generated[index], self.is_finished[index] = generated, is_finished

    def local_state(self) -> np.ndarray:
        """What this rank publishes in a tick, float64 [S]: twice the length, plus 1 once it is
        final; 0 for rows of other ranks."""
        own = self.rank_of == self.rank
        return np.where(own, 2.0 * self.generated + self.is_finished, 0.0)

    def sync(self, states: list[np.ndarray]) -> None:
        """Take in what all ranks have published in a tick, by rank."""
        known = np.maximum.reduce(states).astype(np.int64)
        self.synced = np.where(known & 1, -1, known >> 1)
        # More is known of own rows than was published.
        newest = np.maximum(known, 2 * self.generated + self.is_finished)
        self.generated, self.is_finished = newest >> 1, (newest & 1).astype(bool)

    def unfinished(self) -> tuple[np.ndarray, Rows]:
        """Indices of the rows that are not done as of the last tick, int64 [N], and what is known
        of them; only where their lengths were predicted."""
        indices = np.flatnonzero(self.synced >= 0)
        generated = self.synced[indices]
        rows = self.rows.take(indices)
        return indices, replace(rows, generated=generated, drafted=0.0 * generated)

    def cutoff(self) -> Cutoff:
        """What is certain by now of which rows are trained on. Once all rows have finished or are
        out, those that are not out are all in."""
        launch = self.launch
        finished = self.is_finished.reshape(len(launch.groups), launch.num_generations)
        # An unfinished row gets at least one more token.
        bound = self.generated.reshape(finished.shape) + ~finished
        longest, is_done = bound.max(axis=1), finished.all(axis=1)
        # Bounds only grow, and those of groups that are done not at all. So a group that is done
        # and among the shortest stays there, and one behind enough that are done never gets there.
        order = np.argsort(longest, kind="stable")
        num_done = np.cumsum(is_done[order])
        is_in, is_out = np.zeros((2, len(order)), bool)
        is_in[order[: launch.num_trained]] = is_done[order[: launch.num_trained]]
        is_out[order] = num_done - is_done[order] >= launch.num_trained
        limit = NO_LIMIT
        if num_done[-1] >= launch.num_trained:
            limit = int(longest[order[np.searchsorted(num_done, launch.num_trained)]])
        of_rows = (np.repeat(of, launch.num_generations) for of in (is_in, is_out))
        return Cutoff(*of_rows, limit)

    def trained(self) -> np.ndarray:
        """Indices of the samples that are trained on, int64, once the rollout is over."""
        if self.launch.selects:
            return np.flatnonzero(self.cutoff().is_in)
        return np.arange(len(self.rank_of))

    def deferred(self) -> np.ndarray:
        """Indices of the samples whose turn comes in a later step, int64, once the rollout is over:
        those of all other groups."""
        return np.setdiff1d(np.arange(len(self.rank_of)), self.trained())
