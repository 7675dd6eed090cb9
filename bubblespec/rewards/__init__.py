"""Reward functions and their calls. A configuration names shipped ones bubblespec.rewards.NAME."""

from bubblespec.rewards.functions import answer_format as answer_format
from bubblespec.rewards.functions import exact_match as exact_match
from bubblespec.rewards.functions import per_sample as per_sample
from bubblespec.rewards.functions import reasoning_gym_score as reasoning_gym_score
from bubblespec.rewards.mathematics import math_equivalence as math_equivalence
