"""Reward functions and their calls. A configuration names shipped ones bubblespec.rewards.NAME."""

from bubblespec.rewards.functions import per_sample as per_sample
from bubblespec.rewards.shipped import answer_format as answer_format
from bubblespec.rewards.shipped import exact_match as exact_match
from bubblespec.rewards.shipped import math_equivalence as math_equivalence
from bubblespec.rewards.shipped import reasoning_gym_score as reasoning_gym_score
