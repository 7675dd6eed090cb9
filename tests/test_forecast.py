"""What rows are expected to need, by hand: from drafts, earlier epochs, and recent lengths."""

from types import SimpleNamespace

import numpy as np
import pytest
from bubblespec.idle.draft_planning import Outlook
from bubblespec.idle.rehearsal import NORMAL_QUANTILE
from bubblespec.rollout.forecast import admit_first, forecast, up_to_cut

from bubblespec.draft.store import DraftStore
from bubblespec.draft.suffix import History
from bubblespec.types import Draft, Group, Launch, Prompt
from tests.helpers.rows import launch_of

GROUPS = [
    Group(Prompt(uid, "", (1,) * tokens, {}), 3)
    for uid, tokens in ((1, 10), (2, 20), (3, 30), (4, 10))
]


def make_speculation() -> SimpleNamespace:
    """Recent responses are three times as long as their prompts, the half of them by 4 longer and
    the half by 4 shorter."""
    outlook = Outlook()
    prompts = np.repeat([10, 20, 30], 20)
    outlook.learn(prompts, 3 * prompts + np.tile([-4, 4], 30))
    return SimpleNamespace(outlook=outlook, history=History(1000), store=DraftStore(1000))


def test_the_best_that_is_known_counts():
    speculation = make_speculation()
    for length in (5, 9):
        speculation.history.add(4, np.arange(length), 1.0, 0)
    speculation.store.put(GROUPS[0].sample(0), Draft(np.zeros(7, np.int32), True, 0))
    speculation.store.put(GROUPS[0].sample(1), Draft(np.zeros(7, np.int32), False, 0))
    found = forecast(launch_of(GROUPS, 2), speculation)
    assert found.draft_tokens.tolist() == [7, 7, 0, 0, 0, 0, 0, 0]
    assert found.tokens.tolist() == pytest.approx([0, 23, 60, 60, 90, 90, 7, 7])
    assert found.margins.tolist() == pytest.approx(
        [0, 4, 4, 4, 4, 4, 2 * NORMAL_QUANTILE, 2 * NORMAL_QUANTILE]
    )
    assert found.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.prompt_tokens.tolist() == [10, 10, 20, 20, 30, 30, 10, 10]


def test_where_not_all_are_trained_on_no_row_is_expected_beyond_the_last_that_is():
    launch = Launch(GROUPS, 2, 2, 2)
    speculation = make_speculation()
    speculation.store.put(GROUPS[2].sample(0), Draft(np.zeros(50, np.int32), False, 0))
    expected = forecast(launch, speculation)
    capped = up_to_cut(expected, launch)
    assert (expected.tokens + expected.draft_tokens).tolist() == pytest.approx(
        [30, 30, 60, 60, 90, 90, 30, 30]
    )
    assert capped.draft_tokens.tolist() == pytest.approx([0, 0, 0, 0, 30, 0, 0, 0])
    assert capped.tokens.tolist() == pytest.approx([30, 30, 30, 30, 0, 30, 30, 30])


def test_those_that_are_likely_to_be_out_are_admitted_last_but_for_one_of_each():
    launch = Launch(GROUPS, 2, 2, 2)
    expected = forecast(launch, make_speculation())
    assert admit_first([4, 5, 2, 3, 0, 1, 6, 7], launch, expected) == [0, 1, 6, 7, 4, 2, 5, 3]
    assert admit_first([5, 0], launch, expected) == [0, 5]
