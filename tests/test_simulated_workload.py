"""What the simulator makes up: texts of drafts and of coming epochs against what they promise, and
costs."""

from difflib import SequenceMatcher

import numpy as np
import pytest

from bubblespec.draft.suffix import GroupIndex
from bubblespec.records import Load
from bubblespec.simulate.analytic import GPUS, MODELS, analytic_cost
from bubblespec.simulate.drafting import STOP, DraftModel
from tests.helpers.simulated import first_mismatch, make_workload, true_text


def test_a_draft_goes_on_from_what_it_has():
    """Continued at any place, under any younger weights, a text that has left its response stays
    what it was; one that has not leaves it no sooner than under older weights."""
    model, true = DraftModel(40.0, 2.0, drifts=True), true_text(200)
    for uid in range(20):
        key, nothing = (4, uid, 1), true[:0]
        old, young = (model.text(key, true, 400, STOP, age, nothing) for age in (8, 2))
        left = first_mismatch(old, true)
        assert left <= first_mismatch(young, true)
        assert model.text(key, true, 400, STOP, 0, nothing) is true
        for cut in (1, left, left + 1, len(old) - 1):
            again = model.text(key, true, 400, STOP, 2, old[:cut])
            np.testing.assert_array_equal(again[: min(cut, len(again))], old[:cut])
            if cut > left:
                np.testing.assert_array_equal(again, old)


@pytest.mark.parametrize(
    ("drifts", "age", "wanted"),
    [(False, 1, 100.0), (False, 7, 100.0), (True, 1, 100.0), (True, 4, 25.0)],
)
def test_the_first_mismatch_comes_as_late_as_it_should(drifts, age, wanted):
    model, true = DraftModel(100.0, 2.0, drifts), true_text(4000)
    found = [
        first_mismatch(model.text((0, uid, 0), true, 9000, STOP, age, true[:0]), true)
        for uid in range(400)
    ]
    assert np.mean(found) == pytest.approx(wanted, rel=0.15)  # 3 standard errors


@pytest.mark.parametrize("tokens_a_pass", [1.0, 1.5, 2.0, 4.0, 10.0])
def test_matching_gains_about_the_tokens_a_pass(tokens_a_pass):
    """The real suffix index on drafts that have left their responses at the first token."""
    tokens = passes = 0
    for uid in range(6):
        true = true_text(1500, uid)
        index, done = GroupIndex(), 0
        index.add_draft(
            0, DraftModel(1.0, tokens_a_pass).diverged((0, uid, 0), true, 9000, STOP, at=0)
        )
        while done < len(true):
            proposed, *_ = index.propose(0, 128)
            gained = first_mismatch(proposed, true[done:]) + 1
            index.extend(0, true[done : done + gained])
            done += gained
            passes += 1
        tokens += len(true)
    assert tokens / passes == pytest.approx(tokens_a_pass, rel=0.12)


@pytest.mark.parametrize("at", [0, 5, 18, 19])
@pytest.mark.parametrize("limit", [20, 21, 60])
def test_a_diverged_text_ends_as_a_response_does(at, limit):
    for seed in range(30):
        model = DraftModel(1.0, 3.0, seed=seed)
        for true in (
            true_text(20),
            true_text(limit + 1)[:limit],
        ):  # one with its stop token, one cut off
            text = model.diverged((0, 1, 2), true, limit, STOP, at=at)
            assert (text[:at] == true[:at]).all() and text[at] != true[at]
            assert len(text) <= limit
            assert text[-1] == STOP or len(text) == limit
            assert (text[:-1] != STOP).all()


def test_lengths_have_the_mean_and_the_limit_asked_for():
    workload = make_workload(prompts=200, generations=8, mean=100.0, max=2000)
    lengths = np.array(
        [[len(workload.response(0, p.uid, j)) for j in range(8)] for p in workload.batch(0)]
    )
    assert lengths.mean() == pytest.approx(100.0, rel=0.15)
    assert lengths.max() <= 2000
    between = np.corrcoef(np.log(lengths[:, 0]), np.log(lengths[:, 1]))[0, 1]
    assert between == pytest.approx(0.5, abs=0.15)
    assert (
        make_workload(max=60).response(0, 1, 0).tolist()
        == make_workload(max=60).response(0, 1, 0).tolist()
    )


@pytest.mark.parametrize("edited", [0.05, 0.2])
def test_epochs_repeat_prompts_with_similar_responses(edited):
    """Prompts come again with responses that share all but the edited tokens, and suffix matches
    find them."""
    workload = make_workload(2, 2, steps=4, epochs=2, edited=edited, mean=2000.0, max=4000)
    gained = forwards = 0
    for step in (0, 1):
        assert [p.token_ids for p in workload.batch(step)] == [
            p.token_ids for p in workload.batch(step + 2)
        ]
        for prompt in workload.batch(step):
            for sample in range(2):
                before, after = (workload.response(s, prompt.uid, sample) for s in (step, step + 2))
                same = sum(
                    block.size
                    for block in SequenceMatcher(None, before, after, False).get_matching_blocks()
                )
                # Two thirds of the edits take or replace one of the old tokens.
                assert same / len(before) == pytest.approx(1 - 2 / 3 * edited, abs=0.03)
                index, done = GroupIndex([(before, 0.0)], prompt=prompt.token_ids), 0
                while done < len(after):
                    proposed, *_ = index.propose(sample, 128)
                    accepted = min(first_mismatch(proposed, after[done:]), len(after) - done - 1)
                    index.extend(sample, after[done : done + accepted + 1])
                    gained, forwards, done = (
                        gained + accepted + 1,
                        forwards + 1,
                        done + accepted + 1,
                    )
    # An edit every 1 / edited tokens ends a match, and costs the two tokens at most after which
    # there is one again.
    assert 1 / (3 * edited) < gained / forwards < 1 / edited


# Costs


def test_analytic_cost_is_the_roofline():
    cost = analytic_cost("h200", "7b", 2e-3, 0.8, compute_share=0.5)
    bandwidth, compute = 0.8 * GPUS["h200"][0], 0.5 * GPUS["h200"][1]
    parameters, layers, heads, kv_heads, dimension = MODELS["7b"]
    for tokens, positions in ((1, 0), (32, 10**5), (64, 10**6)):
        seconds = cost.seconds(Load(tokens, tokens, 0, positions, 0, 0))
        by_hand = 2e-3 + max(2 * parameters / bandwidth, 2 * parameters * tokens / compute)
        by_hand += 4 * layers * kv_heads * dimension * positions / bandwidth
        assert seconds == pytest.approx(by_hand, rel=1e-6)
    saturated = cost.seconds(Load(1, 4096, 1, 4096, 4096, 0)) - cost.seconds(
        Load(1, 1, 0, 4096, 0, 0)
    )
    linear = 2 * parameters * 4096 / compute - 2 * parameters / bandwidth
    assert saturated == pytest.approx(
        linear + 4095 * 4096 * 4 * layers * heads * dimension / compute, rel=0.01
    )
    assert cost.kind == "analytic" and "not measured" in cost.hardware["source"]
