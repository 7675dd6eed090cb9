"""A user's functions and classes: what they compute, that mistakes are one line, and that the
process keeps its settings."""

import asyncio
import json
import os
import sys

import numpy as np
import pytest
import torch

from bubblespec.config import Config
from bubblespec.config.imports import call, import_function
from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.sources import DraftSource, Proposals, check_proposals, load_source
from bubblespec.engine.model_checks import prepare_model
from bubblespec.learn.advantages import estimate_advantages, load_estimator
from bubblespec.learn.losses import load_loss
from bubblespec.rewards.functions import Sample, load_reward, score
from bubblespec.setup import load_own
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

SHAPE = (NUM_PROMPTS, GENERATIONS)
ALONE = Ranks(torch.device("cpu"))
PATH = f"{__name__}.own"


@pytest.fixture
def give(monkeypatch):
    """give(function or class) -> makes it what PATH, a user's dotted path, leads to."""
    return lambda own: monkeypatch.setattr(sys.modules[__name__], "own", own, raising=False)


def both_updates(model, **loss) -> tuple[list[torch.Tensor], dict]:
    config = make_config(num_iterations=2, **loss)
    prepare_model(model, 64)
    return gradients(make_learner(model, config), make_samples())


def test_own_loss_equals_formula(make_model, give):
    """A ratio that is not clipped, in two updates of a batch, is DAPO's with clips out of reach."""
    give(lambda logprob, ratio, advantage: -ratio * advantage)
    mine, metrics = both_updates(make_model(), loss_type=PATH)
    wanted, others = both_updates(make_model(), loss_type="dapo", epsilon_low=1e6, epsilon_high=1e6)
    assert len(mine) == len(wanted) == 2 and not torch.equal(wanted[0], wanted[1])
    for gradient, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)
    assert metrics["loss"] == pytest.approx(others["loss"], rel=1e-9)
    clips = {key for key in others if key.startswith("clip_ratio/")}
    assert len(clips) == 3 and not clips & set(metrics)


def test_own_loss_may_have_gradient_at_zero_advantage(make_model, give):
    give(lambda logprob, ratio, advantage: -logprob)
    config = make_config(loss_type=PATH)
    samples, zero = make_samples(), np.zeros_like(ADVANTAGES)
    seen = []
    for advantages in (ADVANTAGES, zero):
        model = make_model(max_length=64)
        seen.append(gradients(make_learner(model, config), samples, advantages)[0][0])
    assert seen[0].any() and torch.equal(*seen)


def test_own_advantages_get_the_samples(give):
    give(lambda samples, rewards: -samples.lengths.reshape(rewards.shape).astype(float))
    samples, rewards = make_samples(), np.zeros(SHAPE)
    found = estimate_advantages(rewards, PATH, samples=samples)
    assert found.tolist() == (-samples.lengths.reshape(SHAPE)).tolist()


SIZE = NUM_PROMPTS * GENERATIONS
BAD_SHAPE = f"returned the shape [{SIZE}], not {list(SHAPE)}, [prompts, generations]"


@pytest.mark.parametrize(
    "own, problem",
    [
        (lambda samples, rewards: rewards.ravel(), BAD_SHAPE),
        (lambda samples, rewards: rewards * np.nan, f"returned {SIZE} values that are not finite"),
        (lambda samples, rewards: [["a"] * GENERATIONS] * NUM_PROMPTS, "not numbers"),
    ],
)
def test_bad_advantages_end_the_run_with_one_line(give, own, problem):
    give(own)
    message = refusal(estimate_advantages, np.ones(SHAPE), PATH, None, make_samples())
    assert message.startswith(f"loss.advantage_estimator: {PATH} ") and problem in message


NOT_FOR_TOKENS = "returned the shape [], not a tensor [3], the loss of each token"
BAD_LOSSES = [
    (lambda logprob, ratio, advantage: (-ratio * advantage).mean(), NOT_FOR_TOKENS),
    (lambda logprob, ratio, advantage: 3.0, "returned 3.0, not a tensor [3]"),
    (lambda logprob, ratio, advantage: (-ratio * advantage).detach(), "has no gradient"),
    (lambda logprob, ratio, advantage: -(ratio - 1).log() * logprob, "not finite for ratios of 1"),
    (lambda *of: int("no\nluck"), "failed in a trial on three tokens: ValueError: invalid literal"),
    (lambda one, two: one, "cannot be called with (logprob, ratio, advantage): too many"),
    (DraftSource, "is not a function"),
]


