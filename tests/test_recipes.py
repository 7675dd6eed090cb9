"""The recipes of docs/recipes.md, each loaded from its own fragment and trained for several updates
of one batch, against the papers' formulas as reference_step.py has them."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from test_update import NUM_PROMPTS, gradients, make_learner, make_samples, moved, responses_of

from bubblespec.config import Config
from bubblespec.config.file import load_config
from bubblespec.learn.advantages import estimate_advantages
from tests.helpers import reference_step

PAGE = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
FRAGMENTS = dict(
    re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
)
LOSSES = ["GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO"]
RECIPES = [*LOSSES, "RLOO", "REINFORCE++", "REINFORCE++-baseline"]  # whose advantages differ
ALL = [*RECIPES, "Distillation"]  # whose loss is in test_masked_loss.py
GENERATIONS = 6
REWARDS = np.random.default_rng(3).normal(size=(NUM_PROMPTS, GENERATIONS))
REWARDS[2] = 0.5  # a group without a gradient, unless the baseline is the batch's
# What the papers leave open, in clips narrow enough that the few updates of these tests reach them.
CLIPS = {
    "DAPO": {"epsilon_low": 0.05, "epsilon_high": 0.1},
    "CISPO": {"epsilon_high": 1.05},
    "GSPO": {"epsilon_low": 0.15, "epsilon_high": 0.15},
}


def recipe_config(name: str, tmp_path: Path) -> Config:
    path = tmp_path / "recipe.yaml"
    path.write_text(FRAGMENTS[name])
    needed = ["model.path=some/model", "data.path=train.jsonl", "run.output_dir=out"]
    return load_config(str(path), needed)


def training_config(name: str, tmp_path: Path) -> Config:
    """The recipe's loss on the small batch of these tests: 2 passes of 2 minibatches, at a rate
    that leaves the old policy."""
    config = recipe_config(name, tmp_path)
    config.rollout.temperature, config.rollout.max_completion_length = 0.8, 20
    config.loss.num_iterations = config.loss.num_minibatches = 2
    clips = {"epsilon_low": 0.05, "epsilon_high": 0.05, **CLIPS.get(name, {})}
    for key, value in clips.items():
        setattr(config.loss, key, value)
    config.optim.learning_rate, config.optim.max_grad_norm = 4e-4, 0.0
    config.optim.max_tokens_per_microbatch = 64
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_fragments_equal_table(name, tmp_path):
    loss = recipe_config(name, tmp_path).loss
    (row,) = re.findall(rf"^\| \[{re.escape(name)}\].*$", PAGE, re.MULTILINE)
    cells = [cell.strip(" `") for cell in row.split("|")[2:6]]
    default = {"rloo": "none", "grpo": "group"}.get(loss.advantage_estimator, "batch")
    assert cells[:3] == [loss.advantage_estimator, loss.scale_rewards or default, loss.loss_type]
    assert loss.importance_sampling_level in cells[3] or name == "RLOO"
    assert (loss.kl_estimator in row) == (loss.kl_coef > 0)


def test_distillation_fragment_loads_without_rewards(tmp_path):
    config = recipe_config("Distillation", tmp_path)
    assert (config.loss.loss_type, config.reward.functions) == ("distillation", [])


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_equal_formulas(make_model, tmp_path, name):
    """Those of all updates of the batch; metrics are in test_masked_loss.py."""
    config, samples = training_config(name, tmp_path), make_samples(generations=GENERATIONS)
    settings = config.loss.advantage_estimator, config.loss.scale_rewards
    advantages = estimate_advantages(REWARDS, *settings).ravel()
    plain, model = make_model(), make_model(max_length=64)
    plain.set_attn_implementation("sdpa")
    references = [moved(of) if config.loss.kl_coef else None for of in (plain, model)]
    parts = responses_of(samples), advantages.tolist()
    wanted = reference_step.train_on(
        plain, references[0], *parts, config=config, step=0, moments={}
    )
    found, metrics = gradients(make_learner(model, config, references[1]), samples, advantages)
    assert len(found) == len(wanted) == 4
    for number, (mine, update) in enumerate(zip(found, wanted, strict=True)):
        assert update.gradient.any()
        torch.testing.assert_close(mine, update.gradient, rtol=1e-7, atol=1e-9 if number else 1e-11)
    assert list(FRAGMENTS) == [*ALL, "A reward model"] and metrics["clip_ratio/high_mean"] > 0.02
    assert name == "CISPO" or metrics["clip_ratio/low_mean"] > 0.02


@pytest.mark.parametrize(
    "minibatches, iterations, forwards", [(1, 1, 1), (1, 3, 3), (2, 1, 2 + 1), (2, 3, 6 + 1)]
)
def test_minibatches_need_one_forward_more_except_first(
    make_model, tmp_path, minibatches, iterations, forwards
):
    config, samples = training_config("DAPO", tmp_path), make_samples(generations=GENERATIONS)
    config.loss.num_minibatches, config.loss.num_iterations = minibatches, iterations
    config.optim.max_tokens_per_microbatch = 10_000
    model, seen = make_model(max_length=64), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    make_learner(model, config).update(samples, np.linspace(-1, 1, len(samples)), 0)
    assert len(seen) == forwards
