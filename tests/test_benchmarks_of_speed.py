"""Each benchmark at its smallest size, on one rank in this process: its arms make equal tokens."""

import argparse
import contextlib
import gc
import json
import sys

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config

from benchmarks import (
    episodes,
    generate,
    paired_rollout,
    shared,
    simulated_combinations,
    simulated_systems,
    slow_game,
    systems,
    tool_game,
    vs_trl,
)
from bubblespec.config.file import load_config
from bubblespec.loading import load_prompts
from bubblespec.mechanisms.episodes.environments import Environments, check_environment
from bubblespec.mechanisms.episodes.forms import load_form
from bubblespec.mechanisms.episodes.tokens import tokenize_with
from bubblespec.rollout.drafting import DraftAhead
from bubblespec.trainer import Trainer
from notebooks import reports
from tests.helpers.runs import ALWAYS_DRAFT

CONFIG = "configs/tiny_cpu.yaml"
SMALL = ["data.size=100", "run.max_steps=2", "eval.num_prompts=2", "rollout.num_generations=2"]
SMALL += ["rollout.num_prompts_per_step=2", "rollout.max_completion_length=4"]
SMALL += ["rollout.max_num_seqs=4", "model.dtype=float64", "optim.learning_rate=0"]


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    """Undo what benchmarks change in their process."""
    monkeypatch.setattr(DraftAhead, "finish", DraftAhead.finish)
    monkeypatch.setattr(Trainer, "report", Trainer.report)
    threads = torch.get_num_threads()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def run_benchmark(benchmark, folder, *overrides: str, config: str = CONFIG, **options) -> dict:
    out = folder / "out.json"
    given = {"config": config, "json": str(out), "overrides": [*SMALL, *overrides]}
    benchmark.run(argparse.Namespace(**given | options), str(folder))
    return json.loads(out.read_text())


