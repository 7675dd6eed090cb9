"""Bad input through the real entry point: one line that names the key, exit code 2, and nothing
left behind or changed. In this process, but for what concerns several ranks.

All the ways in which values, data, rewards and models can be wrong are in the tests of those."""

import contextlib
import datetime
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import sys
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import chat_template_utils

import train
from bubblespec import loading
from bubblespec.checkpoint import PLANNER_FILE, STATE_FILE, SUMS_FILE, _digests, load_arrays
from bubblespec.data.prompts import HELD_OUT, ROWS
from bubblespec.distributed.ranks import ranks_from_environment
from bubblespec.errors import InputError
from tests.helpers.warm import ROOT, launch

TINY = os.path.join(ROOT, "configs", "tiny_policy")
SHORT = ["data.size=10", "run.max_steps=1", "run.eval_steps=0", "eval.num_prompts=0"]
SHORT += ["rollout.num_prompts_per_step=2", "rollout.num_generations=2", "rollout.max_num_seqs=4"]
SHORT += ["rollout.max_completion_length=8", "speculative.method=none", "model.cpu_linear=torch"]
GOOD = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(4)]
CHAT = [{"prompt": [{"role": "user", "content": "1 + 1 ="}], "answer": "2"}] * 4


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """Run from the root as users do, with a cache of our own, no GPU, and nothing of `main` left
    behind in this process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def options(output_dir, *overrides: str) -> list[str]:
    config = os.path.join(ROOT, "configs", "tiny_cpu.yaml")
    return ["--config", config, *SHORT, f"run.output_dir={output_dir}", *overrides]


def run(monkeypatch, output_dir, *overrides: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["train.py", *options(output_dir, *overrides)])
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = train.main()
    return code, said.getvalue()


@pytest.fixture
def trained(monkeypatch):
    """trained(folder, *overrides) -> what a run to its end has said."""

    def check(output_dir, *overrides: str) -> str:
        code, said = run(monkeypatch, output_dir, *overrides)
        assert code == 0, said
        return said

    return check


def contents(folder) -> dict[str, str]:
    """Every file and folder below, with a digest of what it holds, but for the empty lock."""
    found = {}
    for parent, folders, files in os.walk(folder):
        found |= {os.path.join(parent, name): "folder" for name in folders}
        for name in set(files) - {".lock"}:
            with open(os.path.join(parent, name), "rb") as file:
                found[os.path.join(parent, name)] = hashlib.sha256(file.read()).hexdigest()
    return found


@pytest.fixture
def refusal(monkeypatch, tmp_path):
    """refusal(*overrides, output_dir=...) -> the one line of a run that never starts and changes
    nothing."""

    def check(*overrides: str, output_dir=tmp_path / "out") -> str:
        before, existed = contents(output_dir), os.path.exists(output_dir)
        code, said = run(monkeypatch, output_dir, *overrides)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(errors) == 1 and "Traceback" not in said, said
        assert os.path.exists(output_dir) == existed and contents(output_dir) == before
        return errors[0].removeprefix("error: ")

    return check


@pytest.fixture
def data(tmp_path):
    """data(name, rows or text) -> overrides that train on that file."""

    def write(name: str, content) -> list[str]:
        path = tmp_path / name
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_text(content)
        return ["data.tasks=[]", f"data.path={path}"]

    return write


def copy_policy(folder, **keys):
    shutil.copytree(TINY, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


@pytest.mark.parametrize(
    "overrides, says",
    [
        ("rollout.num_generations=0", "rollout.num_generations: 0 must be at least 1"),
        ("data.as_chat=true", "model.path: its tokenizer has no chat template"),
        ("model.attention=varlen", "model.attention: varlen runs on CUDA only; set sdpa on cpu"),
        (
            "rollout.max_prompt_length=2000 optim.max_tokens_per_microbatch=9000",
            "rollout.max_prompt_length + rollout.max_completion_length = 2008 exceeds the "
            "model's 1024 positions",
        ),
        (
            "rollout.stop_token_ids=[312]",
            "rollout.stop_token_ids: 312 is beyond the model's 312 tokens",
        ),
        (f"run.resume_from_checkpoint={TINY}", f"run.resume_from_checkpoint: {TINY} is not a"),
    ],
)
def test_bad_input_is_one_line(refusal, overrides, says):
    assert refusal(*overrides.split()).startswith(says)


def test_all_problems_are_printed_and_exit_code_is_2(monkeypatch, tmp_path):
    code, said = run(monkeypatch, tmp_path / "out", "beta=0.1", "rollout.num_generations=0")
    assert code == 2 and not (tmp_path / "out").exists()
    assert said.splitlines() == [
        "error: beta: unknown key; here it is loss.kl_coef",
        "error: rollout.num_generations: 0 must be at least 1",
    ]


def test_bad_data_is_one_line(refusal, data, tmp_path):
    assert "but data has chat prompts" in refusal(*data("chat.jsonl", CHAT))
    (tmp_path / "bad.jsonl").write_text('{"prompt": 3}\n')
    held_out = ["eval.num_prompts=2", f"data.eval_path={tmp_path / 'bad.jsonl'}"]
    message = refusal(*data("good.jsonl", GOOD), *held_out)
    assert message.startswith("data.eval_path: the prompt of row 0 is 3")
    message = refusal(*data("columns.jsonl", [{"prompt": "1 + 1 =", "level": 1}] * 4))
    assert message.startswith("reward.functions: bubblespec.rewards.exact_match cannot be called")
    assert message.endswith("missing a required argument: 'answer'")


def test_short_or_exhausting_held_out_data_is_named(refusal, trained, data, tmp_path):
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(12)]
    some = data("some.jsonl", rows)
    said = trained(tmp_path / "some", *some, "eval.num_prompts=50")
    assert "eval.num_prompts: 50, but only 6 are held out, half of data.path" in said
    (tmp_path / "few.jsonl").write_text(json.dumps(rows[0]) + "\n")
    few = [*some, f"data.eval_path={tmp_path / 'few.jsonl'}", "eval.num_prompts=2"]
    said = trained(tmp_path / "few", *few)
    assert "2, but only 1 are held out, all of data.eval_path" in said
    message = refusal(*some, f"data.eval_path={tmp_path / 'some.jsonl'}", "eval.num_prompts=12")
    assert message.startswith("data.eval_path: every training prompt is held out")
    message = refusal(*data("alike.jsonl", rows[:1] * 4), "eval.num_prompts=2")
    assert message.startswith("eval.num_prompts: every training prompt is held out")


# Another state of the data in a run that continues


def test_changed_rows_are_refused_appended_rows_named(refusal, trained, data, tmp_path):
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "hint": [i]} for i in range(8)]
    overrides = [*data("rows.jsonl", rows), "eval.num_prompts=3", "eval.num_generations=1"]
    said = trained(tmp_path / "out", *overrides)
    overrides.append("run.max_steps=2")
    text = (tmp_path / "rows.jsonl").read_text()
    for changed, says in [
        (rows[::-1], "of 5 training rows"),
        ([{**row, "answer": "0"} for row in rows], "held-out rows"),
        ([{**row, "hint": [9]} for row in rows], "held-out rows"),
        (rows[:6], ""),
    ]:
        data("rows.jsonl", changed)
        message = refusal(*overrides)
        assert message.startswith("data: ") and says in message
        assert "run.allow_changed_data=true" in message and "checkpoint-1" in message
    (tmp_path / "rows.jsonl").write_text(text)
    more = [{"prompt": f"{i} + 2 =", "answer": str(i + 2), "hint": [i]} for i in range(4)]
    data("rows.jsonl", rows + more)
    said = trained(tmp_path / "out", *overrides)
    assert said.count("data: 4 training rows appended since ") == 1
    before, after = (
        load_arrays(str(tmp_path / "out" / f"checkpoint-{n}"), PLANNER_FILE) for n in (1, 2)
    )
    assert before[HELD_OUT].tolist() == after[HELD_OUT].tolist(), "none that was trained on"
    assert after[ROWS][:5].tolist() == before[ROWS].tolist() and len(after[ROWS]) == 9
    data("rows.jsonl", [{**row, "answer": "0"} for row in rows])
    allowed = ["run.allow_changed_data=true", "run.max_steps=3"]
    said = trained(tmp_path / "out", *overrides, *allowed)
    assert said.count("warning: data: held-out rows") == 1, said


def test_moved_run_continues_with_equal_data(refusal, trained, data, tmp_path):
    """Its folder, data and model are elsewhere; what the files say is the same."""

    def overrides(folder: str) -> list[str]:
        path = tmp_path / folder
        return ["data.tasks=[]", f"data.path={path}/rows.jsonl", f"model.path={path}/policy"]

    old, new = tmp_path / "old", tmp_path / "new"
    copy_policy(old / "policy")
    shutil.move(data("rows.jsonl", GOOD)[1].partition("=")[2], old)
    trained(old / "out", *overrides("old"))
    old.rename(new)
    more = [*overrides("new"), "run.max_steps=2"]
    message = refusal(*more, output_dir=new / "out")
    assert message.startswith("model.path: ") and "run.allow_changed_data=true" in message
    said = trained(new / "out", *more, "run.allow_changed_data=true")
    assert said.count("warning: model.path: ") == 2 == said.count("taken for the same"), said
    assert "differ" not in said and os.path.exists(new / "out" / "checkpoint-2")
    (new / "rows.jsonl").rename(new / "other.jsonl")
    more = [*more, f"data.path={new}/other.jsonl", "run.max_steps=3"]
    text = (new / "other.jsonl").read_text()
    (new / "other.jsonl").write_text(text.replace("1", "2"))
    assert "training rows" in refusal(*more, output_dir=new / "out")
    (new / "other.jsonl").write_text(text)
    trained(new / "out", *more)


@pytest.mark.parametrize("frozen", ["loss.kl_coef=0.1", "model.lora_r=2", "teacher"])
def test_changed_frozen_weights_are_refused(refusal, trained, tmp_path, frozen):
    """The reference, an adapter's base, a teacher: those of the policy are saved."""
    if "lora" in frozen:
        pytest.importorskip("peft", reason="pip install -r requirements-lora.txt")
    folder = copy_policy(tmp_path / "policy")
    overrides = [f"model.path={folder}", frozen]
    if frozen == "teacher":
        overrides = [f"model.teacher_path={folder}", "loss.loss_type=distillation"]
    trained(tmp_path / "out", *overrides)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    save_file(weights, path, metadata={"format": "pt"})
    overrides.append("run.max_steps=2")
    message = refusal(*overrides)
    keys = "model.path, model.teacher_path, reward.functions"
    assert message.startswith(f"{keys}: weights that stay as they are differ")
    said = trained(tmp_path / "out", *overrides, "run.allow_changed_data=true")
    assert said.count(f"warning: {keys}: ") == 1
    trained(tmp_path / "out", *overrides, "run.max_steps=3")


