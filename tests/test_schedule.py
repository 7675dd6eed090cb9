"""The order of the data: which prompts a step draws, and how often each has been drawn before,
against a plain transcription."""

import random
from collections import Counter

import numpy as np
import pytest

from bubblespec.data.schedule import StepSchedule
from bubblespec.types import Group, ids_of
from tests.helpers.rows import numbered_prompts, samples_of

SEED, OF_STEP, GENERATIONS = 11, 4, 2


def make_schedule(num_prompts: int) -> StepSchedule:
    return StepSchedule(numbered_prompts(num_prompts), SEED, OF_STEP, GENERATIONS)


def finish(schedule: StepSchedule, groups: list[Group]) -> None:
    schedule.finish(samples_of(groups, [np.zeros(1, np.int32)] * len(groups) * GENERATIONS), {})


def names(groups: list[Group]) -> list[tuple[int, int]]:
    return [(group.prompt.prompt_id, group.draw_index) for group in groups]


def num_replaced(step: int) -> list[int]:
    """How many groups each further batch of a step asks for, as dynamic sampling does."""
    return random.Random(step).choices((0, 1, 3), k=2)


def run(schedule: StepSchedule, step: int) -> list[list[Group]]:
    launch = schedule.launch(step)
    assert launch.num_generations == GENERATIONS
    assert launch.num_trained == len(launch.groups) == OF_STEP and not launch.selects
    batches, used = [launch.groups], list(launch.groups)
    for count in num_replaced(step):
        batches.append(schedule.replacements(step, count, used))
        used += batches[-1]
    finish(schedule, used)
    return batches


# With and without a remainder, replacements that run out of prompts, and a whole epoch in a step.
SIZES = [14, 12, 5, 4]


@pytest.mark.parametrize("size", SIZES)
def test_visit_counts_earlier_draws_of_prompt(size):
    """By a list of all draws, searched from its beginning each time, also by a schedule that is
    loaded in each step. No prompt is drawn twice in a step, and no sample twice in a run."""
    prompts, schedule, drawn, samples = numbered_prompts(size), make_schedule(size), [], []
    for step in range(40):
        of_step, state = [], schedule.state_dict()
        schedule = make_schedule(size)
        schedule.load_state_dict(state)
        for number, batch in enumerate(run(schedule, step)):
            wanted = prompts.batch(SEED, step, OF_STEP)
            if number:
                wanted = prompts.extra(SEED, step, num_replaced(step)[number - 1], set(of_step))
            prompt_ids = [prompt.prompt_id for prompt in wanted]
            assert names(batch) == [(prompt_id, drawn.count(prompt_id)) for prompt_id in prompt_ids]
            assert [group.prompt for group in batch] == wanted
            of_step += prompt_ids
            samples += ids_of(batch, GENERATIONS)
        assert len(set(of_step)) == len(of_step)
        drawn += of_step
    assert max(Counter(drawn).values()) > 8, "many epochs"
    assert len(set(samples)) == len(samples)


@pytest.mark.parametrize("size", SIZES)
def test_upcoming_equals_later_launches(size):
    """While a step is under way, as far ahead as it is asked for; a prompt that is drawn as a
    replacement in between comes up under its next visit."""
    schedule = make_schedule(size)
    for step in range(20):
        now, upcoming = schedule.launch(step).groups, schedule.upcoming(step, 7)
        assert schedule.upcoming(step, 2) == upcoming[:2] and schedule.upcoming(step, 0) == []
        ahead = make_schedule(size)
        ahead.load_state_dict(schedule.state_dict())
        finish(ahead, now)
        for number, foreseen in enumerate(upcoming, step + 1):
            launched = ahead.launch(number).groups
            assert names(launched) == names(foreseen)
            finish(ahead, launched)
        replaced = {group.prompt.prompt_id for batch in run(schedule, step)[1:] for group in batch}
        assert names(schedule.launch(step + 1).groups) == [
            (prompt_id, draw_index + (prompt_id in replaced))
            for prompt_id, draw_index in names(upcoming[0])
        ]
