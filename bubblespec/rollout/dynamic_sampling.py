"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose responses all got the same
reward, which give no gradient, are replaced by groups of further prompts, generated under the same
weights; so are those that lack a reward. Which prompts come next depends on the step and the
gathered rewards alone, so any number of ranks trains on the same tokens."""

import math
from dataclasses import replace

import numpy as np

from bubblespec.errors import RewardsFailed
from bubblespec.records import StepRecord
from bubblespec.types import has_rewards, has_zero_std


def num_lacking(record: StepRecord, max_batches: int) -> int:
    """Groups that the step should generate further: as many as will fill the gap at the rate so
    far, at most a whole batch; 0 once there are enough whose rewards differ, or it has had
    `max_batches`."""
    rewards, wanted = record.all_rewards, record.batch_sizes[0]
    is_useful = has_rewards(rewards) & ~has_zero_std(rewards)
    missing = wanted - int(is_useful.sum())
    if missing <= 0 or len(record.batch_sizes) >= max_batches:
        return 0
    return min(wanted, math.ceil(missing / max(is_useful.mean(), 1e-9)))


def joined(record: StepRecord, more: StepRecord) -> StepRecord:
    """A step's record with that of a further rollout of it."""
    lists = ("batch_sizes", "rollouts", "stages", "spans")
    return replace(
        record,
        generated=record.generated + more.generated,
        all_rewards=np.concatenate((record.all_rewards, more.all_rewards)),
        owners=np.concatenate((record.owners, more.owners)),
        **{name: getattr(record, name) + getattr(more, name) for name in lists},
        drafts=record.drafts | more.drafts,
        expected_s=record.expected_s + more.expected_s,
    )


def selected(record: StepRecord) -> StepRecord:
    """The record with what is trained on: the first groups whose rewards differ and, where they are
    too few, the first of the others as well, but none that lacks a reward. Raises RewardsFailed if
    all do, on all ranks."""
    order = np.argsort(has_zero_std(record.all_rewards), kind="stable")
    order = order[has_rewards(record.all_rewards)[order]]
    if not len(order):
        raise RewardsFailed(
            f"reward.functions: in step {record.step} no function returned a number for any of "
            f"{len(record.all_rewards)} prompts, so there is nothing to train on"
        )
    chosen = sorted(order[: record.batch_sizes[0]].tolist())
    samples = record.generated.of_groups(chosen)
    return replace(record, samples=samples, rewards=record.all_rewards[chosen])