def test_changed_chat_template_is_refused(refusal, trained, data, tmp_path):
    path = tmp_path / "template.jinja"
    chatml = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    path.write_text(chatml)
    overrides = [*data("chat.jsonl", CHAT), f"model.chat_template_path={path}"]
    trained(tmp_path / "out", *overrides)
    path.write_text(chatml + "{# the same text, so far #}")
    message = refusal(*overrides, "run.max_steps=2")
    assert message.startswith("model.path, model.chat_template_path: the chat template differs")
    folder = tmp_path / "out" / "checkpoint-1"
    state = load_arrays(str(folder), PLANNER_FILE)
    os.remove(folder / SUMS_FILE)
    old = {k: v for k, v in state.items() if not k.startswith(("data.", "model."))}
    np.savez(folder / PLANNER_FILE, **old)
    names = sorted(os.listdir(folder), key=lambda name: name == STATE_FILE)
    sums = "".join(f"{digest}  {name}\n" for name, digest in _digests(str(folder), names).items())
    (folder / SUMS_FILE).write_text(sums)
    said = trained(tmp_path / "out", *overrides, "run.max_steps=2")  # of an earlier version
    assert said.count("has no fingerprints") == 1


def test_long_prompts_are_dropped_and_counted(refusal, trained, data, tmp_path):
    rows = [*GOOD, {"prompt": "1 + " * 200, "answer": ""}]
    said = trained(tmp_path / "some", *data("some.jsonl", rows))
    assert ", 1 longer than rollout.max_prompt_length = 160\n" in said
    message = refusal(*data("all.jsonl", rows[4:] * 3))
    assert message.startswith("rollout.num_prompts_per_step: 2, but the data has 0 usable prompts")


