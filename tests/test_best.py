"""Scores of evaluations apart from rewards, and the best checkpoint by one of them."""

import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bubblespec.checkpoint import (
    BEST,
    STATE_FILE,
    find_damage,
    list_checkpoints,
    read_state,
    step_of,
)
from bubblespec.config import Config
from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import RunFailed
from bubblespec.setup import build
from bubblespec.trainer import Trainer, find_best
from tests.helpers.checks import refusal
from tests.helpers.rewards import better_than, with_gaps
from tests.helpers.runs import SHORT, digests, read, run, same_weights, train_here, weights

EVALUATES = [*SHORT, "rollout.num_prompts_per_step=4", "rollout.max_completion_length=16"]
EVALUATES += ["eval.num_prompts=3", "eval.num_generations=2", "run.eval_steps=1"]
FUNCTIONS = "eval.functions=[tests.helpers.rewards.with_gaps,tests.helpers.rewards.better_than]"
SAVES_BEST = [*EVALUATES, "run.save_best=eval/reward", "run.save_total_limit=1"]


def test_own_functions_score_held_out_responses_alone(tmp_path, monkeypatch):
    """One with gaps, one that sees groups; training is what it is without."""
    options = [*EVALUATES, "speculative.method=none"]
    train_here(tmp_path / "without", short=options)
    seen, evaluate = [], Trainer.evaluate

    def noting(trainer):
        seen.append(evaluate(trainer))
        return seen[-1]

    monkeypatch.setattr(Trainer, "evaluate", noting)
    train_here(tmp_path / "with", FUNCTIONS, "reward.num_workers=2", short=options)
    assert digests(tmp_path / "with") == digests(tmp_path / "without")
    assert len(seen) == 5
    for samples, _, metrics in seen:
        groups = [[t.tolist() for t in samples.tokens[i : i + 2]] for i in (0, 2, 4)]
        gaps = [value for group in groups for value in with_gaps(group)]
        known = [value for value in gaps if value is not None]
        assert metrics.get("eval/with_gaps") == (np.mean(known) if known else None)
        assert metrics.get("eval/with_gaps/missing", 0) == len(gaps) - len(known)
        wanted = [value for group in groups for value in better_than(["a", "a"], group)]
        assert metrics["eval/better_than"] == np.mean(wanted)
    assert any("eval/with_gaps/missing" in metrics for _, _, metrics in seen)
    lines = [read(tmp_path / name) for name in ("without", "with")]
    own = {"eval/with_gaps", "eval/with_gaps/missing", "eval/better_than"}
    for before, after in zip(*lines, strict=True):
        assert after.keys() - before.keys() <= own
        for key in before.keys() & after.keys():
            if key.startswith(("rewards/", "eval/reward", "eval/pass")) or key == "reward":
                assert before[key] == after[key]


def test_broken_functions_change_no_token(tmp_path, capsys):
    """Rewards that change settings, scores that fail or do not apply, a hook that exits."""
    helpers = "tests.helpers.rewards"
    options = [*EVALUATES, "reward.num_workers=0", "speculative.method=none", "run.save_steps=0"]
    train_here(tmp_path / "plain", f"reward.functions=[{helpers}.remainder]", short=options)
    capsys.readouterr()
    options += [f"reward.functions=[{helpers}.nothing,{helpers}.changes_settings]"]
    options += [f"eval.functions=[{helpers}.fails,{helpers}.constant]", "run.log_to=sys.exit"]
    train_here(tmp_path / "broken", "run.save_best=eval/pass@1", short=options)
    said = capsys.readouterr().err
    assert digests(tmp_path / "broken") == digests(tmp_path / "plain")
    assert same_weights(weights(tmp_path / "broken"), weights(tmp_path / "plain"))
    evaluations = [line for line in read(tmp_path / "broken") if "eval/reward" in line]
    assert len(evaluations) == 5
    for line in evaluations:
        assert line["eval/fails/missing"] == 6 and line["eval/constant"] == 0.5
        assert line["eval/rewards/nothing/missing"] == 6
        assert not {"eval/fails", "eval/pass@1", "eval/rewards/nothing/mean"} & line.keys()
    assert said.count("fails failed for all 6 held-out responses; its metric is left out") == 5
    assert said.count("run.save_best: no eval/pass@1 after ") == 4
    assert said.count("run.log_to failed in step 0: SystemExit") == said.count("run.log_to") == 1