@pytest.mark.parametrize("own, problem", BAD_LOSSES)
def test_bad_losses_are_refused_before_the_run(give, own, problem):
    give(own)
    message = refusal(load_loss, PATH)
    assert message.startswith("loss.loss_type: ") and problem in message


def test_bad_estimators_and_hooks_are_refused_before_the_run(give, monkeypatch):
    assert "no_module" in refusal(load_estimator, "no_module.advantages")
    assert "cannot import" in refusal(load_loss, f"{__name__}.absent")
    give(lambda one, two, three: one)
    assert "cannot be called with (samples, rewards)" in refusal(load_estimator, PATH)
    config = Config()
    config.run.log_to = "my_log"
    wanted = "run.log_to: 'my_log' is not a dotted path such as my_module.log"
    assert refusal(load_own, config, ALONE) == wanted
    config.run.log_to = PATH
    assert "cannot be called with (metrics)" in refusal(load_own, config, ALONE)
    config.run.log_to = "builtins.print"
    assert load_own(config, ALONE) == [print]
    monkeypatch.setitem(sys.modules, "trackio", None)
    config.run.log_to = "trackio"
    assert refusal(load_own, config, ALONE).endswith("; pip install trackio")
    # it has no signature
    assert import_function("a.key", "builtins.max", "a.b", ("metrics",)) is max


def test_function_of_an_installed_package_names_its_file():
    """Which has the name of the user's own."""
    message = refusal(load_reward, "json.my_reward")
    assert f"no attribute 'my_reward' ({json.__file__})" in message


async def in_a_notebook(function) -> list:
    return [call(function, 3), call(function, 4)]


def test_async_function_runs_in_a_notebook():
    """Whose thread has a running loop; the functions share one of their own."""
    loops = set()

    async def double(number: int) -> int:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return 2 * number

    assert asyncio.run(in_a_notebook(double)) == [6, 8]
    assert call(double, 5) == 10 and len(loops) == 1


SETTINGS = """
import os
import numpy as np
import torch

def change(**columns):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    np.seterr(all="raise")
    os.chdir("/")
    return [1.0]

async def change_late(**columns):
    return change()

change()
"""


@pytest.mark.parametrize("name", ["change", "change_late"])
def test_functions_change_no_setting_of_the_process(tmp_path, monkeypatch, name):
    def settings():
        device, mode = torch.empty(1).device, torch.get_deterministic_debug_mode()
        precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
        of_torch = (torch.is_grad_enabled(), torch.get_default_dtype(), device, mode, precision)
        return *of_torch, threads, np.geterr(), os.getcwd()

    module_name = f"settings_{name}"
    (tmp_path / f"{module_name}.py").write_text(SETTINGS)
    monkeypatch.syspath_prepend(tmp_path)
    before = settings()
    function = import_function("a.key", f"{module_name}.{name}", "a.b")
    assert settings() == before
    assert score(function, [Sample("p", "a", [1], {})]) == [1.0]
    assert settings() == before


class Fixed(DraftSource):
    kinds = (("fixed",),)

    def propose(self, numbers: np.ndarray, limits: np.ndarray) -> Proposals:
        size = len(numbers)
        kind, count = np.zeros(size, np.int64), np.minimum(limits, 2)
        return Proposals(np.full(2, 5), begin=np.zeros(size, np.int64), count=count, kind=kind)


class NeedsArguments(Fixed):
    def __init__(self, size):
        self.size = size


@pytest.mark.parametrize(
    "own, problem",
    [
        (max, "is not a subclass of bubblespec.draft.sources.DraftSource"),
        (type("NoKinds", (DraftSource,), {}), "must be tuples that begin with a name, not ()"),
        (type("Taken", (Fixed,), {"kinds": (("own",),)}), "'own' is reserved for the built-in"),
        (NeedsArguments, "() failed: TypeError"),
    ],
)
def test_bad_sources_are_refused_before_the_run(give, own, problem):
    give(own)
    message = refusal(load_source, PATH, 100)
    assert message.startswith("speculative.method: ") and problem in message


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
def test_invalid_proposals_end_run(give, proposals, problem):
    give(Fixed)
    source, limits = load_source(PATH, 100), np.array([2, 2])
    good = source.propose(np.arange(2), limits)
    check_proposals(source, good, limits)
    message = refusal(check_proposals, source, good._replace(**proposals), limits)
    assert message.startswith(f"speculative.method: {PATH}.propose returned ")
    assert problem in message
    assert "no proposals" in refusal(check_proposals, source, "no proposals", limits)