# Foreign code


class Mark:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickled_files_run_no_code(refusal, trained, tmp_path):
    mark = Mark(tmp_path / "mark")
    pickle.loads(pickle.dumps(mark)).close()
    os.remove(tmp_path / "mark")  # that is what it would look like
    folder = copy_policy(tmp_path / "policy")
    os.remove(folder / "model.safetensors")
    torch.save({"model.embed_tokens.weight": mark}, folder / "pytorch_model.bin")
    assert "UnpicklingError: Weights only load failed" in refusal(f"model.path={folder}")

    trained(tmp_path / "finished")
    checkpoint = tmp_path / "finished" / "checkpoint-1"
    torch.save({"adamw": mark}, checkpoint / "optimizer.pt")
    sums = (checkpoint / "SHA256SUMS").read_text().splitlines()
    for number, (_, name) in enumerate(line.split("  ", 1) for line in sums):
        sums[number] = f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}"
    (checkpoint / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    message = refusal("run.max_steps=2", f"run.resume_from_checkpoint={checkpoint}")
    assert message.startswith("run.resume_from_checkpoint: ")
    assert "Weights only load failed" in message and not (tmp_path / "mark").exists()


CODE = """
open({mark!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "our_own"
class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_model_code_runs_only_if_trusted(refusal, trained, monkeypatch, tmp_path):
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    folder = copy_policy(tmp_path / "policy", model_type="our_own", auto_map=classes)
    (folder / "code.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    message = refusal(f"model.path={folder}")
    assert message.startswith(f"model.path: {folder} has code of its own")
    assert "model.trust_remote_code=true" in message and not (tmp_path / "mark").exists()
    trained(tmp_path / "trusted", f"model.path={folder}", "model.trust_remote_code=true")
    assert (tmp_path / "mark").exists()


def test_dataset_scripts_are_never_run(refusal, tmp_path):
    (tmp_path / "rows").mkdir()
    script = tmp_path / "rows" / "rows.py"
    script.write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
    for path in (tmp_path / "rows", script):
        refusal("data.tasks=[]", f"data.path={path}", "model.trust_remote_code=true")
    assert not (tmp_path / "mark").exists()


# The folder of the run


def test_unwritable_output_folder_is_refused(refusal, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken" / "config.yaml").mkdir(parents=True)
    for path in (tmp_path / "file" / "below", tmp_path / "taken", "/proc/none/below"):
        before = contents(tmp_path)
        message = refusal(output_dir=path)
        assert message.startswith("run.output_dir: ") and str(path) in message
        assert contents(tmp_path) == before


def test_folder_of_another_run_is_unchanged(refusal, trained, tmp_path):
    folder = tmp_path / "finished"
    trained(folder)
    message = refusal("optim.learning_rate=0.5", output_dir=folder)
    assert message.startswith("optim.learning_rate: 0.5 here, but 0.0002 in")
    message = refusal("run.resume_from_checkpoint=none", output_dir=folder)
    assert message.startswith("run.output_dir: ")


# Several ranks


def test_more_ranks_than_gpus_is_refused_by_all_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for rank in ("0", "7"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with (
            pytest.raises(InputError, match="--nproc_per_node: 8 ranks, but only 4 GPUs"),
            ranks_from_environment("auto", 1.0),
        ):
            pass


PROMPTS = "rollout.num_prompts_per_step"
NO_REWARD = "in step 1 no function returned a number for any of 2 prompts"


@pytest.mark.parametrize(
    "overrides, says, has_started",
    [
        (f"{PROMPTS}=1", f"{PROMPTS}: 1 prompts for 2 ranks", False),
        ("run.output_dir=/proc/none", "run.output_dir: cannot write to", False),
        (
            "reward.functions=[tests.helpers.rewards.nothing]",
            f"reward.functions: {NO_REWARD}",
            True,
        ),
    ],
)
def test_error_is_printed_once_and_all_ranks_end(tmp_path, overrides, says, has_started):
    """Whether the line comes from all of them, from rank 0 alone, or in the middle of the run."""
    done = launch(2, ["train.py", *options(tmp_path / "out", overrides)])
    assert done.returncode == 2, done.stderr[-3000:]
    # Behind the progress bar, if there is one already.
    assert len(re.findall(f"error: .*{re.escape(says)}", done.stderr)) == 1, done.stderr[-3000:]
    assert done.stderr.count("error: ") == 1
    assert (tmp_path / "out").exists() == has_started


# Data that works


def test_columns_may_have_names_of_any_arguments(trained, data, tmp_path):
    """Columns named like arguments of what calls the reward, or of what TRL passes."""
    names = ("function", "functions", "samples", "self", "key", "logs", "log_metric", "seed")
    rows = [row | dict.fromkeys(names, "x") for row in GOOD]
    function = "reward.functions=[tests.helpers.rewards.logs,tests.helpers.rewards.judge]"
    options = [*data("rows.jsonl", rows), function, "reward.reward_on_error=null"]
    for num_workers in (0, 1):
        folder = tmp_path / f"out{num_workers}"
        said = trained(folder, *options, f"reward.num_workers={num_workers}")
        assert "warning: reward" not in said
        line = json.loads((folder / "metrics.jsonl").read_text())
        assert "logged/mean_size" in line


def test_template_with_date_continues_next_day(trained, data, monkeypatch, tmp_path):
    """With the date of the run's beginning; a new run has that of its own."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ strftime_now('%d') }} {{ messages[0].content }}")
    overrides = [*data("chat.jsonl", CHAT), f"model.chat_template_path={template}"]
    states = []
    for name, step, day in [("out", 1, 8), ("out", 2, 9), ("new", 1, 9)]:
        clock = SimpleNamespace(now=lambda day=day: datetime.datetime(2026, 7, day, 23, 59))
        monkeypatch.setattr(chat_template_utils, "datetime", clock)
        monkeypatch.setattr(loading, "datetime", clock, raising=False)
        trained(tmp_path / name, *overrides, f"run.max_steps={step}")
        states.append(load_arrays(str(tmp_path / name / f"checkpoint-{step}"), PLANNER_FILE))
    first, second, other = (state[ROWS].tolist() for state in states)
    assert first == second != other


@pytest.mark.parametrize("output", ["", "runs/own"])
def test_output_folder_may_be_below_data(trained, data, tmp_path, output):
    folder = tmp_path / "data"
    folder.mkdir()
    data("data/rows.jsonl", GOOD)
    for step in (1, 2):
        path = [f"data.path={folder}", "data.tasks=[]", f"run.max_steps={step}"]
        said = trained(folder / output, *path, "run.save_rollouts=true", "run.trace=true")
        assert f"{folder}, split train: 4 rows of 1 file (rows.jsonl)\n" in said
