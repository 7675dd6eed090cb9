"""metrics.jsonl, samples.jsonl, TensorBoard and the user's hook: valid JSON, the same numbers in
all, nothing double after a resume."""

import asyncio
import io
import json
import math
import os
import re
import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from bubblespec.config import Config
from bubblespec.distributed import ranks as ranks_module
from bubblespec.distributed.ranks import Ranks, signals_stop
from bubblespec.errors import InputError, one_line
from bubblespec.metrics import TABLE
from bubblespec.setup import load_own
from bubblespec.telemetry.files import MetricsLogger, begin_logging, import_logger
from bubblespec.telemetry.reporter import RunReporter
from bubblespec.types import Group, Prompt
from tests.helpers.checks import FullDisk
from tests.helpers.documents import files, read_document
from tests.helpers.rows import LETTERS, record_of, samples_of

BASE = {"reward": 0.5, "perf/throughput": 100.0, "timing_s/step": 2.0}


@pytest.fixture(autouse=True)
def files_are_read_in_order(monkeypatch):
    """Files of one second and process are ordered by a number as text, where 10 is before 9."""
    first = type(event_file_writer._global_uid)(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", first)


def not_json(token: str):
    raise AssertionError(f"{token} is not JSON")


def read(folder, name: str = "metrics") -> list[dict]:
    text = (folder / f"{name}.jsonl").read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=not_json) for line in text.splitlines()]


def events(folder) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def curves(folder) -> dict[str, list[tuple[int, float]]]:
    found = events(folder)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


# Curves of the keys here, where they have other names.
TAGS = {"reward": "train/reward", "grad_norm": "train/grad_norm"}
WATCHED = {"reward": "1_learning/reward", "grad_norm": "1_learning/grad_norm"}
WATCHED |= {"eval/reward": "1_learning/eval/reward", "timing_s/step": "2_responses/timing_s/step"}
TAGS |= {"rollout/forwards": "z_bubblespec/rollout/forwards"}
TAGS |= {"timing_s/gen/rank_1": "z_bubblespec/timing_s/gen/rank_1"}


