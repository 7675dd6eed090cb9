"""Evaluation against hand-worked values; and a run that cannot go on says so: through the entry
point, in this process."""

import gc
import itertools
import math
import os
import statistics
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bubblespec
import train
from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.store import TextStore
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.sampling import EVALUATION
from bubblespec.learn.learner import Learner
from bubblespec.planner.costs import CostModel
from bubblespec.planner.stats import RunStats
from bubblespec.records import ForwardRecord, RolloutRecord, digest
from bubblespec.rewards.functions import load_reward
from bubblespec.rollout.evaluate import Evaluator, expected_best
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.sampler import Sampler
from bubblespec.trainer import Trainer
from bubblespec.types import Group, Load, Prompt
from tests.helpers.rows import samples_of
from tests.helpers.runs import SHORT, read, weights

OPTIONS = [*SHORT, "rollout.max_completion_length=16", "run.max_steps=6", "run.save_steps=0"]
OPTIONS += ["eval.num_prompts=0"]


def run_main(monkeypatch, folder, *overrides: str) -> int:
    options = ["--config", "configs/tiny_cpu_bulk.yaml", *OPTIONS, f"run.output_dir={folder}"]
    options += overrides
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    monkeypatch.delenv("RANK", raising=False)
    return train.main()


def test_equal_rewards_give_one_hint_and_complete_run_ends(monkeypatch, tmp_path, capsys):
    """After three steps, not before; the run goes on."""
    assert run_main(monkeypatch, tmp_path, "reward.functions=[tests.helpers.rewards.constant]") == 0
    hints = [line for line in capsys.readouterr().err.splitlines() if "hint: " in line]
    assert len(hints) == 1 and hints[0].startswith("hint: after step 3: ")
    assert [0 < line["entropy"] < 10 for line in read(tmp_path)] == [True] * 6
    assert run_main(monkeypatch, tmp_path, "reward.functions=[tests.helpers.rewards.constant]") == 0
    said = capsys.readouterr().err
    assert "run complete (6 steps); set run.max_steps=12" in said
    assert f"\ncheckpoint: {tmp_path}/checkpoint-6 " in said and "finished" not in said
    assert len(read(tmp_path)) == 6


@pytest.mark.parametrize(
    "broken_steps, exit_code, num_lines", [((1, 3, 4), 0, 6), ((2, 3, 4), 1, 4)]
)
def test_successive_skipped_updates_end_run(
    monkeypatch, tmp_path, capsys, broken_steps, exit_code, num_lines
):
    """Two may follow each other, three may not."""
    original = Learner.accumulate_gradient

    def sometimes_broken(*arguments):
        assert gc.get_freeze_count(), "a collection in the middle of a step takes long"
        measured = original(*arguments)
        step = len(read(tmp_path))
        return measured * math.nan if step in broken_steps else measured

    monkeypatch.setattr(Learner, "accumulate_gradient", sometimes_broken)
    monkeypatch.setattr("bubblespec.learn.learner.MAX_SKIPPED_STEPS", 2)
    assert run_main(monkeypatch, tmp_path) == exit_code
    assert not gc.get_freeze_count()
    lines = read(tmp_path)
    assert len(lines) == num_lines
    for step, line in enumerate(lines):
        is_skipped = step in broken_steps
        assert line["skipped_updates"] == is_skipped == (line["loss"] is None)
        assert (line["learning_rate"] == 0) == is_skipped
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    if exit_code:
        assert len(errors) == 1 and "in 3 steps in a row, the last of them step 5" in errors[0]
    else:
        assert not errors and all(torch.isfinite(t).all() for t in weights(tmp_path, 6).values())


# Evaluation


def make_trainer(config: Config, sampler: dict, **fields) -> Trainer:
    """With these parts of it and of its sampler, and no others."""
    common = {"config": config, "ranks": Ranks(torch.device("cpu"))}
    made = Sampler(**dict.fromkeys(Sampler.__dataclass_fields__) | common | sampler)
    common |= {"sampler": made, "evaluator": Evaluator(made, None)}
    return Trainer(**dict.fromkeys(Trainer.__dataclass_fields__) | common | fields)


@pytest.mark.parametrize(
    "rewards", [[0.0, 1.0, 0.0, 0.0, 1.0], [0.3, -2.0, 0.5, 0.5, 7.0, 0.1], [1.0], [0.0, 0.0]]
)
def test_expected_best_equals_mean_over_choices(rewards):
    for k in range(1, len(rewards) + 1):
        wanted = statistics.fmean(max(chosen) for chosen in itertools.combinations(rewards, k))
        assert expected_best(np.array(rewards), k) == pytest.approx(wanted, abs=1e-12)


