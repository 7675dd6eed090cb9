"""Checkpoints: what is saved is whole, damage and another configuration are noticed, and a full
disk costs nothing that was there."""

import errno
import fcntl
import json
import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch
import transformers

from bubblespec.checkpoint import (
    CONFIG_FILE,
    FORMAT,
    OPTIMIZER_FILE,
    PLANNER_FILE,
    SPECULATION_FILE,
    STATE_FILE,
    SUMS_FILE,
    _digests,
    add_old_keys,
    find_checkpoint,
    find_damage,
    list_checkpoints,
    load_optimizer,
    lock_output_dir,
    read_state,
    save_checkpoint,
)
from bubblespec.config import Config, DataConfig, ModelConfig, RunConfig, flatten, resume_classes
from bubblespec.config.file import load_config
from bubblespec.config.keys import EXACT, ROUNDING
from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import InputError
from bubblespec.learn.optimizer import Optimizer
from tests.helpers.checks import FullDisk, refusal

ALONE = Ranks(torch.device("cpu"))
SAVED_FILES = {"model.safetensors", "optimizer.pt", PLANNER_FILE, SPECULATION_FILE, STATE_FILE}


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        # One before and one after the state file in the alphabet.
        for name in ("tokenizer.json", "vocab.json"):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write("{}")


def make_config(folder) -> Config:
    return Config(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d"),
        run=RunConfig(output_dir=str(folder)),
    )


@pytest.fixture
def saver(tmp_path, make_model):
    """save(step, ...) saves what has had `step` updates; it has config and optimizer."""
    transformers.utils.logging.disable_progress_bar()
    model = make_model("llama", torch.float32)
    config = make_config(tmp_path / "out")
    optimizer = Optimizer(model, config.optim, config.run.max_steps, ALONE)
    os.makedirs(config.run.output_dir)

    def save(step: int, evaluated: int = -1, best: int | None = None) -> str | None:
        with torch.no_grad():
            optimizer.flat_grad.fill_(1.0 + step)
        optimizer.step(step)
        return save_checkpoint(
            config,
            ALONE,
            {"step": step, "evaluated": evaluated, "progress": {}, "linear": None}
            | {"best": best and {"step": best}},
            model=model,
            tokenizer=Tokenizer(),
            optimizer=optimizer,
            arrays={
                PLANNER_FILE: {"uids": np.arange(step)},
                SPECULATION_FILE: {"drafts.tokens": np.arange(step)},
            },
        )

    save.config, save.optimizer, save.folder = config, optimizer, config.run.output_dir
    return save


def checkpoint(folder, step: int) -> str:
    return os.path.join(folder, f"checkpoint-{step}")


def flip_bit(path: str, position: float) -> None:
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        offset = min(int(position * size), size - 1)
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def cut(path: str, position: float) -> None:
    os.truncate(path, int(position * os.path.getsize(path)))


