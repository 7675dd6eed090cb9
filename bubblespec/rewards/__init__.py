"""Reward functions, and how they are run. The ready-made ones can be named in a configuration as
bubblespec.rewards.NAME.

May import: ranks, config and what lies below.
"""

from bubblespec.rewards.functions import (
    answer_format,
    exact_match,
    math_equivalence,
    reasoning_gym_score,
)

__all__ = ["answer_format", "exact_match", "math_equivalence", "reasoning_gym_score"]
