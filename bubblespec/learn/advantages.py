"""Advantages from rewards: one number a sample, for all its tokens. Each estimator is a baseline and a divisor.

grpo: the mean of the prompt's own group (Shao et al. 2024, arXiv 2402.03300, section 4.1.2).
rloo: the mean of the group's other samples (Ahmadian et al. 2024, arXiv 2402.14740, section 3.2).
reinforce_plus_plus: the mean of the whole batch; reinforce_plus_plus_baseline: the mean of the group, and then the mean of
the batch, which it has made 0 (Hu et al. 2025, arXiv 2501.03262, both variants without a critic).
"""

import numpy as np

# What divides the centred rewards where the configuration leaves it open: what each paper does.
DEFAULT_SCALE = {
    "grpo": "group",
    "rloo": "none",
    "reinforce_plus_plus": "batch",
    "reinforce_plus_plus_baseline": "batch",
}


def estimate_advantages(rewards: np.ndarray, estimator: str, scale_rewards: str | None = None) -> np.ndarray:
    """rewards: float64 [prompts, generations]. Returns advantages of the same shape.

    A = (r - baseline) / (std + 1e-4), with the sample standard deviation of the group, of the whole batch ("batch"; Liu et
    al. 2025, arXiv 2508.08221), or no division ("none"; Dr. GRPO, arXiv 2503.20783). The batch's is that of the rewards,
    but for the two reinforce_plus_plus that of the centred rewards. A single generation has no group to compare with: its
    advantage is 0, except under reinforce_plus_plus, which knows no groups.
    """
    scale = scale_rewards or DEFAULT_SCALE[estimator]
    if estimator == "reinforce_plus_plus":
        centred = rewards - rewards.mean()
    else:
        centred = rewards - rewards.mean(axis=1, keepdims=True)
    if rewards.size == 1:
        return np.zeros_like(rewards)
    if estimator == "rloo" and rewards.shape[1] > 1:
        # r - (G mean - r) / (G - 1), so written because equal rewards then leave no more rounding than in grpo.
        centred = centred * (rewards.shape[1] / (rewards.shape[1] - 1))
    if scale == "batch":
        spread = centred if estimator.startswith("reinforce_plus_plus") else rewards
        return centred / (spread.std(ddof=1) + 1e-4)
    if scale == "group" and rewards.shape[1] > 1:
        return centred / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return centred


def has_zero_std(rewards: np.ndarray) -> np.ndarray:
    """Whether a prompt's generations all got the same reward, bool [prompts]: compared within their group they give no gradient.

    rewards: [prompts, generations].
    """
    return np.ptp(rewards, axis=1) < 1e-8
