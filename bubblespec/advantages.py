"""Group advantages (GRPO, Shao et al. 2024, arXiv 2402.03300, section 4.1.2): rewards relative to the prompt's own group."""

import numpy as np


def group_advantages(rewards: np.ndarray, scale_rewards: str) -> np.ndarray:
    """rewards: float64 [prompts, generations]. Returns advantages of the same shape.

    A = (r - mean of the group) / (std + 1e-4), with the sample standard deviation of the group, of the whole batch
    ("batch"; Liu et al. 2025, arXiv 2508.08221), or no division ("none"; Dr. GRPO, arXiv 2503.20783). A single
    generation has no group to compare with: its advantage is 0.
    """
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    if scale_rewards == "none" or rewards.shape[1] == 1:
        return centered
    if scale_rewards == "batch":
        return centered / (rewards.std(ddof=1) + 1e-4)
    return centered / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)


def has_zero_std(rewards: np.ndarray) -> np.ndarray:
    """Whether the generations of a prompt all got the same reward, bool [prompts]. rewards: [prompts, generations]."""
    return np.ptp(rewards, axis=1) < 1e-8