def test_unknown_metric_and_column_are_refused(tmp_path):
    def refused(*options: str) -> str:
        config = load_config(
            "configs/tiny_cpu_bulk.yaml", [*EVALUATES, f"run.output_dir={tmp_path}", *options]
        )
        return refusal(build, config, Ranks(torch.device("cpu")))

    message = refused(FUNCTIONS, "run.save_best=eval/remainder")
    assert message.startswith("run.save_best: eval/remainder is not measured; ")
    for name in ("with_gaps", "better_than", "reward", "rewards/exact_match/mean", "pass@2"):
        assert f"eval/{name}" in message
    message = refused("eval.functions=[bubblespec.rewards.code.passes_tests]")
    assert message.startswith(
        "eval.functions: bubblespec.rewards.code.passes_tests cannot be called"
    )


@pytest.fixture
def scored(monkeypatch):
    """scored(scores): eval/reward is these after 0, 1, ... updates. Returns the list of updates
    after which there has been an evaluation."""
    evaluate, updates = Trainer.evaluate, []

    def score(scores: list[float]) -> list[int]:
        def scored_evaluate(trainer):
            updates.append(trainer.num_updates)
            evaluation = evaluate(trainer)
            evaluation.metrics["eval/reward"] = scores[trainer.num_updates]
            return evaluation

        monkeypatch.setattr(Trainer, "evaluate", scored_evaluate)
        return updates

    return score


def steps_and_best(folder) -> tuple[list[int], str | None]:
    link = os.path.join(folder, BEST)
    best = os.readlink(link) if os.path.islink(link) else None
    assert best is None or find_damage(link) is None
    return [step_of(path) for path in list_checkpoints(str(folder))], best


def test_best_checkpoint_outlives_rotation_and_resume(tmp_path, scored):
    """The initial policy does not count, equal scores do not move the link, and a better one does,
    after a resume too."""
    scored([9.0, 0.2, 0.5, 0.5, 0.4])
    train_here(tmp_path, "run.save_steps=1", short=SAVES_BEST)
    assert steps_and_best(tmp_path) == ([2, 4], "checkpoint-2")
    best = {"metric": "eval/reward", "value": 0.5, "step": 2}
    assert read_state(str(tmp_path / "checkpoint-4"))["best"] == best
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / BEST, dtype=torch.float64)
    saved = weights(tmp_path, 2)
    assert all(torch.equal(policy.state_dict()[name], saved[name]) for name in saved)
    updates = scored([9.0, 0.2, 0.5, 0.5, 0.4, 0.45, 0.6, 0.1])
    train_here(tmp_path, "run.save_steps=1", "run.max_steps=5", short=SAVES_BEST)
    assert steps_and_best(tmp_path) == ([2, 5], "checkpoint-2")
    train_here(tmp_path, "run.save_steps=0", "run.max_steps=7", short=SAVES_BEST)
    assert steps_and_best(tmp_path) == ([6, 7], "checkpoint-6")
    assert updates == list(range(8)), "once after each, also where a run was resumed"


def test_better_evaluation_saves_between_save_steps(tmp_path, scored):
    scored([0.0, 0.3, 0.2, 0.4, 0.1])
    train_here(tmp_path, "run.save_steps=0", "run.save_total_limit=9", short=SAVES_BEST)
    assert steps_and_best(tmp_path) == ([1, 3, 4], "checkpoint-3")


