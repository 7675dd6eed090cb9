"""Advantages from rewards: one number a sample, for all its tokens.

An estimator is a function of the rewards and of what divides them, with a name in ESTIMATORS, or
the user's own, a function of samples and rewards that a dotted path names. Throughout, rewards are
float64 [prompts, generations], and advantages of the same shape."""

from collections.abc import Callable

import numpy as np

from bubblespec.config.imports import call, import_function
from bubblespec.errors import InputError, shown
from bubblespec.records import Samples

KEY = "loss.advantage_estimator"


def grpo(rewards: np.ndarray, scale: str | None) -> np.ndarray:
    """Compare with the mean of the group (Shao et al. 2024, arXiv 2402.03300, section 4.1.2)."""
    return divided(centred_by_group(rewards), rewards, scale or "group")


def rloo(rewards: np.ndarray, scale: str | None) -> np.ndarray:
    """Compare with the group's other samples (Ahmadian et al. 2024, arXiv 2402.14740, 3.2)."""
    centred, generations = centred_by_group(rewards), rewards.shape[1]
    if generations > 1:
        # r - (G mean - r) / (G - 1), so written because equal rewards then leave no more rounding
        # than in grpo.
        centred = centred * (generations / (generations - 1))
    return divided(centred, rewards, scale or "none")


def reinforce_plus_plus(rewards: np.ndarray, scale: str | None) -> np.ndarray:
    """Compare with the mean of the batch (Hu et al. 2025, arXiv 2501.03262, without a critic)."""
    centred = rewards - rewards.mean()
    return divided(centred, centred, scale or "batch")


def reinforce_plus_plus_baseline(rewards: np.ndarray, scale: str | None) -> np.ndarray:
    """Compare with the mean of the group, divide by the batch's deviation (the same paper)."""
    centred = centred_by_group(rewards)
    return divided(centred, centred, scale or "batch")


ESTIMATORS = {
    function.__name__: function
    for function in (grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline)
}


def estimate_advantages(
    rewards: np.ndarray,
    estimator: str,
    scale_rewards: str | None = None,
    samples: Samples | None = None,
) -> np.ndarray:
    """Return advantages by one of ESTIMATORS or by the user's own function, given `samples`.

    scale_rewards: see `divided`, by default that of the estimator's paper. A single generation
    has no group: its advantage is 0, except under reinforce_plus_plus and the user's own.
    Raises InputError if the user's own does not return one finite number per sample."""
    if "." not in estimator:
        zeros = np.zeros_like(rewards)
        return zeros if rewards.size == 1 else ESTIMATORS[estimator](rewards, scale_rewards)
    returned = call(load_estimator(estimator), samples, rewards.copy())
    problem = f"{KEY}: {estimator} returned"
    try:
        advantages = np.array(returned, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{problem} {shown(returned)}, not numbers") from error
    if advantages.shape != rewards.shape:
        wanted = f"not {list(rewards.shape)}, [prompts, generations]"
        raise InputError(f"{problem} the shape {list(advantages.shape)}, {wanted}")
    if number := int((~np.isfinite(advantages)).sum()):
        raise InputError(f"{problem} {number} values that are not finite")
    return advantages


def load_estimator(path: str) -> Callable[[Samples | None, np.ndarray], object]:
    return import_function(KEY, path, "my_module.my_advantages", ("samples", "rewards"))


def centred_by_group(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean(axis=1, keepdims=True)


def divided(centred: np.ndarray, spread: np.ndarray, scale: str) -> np.ndarray:
    """Return centred / (std + 1e-4), with the sample standard deviation of `spread`.

    scale: "group", "batch" (Liu et al. 2025, arXiv 2508.08221), or "none" for no division (Dr.
    GRPO, arXiv 2503.20783)."""
    if scale == "batch":
        return centred / (spread.std(ddof=1) + 1e-4)
    if scale == "group" and spread.shape[1] > 1:
        return centred / (spread.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return centred
