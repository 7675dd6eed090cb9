"""The commands evaluate and generate: a run's own evaluation, transformers' greedy responses."""

import json
import os
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bubblespec import __main__
from bubblespec.checkpoint import STATE_FILE
from bubblespec.tools import evaluate, generate, launch
from tests.helpers.checks import refusal
from tests.helpers.runs import read, train_here
from tests.helpers.warm import ROOT
from tests.helpers.warm import launch as launch_ranks

CONFIG = os.path.join(ROOT, "configs", "tiny_cpu_bulk.yaml")
TINY = os.path.join(ROOT, "configs", "tiny_policy")
OPTIONS = ["eval.num_prompts=6", "eval.num_generations=4", "eval.temperature=0.8"]
OPTIONS += ["run.max_steps=2", "run.eval_steps=1", "run.save_steps=1", "run.save_total_limit=2"]
OPTIONS += ["eval.functions=[bubblespec.rewards.math_equivalence]", "optim.learning_rate=0.01"]
NOT_EQUAL = ("timing_s/", "eval/forwards", "eval/spec_accept_rate")  # the time of drafts


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two steps with all weights, and of an adapter, with an evaluation after each step."""
    folder = tmp_path_factory.mktemp("runs")
    for name, more in (("whole", []), ("adapter", ["model.lora_r=4", "model.lora_alpha=64"])):
        train_here(folder / name, *OPTIONS, *more)
    return folder


def of_run(folder, step: int) -> dict:
    (line,) = [line for line in read(folder) if line["step"] == step and "eval/digest" in line]
    return {key: of for key, of in line.items() if not key.startswith((*NOT_EQUAL, "step"))}


def of_command(path) -> dict:
    metrics = json.loads(path.read_text())["metrics"]
    return {key: of for key, of in metrics.items() if not key.startswith(NOT_EQUAL)}


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_checkpoint_has_the_evaluation_of_its_run(runs, tmp_path, capsys, kind):
    """At both steps, which differ; by the configuration that the checkpoint keeps, or a file's."""
    run, out = runs / kind, tmp_path / "out.json"
    given = [str(run / "checkpoint-1"), "--json", str(out)]
    evaluate.main(given)
    assert of_command(out) == of_run(run, 1) != of_run(run, 2)
    shown = dict(line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert float(shown["eval/pass@4"]) == pytest.approx(of_run(run, 1)["eval/pass@4"], abs=5e-4)
    given = [str(run), "--config", CONFIG, *OPTIONS, "model.dtype=float64", "data.size=200"]
    given += ["rollout.max_completion_length=48", "--json", str(out)]
    evaluate.main(given)
    assert of_command(out) == of_run(run, 2), "the newest of the run's folder"


def test_ranks_share_an_evaluation_and_write_responses(runs, tmp_path):
    out, responses = tmp_path / "out.json", tmp_path / "out.jsonl"
    command = ["-m", "bubblespec", "evaluate", str(runs / "whole"), "--json", str(out)]
    done = launch_ranks(2, [*command, "--nproc-per-node", "2", "--responses", str(responses)])
    assert done.returncode == 0, done.stderr
    wanted = of_run(runs / "whole", 2)
    assert of_command(out) == wanted and done.stdout.count("eval/reward ") == 1
    samples = [json.loads(line) for line in responses.read_text().splitlines()]
    assert len(samples) == 6 * 4 and {"completion", "columns"} <= samples[0].keys()
    for name, key in (("exact_match", "rewards/exact_match/mean"), ("math_equivalence", "math_")):
        mean = sum(sample["rewards"][name] for sample in samples) / len(samples)
        key = key if key.startswith("rewards") else name
        assert mean == pytest.approx(wanted[f"eval/{key}"])


def test_more_prompts_than_a_run_held_out_are_warned_of(runs, tmp_path, capsys):
    evaluate.main([str(runs / "whole"), "eval.num_prompts=8", "eval.num_generations=1"])
    said = capsys.readouterr()
    assert "eval.num_prompts: 8, but the run held 6 out; it may have trained on" in said.err
    assert said.out.splitlines()[0].endswith(
        "8 prompts, 1 responses each, temperature 0.8, top_p 1, top_k 0"
    )


def test_what_is_no_policy_is_one_line(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "whole", run)
    assert refusal(evaluate.main, [TINY]).startswith(f"--config: {TINY} is no checkpoint")
    given = [TINY, "--config", CONFIG, "eval.num_prompts=0"]
    assert refusal(evaluate.main, given).startswith("eval.num_prompts: 0 must be at least 1")
    given = [TINY, "--config", CONFIG, "eval.num_prompts=4", "--json", str(tmp_path)]
    assert refusal(evaluate.main, given).startswith(f"--json: cannot write to {tmp_path}")
    (run / "checkpoint-2" / STATE_FILE).write_text("{}")
    message = refusal(evaluate.main, [str(run / "checkpoint-2")])
    assert "checkpoint-2 is damaged: " in message
    assert evaluate.find_saved(str(run)) == str(run / "checkpoint-1")
    for number in (1, 2):
        shutil.rmtree(run / f"checkpoint-{number}")
    assert refusal(evaluate.main, [str(run)]).endswith("of a run that has no checkpoint yet")


@pytest.mark.parametrize("command", [evaluate, generate])
def test_ranks_are_started_as_torchrun_does(monkeypatch, command):
    taken = []
    monkeypatch.setattr(launch.run, "run", taken.append)
    monkeypatch.setattr(launch.logging, "disable", lambda level: None)
    monkeypatch.delenv("RANK", raising=False)
    name = command.__name__.rpartition(".")[2]
    given = [TINY, "--config", CONFIG, "--nproc-per-node", "3", "run.seed=1"]
    given[1:1] = ["1 + 1 ="] * (command is generate)
    monkeypatch.setattr(sys, "argv", ["bubblespec", name, *given])
    assert __main__.main() == 0
    (options,) = taken
    assert options.module and options.training_script == "bubblespec"
    assert options.training_script_args == [name, *given] and options.nproc_per_node == "3"


# generate

TEXTS = ["1 + 2 =", "State the final answer to the following arithmetic problem: 4 + 3 - 2 ="]


def greedy(folder, text: str, length: int) -> str:
    """Return what transformers generates, in float64."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = tokenizer(text, return_tensors="pt")
    given = ids["input_ids"].shape[1]
    tokens = model.generate(**ids, max_new_tokens=length, do_sample=False)[0, given:]
    return tokenizer.decode(tokens)


def test_greedy_responses_are_those_of_transformers(runs, tmp_path, capsys):
    """A checkpoint answers the prompts of a file, a model without configuration a text."""
    folder, out = runs / "whole" / "checkpoint-2", tmp_path / "out.jsonl"
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": t, "n": n}) + "\n" for n, t in enumerate(TEXTS)))
    options = ["eval.temperature=0", "--num-generations", "2", "--responses", str(out)]
    generate.main([str(runs / "whole"), str(path), *options])
    samples = [json.loads(line) for line in out.read_text().splitlines()]
    wanted = [greedy(folder, text, 48) for text in TEXTS]
    assert [s["completion"] for s in samples] == [text for text in wanted for _ in range(2)]
    assert [s["columns"] for s in samples] == [{"n": n} for n in (0, 0, 1, 1)]
    capsys.readouterr()
    options = ["eval.temperature=0", "rollout.max_completion_length=12", "model.dtype=float64"]
    generate.main([TINY, TEXTS[1], *options, "data.as_chat=false"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"prompt: {TEXTS[1]}\nresponse")
    assert shown.endswith(f": {greedy(TINY, TEXTS[1], 12)}\n")


def test_chats_go_through_the_template(tmp_path, capsys):
    """A text is a user's message where the model has a template; a chat is one in any case."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}="
    (model / "chat_template.jinja").write_text(template)
    options = ["eval.temperature=0", "rollout.max_completion_length=12", "model.dtype=float64"]
    path = tmp_path / "own.json"
    path.write_text(json.dumps([{"prompt": [{"role": "user", "content": "1 + 2"}]}]))
    shown = []
    for prompts in ("1 + 2", str(path)):
        generate.main([str(model), prompts, *options])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and shown[0].endswith(f": {greedy(TINY, '1 + 2 =', 12)}\n")


def test_file_without_prompts_is_one_line(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"question": "1 + 1 ="}\n')
    message = refusal(generate.main, [TINY, str(path)])
    assert message.startswith("PROMPT_OR_FILE: ") and "{prompt: question}" in message
    message = refusal(generate.main, [TINY, str(tmp_path / "none.jsonl")])
    assert message.startswith("PROMPT_OR_FILE: no JSON")


def test_file_may_have_the_columns_of_the_training_data(tmp_path, capsys):
    path, config = tmp_path / "own.jsonl", tmp_path / "run.yaml"
    path.write_text('{"question": "1 + 1 ="}\n')
    config.write_text(
        f"model: {{path: {TINY}, dtype: float64}}\n"
        "data: {path: none, columns: {prompt: question}}\n"
        f"run: {{output_dir: {tmp_path / 'run'}}}\n"
    )
    options = ["--config", str(config), "eval.temperature=0", "rollout.max_completion_length=12"]
    generate.main([TINY, str(path), *options])
    assert capsys.readouterr().out.endswith(f": {greedy(TINY, '1 + 1 =', 12)}\n")


def test_second_prompt_is_one_line():
    message = refusal(generate.main, [TINY, "1 + 1 =", "2 + 2 ="])
    assert message.startswith("PROMPT_OR_FILE: give one prompt, or a file of several; '2 + 2 ='")
