"""Rows, lengths and costs to plan with."""

import numpy as np

from bubblespec.planner.costs import KNOTS, CostModel
from bubblespec.planner.lengths import LengthForecast, LengthModel, acceptance_rates
from bubblespec.types import Draft, Group, Prompt
from tests.helpers.rows import samples_of

CPU = (5e-3, 2e-3, 1e-3, 1e-3, 2e-6)  # a row makes every forward slower
GPU = (1e-2, 1e-6, 1e-6, 1e-6, 1e-9)  # only the number of forwards counts
NO_COUNTS = np.zeros((2, 2))
NONE_HOLD = acceptance_rates(np.array([[1e9, 0.0], [1e6, 0.0]]))
ALL_HOLD = acceptance_rates(np.array([[1e6, 1e6], [1.0, 0.0]]))


def cost_of(terms) -> CostModel:
    return CostModel.from_parameters(np.array([*terms, *np.zeros(len(KNOTS))]))


def make_rows(
    expected, spread=0.0, *, drafted=0.0, generated=0, prompt_tokens=10, num_generations=1
) -> LengthForecast:
    expected = np.array(expected, np.float64)
    whole = np.zeros(len(expected))
    return LengthForecast(
        prompt_tokens=np.full(len(expected), prompt_tokens),
        group=np.arange(len(expected)) // num_generations,
        expected=expected,
        spread=whole + spread,
        drafted=whole + drafted,
        generated=np.zeros(len(expected), np.int64) + generated,
    )


def random_rows(seed: int, count: int, relative_spread=0.6, **others) -> LengthForecast:
    expected = np.random.default_rng(seed).uniform(20, 200, count)
    return make_rows(expected, relative_spread * expected, **others)


def groups_of(prompt_ids, prompt_tokens=lambda prompt_id: 4) -> list[Group]:
    return [
        Group(Prompt(prompt_id, "", (1,) * prompt_tokens(prompt_id), {}), 0)
        for prompt_id in prompt_ids
    ]


def observed(lengths_by_id: dict[int, list[int]], **prompts) -> LengthModel:
    model, groups = LengthModel(), groups_of(lengths_by_id, **prompts)
    lengths = (length for of_prompt in lengths_by_id.values() for length in of_prompt)
    model.observe(samples_of(groups, [np.ones(length, np.int32) for length in lengths]))
    return model


def draft(length: int, is_finished: bool = True) -> Draft:
    return Draft(np.ones(length, np.int32), is_finished, 0)
