"""docs/coming-from.md: its configurations say what the scripts of TRL and verl next to them say,
and run with a small model."""

import ast
import json
import os
import re
import shlex

import datasets
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bubblespec.config import flatten
from bubblespec.config.file import TRL, VERL, load_config, value_of
from tests.helpers.documents import blocks, files, read_document
from tests.helpers.runs import read
from tests.helpers.warm import ROOT, launch

CHAT = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
FILES = files(read_document("docs/coming-from.md"))
(VERL_SCRIPT,) = (
    text for kind, _, text in blocks(read_document("docs/coming-from.md")) if kind == "sh"
)
# Two steps of short responses.
SMALL = ["model.path=model", "model.dtype=auto", "run.max_steps=2"]
SMALL += ["rollout.max_completion_length=16"]
SMALL += ["rollout.num_prompts_per_step=8", "model.cpu_linear=torch", "speculative.method=none"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    os.symlink(os.path.join(ROOT, "train.py"), tmp_path / "train.py")
    policy = os.path.join(ROOT, "configs", "tiny_policy")
    AutoModelForCausalLM.from_pretrained(policy).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_equal(given: dict, names: dict[str, str], ours: dict) -> list[str]:
    """Compare what a script sets with our keys of the same meaning; return the keys that differ in
    meaning, which the caller looks at."""
    differing = []
    for name, value in given.items():
        key, _, remark = names[name].partition(", ")
        if remark or " " in key:
            differing.append(name)
            continue
        if answer := value_of(key, value):
            value = answer.rpartition(" ")[2]
        assert str(ours[key]) == str(value) or ours[key] == value, name
    return differing


def test_trl_script_and_configuration_are_equal(folder):
    (call,) = (
        node
        for node in ast.walk(ast.parse(FILES["train_trl.py"]))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "GRPOConfig"
    )
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    ours = flatten(load_config("from_trl.yaml"))
    given.pop("vllm_gpu_memory_utilization")  # ours is the share of the whole run
    differing = check_equal(given, TRL, ours)
    prompts = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    assert differing == [*prompts, "bf16", "use_vllm", "vllm_mode", "logging_steps", "report_to"]
    responses = 8 * given[prompts[0]] * given[prompts[1]]
    assert ours["rollout.num_prompts_per_step"] * given["num_generations"] == responses
    # What the script leaves to TRL's defaults.
    defaults = dataclass_defaults()
    for name in ("lr_scheduler_type", "seed", "gradient_checkpointing", "weight_decay"):
        assert ours[TRL[name]] == defaults[name]


def dataclass_defaults() -> dict:
    trl = pytest.importorskip("trl")
    return {name: field.default for name, field in trl.GRPOConfig.__dataclass_fields__.items()}


def test_verl_script_and_configuration_are_equal(folder):
    words = shlex.split(VERL_SCRIPT.replace("\\\n", " "))[3:]
    given = {name: ast_value(value) for name, _, value in (word.partition("=") for word in words)}
    ours = flatten(load_config("from_verl.yaml"))
    given.pop("actor_rollout_ref.rollout.gpu_memory_utilization")  # of the whole run, too
    differing = set(check_equal(given, VERL, ours))
    assert not [name for name in differing if not re.search(", | and ", VERL[name])]
    minibatch = given["actor_rollout_ref.actor.ppo_mini_batch_size"]
    assert ours["loss.num_minibatches"] * minibatch == given["data.train_batch_size"]
    steps = given["trainer.total_epochs"] * (7473 // given["data.train_batch_size"])
    assert ours["run.max_steps"] == steps


def ast_value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def test_configuration_after_trl_runs(folder):
    """With TRL's own functions, too, whose values are those of a call in another process."""
    trl_rewards = pytest.importorskip("trl.rewards")
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(16)]
    for name, solution in (("my_data.jsonl", {}), ("solutions.jsonl", {"solution": "3"})):
        with open(name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row | solution) + "\n" for row in rows)
    names = ["my_rewards.is_right", "my_rewards.has_box", "trl.rewards.think_format_reward"]
    names.append("trl.rewards.accuracy_reward")
    functions = ["data.path=solutions.jsonl", "reward.weights=null"]
    functions.append(f"reward.functions=[{','.join(names)}]")
    for options, output_dir in ([], "runs/my_run"), (functions, "runs/functions"):
        overrides = [*SMALL, *options, f"run.output_dir={output_dir}"]
        done = launch(2, ["train.py", "--config", "from_trl.yaml", *overrides], folder)
        assert done.returncode == 0, done.stderr[-3000:]
        assert [line["step"] for line in read(folder / output_dir)] == [1, 2]
    line = read(folder / "runs/my_run")[0]
    assert line["reward"] == pytest.approx(
        line["rewards/is_right/mean"] + 0.2 * line["rewards/has_box/mean"]
    )
    with open("runs/functions/samples.jsonl", encoding="utf-8") as file:
        samples = [json.loads(line) for line in file]
    for sample in samples:
        chat = [[{"role": "assistant", "content": sample["completion"]}]]
        assert [sample["rewards"]["think_format_reward"]] == trl_rewards.think_format_reward(chat)
        wanted = trl_rewards.accuracy_reward(chat, [sample["columns"]["solution"]])
        assert [sample["rewards"]["accuracy_reward"]] == wanted


def test_configuration_after_verl_runs(folder):
    os.mkdir("gsm8k")
    for name, count in (("train", 40), ("test", 6)):
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{number} + {count} ="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(number + count)},
                "extra_info": {"split": name, "index": number},
            }
            for number in range(count)
        ]
        datasets.Dataset.from_list(rows).to_parquet(f"gsm8k/{name}.parquet")
    options = [*SMALL, "eval.num_prompts=6", "run.eval_steps=1"]
    done = launch(2, ["train.py", "--config", "from_verl.yaml", *options], folder)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = read(folder / "runs/gsm8k")
    steps = [line for line in lines if "rewards/score/mean" in line]
    evaluations = [line for line in lines if "eval/reward" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["step"] for line in evaluations] == [0, 1, 2]