def curves_of_lines(lines: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """Return every number of metrics.jsonl, in float32 as TensorBoard stores it."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for key, value in line.items():
            if key != "step" and isinstance(value, (int, float)):
                point = line["step"], float(np.float32(value))
                for tag in [TAGS.get(key, key), *filter(None, [WATCHED.get(key)])]:
                    found.setdefault(tag, []).append(point)
    return found


def run(folder, steps: range, evaluate_at: tuple[int, ...] = (), **more) -> None:
    """The trainer's order: a step's line, then the evaluation after it."""
    folder.mkdir(exist_ok=True)
    logger = MetricsLogger(str(folder), steps.start)
    if steps.start == 0 and 0 in evaluate_at:
        logger.log_evaluation(0, {"eval/reward": 0.0})
    for step in steps:
        logger.log(step + 1, {**BASE, "reward": step / 4, **more})
        if step + 1 in evaluate_at:
            logger.log_evaluation(step + 1, {"eval/reward": (step + 1) / 8})
    logger.close()


def test_step_and_evaluation_are_one_line_and_one_point(tmp_path):
    more = {"completions/max_length": 7, "rollout/digest": "abc", "rollout/forwards": 9}
    more["timing_s/gen/rank_1"] = 0.5
    run(tmp_path, range(3), (0, 2), **more)
    lines = read(tmp_path)
    step = {**BASE, **more}
    assert lines == [
        {"step": 0, "eval/reward": 0.0},
        {"step": 1, **step, "reward": 0.0},
        {"step": 2, **step, "reward": 0.25},
        {"step": 2, "eval/reward": 0.25},
        {"step": 3, **step, "reward": 0.5},
    ]
    assert curves(tmp_path) == curves_of_lines(lines)
    assert set(TAGS.values()) - {"train/grad_norm"} <= set(curves(tmp_path))
    assert {"completions/max_length", "eval/reward"} <= set(curves(tmp_path))


def test_repeated_evaluation_has_one_line_and_one_point(tmp_path):
    """A run that was stopped in an evaluation saves before it, makes it when it continues, and may
    be killed then."""
    run(tmp_path, range(2), (2,))
    logger = MetricsLogger(str(tmp_path), 2)
    logger.log_evaluation(2, {"eval/reward": 0.25})
    logger.log_evaluation(3, {"eval/reward": 0.5})
    logger.close()
    evaluations = [line for line in read(tmp_path) if "eval/reward" in line]
    assert evaluations == [{"step": 2, "eval/reward": 0.25}, {"step": 3, "eval/reward": 0.5}]
    assert curves(tmp_path)["eval/reward"] == [(2, 0.25), (3, 0.5)]


def test_first_page_has_the_curves_to_watch_first(tmp_path):
    """TensorBoard opens the first two groups by name, and folds all others."""
    keys = [key for title, rows in TABLE.items() for names in rows for key in names.split(", ")]
    keys = [re.sub(r"\{(\w+)[^}]*\}", r"\1", key) for key in keys]
    run(tmp_path, range(2), (0,), **dict.fromkeys(keys, 1.0))
    groups: dict[str, list[str]] = {}
    for tag in sorted(curves(tmp_path)):
        group, _, name = tag.partition("/")
        groups.setdefault(group, []).append(name)
    first, second, *others = groups
    watched = "completions/clipped_ratio completions/mean_length entropy eval/reward "
    watched += "frac_reward_zero_std grad_norm reward timing_s/step"
    assert sorted(groups[first] + groups[second]) == watched.split()
    assert sorted(watched.split()) == sorted(TABLE["Watch first"])
    assert set(keys) == {
        key.removeprefix("train/").removeprefix("z_bubblespec/")
        for group in others
        for key in (f"{group}/{name}" for name in groups[group])
    }


@pytest.mark.parametrize("value", [math.nan, -math.inf, np.float32("inf")])
def test_nonfinite_numbers_are_null_in_lines(tmp_path, value):
    run(tmp_path, range(1), grad_norm=value)
    assert read(tmp_path) == [{"step": 1, **BASE, "reward": 0.0, "grad_norm": None}]
    (point,) = curves(tmp_path)["train/grad_norm"]
    assert point[0] == 1 and (math.isnan(point[1]) if math.isnan(value) else point[1] == value)


@pytest.mark.parametrize("lost", [0, 1, 40])
def test_resumed_run_writes_each_step_once(tmp_path, lost):
    """Killed in step 7, perhaps in the middle of its line; continued after step 4."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole, range(8), (0, 2, 4, 6, 8))
    run(killed, range(7), (0, 2, 4, 6))
    path = killed / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[: path.stat().st_size - lost])
    run(killed, range(4, 8), (0, 2, 4, 6, 8))
    assert read(killed) == read(whole)
    assert curves(killed) == curves_of_lines(read(whole)) == curves(whole)


def test_fresh_start_renames_earlier_files(tmp_path, capsys):
    run(tmp_path, range(3), (0, 2))
    run(tmp_path, range(2), (0,))
    found = [(line["step"], "eval/reward" in line) for line in read(tmp_path)]
    assert found == [(0, True), (1, False), (2, False)]
    assert curves(tmp_path) == curves_of_lines(read(tmp_path))
    kept = tmp_path / "metrics.jsonl.1"
    assert kept.read_text(encoding="utf-8").count("\n") > len(read(tmp_path)) > 0
    assert f"now {kept}" in capsys.readouterr().err
    run(tmp_path, range(1))
    assert (tmp_path / "metrics.jsonl.2").exists() and kept.exists()


def a_record(step: int, num_prompts: int = 2):
    """Two responses to each prompt; the second function applies to the first prompt alone."""
    groups = [Group(Prompt(u, f"question {u}", (1,), {"answer": u}), 0) for u in range(num_prompts)]
    tokens = [np.array([i % 26], np.int32) for i in range(2 * num_prompts)]
    tokens[2:3] = [np.array([3, 4, 5], np.int32)]
    samples = samples_of(groups, tokens)
    samples.logprob[2] = np.array([0, np.nan, 0])
    rewards = np.arange(2 * num_prompts) / 4
    samples.rewards = np.stack((rewards, np.full(2 * num_prompts, np.nan)), axis=1)
    samples.rewards[:2, 1] = 0.5
    fields = {"step": step, "advantages": rewards - 1.0}
    return record_of(samples, rewards.reshape(-1, 2) + 10.0, **fields)


