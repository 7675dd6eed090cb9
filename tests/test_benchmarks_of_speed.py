"""The comparisons with other software run at their smallest size, and count what they say they
count."""

import argparse
import importlib
import json
import os
import sys

import numpy as np
import pytest
import torch

from benchmarks import generate, reward_vs_trl, shared, step_vs_trl, systems, tail_batching
from bubblespec.errors import InputError
from tests.helpers.warm import launch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = [
    "rollout.num_prompts_per_step=2",
    "rollout.num_generations=2",
    "rollout.max_completion_length=12",
    "rollout.num_slots=8",
]


def test_tail_is_the_law_it_says():
    lengths = generate.tail_lengths(1000, 4000, seed=1)
    assert lengths.max() == 4000 and lengths.min() >= 1
    assert np.log(lengths).std() == pytest.approx(generate.SIGMA, rel=0.02)
    assert (generate.tail_lengths(32, 400, 0) == generate.tail_lengths(32, 400, 0)).all()


def test_ended_rows_are_those_at_their_length():
    criterion = generate.EndsAt(torch.tensor([5, 9, 7]))
    assert criterion(torch.zeros(3, 7), None).tolist() == [True, False, True]


def test_all_arms_of_generate_make_the_prescribed_tokens(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = "generate.py --num-prompts 2 --num-generations 2 --longest 9 --repeats 1 --json"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), str(out)])
    assert generate.main() == 0
    workloads = json.loads(out.read_text())["workloads"]
    for lengths in (workloads["tail"], workloads["equal"]):
        rows = {name: arm["row_tokens"] for name, arm in lengths.items()}
        assert set(rows) == {"engine", "generate", "generate_batch"}
        assert (
            rows["engine"] == rows["generate"] == rows["generate_batch"]
            and len(rows["engine"]) == 4
        )
    assert max(workloads["tail"]["engine"]["row_tokens"]) == 9
    assert "| tail | generate_batch |" in capsys.readouterr().out