def call_benchmark(monkeypatch, benchmark, arguments: str) -> int:
    """Call a benchmark that has no run of its own, as its command line does."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments.split()])
    return shared.main(benchmark.run, benchmark.make_parser())


def test_generate_arms_make_prescribed_tokens(monkeypatch, tmp_path, capsys):
    criterion = generate.EndsAt(torch.tensor([5, 9, 7]))
    assert criterion(torch.zeros(3, 7), None).tolist() == [True, False, True]
    sizes, out = (
        "--num-prompts 1 --num-generations 2 --longest 5 --repeats 1",
        tmp_path / "out.json",
    )
    assert call_benchmark(monkeypatch, generate, f"{sizes} --repeats 1 --json {out}") == 0
    for lengths in json.loads(out.read_text())["workloads"].values():
        rows = [arm["row_tokens"] for arm in lengths.values()]
        assert rows[0] == rows[1] == rows[2] and len(rows[0]) == 2
    assert "| tail | generate_batch |" in capsys.readouterr().out


def test_paired_rollouts_generate_the_same_rows(tmp_path, capsys):
    keys = ["speculative.planning=always", f"run.output_dir={tmp_path}/run"]
    result = run_benchmark(paired_rollout, tmp_path, *keys, useless_drafts=True)
    assert (result["differing_rows"], result["rows"], len(result["steps"])) == (0, 8, 2)
    assert result["fitted_ms"].keys() == {"rollout", "forward", "verified", "drafted"}
    assert "fitted ms: " in capsys.readouterr().out


def test_episodes_are_the_same_in_all_ways(monkeypatch, tmp_path):
    for name, seconds in {"SHORTEST": 0.001, "MEDIAN": 0.001, "LONGEST": 0.002}.items():
        monkeypatch.setattr(slow_game, f"{name}_S", seconds)
    keys = ["environment.num_workers=0", "rollout.max_num_seqs=16", ALWAYS_DRAFT]
    keys.append("rollout.max_completion_length=80")
    result = run_benchmark(episodes, tmp_path, *keys, config="configs/tiny_episodes.yaml")
    assert (result["differing_rows"], result["rows"], len(result["steps"])) == (0, 8, 2)
    assert all(result[name] > 0 for name in ("overlap", "drafts"))
    first, _ = result["steps"]
    assert first["turns"] > 4 and first["drafted_tokens"] > 0


def test_systems_are_compared_fairly(tmp_path):
    """With constant weights, held-out rewards are equal and tail batching has the same samples."""
    picture, names = tmp_path / "out.png", ["plain", "tail"]
    options = {"picture": str(picture), "seeds": "0", "skip": 0, "one_by_one": False}
    keys = ["run.eval_steps=1", "tail_batching.over_sampling_ratio=2"]
    result = run_benchmark(systems, tmp_path, *keys, systems=",".join(names), **options)
    assert list(result["systems"]) == names
    for system in result["systems"].values():
        assert system["length_ratio"] == 1.0, "nothing is waiting after the last step"
    assert result["systems"]["plain"]["speedups"] == [1.0]
    (arms,) = result["seeds"].values()
    for arm in arms.values():
        assert sum(arm["tokens"]) == sum(arms["plain"]["tokens"])
        assert {reward for _, reward in arm["curve"]} == {arms["plain"]["curve"][0][1]}
    assert picture.stat().st_size > 10_000
    assert reports.SYSTEMS.keys() == systems.SYSTEMS.keys(), "each has a label in words"


def test_trl_is_measured_next_to_own_arms_by_phase(monkeypatch, tmp_path):
    """With random weights, whose responses all have the maximum length."""
    pytest.importorskip("trl")
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2Config(vocab_size=512, **shape, **heads).save_pretrained(tmp_path / "shape")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--config", CONFIG, "--random-weights", str(tmp_path / "shape"), "--json", str(out)]
    options += ["--steps", "2", "--nproc-per-node", "1", "--every", "1", "--picture", str(picture)]
    keys = [key for key in SMALL if "dtype" not in key] + ["rollout.max_completion_length=8"]
    command = ["vs_trl.py", *options, "--arms", "trl", "none", "--", *keys]
    monkeypatch.setattr(sys, "argv", command)
    assert vs_trl.main() == 0
    result = json.loads(out.read_text())
    for (job,) in result["jobs"].values():
        assert job["median_length"] == [8.0, 8.0]
        for step in range(2):
            phases = [job[phase][step] for phase in vs_trl.PHASES]
            assert min(phases) >= 0 and 0 < sum(phases) <= 1.01 * job["seconds"][step]
    assert list(result["jobs"]) == ["trl", "none"] and picture.stat().st_size > 10_000
    assert vs_trl.LABELS.keys() == set(vs_trl.ARMS), "each has a label in words"


def test_tool_game_reads_the_same_calls_as_trl(tmp_path):
    """Answers of the policy become calls of a tool."""
    utils = pytest.importorskip("trl.chat_template_utils")
    policy = tool_game.make_policy("configs/tiny_policy", str(tmp_path / "policy"))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    options = [*tool_game.OVERRIDES, f"model.path={policy}", "data.size=100", "eval.num_prompts=0"]
    options += ["environment.num_workers=0", "run.eval_steps=0"]
    config = load_config("configs/tiny_episodes.yaml", options)
    form = load_form(config.environment.factory, [])
    prompt = load_prompts(config, tokenizer, tokenize_with(tokenizer, form))[0].prompts[0]
    check_environment(config.environment, tokenizer, prompt.text, prompt.columns)
    answer = f"<answer>{prompt.columns['answer']}</answer>"
    with contextlib.closing(Environments(config.environment, tokenizer)) as environments:
        environments.begin("a", prompt, 0)
        prefix, schemas = list(prompt.token_ids), environments.schemas
        environments.poll()
        ids = tokenizer(f"{answer}<|endoftext|>")["input_ids"]
        (call,) = utils.parse_response(tokenizer, ids, prefix, tools=schemas)["tool_calls"]
        assert call["function"] == {"name": "answer", "arguments": {"number": answer[8:-9]}}
        environments.act("a", ids)
        ((_, observation),) = environments.poll()
        assert (observation.num_calls, observation.num_failed) == (1, 0)
        assert environments.end("a").result().reward == 1.0


def test_simulated_combinations_have_the_same_samples(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    sizes = "--synthetic mean=20,max=60,steps=2 --ranks 2 --rows 4 --generations 2"
    assert call_benchmark(monkeypatch, simulated_combinations, f"{sizes} --json {out}") == 0
    runs = {run["parts"]: run for run in json.loads(out.read_text())["runs"]}
    assert len(runs) == 12 and runs["none"]["speedup"] == 1.0
    assert len({run["response_tokens"] for run in runs.values()}) == 1
    assert runs["none"]["drafted_tokens"] == runs["placement"]["drafted_tokens"] == 0
    assert "slower than the best combination" in capsys.readouterr().out
    found = simulated_combinations.combinations(True)
    assert len({tuple(simulated_combinations.overrides(parts)) for parts in found}) == 32


def test_simulated_systems_are_compared_and_drawn(monkeypatch, tmp_path, capsys):
    """Runs in the file are not run again."""
    monkeypatch.setattr(simulated_systems, "RANKS", 2)
    monkeypatch.setattr(simulated_systems, "GENERATIONS", 2)
    out, picture, ablation = (str(tmp_path / name) for name in ("out.json", "a.png", "b.png"))
    arguments = "--sizes 7b --lengths 8k --longest 100 --steps 2 --prompts 2"
    arguments += f" --json {out} --picture {picture} --ablation {ablation}"
    for num_runs in (len(simulated_systems.SYSTEMS) + 1 + len(simulated_systems.CHANGES), 0):
        assert call_benchmark(monkeypatch, simulated_systems, arguments) == 0
        printed = capsys.readouterr()
        assert printed.err.startswith(f"{num_runs} runs")
        assert "TLT (2511.16665): 1.7x end to end" in printed.out
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("a.png", "b.png"))
    runs = {run["system"]: run for run in json.loads((tmp_path / "out.json").read_text())["runs"]}
    assert runs["plain"]["speedup"] == runs["plain, second epoch"]["speedup"] == 1.0
    assert runs["learned drafter"]["speedup"] > 1.2 and runs["quantised copy"]["speedup"] > 1.05
