"""Benchmarks at their smallest size: they count what they say they count."""

import argparse
import importlib
import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import generate, shared, systems, tail_batching, vs_trl
from bubblespec.errors import InputError
from tests.helpers.warm import launch

CONFIG = "configs/tiny_cpu.yaml"
SMALL = [
    "rollout.num_prompts_per_step=2",
    "rollout.num_generations=2",
    "rollout.max_completion_length=12",
    "rollout.num_slots=8",
]


def run_script(name: str, out, *arguments: str) -> dict:
    """A benchmark on two ranks; what it has written."""
    command = [f"benchmarks/{name}.py", "--config", CONFIG, "--json", str(out), *arguments]
    done = launch(2, [*command, *SMALL])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_tail_lengths_are_lognormal():
    lengths = generate.tail_lengths(1000, 4000, seed=1)
    assert lengths.max() == 4000 and lengths.min() >= 1
    assert np.log(lengths).std() == pytest.approx(generate.SIGMA, rel=0.02)
    assert (generate.tail_lengths(32, 400, 0) == generate.tail_lengths(32, 400, 0)).all()


def test_all_arms_of_generate_make_the_prescribed_tokens(monkeypatch, tmp_path, capsys):
    criterion = generate.EndsAt(torch.tensor([5, 9, 7]))
    assert criterion(torch.zeros(3, 7), None).tolist() == [True, False, True]
    out = tmp_path / "out.json"
    arguments = "generate.py --num-prompts 2 --num-generations 2 --longest 9 --repeats 1 --json"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), str(out)])
    assert generate.main() == 0
    for lengths in json.loads(out.read_text())["workloads"].values():
        rows = [arm["row_tokens"] for arm in lengths.values()]
        assert rows[0] == rows[1] == rows[2] and len(rows[0]) == 4
    assert "| tail | generate_batch |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["generate.py", "--model", "no/such/folder"])
    assert generate.main() == 2
    assert "error: --model: no folder no/such/folder" in capsys.readouterr().err


def test_paired_rollouts_generate_the_same_rows(tmp_path):
    keys = ["run.max_steps=3", "model.dtype=float64", "speculative.planning=always"]
    keys.append(f"run.output_dir={tmp_path}/run")
    result = run_script("paired_rollout", tmp_path / "out.json", "--useless-drafts", *keys)
    assert (result["differing_rows"], result["rows"], len(result["steps"])) == (0, 12, 3)


def test_scheduling_is_measured_on_the_same_samples(tmp_path):
    """With weights that stand still every arm trains on the same tokens, as far as it gets."""
    keys = ["run.max_steps=6", "optim.learning_rate=0", "tail_batching.over_sampling_ratio=2"]
    arms = ["plain", "tail", "all"]
    result = run_script("tail_batching", tmp_path / "out.json", "--arms", ",".join(arms), *keys)
    assert list(result["arms"]) == arms
    tokens = {name: [step["tokens"] for step in result["steps"][name]] for name in arms}
    assert tokens["tail"] == tokens["all"] and sum(tokens["tail"]) == sum(tokens["plain"])
    assert [step["tail/is_long_round"] for step in result["steps"]["tail"]] == [0, 1, 0, 1, 0, 1]
    assert result["length_ratio"] == 1.0, "nothing is waiting after the last step"


def test_an_unknown_arm_is_named(monkeypatch, capsys):
    arguments = ["tail_batching.py", "--config", CONFIG, "--arms", "plain,fast"]
    monkeypatch.setattr(sys, "argv", arguments)
    parser = shared.make_parser("")
    parser.add_argument("--arms")
    assert shared.main(tail_batching.run, parser) == 2
    assert capsys.readouterr().err.startswith("error: --arms: fast unknown; valid are plain, ")


def run_against_trl(monkeypatch, tmp_path, arms: list[str], *options: str) -> dict:
    out = tmp_path / "out.json"
    arguments = ["vs_trl.py", "--config", CONFIG, "--json", str(out), "--steps", "2"]
    arguments += ["--nproc-per-node", "1", *options, "--arms", *arms, "--", *SMALL]
    monkeypatch.setattr(sys, "argv", [*arguments, "optim.learning_rate=0", "eval.num_prompts=4"])
    assert vs_trl.main() == 0
    return json.loads(out.read_text())


