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
    num_done: int
    """Groups that have all the responses that they will be trained on."""
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
        least = (
            lengths.reshape(self.shape) + ~finished
        )  # an unfinished row gets at least one more token
        first, behind = _ahead(least, finished, self.num_kept)  # within each group
        longest = np.where(first, least, 0).max(axis=1)
        is_done = (finished | ~first).all(axis=1)
        group_first, group_behind = _ahead(longest[None], is_done[None], self.num_trained)
        group_in, group_out = (group_first & is_done)[0], group_behind[0]
        rows_out = behind | group_out[:, None]
        num_done, cut = int(is_done.sum()), NO_CUT
        if num_done >= self.num_trained:
            cut = int(np.partition(longest[is_done], self.num_trained - 1)[self.num_trained - 1])
        return Judgement((group_in[:, None] & first).ravel(), rows_out.ravel(), num_done, cut)


def _ahead(least: np.ndarray, is_final: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of entries that are known by a lower bound, along the last axis: the `count` with the
    smallest bounds (ties: the first in order), and those behind `count` entries that are final.
    bool of the shape of `least`.

    Bounds only grow, and those of final entries not at all. So a final entry of the first kind will
    stay among the smallest, and an entry of the second kind will never be among them.
    """
    order = np.argsort(least, axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(
        rank, order, np.broadcast_to(np.arange(least.shape[-1]), least.shape), axis=-1
    )
    final = np.take_along_axis(is_final, order, axis=-1)
    before = np.cumsum(final, axis=-1) - final  # final entries in front of each, in order
    behind = np.empty_like(is_final)
    np.put_along_axis(behind, order, before >= count, axis=-1)
    return rank < count, behind
