"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

Groups whose responses all got the same reward give no gradient. They are replaced by groups of
further prompts, generated under the same weights, as are groups that lack a reward. The choice of
prompts depends on the step and the gathered rewards alone, so any number of ranks trains on the
same tokens.
"""

import math
from dataclasses import replace

import numpy as np

from bubblespec.errors import RewardsFailed
from bubblespec.records import StepRecord
from bubblespec.samples import has_rewards, has_zero_std


def num_lacking(record: StepRecord, max_batches: int) -> int:
    """Return how many further groups the step generates, enough for the gap at the rate so far.

    At most a whole batch; 0 once enough rewards differ, or after `max_batches`."""
    rewards, wanted = record.all_rewards, record.batch_sizes[0]
    is_useful = has_rewards(rewards) & ~has_zero_std(rewards)
    missing = wanted - int(is_useful.sum())
    if missing <= 0 or len(record.batch_sizes) >= max_batches:
        return 0
    return min(wanted, math.ceil(missing / max(is_useful.mean(), 1e-9)))


def join(record: StepRecord, more: StepRecord) -> StepRecord:
    """Return the record of a step with a further rollout."""
    return replace(
        record,
        generated=record.generated + more.generated,
        all_rewards=np.concatenate((record.all_rewards, more.all_rewards)),
        owners=np.concatenate((record.owners, more.owners)),
        batch_sizes=record.batch_sizes + more.batch_sizes,
        rollouts=record.rollouts + more.rollouts,
        stages=record.stages + more.stages,
        spans=record.spans + more.spans,
        drafts=record.drafts | more.drafts,
        expected_s=record.expected_s + more.expected_s,
    )


def select_trained(record: StepRecord) -> StepRecord:
    """Return the record with the groups that are trained on.

    The first groups whose rewards differ come first, then groups of equal rewards; groups that lack
    a reward are left out. Raises RewardsFailed, on all ranks, if all groups lack one.
    """
    order = np.argsort(has_zero_std(record.all_rewards), kind="stable")
    order = order[has_rewards(record.all_rewards)[order]]
    if not len(order):
        raise RewardsFailed(
            f"reward.functions: in step {record.step + 1} no function returned a number for any of "
            f"{len(record.all_rewards)} prompts, so there is nothing to train on"
        )
    chosen = sorted(order[: record.batch_sizes[0]].tolist())
    samples = record.generated.of_groups(chosen)
    return replace(record, samples=samples, rewards=record.all_rewards[chosen])
