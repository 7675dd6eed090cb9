"""The user's own losses, advantages, draft sources and hooks: what they compute, and that mistakes
in them are one line."""

import numpy as np
import pytest
import torch

from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.sources import check_proposals, load_source
from bubblespec.engine.model_checks import prepare_model
from bubblespec.imports import import_function
from bubblespec.learn.advantages import estimate_advantages, load_estimator
from bubblespec.learn.losses import load_loss
from bubblespec.setup import load_own
from tests.helpers import own
from tests.helpers.checks import refusal
from tests.test_update import (
    ADVANTAGES,
    GENERATIONS,
    NUM_PROMPTS,
    gradients,
    make_config,
    make_learner,
    make_samples,
)

OWN = "tests.helpers.own"
SHAPE = (NUM_PROMPTS, GENERATIONS)
ALONE = Ranks(torch.device("cpu"))


def both_updates(model, **loss) -> tuple[list[torch.Tensor], dict]:
    config = make_config(num_iterations=2, **loss)
    prepare_model(model, 64)
    return gradients(make_learner(model, config), make_samples())


def test_own_loss_equals_formula(make_model):
    """A ratio that is not clipped, in two updates of a batch, is DAPO's with clips out of reach."""
    mine, metrics = both_updates(make_model(), loss_type=f"{OWN}.unclipped")
    wanted, others = both_updates(make_model(), loss_type="dapo", epsilon_low=1e6, epsilon_high=1e6)
    assert len(mine) == len(wanted) == 2 and not torch.equal(wanted[0], wanted[1])
    for gradient, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)
    assert metrics["loss"] == pytest.approx(others["loss"], rel=1e-9)
    clips = {key for key in others if key.startswith("clip_ratio/")}
    assert len(clips) == 3 and not clips & set(metrics)


def test_own_loss_may_have_gradient_at_zero_advantage(make_model):
    config = make_config(loss_type=f"{OWN}.without_advantage")
    samples, zero = make_samples(), np.zeros_like(ADVANTAGES)
    seen = []
    for advantages in (ADVANTAGES, zero):
        model = make_model()
        prepare_model(model, 64)
        seen.append(gradients(make_learner(model, config), samples, advantages)[0][0])
    assert seen[0].any() and torch.equal(*seen)


def test_advantages_of_ones_own_are_given_the_samples():
    samples, rewards = make_samples(), np.zeros(SHAPE)
    found = estimate_advantages(rewards, f"{OWN}.lengths", samples=samples)
    assert found.tolist() == (-samples.lengths.reshape(SHAPE)).tolist()


@pytest.mark.parametrize(
    "name, problem",
    {
        "flat": f"returned the shape [{np.prod(SHAPE)}], not {list(SHAPE)}, [prompts, generations]",
        "not_a_number": f"returned {np.prod(SHAPE)} values that are not finite",
        "text": "not numbers",
    }.items(),
)
def test_bad_advantages_end_the_run_with_one_line(name, problem):
    rewards = np.ones(SHAPE)
    said = refusal(estimate_advantages, rewards, f"{OWN}.{name}", None, make_samples())
    assert said.startswith(f"loss.advantage_estimator: {OWN}.{name} ") and problem in said


@pytest.mark.parametrize(
    "name, problem",
    {
        "mean_loss": "returned the shape [], not a tensor [3], the loss of each token",
        "no_tensor": "returned 3.0, not a tensor [3]",
        "detached_loss": "has no gradient",
        "infinite_loss": "is not finite for ratios of 1",
        "failing_loss": "failed in a trial on three tokens: RuntimeError: no luck",
        "two_arguments": "cannot be called with (logprob, ratio, advantage): too many",
        "absent": "cannot import",
        "Fixed": "is not a function",
    }.items(),
)
def test_bad_losses_are_refused_before_the_run(name, problem):
    said = refusal(load_loss, f"{OWN}.{name}")
    assert said.startswith("loss.loss_type: ") and problem in said


def test_bad_estimators_and_hooks_are_refused_before_the_run():
    assert "no_module" in refusal(load_estimator, "no_module.advantages")
    assert "cannot be called with (samples, rewards)" in refusal(load_estimator, f"{OWN}.unclipped")
    config = Config()
    config.run.log_to = "my_log"
    wanted = "run.log_to: 'my_log' is not a dotted path such as my_module.log"
    assert refusal(load_own, config, ALONE) == wanted
    config.run.log_to = f"{OWN}.two_arguments"
    assert "cannot be called with (metrics)" in refusal(load_own, config, ALONE)
    config.run.log_to = "builtins.print"
    assert load_own(config, ALONE) == [print]


def test_function_without_signature_is_accepted():
    assert import_function("a.key", "builtins.max", "a.b", ("metrics",)) is max


@pytest.mark.parametrize(
    "name, problem",
    {
        "unclipped": "is not a subclass of bubblespec.draft.sources.DraftSource",
        "NoKinds": "kinds must be tuples that begin with a name, not ()",
        "TakenName": "'own' is reserved for the built-in sources",
        "NeedsArguments": "() failed: TypeError",
    }.items(),
)
def test_bad_sources_are_refused_before_the_run(name, problem):
    said = refusal(load_source, f"{OWN}.{name}", 100)
    assert said.startswith("speculative.method: ") and problem in said


@pytest.mark.parametrize(
    "proposals, problem",
    [
        ({"count": np.array([3, 0])}, "one above its limit"),
        ({"count": np.array([-1, 0])}, "a negative count"),
        ({"count": np.array([1])}, "count of [1]"),
        ({"begin": np.array([1, 1])}, "a range beyond its tokens"),
        ({"kind": np.array([0, 1])}, "a kind that is not below 1"),
        ({"tokens": np.array([5, 100])}, "tokens outside of the vocabulary of 100"),
        ({"tokens": np.array([-1, 5])}, "tokens outside of the vocabulary of 100"),
        ({"tokens": np.array([1.5, 2.5])}, "tokens that is not an integer array"),
        ({"tokens": [5, 6]}, "tokens that is not an integer array"),
    ],
)
def test_invalid_proposals_end_run(monkeypatch, proposals, problem):
    source, numbers, limits = load_source(f"{OWN}.Fixed", 100), np.arange(2), np.array([2, 2])
    check_proposals(source, source.propose(numbers, limits), limits)
    monkeypatch.setattr(own.Fixed, "changes", tuple(proposals.items()))
    said = refusal(check_proposals, source, source.propose(numbers, limits), limits)
    assert said.startswith(f"speculative.method: {OWN}.Fixed.propose returned ") and problem in said
    assert "no proposals" in refusal(check_proposals, source, "no proposals", limits)