def drop_last_line(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        lines = file.readlines()
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(lines[:-1])


def test_a_whole_checkpoint_is_found_and_loads(saver):
    assert saver(3, evaluated=2) is None
    folder = find_checkpoint(saver.config, ALONE)
    assert folder == checkpoint(saver.folder, 3) and find_damage(folder) is None
    state = read_state(folder)
    assert (state["step"], state["evaluated"], state["world_size"]) == (3, 2, 1)
    parameter = saver.optimizer.params[0]
    moment = saver.optimizer.local.state[parameter]["exp_avg"].clone()
    saver(4)
    assert not torch.equal(saver.optimizer.local.state[parameter]["exp_avg"], moment)
    load_optimizer(folder, saver.optimizer)
    assert torch.equal(saver.optimizer.local.state[parameter]["exp_avg"], moment)


@pytest.mark.parametrize(
    "damage", [lambda path: flip_bit(path, 0.5), lambda path: cut(path, 0.9), os.remove]
)
def test_every_damaged_file_is_noticed(saver, damage):
    saver(1)
    folder = checkpoint(saver.folder, 1)
    names = os.listdir(folder)
    assert SAVED_FILES | {SUMS_FILE, "tokenizer.json"} <= set(names)
    for name in names:
        path = os.path.join(folder, name)
        with open(path, "rb") as file:
            before = file.read()
        damage(path)
        found = find_damage(folder)
        assert found is not None and (name in found or name == SUMS_FILE)
        with open(path, "wb") as file:
            file.write(before)
        assert find_damage(folder) is None
    drop_last_line(os.path.join(folder, SUMS_FILE))
    assert "is truncated" in find_damage(folder)


def test_a_damaged_checkpoint_is_skipped_with_a_warning(saver, capfd):
    for step in (1, 2):
        saver(step)
    flip_bit(os.path.join(checkpoint(saver.folder, 2), "model.safetensors"), 0.7)
    assert find_checkpoint(saver.config, ALONE) == checkpoint(saver.folder, 1)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: ") and "checkpoint-2 is damaged: model.safetensors" in line
    saver.config.run.resume_from_checkpoint = checkpoint(saver.folder, 2)
    says = r"run.resume_from_checkpoint: .*checkpoint-2 is damaged: model.safetensors"
    with pytest.raises(InputError, match=says):
        find_checkpoint(saver.config, ALONE)


def test_a_checkpoint_of_another_version_is_refused(saver):
    """One without a format, whose noise was keyed by the step; whole in all else."""
    saver(1)
    folder = checkpoint(saver.folder, 1)
    path = os.path.join(folder, STATE_FILE)
    with open(path, encoding="utf-8") as file:
        state = json.load(file)
    assert state.pop("format") == FORMAT
    with open(path, "w", encoding="utf-8") as file:
        json.dump(state, file)
    names = sorted(set(os.listdir(folder)) - {SUMS_FILE}, key=lambda name: name == STATE_FILE)
    with open(os.path.join(folder, SUMS_FILE), "w", encoding="utf-8") as file:
        file.writelines(f"{of}  {name}\n" for name, of in _digests(folder, names).items())
    assert find_damage(folder) is None
    message = refusal(find_checkpoint, saver.config, ALONE)
    assert message.startswith(f"run.resume_from_checkpoint: {folder} was written by another")


def test_without_a_whole_checkpoint_a_run_does_not_start_over(saver):
    for step in (1, 2):
        saver(step)
        cut(os.path.join(checkpoint(saver.folder, step), "optimizer.pt"), 0.5)
    says = "run.output_dir: all its checkpoints are damaged"
    with pytest.raises(InputError, match=says):
        find_checkpoint(saver.config, ALONE)


def test_damaged_checkpoint_replaces_no_whole_checkpoint(saver):
    """A damaged checkpoint-5 is not one of those to keep."""
    saver.config.run.save_total_limit = 1
    saver(5)
    flip_bit(os.path.join(checkpoint(saver.folder, 5), STATE_FILE), 0.5)
    for step in (2, 3):
        saver(step)
    assert list_checkpoints(saver.folder) == [checkpoint(saver.folder, step) for step in (3, 5)]
    assert find_checkpoint(saver.config, ALONE) == checkpoint(saver.folder, 3)
    saver(5)  # reached again: replaced
    assert list_checkpoints(saver.folder) == [checkpoint(saver.folder, 5)]
    assert find_damage(checkpoint(saver.folder, 5)) is None


def test_lock_removes_unfinished_saves(saver):
    saver(1)
    os.makedirs(os.path.join(saver.folder, "tmp-checkpoint-2"))
    lock = lock_output_dir(saver.config)
    assert sorted(os.listdir(saver.folder)) == [".lock", "checkpoint-1", "config.yaml"]

    def lock_again() -> int:
        """Exit code of another process that tries."""
        child = os.fork()
        if child == 0:
            try:
                lock_output_dir(saver.config)
            except InputError as error:
                os._exit(7 if "in use by another run" in str(error) else 8)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    shutil.copytree(saver.folder, f"{saver.folder}-copy")  # as a logger does
    assert lock_again() == 7
    forked = os.fork()  # which must not keep our lock
    if forked == 0:
        time.sleep(60)
        os._exit(0)
    lock.close()
    assert lock_again() == 0
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)


def fails(number: int):
    """A function that fails with an error of the system."""

    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return fail


def test_file_system_without_extras_saves(saver, monkeypatch, capfd):
    """Neither modes, links, locks nor flushes of folders; the best checkpoint stays."""
    fsync = os.fsync

    def fsync_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_files)
    monkeypatch.setattr(os, "chmod", fails(errno.EPERM))
    monkeypatch.setattr(os, "symlink", fails(errno.EOPNOTSUPP))
    monkeypatch.setattr(fcntl, "flock", fails(errno.ENOLCK))
    monkeypatch.setattr(fcntl, "lockf", fails(errno.ENOLCK))
    lock_output_dir(saver.config).close()
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "cannot be locked (No locks available)" in said
    saver.config.run.save_total_limit = 1
    for step in (1, 2, 3):
        assert saver(step, best=1) is None
    assert list_checkpoints(saver.folder) == [checkpoint(saver.folder, step) for step in (1, 3)]
    assert find_checkpoint(saver.config, ALONE) == checkpoint(saver.folder, 3)


