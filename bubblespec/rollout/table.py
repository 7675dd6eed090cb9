"""The row table: the length of each row of a rollout, on all ranks, and whether it is trained on.

Rows have the index of their sample in the launch: by group, then by number. Lengths of other ranks'
rows are as old as the last tick. Lengths only grow, so a conclusion from lower bounds stays true,
and each rank may act on it at once.

Of G groups, a step trains on the P whose longest response is shortest (RollPacker's short round,
arXiv 2509.21009, section 4); ties go to the first in the data order. The choice is therefore a
function of the responses alone, not of a clock or a rank.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bubblespec.distributed.ranks import Ranks
from bubblespec.planner.lengths import LengthForecast
from bubblespec.types import Row, StepBatch

NO_LIMIT = 1 << 62
FINISHES = (None, "stop", "length")


class Cutoff(NamedTuple):
    """Conclusions on which samples this step trains on."""

    is_in: np.ndarray
    """Samples certain to be trained on, bool [S]."""
    is_out: np.ndarray
    """Samples certain not to be trained on, bool [S]."""
    limit: int
    """Length of unfinished rows from which on a group is out; NO_LIMIT with too few groups done."""


class RolloutProgress:
    """The rows of one rollout, from one rank's view."""

    def __init__(
        self, launch: StepBatch, rank_of: np.ndarray, rank: int, rows: LengthForecast | None = None
    ):
        """rank_of: int64 [S], the rank of each sample; rows: predicted lengths, where known."""
        self.launch, self.rank_of, self.rank, self.rows = launch, rank_of, rank, rows
        self.generated = np.zeros(len(rank_of), np.int64)
        self.is_finished = np.zeros(len(rank_of), bool)
        # Lengths as of the last tick, the same on all ranks; -1 for finished rows.
        self.synced = np.zeros(len(rank_of), np.int64)

    def make_rows(self, max_new_tokens: int) -> dict[int, Row]:
        """Create this rank's rows, by index, those of a group adjacent."""
        own = np.flatnonzero(self.rank_of == self.rank).tolist()
        return {index: self.make_row(index, max_new_tokens) for index in own}

    def make_row(self, index: int, max_new_tokens: int) -> Row:
        """Create the empty row of a sample."""
        place, number = divmod(index, self.launch.num_generations)
        group = self.launch.groups[place]
        return Row(group.sample(number), group.prompt.token_ids, max_new_tokens, number=index)

    def note(self, index: int, generated: int, is_finished: bool) -> None:
        """Set the length of a row of this rank."""
        self.generated[index], self.is_finished[index] = generated, is_finished

    def local_state(self) -> np.ndarray:
        """Return this rank's numbers for a tick, float64 [S]: 0 for rows of other ranks.

        Own rows have twice their length, plus 1 once the length is final."""
        own = self.rank_of == self.rank
        return np.where(own, 2.0 * self.generated + self.is_finished, 0.0)

    def sync(self, states: list[np.ndarray]) -> None:
        """Update lengths with the states of all ranks in a tick, by rank."""
        known = np.maximum.reduce(states).astype(np.int64)
        self.synced = np.where(known & 1, -1, known >> 1)
        # More is known of own rows than was published.
        newest = np.maximum(known, 2 * self.generated + self.is_finished)
        self.generated, self.is_finished = newest >> 1, (newest & 1).astype(bool)

    def unfinished(self) -> tuple[np.ndarray, LengthForecast]:
        """Return the indices of rows unfinished at the last tick, int64 [N], and their predictions.

        Only where lengths were predicted."""
        indices = np.flatnonzero(self.synced >= 0)
        generated = self.synced[indices]
        assert self.rows is not None
        rows = self.rows.take(indices)
        # A row that has outgrown its whole draft is of unknown length again.
        is_known = (rows.spread > 0.0) | (generated < rows.expected)
        spread = np.where(is_known, rows.spread, 0.5 * generated)
        return indices, replace(rows, generated=generated, spread=spread, drafted=0.0 * generated)

    def cutoff(self) -> Cutoff:
        """Return the conclusions so far; in the end all samples are in or out."""
        launch = self.launch
        finished = self.is_finished.reshape(len(launch.groups), launch.num_generations)
        # An unfinished row gets at least one more token.
        bound = self.generated.reshape(finished.shape) + ~finished
        longest: np.ndarray = bound.max(axis=1)
        is_done = np.all(finished, axis=1)
        # Bounds of unfinished groups only grow. So a finished group among the shortest stays there,
        # and a group behind enough finished ones stays out.
        order = np.argsort(longest, kind="stable")
        num_done = np.cumsum(is_done[order])
        is_in, is_out = np.zeros((2, len(order)), bool)
        is_in[order[: launch.num_trained]] = is_done[order[: launch.num_trained]]
        is_out[order] = num_done - is_done[order] >= launch.num_trained
        limit = NO_LIMIT
        if num_done[-1] >= launch.num_trained:
            limit = int(longest[order[np.searchsorted(num_done, launch.num_trained)]])
        size = launch.num_generations
        return Cutoff(is_in.repeat(size), is_out.repeat(size), limit)

    def trained(self) -> np.ndarray:
        """Return the indices of the samples that are trained on, int64, after the rollout."""
        if self.launch.selects:
            return np.flatnonzero(self.cutoff().is_in)
        return np.arange(len(self.rank_of))

    def deferred(self) -> np.ndarray:
        """Return the indices of the samples deferred to a later step, int64, after the rollout."""
        return np.setdiff1d(np.arange(len(self.rank_of)), self.trained())


def gather_rows(own: dict[int, Row], table: RolloutProgress, ranks: Ranks) -> dict[int, Row]:
    """Return the rows of all ranks by index: this rank's own objects, and copies of the others.

    The ranks exchange a header, the tokens and their log-probabilities of each row. All of these
    are exact as float64, NaN as well.
    """
    rows = dict(own)
    numbers: list[ArrayLike] = [np.empty(0)]
    for index, row in own.items():
        header = (index, row.max_new_tokens, FINISHES.index(row.finish), len(row.tokens))
        numbers += [header, row.tokens, row.logprob]
    for rank, left in enumerate(ranks.gather_ragged(np.concatenate(numbers, dtype=np.float64))):
        while len(left) and rank != ranks.rank:
            index, max_new_tokens, finish, length = left[:4].astype(np.int64).tolist()
            columns, left = np.split(left[4:], [2 * length])
            row = rows[index] = table.make_row(index, max_new_tokens)
            row.finish, row.tokens = FINISHES[finish], columns[:length].astype(np.int64)
            row.logprob = columns[length:].astype(np.float32)
    return rows
