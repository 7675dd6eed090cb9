"""Which of the responses that a rollout has launched are trained on: those of the groups that are
done with fewest tokens.

Of G groups the P are trained whose longest response is shortest (RollPacker's short round, arXiv
2509.21009, section 4); of equally long ones the first in the data order. So what is trained is a
function of the responses alone, of no clock and no rank. What is known while they are generated, a
lower bound of each length, is enough to say of most rows long before their end that they are in or
out: a rollout is over once the others have finished.

With a race within groups, of a group's R responses only the K shortest count, by the same rule.
"""

from typing import NamedTuple

import numpy as np

from bubblespec.types import Launch

NO_CUT = 1 << 62


class Judgement(NamedTuple):
    """What is sure of a rollout's rows."""

    is_in: np.ndarray
    """bool [S], trained on in this step."""
    is_out: np.ndarray
    """bool [S], not trained on in it."""
    cut: int
    """A group with a row of as many tokens that has not finished is out; NO_CUT while too few
    groups are done."""


class Selection:
    """The rule for one rollout; its methods are pure functions of how far the rows are."""

    def __init__(self, launch: Launch):
        self.num_trained, self.num_kept = launch.num_trained, launch.num_kept
        self.shape = (len(launch.groups), launch.num_generations)

    def judge(self, lengths: np.ndarray, is_finished: np.ndarray) -> Judgement:
        """What is sure by now. Once all rows have finished or are out, those that are not out are
        all in.

        lengths: int64 [S], tokens so far, by group and number; is_finished: bool [S].
        """
        finished = is_finished.reshape(self.shape)
        # an unfinished row gets at least one more token
        bound = lengths.reshape(self.shape) + ~finished
        first, behind = _ahead(bound, finished, self.num_kept)  # within each group
        longest = np.where(first, bound, 0).max(axis=1)
        is_done = (finished | ~first).all(axis=1)
        group_first, group_behind = _ahead(longest, is_done, self.num_trained)
        is_in = (group_first & is_done)[:, None] & first
        done = np.sort(longest[is_done])
        cut = int(done[self.num_trained - 1]) if len(done) >= self.num_trained else NO_CUT
        return Judgement(is_in.ravel(), (behind | group_behind[:, None]).ravel(), cut)


def _ahead(bound: np.ndarray, is_final: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of entries that are known by a lower bound, along the last axis: the `count` with the
    smallest bounds (ties: the first in order), and those behind `count` entries that are final.
    bool of the shape of `bound`.

    Bounds only grow, and those of final entries not at all. So a final entry of the first kind will
    stay among the smallest, and an entry of the second kind will never be among them.
    """
    order = np.argsort(bound, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1)
    final = np.take_along_axis(is_final, order, axis=-1)
    num_final_before = np.cumsum(final, axis=-1) - final  # in front of each, in order
    return rank < count, np.take_along_axis(num_final_before >= count, rank, axis=-1)