def test_own_arms_generate_the_same_tokens_and_are_evaluated(monkeypatch, tmp_path):
    """With weights that stand still all evaluations give the same."""
    options = ["--every", "1", "--picture", str(tmp_path / "out.png")]
    result = run_against_trl(monkeypatch, tmp_path, ["none", "bubble+suffix"], *options)
    none, ours = (result["jobs"][arm][0] for arm in ("none", "bubble+suffix"))
    assert none["tokens"] == ours["tokens"] and len(none["tokens"]) == 2
    assert all(s > 0 for s in none["seconds"]) and result["summary"]["none"]["steps"] == 1
    (curve,) = result["curves"]["none"]
    assert len(set(curve["rewards"])) == 1
    assert curve["seconds"] == pytest.approx([0.0, none["seconds"][0], sum(none["seconds"])])
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_time_to_a_reward_is_on_straight_lines():
    curve = {"seconds": [0.0, 10.0, 20.0, 30.0], "rewards": [0.4, 0.6, 0.5, 0.9]}
    assert vs_trl.time_to(curve, 0.5) == 5.0
    assert vs_trl.time_to(curve, 0.7) == pytest.approx(25.0)
    assert vs_trl.time_to(curve, 0.95) is None


def test_a_step_of_trl_or_its_error_in_the_table(monkeypatch, tmp_path, capsys):
    result = run_against_trl(monkeypatch, tmp_path, ["trl"])
    if importlib.util.find_spec("trl") is None:
        assert "No module named 'trl'" in result["summary"]["trl"]["error"]
        assert "| trl | does not run:" in capsys.readouterr().out
        return
    assert "error" not in result["summary"]["trl"], result["summary"]["trl"]
    job = result["jobs"]["trl"][0]
    assert len(job["tokens"]) == len(job["seconds"]) == 2
    assert all(4 <= tokens <= 4 * 12 for tokens in job["tokens"])


def test_what_trl_is_not_set_up_for_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vs_trl.py", "--config", CONFIG, "loss.kl_coef=0.1"])
    assert vs_trl.main() == 2
    message = "error: loss.kl_coef: 0.1; the comparison is made for 0.0 alone\n"
    assert capsys.readouterr().err == message


def test_first_steps_are_not_counted():
    run = {"seconds": [9.0, 1.0, 2.0, 3.0], "tokens": [5, 10, 20, 30], "peak_memory_gb": 0.5}
    slow = {**run, "seconds": [9.0, 4.0, 4.0, 4.0]}
    summary = vs_trl.summarise({"trl": [slow], "none": [run], "all": [{"error": "no"}]}, 1)
    assert summary["none"]["seconds"] == 2.0 and summary["none"]["steps"] == 3
    assert summary["none"]["tokens_per_second"] == pytest.approx(10.0)
    assert summary["none"]["speedup"] == summary["none"]["speedup_median_step"] == 2.0
    assert summary["none"]["speedup_by_tokens"] == pytest.approx(2.0)
    assert summary["all"] == {"error": "no"}


def test_systems_side_by_side(tmp_path):
    """With weights that stand still every system gets the same held-out reward each time."""
    picture, names = tmp_path / "out.png", ["plain", "race", "all"]
    options = ["--picture", str(picture), "--systems", ",".join(names), "run.max_steps=2"]
    options += ["run.eval_steps=1", "eval.num_prompts=2", "optim.learning_rate=0"]
    options += ["model.dtype=float64", "drafter.warm_start=200"]
    result = run_script("systems", tmp_path / "out.json", *options)
    assert list(result["systems"]) == names
    for name, system in result["systems"].items():
        assert 0.0 <= system["idle_ratio"] <= 1.0 and system["memory_gb"] > 0
        assert bool(system["paper"]) == (name == "race")
    assert result["systems"]["plain"]["speedups"] == [1.0]
    (arms,) = result["seeds"].values()
    for name, arm in arms.items():
        first_s, second_s = arm["seconds"]
        seconds = [at for at, _ in arm["curve"]]
        assert seconds == pytest.approx([0.0, first_s, first_s + second_s])
        assert {reward for _, reward in arm["curve"]} == {arms["plain"]["curve"][0][1]}, name
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("option, value", [("systems", "plain,fast"), ("skip", 60)])
def test_systems_name_what_cannot_be(option, value):
    given = {"config": CONFIG, "overrides": [], "systems": "plain", "skip": 0} | {option: value}
    with pytest.raises(InputError, match=f"^--{option}: "):
        systems.run(argparse.Namespace(**given), "")
