"""The doctor on one and two ranks, and what it must find."""

import sys

import pytest

from bubblespec import setup
from bubblespec.__main__ import main
from bubblespec.rollout.sampler import Sampler
from tests.helpers.warm import ROOT, launch

COMMAND = ["doctor", "--config", "configs/tiny_cpu.yaml"]
SHORT = ["data.size=100", "eval.num_prompts=8", "run.eval_steps=0", "model.cpu_linear=torch"]
SHORT += ["rollout.max_num_seqs=72"]


def problem_of(monkeypatch, capsys, *overrides: str) -> str:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["", *COMMAND, *SHORT, *overrides])
    assert main() == 1
    out, err = capsys.readouterr()
    assert "\nok: " not in out
    return err.splitlines()[-1]


@pytest.mark.parametrize("ranks", [0, 2])
def test_default_run_is_built_and_tried(ranks, tmp_path):
    done = launch(ranks, ["-m", "bubblespec", *COMMAND, *SHORT], TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(found) == ["versions", "devices", "set-up", "step", "ok"]
    assert f"ticks by {'shared memory' if ranks else 'one rank'}; mechanisms: " in found["set-up"]
    assert found["step"].startswith("6 responses of up to 64 tokens")
    assert "warning" not in done.stderr and not any(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_token_of_a_rollout_is_found(monkeypatch, capsys, dtype):
    rollout = Sampler.rollout

    def wrong(sampler, plan):
        result = rollout(sampler, plan)
        plan.rows[0].tokens[-1] += 1
        return result

    monkeypatch.setattr(Sampler, "rollout", wrong)
    problem = problem_of(monkeypatch, capsys, f"model.dtype={dtype}")
    assert problem.startswith("error: rollouts differ from a forward of transformers' modules: ")


@pytest.mark.parametrize(
    "name, line",
    [
        ("gradient_problem", "with attention by sdpa they differ"),
        ("generation_problem", "they differ, also by torch's operations"),
    ],
)
def test_comparisons_of_set_up_are_made_on_cpus(monkeypatch, capsys, name, line):
    monkeypatch.setattr(setup, name, lambda *_: "they differ")
    assert problem_of(monkeypatch, capsys) == f"error: {line}"