NAMES = ["match", "form"]


def test_samples_are_written(tmp_path):
    """The first response to each of four prompts; later steps of a killed run are cut off."""
    logger = MetricsLogger(str(tmp_path), 0)
    logger.log_samples(a_record(3), NAMES, LETTERS)
    logger.log_samples(a_record(10, 10), NAMES, LETTERS)
    logger.close()
    first, second, *others = read(tmp_path, "samples")
    numbers = {"step": 4, "uid": 0, "visit": 0, "sample": 0, "num_tokens": 1, "reward": 10.0}
    texts = {"prompt": "question 0", "completion": "a", "columns": {"answer": 0}}
    rewards = {"rewards": {"match": 0.0, "form": 0.5}, "advantage": -1.0, "is_truncated": False}
    assert first == numbers | texts | rewards
    assert second["completion"] == "d⟦e⟧f" and second["rewards"] == {"match": 0.5, "form": None}
    assert [(sample["uid"], sample["sample"]) for sample in others] == [(n, 0) for n in range(4)]
    MetricsLogger(str(tmp_path), 4).close()
    assert read(tmp_path, "samples") == [first, second]
    MetricsLogger(str(tmp_path), 0).close()
    assert read(tmp_path, "samples") == [] and (tmp_path / "samples.jsonl.1").exists()


def log_steps(folder, hook) -> None:
    logger = MetricsLogger(str(folder), 0, hook)
    logger.log_evaluation(0, {"eval/reward": 0.0})
    for step in range(2):
        logger.log(step, BASE)
    logger.close()


def test_hook_gets_each_line_and_may_fail(tmp_path, capsys):
    taken = []

    def hook(metrics: dict) -> None:
        taken.append(dict(metrics))
        metrics.clear()
        if len(taken) != 2:
            raise ConnectionError("no network")

    log_steps(tmp_path, hook)
    assert taken == read(tmp_path) and len(taken) == 3
    warnings = capsys.readouterr().err
    assert warnings.count("run.log_to failed") == 1
    assert "ConnectionError: no network" in warnings


@pytest.fixture(params=["wandb", "trackio"])
def package(request, tmp_path, monkeypatch):
    """(the package's stand-in, whose `init` is to be set, and what a reporter gets with it)."""
    module = SimpleNamespace(finish=list)
    monkeypatch.setitem(sys.modules, request.param, module)
    config = Config()
    config.run.output_dir, config.run.log_to = str(tmp_path / "my_run"), request.param
    return module, config


def test_lines_go_to_the_package_that_log_to_names(tmp_path, monkeypatch, package):
    begun, taken = [], []
    module, config = package
    run = SimpleNamespace(log=lambda metrics, step: taken.append((step, metrics)))
    module.init = lambda **options: begun.append(options) or run
    monkeypatch.setenv(f"{config.run.log_to.upper()}_PROJECT", "sums")
    (found,) = load_own(config, Ranks(torch.device("cpu")))
    assert not begun, "no run before all else is checked"
    log_steps(tmp_path, begin_logging(found, config))
    (options,) = begun
    assert (options["project"], options["name"], options["resume"]) == ("sums", "my_run", "allow")
    assert options["config"]["run.log_to"] == config.run.log_to
    assert [metrics for _, metrics in taken] == read(tmp_path)
    assert [step for step, _ in taken] == [line["step"] for line in read(tmp_path)]


def test_folder_named_as_a_package_is_refused(tmp_path, monkeypatch):
    """As Weights & Biases leaves one behind, where the package is not installed."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(InputError, match=f"run.log_to: .*{tmp_path}/wandb is .*; pip install wan"):
        import_logger("wandb")
    del sys.modules["wandb"]


@pytest.fixture
def terminal(monkeypatch):
    """A terminal as standard input, at which an answer waits."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("an answer\n"))
    sys.stdin.isatty = lambda: True
    return sys.stdin


def ask(*_, **options):
    """As Weights & Biases without a key: ask at a terminal, else raise."""
    if sys.stdin.isatty():
        return input()
    raise LookupError("no key")