@pytest.mark.parametrize("lacking", ["rename", "replace", "fsync"])
def test_folder_that_cannot_keep_saves_is_refused(saver, monkeypatch, lacking):
    """At the start, not in the first save."""
    lock_output_dir(saver.config).close()
    number = errno.EIO if lacking == "fsync" else errno.ENOTSUP
    with monkeypatch.context() as patch:
        patch.setattr(os, lacking, fails(number))
        message = refusal(lock_output_dir, saver.config)
    assert message == f"run.output_dir: cannot write to {saver.folder}: {os.strerror(number)}"
    lock_output_dir(saver.config).close()
    assert sorted(os.listdir(saver.folder)) == [".lock", "config.yaml"]


def test_branch_that_is_given_up_is_kept_aside(saver):
    """The next start continues the branch that the metrics are of."""
    saver.config.run.save_total_limit = 3
    for step in (1, 2, 3):
        saver(step)
    saver.config.run.resume_from_checkpoint = checkpoint(saver.folder, 1)
    lock_output_dir(saver.config, 1).close()
    assert list_checkpoints(saver.folder) == [checkpoint(saver.folder, 1)]
    assert find_damage(checkpoint(saver.folder, 2) + ".1") is None
    saver.config.run.resume_from_checkpoint = "auto"
    lock_output_dir(saver.config, 1).close()
    assert find_checkpoint(saver.config, ALONE) == checkpoint(saver.folder, 1)


@pytest.mark.parametrize("content", ["", "\0\0\0"])
def test_empty_configuration_beside_checkpoints_resumes(saver, content):
    """As a power failure may leave it."""
    saver(1)
    with open(os.path.join(saver.folder, CONFIG_FILE), "w", encoding="utf-8") as file:
        file.write(content)
    assert find_checkpoint(saver.config, ALONE) == checkpoint(saver.folder, 1)
    saver.config.run.seed += 1
    assert refusal(find_checkpoint, saver.config, ALONE).startswith("run.seed: 1 here, but 0 in ")


def test_folder_without_checkpoint_takes_another_config(saver):
    """A run that has ended before its first save has nothing that a correction could spoil."""
    lock_output_dir(saver.config).close()
    saver.config.run.seed, saver.config.optim.learning_rate = 1, 0.5
    assert find_checkpoint(saver.config, ALONE) is None
    lock_output_dir(saver.config).close()
    kept = load_config(os.path.join(saver.folder, CONFIG_FILE))
    assert (kept.run.seed, kept.optim.learning_rate) == (1, 0.5)
    saver(1)
    saver.config.run.seed = 2
    assert refusal(find_checkpoint, saver.config, ALONE).startswith("run.seed: 2 here, but 1 in ")


SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e4}
ROTARY = {
    "Llama": ({"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5}),
    "Qwen2": (SCALED, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 7e4}),
    "Phi": ({"rope_theta": 3e4, "partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.25}),
    "GPTNeoX": (
        {"rope_theta": 3e4, "partial_rotary_factor": 0.5},
        {"rotary_emb_base": 3e4, "rotary_pct": 0.5},
    ),
    "Gemma3Text": (
        {
            "full_attention": SCALED,
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
        {"rope_theta": 7e4, "rope_local_base_freq": 2e4, "rope_scaling": SCALED},
    ),
}


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_keys_are_those_of_both_versions(tmp_path, kind):
    """transformers 4 reads keys of their own; the version here reads what it had written."""
    given, wanted = ROTARY[kind]
    make = getattr(transformers, f"{kind}Config")
    config = make(rope_parameters=given, hidden_size=64, num_attention_heads=4, vocab_size=9)
    config.save_pretrained(tmp_path)
    add_old_keys(str(tmp_path), make.from_dict)
    saved = json.loads((tmp_path / "config.json").read_text())
    old = {key: saved[key] for key in wanted}
    if "rope_scaling" in old:
        wanted = wanted | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert old == wanted
    again = make.from_pretrained(tmp_path)
    assert again.rope_parameters == config.rope_parameters
    part = again.to_dict()
    assert {key: part[key] for key in config.to_dict()} == config.to_dict()


def test_tokenizer_class_is_one_of_both_versions(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained("configs/tiny_policy")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|think|>"]})
    tokenizer.save_pretrained(tmp_path)
    add_old_keys(str(tmp_path), transformers.LlamaConfig.from_dict)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert saved["additional_special_tokens"] == ["<|think|>"]
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "12 + 3 = <|think|>15<|endoftext|>"
    assert type(again) is type(tokenizer) and again(text) == tokenizer(text)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.all_special_tokens == tokenizer.all_special_tokens


# Configurations


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return [1] if isinstance(value, list) else f"{value}x"


def test_former_default_resumes_without_environment(saver):
    """Once environment.max_observation_length was 512; now it depends on another key."""
    saver.config.environment.max_observation_length = 512
    saver(1)
    saver.config.environment.max_observation_length = 256
    assert find_checkpoint(saver.config, ALONE) == checkpoint(saver.folder, 1)


def test_changed_key_is_handled_by_class(saver, capfd):
    saver.config.environment.factory = "my.Environment"
    saver(1)
    classes = resume_classes(saver.config)
    for key, value in flatten(saver.config).items():
        section, name = key.split(".")
        if key in ("run.output_dir", "run.resume_from_checkpoint"):  # where, not what
            continue
        setattr(getattr(saver.config, section), name, changed(value))
        if classes[key] != EXACT or key == "data.path":  # no file; rows are compared later
            assert find_checkpoint(saver.config, ALONE) == checkpoint(saver.folder, 1), key
        else:
            said = rf"^{key}: .* here, but .* in .*checkpoint-1; set the same to resume"
            with pytest.raises(InputError, match=said):
                find_checkpoint(saver.config, ALONE)
        said = capfd.readouterr().err
        is_said = said.startswith(f"warning: {key}: ") and said.count("\n") == 1
        assert is_said if classes[key] == ROUNDING else said == "", (key, said)
        setattr(getattr(saver.config, section), name, value)


def test_max_steps_with_linear_schedule_cannot_grow(saver):
    saver.config.optim.lr_scheduler_type = "linear"
    saver(1)
    saver.config.run.max_steps += 1
    with pytest.raises(InputError, match=r"run.max_steps: 101 here, but 100"):
        find_checkpoint(saver.config, ALONE)


def test_resume_prints_a_changed_number_of_ranks(saver, capfd):
    saver(1)
    two = Ranks(torch.device("cpu"))
    two.world_size, two.gather_text = 2, lambda text: [text]
    assert find_checkpoint(saver.config, two) == checkpoint(saver.folder, 1)
    assert capfd.readouterr().err.startswith("warning: 2 ranks here, but 1 in ")


def test_checkpoint_is_flushed_before_rename(saver, monkeypatch):
    """Every file, whole, and the folder that lists them; then the name; then the folder that has
    the name. A power failure between two of these leaves either no checkpoint of that name or a
    whole one."""
    calls, fsync, rename = [], os.fsync, os.rename
    unfinished, final = os.path.join(saver.folder, "tmp-checkpoint-2"), checkpoint(saver.folder, 2)

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        size = sorted(os.listdir(path)) if os.path.isdir(path) else os.path.getsize(path)
        calls.append(("on disk", path, size))

    def recorded_rename(source: str, target: str) -> None:
        rename(source, target)
        calls.append(("named", source, target))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    assert saver(2) is None
    names = sorted(os.listdir(final))
    assert set(names) >= SAVED_FILES
    *files, folder, named, parent = calls
    assert sorted(files) == [
        ("on disk", os.path.join(unfinished, name), os.path.getsize(os.path.join(final, name)))
        for name in names
    ]
    assert folder == ("on disk", unfinished, names) and named == ("named", unfinished, final)
    assert parent == ("on disk", saver.folder, ["checkpoint-2"])


def test_the_newest_checkpoints_are_kept(saver):
    """As many as `save_total_limit`, by their numbers, not in the order of the alphabet."""
    saver.config.run.save_total_limit = 2
    for step in (8, 9, 10):
        assert saver(step) is None
    assert list_checkpoints(saver.folder) == [checkpoint(saver.folder, step) for step in (9, 10)]


@pytest.mark.parametrize("step", [1, 2])
def test_kill_during_deletion_leaves_whole_checkpoints(saver, monkeypatch, step):
    """A kill while an older one is deleted (2), or one is replaced (1)."""
    saver.config.run.save_total_limit = 1
    saver(1)

    def delete_and_die(path: str, **options) -> None:
        if os.path.exists(path):
            os.remove(os.path.join(path, OPTIMIZER_FILE))
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", delete_and_die)
        saver(step)
    assert [find_damage(folder) for folder in list_checkpoints(saver.folder)] == [None] * (step - 1)
    os.symlink("checkpoint-1", os.path.join(saver.folder, "tmp-checkpoint-best"))
    lock_output_dir(saver.config).close()
    assert not [name for name in os.listdir(saver.folder) if name.startswith("tmp-")]


@pytest.mark.parametrize("size", [0, 40_000])
def test_failed_save_keeps_earlier_checkpoints(saver, size):
    """The limit hits the configuration or the weights."""
    assert saver(1) is None
    with FullDisk(size):
        problem = saver(2)
    assert "File too large" in problem and "\n" not in problem, "whichever library was writing"
    assert os.listdir(saver.folder) == ["checkpoint-1"]
    assert find_damage(checkpoint(saver.folder, 1)) is None
    assert saver(3) is None and find_checkpoint(saver.config, ALONE) == checkpoint(saver.folder, 3)
