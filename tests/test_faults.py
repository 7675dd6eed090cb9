"""Runs of train.py that are stopped, killed in a save, and lose a rank under `--max-restarts`: they
end as if nothing had happened."""

import signal

import pytest
import torch

from bubblespec.checkpoint import list_checkpoints, step_of
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.engine import Engine
from tests.helpers.runs import (
    EPOCHS,
    digests,
    launch_with_agent,
    read,
    run,
    same_weights,
    train_here,
    weights,
)
from tests.helpers.threads import train_on_threads

OPTIONS = [*EPOCHS, "rollout.num_prompts_per_step=4", "rollout.max_completion_length=24"]
OPTIONS += ["eval.num_prompts=4", "run.eval_steps=2"]


def train_alone(folder, stop_at: str | None = None) -> None:
    """A run that is told to stop at the second forward of a rollout or evaluation."""
    ranks, step, num_forwards = Ranks(torch.device("cpu")), Engine.step, 0

    def stopped_step(engine, *arguments) -> tuple:
        nonlocal num_forwards
        num_forwards += ranks.activity == stop_at
        ranks.must_stop = num_forwards >= 2
        return step(engine, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", stopped_step)
        train_here(folder, "run.max_steps=3", ranks=ranks, short=OPTIONS)
    assert ranks.must_stop == (stop_at is not None)


def evaluations(folder) -> list[dict]:
    """What they say of the policy, and nothing that depends on how fast it was."""
    measured = ("eval/forwards", "eval/spec_accept_rate", "timing_s/eval")
    lines = [line for line in read(folder) if "eval/reward" in line]
    return [{key: value for key, value in line.items() if key not in measured} for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train_alone(folder)
    return folder


@pytest.mark.parametrize(
    "place, done", [("rollout of step 2", 1), ("evaluation after 2 updates", 2)]
)
def test_stopped_run_resumes(alone, tmp_path, place, done):
    """No line is missing, none is there twice, and the bits are the same."""
    train_alone(tmp_path, place)
    assert [step_of(path) for path in list_checkpoints(str(tmp_path))] == [done]
    assert len(digests(tmp_path)) == done
    train_alone(tmp_path)
    assert digests(tmp_path) == digests(alone)
    assert evaluations(tmp_path) == evaluations(alone)
    assert [line["step"] for line in evaluations(tmp_path)] == [0, 2, 3]
    assert same_weights(weights(alone, 3), weights(tmp_path, 3))


STEPS = 3
RUN = [*OPTIONS, "eval.num_prompts=0", "run.eval_steps=0", f"run.max_steps={STEPS}"]
RUN += ["run.save_steps=1", "run.save_total_limit=2"]


def signalled(kind: str, at: int) -> tuple[str, ...]:
    """Every signal comes at an exact place, see the script."""
    return ("tests/system/signalled_train.py", "--at", str(at), "--kind", kind)


def test_stopped_and_killed_runs_end_as_undisturbed(tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    train_on_threads(2, *RUN, f"run.output_dir={whole}")

    # Told to stop: the state of the step that was done is saved.
    done = run(folder, 2, short=RUN, script=signalled("ranks", 0), check=False)
    said = done.stderr
    assert done.returncode == 128 + signal.SIGTERM, "not all steps are done"
    assert f"stopped after 1 of {STEPS} updates" in said, said[-3000:]
    saved = [step_of(path) for path in list_checkpoints(str(folder))]
    assert len(digests(folder)) == 1 and saved == [1]

    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 2, "rew')  # a torn line, as a kill may leave

    # Rank 0 dies in the middle of a save, and the launcher restarts the run, which the lock does
    # not keep from it, under torchrun's own agent. What was written of the save does not count.
    script = [*signalled("save-dies", 1), "--config", "configs/tiny_cpu_bulk.yaml", *RUN]
    script.append(f"run.output_dir={folder}")
    codes, said = launch_with_agent(script, rdzv_endpoint="localhost:0", max_restarts=1)
    assert codes == [0] and "rank 0 missing in save after 2" in said, said[-3000:]
    assert not (folder / "tmp-checkpoint-2").exists()

    assert digests(whole) == digests(folder)
    assert all(line["grad_norm"] > 0 for line in read(whole)), "it must have learned"
    assert same_weights(weights(whole, STEPS), weights(folder, STEPS))


def test_signal_in_set_up_ends_rank_at_once(tmp_path):
    """Though the trial call of the reward function never returns."""
    options = ["reward.functions=[tests.helpers.rewards.ends_its_rank]", "reward.num_workers=0"]
    assert run(tmp_path, 1, *options, short=RUN, check=False).returncode == -signal.SIGTERM
    assert not list_checkpoints(str(tmp_path))