def test_package_without_a_key_is_one_line_before_files(tmp_path, terminal, package):
    module, config = package
    module.init = ask
    parts = dict.fromkeys(("learner", "tokenizer")) | {"schedule": SimpleNamespace(prompts=[])}
    parts |= {"functions": [], "num_held_out": 0, "began_s": 0.0, "log_to": module}
    reporter = RunReporter(config, Ranks(torch.device("cpu")), **parts)
    begin = f"run.log_to: {config.run.log_to} cannot begin a run: LookupError: no key"
    with pytest.raises(InputError, match=f"^{begin}(; WANDB_MODE=offline .*)?$"):
        reporter.start(0, None)
    assert terminal.read() == "an answer\n" and sys.stdin is terminal
    assert not any(tmp_path.iterdir())


def test_hook_is_not_answered(tmp_path, terminal, capsys):
    log_steps(tmp_path, ask)
    assert "run.log_to failed in step 0: LookupError: no key" in capsys.readouterr().err
    assert terminal.read() == "an answer\n"


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()])
@pytest.mark.parametrize("is_async", [False, True])
def test_hook_may_raise_anything(tmp_path, capsys, error, is_async):
    taken = []

    def hook(metrics: dict) -> None:
        taken.append(metrics)
        raise error

    async def hook_late(metrics: dict) -> None:
        await asyncio.sleep(0)
        hook(metrics)

    with signals_stop(Ranks(torch.device("cpu"))):
        log_steps(tmp_path, hook_late if is_async else hook)
    assert taken == read(tmp_path) and len(taken) == 3
    assert capsys.readouterr().err.count(f"run.log_to failed in step 0: {one_line(error)}") == 1


def test_second_interrupt_in_a_hook_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks_module, "SAME_CTRL_C_S", -1.0)  # the first one counts as two
    with pytest.raises(KeyboardInterrupt), signals_stop(Ranks(torch.device("cpu"))):
        log_steps(tmp_path, lambda metrics: os.kill(os.getpid(), signal.SIGINT))


def test_documented_wandb_hook_logs(tmp_path, monkeypatch):
    code = files(read_document("docs/metrics.md"))["my_log.py"]
    logged, module = [], {}
    library = SimpleNamespace(init=lambda **options: library)
    library.log = lambda metrics, step: logged.append((step, metrics.get("reward")))
    monkeypatch.setitem(sys.modules, "wandb", library)
    exec(code, module)
    log_steps(tmp_path, module["log"])
    assert logged == [(0, None), (0, 0.5), (1, 0.5)]


# A full disk


@pytest.fixture
def quiet_threads(monkeypatch):
    """TensorBoard's thread ends with an error on a full disk."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


def test_lines_wait_for_room(quiet_threads, tmp_path, capsys):
    logger = MetricsLogger(str(tmp_path), 0)
    logger.log(0, BASE)
    size = os.path.getsize(tmp_path / "metrics.jsonl")
    with FullDisk(size + 10):
        for step in (1, 2):
            logger.log(step, BASE)
        logger.log_samples(a_record(0), NAMES, LETTERS)
        assert os.path.getsize(tmp_path / "metrics.jsonl") == size, "no half line is left"
    for step in (3, 4):
        logger.log(step, BASE)
    logger.log_samples(a_record(10), NAMES, LETTERS)
    logger.close()
    assert [line["step"] for line in read(tmp_path)] == [0, 1, 2, 3, 4]
    assert [sample["step"] for sample in read(tmp_path, "samples")] == [1, 1, 11, 11]
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl cannot be written") == 1 and "lost" not in said
    assert said.count("samples.jsonl cannot be written") == 1


def test_curves_fail_without_ending_the_run(quiet_threads, tmp_path, capsys):
    logger = MetricsLogger(str(tmp_path), 0)
    with FullDisk(1500):
        for step in range(10):
            logger.log(step, BASE)
    logger.log(10, BASE)
    logger.close()
    assert len(read(tmp_path)) == 11
    said = capsys.readouterr().err
    assert said.count("TensorBoard's files cannot be written") == 1
    assert "metrics.jsonl cannot" not in said
