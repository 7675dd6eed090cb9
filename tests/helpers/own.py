"""Functions and classes as users name them by dotted path, good ones and bad ones."""

import numpy as np
import torch

from bubblespec.draft.sources import DraftSource, Proposals


def unclipped(logprob, ratio, advantage):
    return -ratio * advantage


def without_advantage(logprob, ratio, advantage):
    return -logprob


def mean_loss(logprob, ratio, advantage):
    return (-ratio * advantage).mean()


def detached_loss(logprob, ratio, advantage):
    return (-ratio * advantage).detach()


def infinite_loss(logprob, ratio, advantage):
    return -torch.log(ratio - 1) * logprob


def no_tensor(logprob, ratio, advantage):
    return 3.0


def failing_loss(logprob, ratio, advantage):
    raise RuntimeError("no\nluck")


def two_arguments(one, two):
    return one


def lengths(samples, rewards):
    return -samples.lengths.reshape(rewards.shape).astype(float)


def flat(samples, rewards):
    return rewards.ravel()


def not_a_number(samples, rewards):
    return np.where(rewards > 0, np.nan, rewards)


def text(samples, rewards):
    return [["a"] * rewards.shape[1]] * rewards.shape[0]


class Fixed(DraftSource):
    """Proposes the same for every row, whatever that is."""

    kinds = (("fixed",),)
    changes = ()  # (column, its values), in place of those below

    def propose(self, numbers: np.ndarray, limits: np.ndarray) -> Proposals:
        size = len(numbers)
        columns = {
            "tokens": np.full(2, 5),
            "begin": np.zeros(size, np.int64),
            "count": np.minimum(limits, 2),
            "kind": np.zeros(size, np.int64),
        }
        return Proposals(**columns | dict(self.changes))


class NoKinds(DraftSource):
    pass


class TakenName(DraftSource):
    kinds = (("own",),)


class NeedsArguments(DraftSource):
    kinds = (("needy",),)

    def __init__(self, size):
        self.size = size
