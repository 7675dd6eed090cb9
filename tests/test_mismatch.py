"""A run says once that training does not compute what generation did, and never where the
difference is rounding."""

from types import SimpleNamespace

import pytest
import torch

from bubblespec.config import Config, ModelConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.learn import losses
from bubblespec.learn.learner import Learner
from tests.helpers.runs import read, train_here

MEAN = "sampling/logp_difference/mean"


def make_learner(dtype: str, temperature: float, rank: int = 0) -> Learner:
    config = Config(model=ModelConfig(path="", dtype=dtype))
    config.rollout.temperature = temperature
    ranks = Ranks(torch.device("cpu"))
    ranks.rank, ranks.is_main = rank, rank == 0
    model = SimpleNamespace(dtype=getattr(torch, dtype))
    return Learner(
        config=config,
        ranks=ranks,
        model=model,
        reference=None,
        optimizer=None,
        kernel="sdpa",
        params=SamplingParams(temperature),
    )


@pytest.mark.parametrize(
    "dtype, temperature, passes, warns",
    [
        ("float64", 1.0, 0.9e-5, 1.1e-5),
        ("float32", 1.0, 0.9e-3, 1.1e-3),
        ("bfloat16", 1.0, 0.09, 0.11),
        ("float32", 0.1, 0.9e-2, 1.1e-2),  # which logits are divided by, and so their rounding
        ("float32", 2.0, 0.9e-3, 1.1e-3),
    ],
)
def test_mismatch_warning_depends_on_dtype_and_temperature(
    capsys, dtype, temperature, passes, warns
):
    learner = make_learner(dtype, temperature)
    for metrics in ({"loss": 0.0}, {MEAN: 0.0}, {MEAN: passes}, {MEAN: float("nan")}):
        learner.warn_of_mismatch(metrics, 3)
    assert capsys.readouterr().err == ""
    for step in (4, 5):
        learner.warn_of_mismatch({MEAN: warns}, step)
    said = capsys.readouterr().err
    assert said.startswith("warning: in step 5 log-probabilities in training differ from those in")
    assert f" by {warns:.1e} " in said
    assert said.count("\n") == 1 and f"rounding of {dtype}" in said and "dropout" in said


def test_mismatch_warning_appears_once_per_run(monkeypatch, tmp_path, capsys):
    original = losses.token_logprobs

    def disturbed(*arguments, **options):
        return original(*arguments, **options) + 0.25

    monkeypatch.setattr(losses, "token_logprobs", disturbed)
    options = ("run.max_steps=3", "run.save_steps=0", "eval.num_prompts=0")
    train_here(tmp_path, *options, "rollout.max_completion_length=16")
    assert capsys.readouterr().err.count("differ from those in generation") == 1
    means = [line[MEAN] for line in read(tmp_path) if MEAN in line]
    assert len(means) >= 2 and means == pytest.approx([0.25] * len(means), abs=1e-6)