def test_an_evaluation_by_hand(monkeypatch):
    """Two prompts with four responses each; the second function applies to the first prompt alone,
    and weighs 10 there. The overlong penalty, which is on, is no part of it."""
    config = Config()
    config.rollout.max_completion_length, config.reward.overlong_buffer_length = 6, 6
    config.eval.num_generations, config.eval.temperature = 4, 0.25
    prompts = [Prompt(5, "p", (1, 2), {}), Prompt(9, "q", (3,), {})]
    first, second = [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0], [0.5, 0.0, 0.0, 0.0, *[math.nan] * 4]
    lengths, used = [1, 2, 6, 3, 4, 6, 6, 2], []
    sampling = SamplingParams(0.9, 0.8, 7, (3,), 2)

    def generate(loop):
        rows = loop.plan.rows
        used.append((loop.plan.params, [(*row.id, row.max_new_tokens) for row in rows.values()]))
        for row, length in zip(rows.values(), lengths, strict=True):
            row.tokens, row.finish = np.arange(length), "length" if length == 6 else "stop"
            row.logprob = np.zeros(length, np.float32)
            loop.plan.scoring.on_finished(row)
        forwards = [ForwardRecord(*[0.0] * 4, Load(0, 0), own_rows, 0, 0) for own_rows in (8, 5)]
        return RolloutRecord(forwards=forwards)

    monkeypatch.setattr(RolloutLoop, "run", generate)
    rewards = np.array([first, second]).T
    scoring = SimpleNamespace(on_finished=lambda row: None, collect=lambda rows: rewards)
    scorer = SimpleNamespace(
        sees_groups=lambda step: False,
        names=["my.first", "my.second"],
        begin=lambda groups, step: used.append(step) or scoring,
        take_metrics=lambda: {"reward/errors": 3},
    )
    parts = {"params": sampling, "scorer": scorer, "reward_weights": [1.0, 10.0]}
    parts |= {"engine": SimpleNamespace(num_slots=8), "stats": RunStats(cost=CostModel())}
    parts |= {"mechanisms": [], "store": TextStore(0), "planning_s": 0.0}
    trainer = make_trainer(config, parts, eval_prompts=prompts, num_updates=12)
    trainer.ranks.clock = SimpleNamespace(perf_counter=iter([2.0] * 7 + [5.5]).__next__)
    assert trainer.evaluate().metrics == {
        "eval/reward": (3 + 5) / 8,
        "eval/completions/mean_length": 30 / 8,
        "eval/completions/clipped_ratio": 3 / 8,
        "eval/reward/errors": 3,
        "eval/rewards/first/mean": 3 / 8,
        "eval/rewards/first/std": pytest.approx(statistics.stdev(first)),
        "eval/rewards/second/missing": 4,
        "eval/rewards/second/mean": 0.5 / 4,  # over the prompt that it applies to
        "eval/rewards/second/std": 0.25,
        "eval/pass@1": (2 / 4 + 1 / 4) / 2,
        # of 6 pairs, 1 and 3 have no right answer
        "eval/pass@2": pytest.approx((5 / 6 + 3 / 6) / 2),
        "eval/pass@4": 1.0,
        "eval/digest": digest(
            samples_of([Group(p, EVALUATION) for p in prompts], [np.arange(n) for n in lengths])
        ),
        "eval/forwards": 2,
        "timing_s/eval": 3.5,
    }
    step, (params, rows) = used
    assert step is None
    assert params == SamplingParams(0.25, 0.8, 7, (3,), 2) and trainer.evaluated == 12
    assert rows == [
        (prompt_id, EVALUATION, sample, 6) for prompt_id in (5, 9) for sample in range(4)
    ]


def test_user_modules_come_from_working_directory_first(monkeypatch, tmp_path, capsys):
    """Not from a file of the same name next to train.py."""
    for folder, text in ((tmp_path / "next_to_train", "0 / 0"), (tmp_path / "here", "")):
        folder.mkdir()
        (folder / "own_reward.py").write_text(f"def reward(**_): ...\n{text}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "next_to_train"), *sys.path])
    monkeypatch.setattr(train, "build", lambda config, ranks: load_reward("own_reward.reward"))
    monkeypatch.setattr(train, "train", lambda function: None)
    config = os.path.abspath("configs/tiny_cpu.yaml")
    monkeypatch.chdir(tmp_path / "here")
    bubblespec.own_folders_last()
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", config])
    monkeypatch.delenv("RANK", raising=False)
    assert train.main() == 0, capsys.readouterr().err
    del sys.modules["own_reward"]