def test_resume_before_the_best_forgets_the_best(tmp_path, scored):
    """Its checkpoint is damaged, so that the run goes back, and another one becomes the best."""
    scored([0.0, 0.3, 0.2, 0.4, 0.1])
    options = ("run.save_steps=1", "run.save_total_limit=9")
    train_here(tmp_path, *options, "run.max_steps=3", short=SAVES_BEST)
    assert steps_and_best(tmp_path)[1] == "checkpoint-3"
    os.truncate(tmp_path / "checkpoint-3" / "model.safetensors", 100)
    scored([0.0, 0.3, 0.2, 0.1, 0.1])
    train_here(tmp_path, *options, short=SAVES_BEST)
    assert steps_and_best(tmp_path) == ([1, 2, 3, 4], "checkpoint-1")


def test_best_of_another_metric_is_forgotten(tmp_path):
    config, best = Config(), {"metric": "eval/reward", "value": 0.5, "step": 2}
    config.run.output_dir = str(tmp_path)
    (tmp_path / "checkpoint-2").mkdir()
    for name, found, link in (("eval/reward", best, "checkpoint-2"), ("eval/pass@1", None, None)):
        config.run.save_best = name
        assert find_best(config, {"best": best}) == found
        path = tmp_path / BEST
        assert (os.readlink(path) if path.is_symlink() else None) == link


@pytest.mark.parametrize("is_last", [False, True])
def test_weights_that_are_no_numbers_are_not_saved(tmp_path, monkeypatch, is_last):
    """In a run that keeps one checkpoint: in the middle, and after its last update."""
    update, last = Trainer.update, 2 if is_last else 4

    def spoilt_update(trainer, record, advantages):
        metrics = update(trainer, record, advantages)
        if record.step == 1:
            with torch.no_grad():
                trainer.learner.optimizer.params[-1].view(-1)[-1] = torch.nan
        return metrics

    monkeypatch.setattr(Trainer, "update", spoilt_update)
    options = ("run.save_steps=1", "run.save_total_limit=1", f"run.max_steps={last}")
    with pytest.raises(RunFailed, match=r"not finite after 2 .* newest checkpoint is checkpoint-1"):
        train_here(tmp_path, *options, "run.eval_steps=0", short=EVALUATES)
    assert steps_and_best(tmp_path) == ([1], None)


THIRD_IS_BEST = (0.3, 0.2, 0.5, 0.4)


@pytest.mark.parametrize("kind, saved", [("save-dies", [1, 2]), ("best-dies", [1, 2, 3])])
def test_kill_leaves_previous_best(tmp_path, scored, kind, saved):
    """Before the new best has its name, and before the link leads to it; the run then goes on. Runs
    that end as undisturbed ones are in test_faults.py."""
    options = ("--at", "2", "--kind", kind, "--scores", *map(str, THIRD_IS_BEST))
    script = ("tests/system/signalled_train.py", *options)
    run(tmp_path, 0, short=SAVES_BEST, script=script, check=False)
    assert steps_and_best(tmp_path) == (saved, "checkpoint-1")
    scored([0.0, *THIRD_IS_BEST])
    train_here(tmp_path, short=SAVES_BEST)
    assert steps_and_best(tmp_path) == ([3, 4], "checkpoint-3")
    best = {"metric": "eval/reward", "value": 0.5, "step": 3}
    assert read_state(str(tmp_path / "checkpoint-4"))["best"] == best


@pytest.mark.parametrize("has_target", [True, False])
def test_copy_of_the_link_becomes_a_link_again(tmp_path, has_target):
    """As `cp -rL` leaves it; it may be the only copy of its checkpoint."""
    for name in [BEST, "checkpoint-4"] + ["checkpoint-2"] * has_target:
        (tmp_path / name).mkdir()
        (tmp_path / name / STATE_FILE).write_text('{"step": 2}')
    options = [*SAVES_BEST, f"run.output_dir={tmp_path}"]
    config = load_config("configs/tiny_cpu_bulk.yaml", options)
    best = {"metric": "eval/reward", "value": 0.5, "step": 4}
    assert find_best(config, {"best": best}) == best
    assert os.readlink(tmp_path / BEST) == "checkpoint-4"
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint-{n}" for n in (2, 4, "best")]
