"""Examples are run as they stand in the documents: a user's own data, model and rewards (README.md
and docs/quickstart.md), the engine alone (docs/architecture.md), and a reward function
(docs/troubleshooting.md)."""

import json
import os
import re
import shlex

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from bubblespec.data.prompts import build_prompt_set, make_tokenize
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.types import Row, SampleId
from tests.helpers.documents import blocks, files, read_document
from tests.helpers.models import GQA
from tests.helpers.runs import digests, read
from tests.helpers.warm import ROOT, launch, python

RUNS = ("runs/my_run", "runs/my_model", "runs/my_reward")
TRAIN = "python -m bubblespec train --nproc-per-node 2 --config my_run.yaml"


def execute(commands: str, folder) -> None:
    """Run the commands of a block that train my_run.yaml."""
    for command in commands.replace("\\\n", " ").splitlines():
        if command.startswith(TRAIN):
            overrides = shlex.split(command.removeprefix(TRAIN), comments=True)
            done = launch(2, ["train.py", "--config", "my_run.yaml", *overrides], folder)
            assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files of the README and the quick start and a model of another
    architecture, in which the quick start's runs have been made."""
    folder = tmp_path_factory.mktemp("own_run")
    for name in ("train.py", "configs"):
        os.symlink(os.path.join(ROOT, name), folder / name)
    tokenizer = AutoTokenizer.from_pretrained(os.path.join(ROOT, "configs/tiny_policy"))
    torch.manual_seed(0)
    shape = {**GQA, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    shape["max_position_embeddings"] = 1024
    AutoModelForCausalLM.from_config(Qwen2Config(**shape)).save_pretrained(folder / "my_model")
    tokenizer.save_pretrained(folder / "my_model")
    page = read_document("docs/quickstart.md")
    for name, text in files(read_document("README.md") + page).items():
        (folder / name).write_text(text, encoding="utf-8")
    assert f"\n{TRAIN}\n" in read_document("README.md")
    for language, _, text in blocks(page):
        if language == "sh":
            execute(text, folder)
    return folder


@pytest.mark.parametrize("run", RUNS)
def test_documented_run_takes_all_steps(folder, run):
    lines = read(folder / run)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["completions/max_length"] <= 64 for line in lines)
    config = AutoModelForCausalLM.from_pretrained(folder / run / "checkpoint-2").config
    shape = ("qwen2", GQA["hidden_size"])
    assert ((config.model_type, config.hidden_size) == shape) == (run == "runs/my_model")


def test_documented_data_fits_policy(folder):
    """The first step's reward is the share of right answers that the engine alone gives."""
    with open(folder / "my_problems.jsonl", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    tokenizer = AutoTokenizer.from_pretrained(folder / "configs/tiny_policy")
    model = AutoModelForCausalLM.from_pretrained(folder / "configs/tiny_policy").eval()
    prepare_model(model, max_length=128)
    engine = Engine(ModelRunner(model, num_slots=16, max_length=128, seed=0))
    prompts = build_prompt_set(problems, make_tokenize(tokenizer), max_prompt_length=64).prompts
    pairs = zip(prompts, problems, strict=True)
    answers = {
        prompt.prompt_id: f"<answer>{problem['answer']}</answer>" for prompt, problem in pairs
    }
    rows = [Row(SampleId(p.prompt_id, 0, j), p.token_ids, 64) for p in prompts for j in range(8)]
    engine.run(rows, SamplingParams(stop_token_ids=(tokenizer.eos_token_id,)))
    texts = [tokenizer.decode(row.tokens, skip_special_tokens=True) for row in rows]
    right = [
        text.endswith(answers[row.id.prompt_id]) for text, row in zip(texts, rows, strict=True)
    ]
    assert 0 < sum(right) < 16
    assert read(folder / "runs/my_run")[0]["rewards/is_right/mean"] == sum(right) / 16


def test_own_model_changes_tokens_own_reward_does_not(folder):
    of_data, of_model, of_reward = (digests(folder / run) for run in RUNS)
    assert of_model != of_data
    # Another reward: the same first rollout.
    assert of_reward[0] == of_data[0]


def test_own_reward_is_used(folder):
    lines, others = read(folder / "runs/my_reward"), read(folder / "runs/my_run")
    for line, other in zip(lines, others, strict=True):
        brevity = line["rewards/brevity/mean"]
        shortest = line["completions/mean_length"] / line["completions/max_length"]
        assert -0.1 <= brevity <= -0.1 * shortest + 1e-9, "of each group the longest has -0.1"
        assert line["reward"] == pytest.approx(line["rewards/is_right/mean"] + brevity)
        if line["rollout/digest"] == other["rollout/digest"]:
            assert line["rewards/is_right/mean"] == other["rewards/is_right/mean"]


def test_engine_example(tmp_path):
    page = read_document("docs/architecture.md")
    (code,) = (text for language, _, text in blocks(page) if language == "python")
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    output = python(str(tmp_path / "example.py")).stdout
    printed = re.findall(r"^(\d+) \[(.*?)\] (\w+)$", output, re.M | re.S)
    got = {int(sample): (tokens.split(), finish) for sample, tokens, finish in printed}
    assert sorted(got) == list(range(8))
    # the same rows, one after the other
    model = AutoModelForCausalLM.from_pretrained(os.path.join(ROOT, "configs/tiny_policy")).eval()
    prepare_model(model, max_length=256)
    engine = Engine(ModelRunner(model, num_slots=1, max_length=256, seed=0))
    rows = [Row(SampleId(1, 0, j), prompt=(5, 6, 7), max_new_tokens=20) for j in range(8)]
    for row in engine.run(rows, SamplingParams()):
        assert got[row.id.sample] == (list(map(str, row.tokens.tolist())), row.finish)


def test_reward_example(capsys):
    ((_, _, code),) = blocks(read_document("docs/troubleshooting.md"))
    exec(code, {})
    assert capsys.readouterr().out == "[1.0]\n[0.0]\n"
