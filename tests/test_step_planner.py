"""The order of the data: which prompts a step draws, and how often each has been drawn before,
against a plain transcription."""

import random
from collections import Counter

import numpy as np
import pytest

from bubblespec.data.prompts import PromptSet
from bubblespec.data.schedule import InOrder
from bubblespec.types import Group, Prompt
from tests.helpers.rows import samples_of

SEED, OF_STEP, GENERATIONS = 11, 4, 2


def make_prompts(count: int) -> PromptSet:
    return PromptSet(
        [Prompt(1000 + number, f"prompt {number}", (number,), {}) for number in range(count)], 0
    )


def make_planner(num_prompts: int) -> InOrder:
    return InOrder(make_prompts(num_prompts), SEED, OF_STEP, GENERATIONS)


def finish(planner: InOrder, groups: list[Group]) -> None:
    """All of a step have had their turn."""
    planner.finish(samples_of(groups, [np.zeros(1, np.int32)] * len(groups) * GENERATIONS), {})


def names(groups: list[Group]) -> list[tuple[int, int]]:
    """uid and visit of each."""
    return [(group.prompt.uid, group.visit) for group in groups]


def num_replaced(step: int) -> list[int]:
    """How many groups each further batch of a step asks for: as dynamic sampling does, by what has
    been generated."""
    return random.Random(step).choices((0, 1, 3), k=2)


def run(planner: InOrder, step: int) -> list[list[Group]]:
    """The batches of a step from its beginning to its end."""
    launch = planner.launch(step)
    assert (
        launch.num_generations == launch.num_kept == GENERATIONS
        and launch.num_trained == len(launch.groups) == OF_STEP
    )
    assert not launch.selects
    batches = [launch.groups]
    for count in num_replaced(step):
        batches.append(
            planner.replacements(step, count, [group for batch in batches for group in batch])
        )
    finish(planner, [group for batch in batches for group in batch])
    return batches


# With and without a remainder, replacements that run out of prompts, and a whole epoch in a step.
SIZES = [14, 12, 5, 4]


@pytest.mark.parametrize("size", SIZES)
def test_a_visit_is_how_often_the_prompt_was_drawn_before(size):
    """By a list of all draws, searched from its beginning each time."""
    prompts, planner, drawn = make_prompts(size), make_planner(size), []
    for step in range(40):
        of_step = []
        for number, batch in enumerate(run(planner, step)):
            wanted = prompts.batch(SEED, step, OF_STEP)
            if number:
                wanted = prompts.extra(SEED, step, num_replaced(step)[number - 1], set(of_step))
            uids = [prompt.uid for prompt in wanted]
            assert names(batch) == [(uid, sum(uid == before for before in drawn)) for uid in uids]
            assert [group.prompt.token_ids for group in batch] == [
                prompt.token_ids for prompt in wanted
            ]
            of_step += uids
        drawn += of_step
    assert max(Counter(drawn).values()) > 8, "many epochs"


@pytest.mark.parametrize("size", SIZES)
def test_no_name_is_drawn_twice(size):
    """Over a long run, all samples of all its groups; nor is a prompt drawn twice in a step."""
    planner, drawn = make_planner(size), []
    for step in range(300):
        groups = [group for batch in run(planner, step) for group in batch]
        assert len({group.prompt.uid for group in groups}) == len(groups)
        drawn += [group.sample(number) for group in groups for number in range(GENERATIONS)]
    assert len(set(drawn)) == len(drawn) >= GENERATIONS * OF_STEP * 300


@pytest.mark.parametrize("size", SIZES)
def test_upcoming_is_what_will_be_launched(size):
    """While a step is under way, as far ahead as it is asked for; groups that replace others in
    between are not foreseen."""
    planner = make_planner(size)
    for step in range(20):
        now, upcoming = planner.launch(step).groups, planner.upcoming(step, 7)
        assert (
            len(upcoming) == 7
            and planner.upcoming(step, 2) == upcoming[:2]
            and planner.upcoming(step, 0) == []
        )
        ahead = make_planner(size)
        ahead.load_state_dict(planner.state_dict())
        finish(ahead, now)
        for number, foreseen in enumerate(upcoming, step + 1):
            launched = ahead.launch(number).groups
            assert names(launched) == names(foreseen)
            finish(ahead, launched)
        finish(planner, now)


def test_what_is_upcoming_takes_in_the_replacements_that_are_over():
    """A replaced prompt comes up again under its next visit: seen from the step after."""
    planner, shifted = make_planner(12), 0
    for step in range(20):
        before = planner.upcoming(step, 1)[0]
        extra = [group for batch in run(planner, step)[1:] for group in batch]
        launched = planner.launch(step + 1).groups
        replaced = {group.prompt.uid for group in extra}
        assert names(launched) == [(uid, visit + (uid in replaced)) for uid, visit in names(before)]
        shifted += names(launched) != names(before)
    assert shifted > 3


@pytest.mark.parametrize("count", [1, 5, 100])
def test_replacements_are_groups_that_the_step_has_not_used(count):
    planner = make_planner(30)
    for step in range(10):
        used = planner.launch(step).groups
        while more := planner.replacements(step, count, used):
            assert names(planner.replacements(step, count, used)) == names(more), (
                "the same when asked again"
            )
            assert not {group.prompt.uid for group in used} & {group.prompt.uid for group in more}
            assert len(more) == min(count, 30 - len(used))
            used = used + more
        assert sorted(group.prompt.uid for group in used) == list(range(1000, 1030)), (
            "until there are no more"
        )
        finish(planner, used[: OF_STEP + 3])


def test_a_saved_state_goes_on_as_the_run_would_have():
    whole, states, batches = make_planner(14), [], []
    for step in range(30):
        states.append(whole.state_dict())
        batches.append([names(batch) for batch in run(whole, step)])
    for step in range(25):
        resumed = make_planner(14)
        resumed.load_state_dict(states[step])
        steps = range(step, step + 6)
        assert [[names(batch) for batch in run(resumed, coming)] for coming in steps] == batches[
            step : step + 6
        ]


def test_a_state_is_replaced_not_added_to():
    planner, fresh = make_planner(12), make_planner(12)
    run(planner, 0)
    planner.load_state_dict(fresh.state_dict())
    assert names(planner.launch(3).groups) == names(fresh.launch(3).groups)


def test_an_abandoned_step_is_launched_the_same_again():
    """Whatever was looked up, and drawn for it, before it was given up: it has not been
    finished."""
    planner = make_planner(12)
    for step in range(12):
        first, upcoming = planner.launch(step).groups, planner.upcoming(step, 3)
        more = planner.replacements(step, 3, first)
        assert names(planner.launch(step).groups) == names(first)
        assert names(planner.replacements(step, 3, first)) == names(more)
        assert [names(groups) for groups in planner.upcoming(step, 3)] == [
            names(groups) for groups in upcoming
        ]
        run(planner, step)