@pytest.mark.parametrize("option", [[], ["--useless-drafts"]])
def test_paired_rollouts_generate_the_same_rows(tmp_path, option):
    out = tmp_path / "out.json"
    overrides = [
        *SMALL,
        "run.max_steps=3",
        f"run.output_dir={tmp_path}/run",
        "model.dtype=float64",
        "speculative.planning=always",
    ]
    overrides.append()
    done = launch(
        2,
        [
            "benchmarks/paired_rollout.py",
            "--config",
            "configs/tiny_cpu.yaml",
            "--json",
            str(out),
            *option,
            *overrides,
        ],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert (result["differing_rows"], result["rows"], len(result["steps"])) == (0, 12, 3)


def test_paired_evaluations_generate_the_same_tokens(tmp_path):
    out = tmp_path / "out.json"
    overrides = [
        *SMALL,
        "run.max_steps=3",
        "eval.num_prompts=4",
        "run.eval_steps=2",
        "model.dtype=float64",
    ]
    done = launch(
        2,
        [
            "benchmarks/evaluation.py",
            "--config",
            "configs/tiny_cpu.yaml",
            "--json",
            str(out),
            *overrides,
        ],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert [entry["updates"] for entry in result["evaluations"]] == [2, 3] and result[
        "num_same_digests"
    ] == 2
    assert result["forward_reduction"] > 0 and result["speedup"] > 0
    done = launch(
        1,
        [
            "benchmarks/evaluation.py",
            "--config",
            "configs/tiny_cpu.yaml",
            *overrides,
            "speculative.method=none",
        ],
    )
    assert (
        done.returncode == 2
        and "error: speculative.method: none; give one with drafts" in done.stderr
    )


def test_scheduling_is_measured_on_the_same_samples(tmp_path):
    """With weights that stand still every arm trains on the same tokens, as far as it gets."""
    out = tmp_path / "out.json"
    overrides = [
        *SMALL,
        "run.max_steps=6",
        "optim.learning_rate=0",
        "tail_batching.over_sampling_ratio=2",
    ]
    arms = ["plain", "take_over", "tail", "all"]
    script = [
        "benchmarks/tail_batching.py",
        "--config",
        "configs/tiny_cpu.yaml",
        "--json",
        str(out),
        "--arms",
        ",".join(arms),
    ]
    done = launch(2, [*script, *overrides])
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert (
        list(result["arms"]) == arms and result["speedup"] == result["arms"]["all"]["speedup"] > 0
    )
    tokens = {name: [step["tokens"] for step in result["steps"][name]] for name in arms}
    assert tokens["plain"] == tokens["take_over"] and tokens["tail"] == tokens["all"]
    assert [step["tail/is_long_round"] for step in result["steps"]["tail"]] == [0, 1, 0, 1, 0, 1]
    assert sum(tokens["tail"]) == sum(tokens["plain"]) and result["length_ratio"] == 1.0, (
        "nothing is waiting after the last step"
    )


def test_scheduling_names_an_unknown_arm(monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        ["tail_batching.py", "--config", "configs/tiny_cpu.yaml", "--arms", "plain,fast"],
    )
    parser = shared.make_parser("")
    parser.add_argument("--arms")
    assert shared.main(tail_batching.run, parser) == 2
    assert capsys.readouterr().err.startswith("error: --arms: fast unknown; valid are plain, ")


def test_generate_names_a_missing_folder(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--model", "no/such/folder"])
    assert generate.main() == 2
    assert (
        capsys.readouterr().err
        == "error: --model: no folder no/such/folder; `make smollm2` makes that of smollm2\n"
    )


def run_against_trl(monkeypatch, tmp_path, *arms: str) -> dict:
    out = tmp_path / "out.json"
    config = os.path.join(ROOT, "configs", "tiny_cpu.yaml")
    arguments = [
        "step_vs_trl.py",
        "--config",
        config,
        "--json",
        str(out),
        "--steps",
        "2",
        "--nproc-per-node",
        "1",
        "--arms",
        *arms,
    ]
    monkeypatch.setattr(sys, "argv", [*arguments, "--", *SMALL])
    assert step_vs_trl.main() == 0
    return json.loads(out.read_text())


def test_own_arms_of_the_step_generate_the_same_tokens(monkeypatch, tmp_path):
    result = run_against_trl(monkeypatch, tmp_path, "none", "bubble+suffix", "all")
    plain, speculative, both = (result["jobs"][arm][0] for arm in ("none", "bubble+suffix", "all"))
    assert (
        plain["tokens"] == speculative["tokens"]
        and len(plain["tokens"]) == len(both["tokens"]) == 2
    )
    assert all(s > 0 for s in plain["seconds"]) and result["summary"]["none"]["steps"] == 1


def test_reward_over_time_is_of_the_weights_of_that_step(monkeypatch, tmp_path):
    """With weights that stand still all evaluations give the same; and what is measured is what
    train.py reports."""
    config = os.path.join(ROOT, "configs", "tiny_cpu.yaml")
    arguments = f"reward_vs_trl.py --config {config} --json {tmp_path}/out.json --picture {tmp_path}/out.png --steps 3 --every 1"
    arguments += " --nproc-per-node 1 --seeds 0 --arms"
    small = [
        *SMALL,
        "eval.num_prompts=8",
        "eval.num_generations=2",
        "optim.warmup_steps=0",
        "rollout.max_completion_length=50",
    ]
    curves = {}
    for rate, arms in (("0", ["none"]), ("0.01", ["none", "bubble+suffix"])):
        monkeypatch.setattr(
            sys, "argv", [*arguments.split(), *arms, "--", *small, f"optim.learning_rate={rate}"]
        )
        assert reward_vs_trl.main() == 0
        curves[rate] = json.loads((tmp_path / "out.json").read_text())["curves"]
    (still,), (moving,), (drafted,) = (
        curves["0"]["none"],
        curves["0.01"]["none"],
        curves["0.01"]["bubble+suffix"],
    )
    assert len(set(still["rewards"])) == 1 and len(still["rewards"]) == len(still["seconds"]) == 4
    assert moving["rewards"][0] == still["rewards"][0] and len(set(moving["rewards"])) > 1
    assert moving["rewards"] == drafted["rewards"]  # the same samples, the same updates
    run = [
        f"run.output_dir={tmp_path}/run",
        "run.max_steps=3",
        "run.eval_steps=1",
        "run.save_steps=0",
        "model.cpu_linear=torch",
    ]
    rate = "optim.learning_rate=0.01"
    done = launch(
        1, ["train.py", "--config", config, *small, *run, rate, "speculative.method=none"]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["eval/reward"] for line in lines if "eval/reward" in line] == moving["rewards"]


def test_time_to_a_reward_is_on_straight_lines():
    curve = {"seconds": [0.0, 10.0, 20.0, 30.0], "rewards": [0.4, 0.6, 0.5, 0.9]}
    assert reward_vs_trl.time_to(curve, 0.5) == 5.0 and reward_vs_trl.time_to(
        curve, 0.7
    ) == pytest.approx(25.0)
    assert reward_vs_trl.time_to(curve, 0.95) is None


def test_step_of_trl(monkeypatch, tmp_path):
    pytest.importorskip("trl")
    result = run_against_trl(monkeypatch, tmp_path, "trl")
    assert "error" not in result["summary"]["trl"], result["summary"]["trl"]
    job = result["jobs"]["trl"][0]
    assert len(job["tokens"]) == len(job["seconds"]) == 2 and all(
        4 <= tokens <= 4 * 12 for tokens in job["tokens"]
    )


def test_an_arm_that_fails_has_its_error_in_the_table(monkeypatch, tmp_path, capsys):
    if importlib.util.find_spec("trl"):
        pytest.skip("trl is installed")
    result = run_against_trl(monkeypatch, tmp_path, "trl")
    assert "No module named 'trl'" in result["summary"]["trl"]["error"]
    assert "| trl | does not run:" in capsys.readouterr().out


def test_what_trl_is_not_set_up_for_is_refused(monkeypatch, capsys):
    config = os.path.join(ROOT, "configs", "tiny_cpu.yaml")
    monkeypatch.setattr(sys, "argv", ["step_vs_trl.py", "--config", config, "loss.kl_coef=0.1"])
    assert step_vs_trl.main() == 2
    assert (
        capsys.readouterr().err
        == "error: loss.kl_coef: 0.1; the comparison is made for 0.0 alone\n"
    )


def test_first_steps_are_not_counted():
    run = {"seconds": [9.0, 1.0, 2.0, 3.0], "tokens": [5, 10, 20, 30], "peak_memory_gb": 0.5}
    summary = step_vs_trl.summarise(
        {"none": [run, {**run, "peak_memory_gb": 0.7}], "trl": [{"error": "no"}]}, 1
    )
    assert (
        summary["none"]["seconds"] == 2.0
        and summary["none"]["steps"] == 6
        and summary["none"]["peak_memory_gb"] == 0.7
    )
    assert summary["none"]["tokens_per_second"] == pytest.approx(10.0)
    assert summary["trl"] == {"error": "no"} and "speedup" not in summary["none"]
    summary = step_vs_trl.summarise(
        {"trl": [{**run, "seconds": [9.0, 4.0, 4.0, 4.0]}], "none": [run]}, 1
    )
    assert summary["none"]["speedup"] == 2.0 and summary["none"]["speedup_median_step"] == 2.0
    assert summary["none"]["speedup_by_tokens"] == pytest.approx(2.0)


@pytest.mark.parametrize("seeds, options", [("0,1", []), ("0", ["--one-by-one"])])
def test_systems_side_by_side(tmp_path, seeds, options):
    """With weights that stand still every system gets the same held-out reward each time."""
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    overrides = [
        *SMALL,
        "run.max_steps=2",
        "run.eval_steps=1",
        "eval.num_prompts=2",
        "optim.learning_rate=0",
        "model.dtype=float64",
        "drafter.warm_start=200",
    ]
    names = ["plain", "race", "all"]
    arguments = [
        "--json",
        str(out),
        "--picture",
        str(picture),
        "--seeds",
        seeds,
        "--systems",
        ",".join(names),
        *overrides,
    ]
    done = launch(
        2, ["benchmarks/systems.py", "--config", "configs/tiny_cpu.yaml", *options, *arguments]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert list(result["systems"]) == names and list(result["seeds"]) == seeds.split(",")
    for name, system in result["systems"].items():
        assert system["speedup"] == pytest.approx(np.median(system["speedups"])) and len(
            system["speedups"]
        ) == len(result["seeds"])
        assert (
            system["tokens_a_pass"] >= 1.0
            and 0.0 <= system["idle_ratio"] <= 1.0
            and system["memory_gb"] > 0
        )
        assert bool(system["paper"]) == (name == "race")
    assert (
        set(result["systems"]["plain"]["speedups"]) == {1.0}
        and result["systems"]["plain"]["tokens_a_pass"] == 1.0
    )
    for arms in result["seeds"].values():
        for name, arm in arms.items():
            seconds = arm["seconds"]
            assert [at for at, _ in arm["curve"]] == pytest.approx([0.0, seconds[0], sum(seconds)])
            assert {reward for _, reward in arm["curve"]} == {arms["plain"]["curve"][0][1]}, name
            assert len(seconds) == len(arm["tokens"]) == 2
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("option, value", [("--systems", "plain,fast"), ("--skip", "60")])
def test_systems_name_what_cannot_be(option, value):
    arguments = argparse.Namespace(
        config="configs/tiny_cpu.yaml", overrides=[], systems="plain", skip=0
    )
    setattr(arguments, option.removeprefix("--"), int(value) if value.isdigit() else value)
    with pytest.raises(InputError, match=f"^{option}: "):
        systems.run(arguments, "")
