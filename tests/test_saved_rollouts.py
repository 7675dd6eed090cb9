"""run.save_rollouts: what is read back equals what the trainer trained on, also after kills."""

import json
import os

import numpy as np
import pyarrow.parquet
import pytest
import torch

from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import log, one_line
from bubblespec.telemetry.files import MetricsLogger, StepFiles, save_rollouts
from bubblespec.trainer import Trainer
from tests.helpers.checks import refusal
from tests.helpers.rows import LETTERS
from tests.helpers.runs import SHORT, train_here
from tests.helpers.threads import Killed
from tests.test_metrics import NAMES, a_record, read

OPTIONS = [*SHORT, "rollout.num_prompts_per_step=4", "rollout.max_completion_length=24"]
OPTIONS += ["eval.num_prompts=0", "run.save_rollouts=true", "run.max_steps=4", "run.save_steps=2"]


@pytest.fixture
def trained(monkeypatch) -> dict[int, tuple]:
    """Samples, rewards and advantages of the latest update of each step, from 1."""
    found, update = {}, Trainer.update

    def kept(trainer, record, advantages):
        metrics = update(trainer, record, advantages)
        found[record.step + 1] = (record, np.array(record.advantages))
        return metrics

    monkeypatch.setattr(Trainer, "update", kept)
    return found


def files_in(folder, num_updates: int = 0) -> StepFiles:
    path = str(folder / "rollouts")
    return StepFiles(path, num_updates, "run.save_rollouts", keeps_earlier=True)


def check(folder, trained: dict[int, tuple]) -> None:
    rows = pyarrow.parquet.read_table(folder / "rollouts").to_pylist()
    by_key = {(row["step"], row["uid"], row["visit"], row["sample"]): row for row in rows}
    assert len(by_key) == len(rows) == sum(len(record.generated) for record, _ in trained.values())
    for step, (record, advantages) in trained.items():
        index = {name: i for i, name in enumerate(record.samples.ids)}
        for i, name in enumerate(record.generated.ids):
            row, prompt = by_key[step, *name], record.generated.prompt_of(i)
            assert row["tokens"] == record.generated.tokens[i].tolist()
            assert row["prompt_tokens"] == list(prompt.token_ids) and row["prompt"] == prompt.text
            assert json.loads(row["columns"])["answer"] == prompt.columns["answer"]
            assert row["reward"] == record.all_rewards.ravel()[i]
            assert row["rewards/exact_match"] == record.generated.rewards[i, 0]
            is_trained = name in index
            assert row["advantage"] == (advantages[index[name]] if is_trained else None)


def test_rollouts_equal_the_trainers_data(trained, tmp_path):
    train_here(tmp_path, "rollout.dynamic_sampling_max_batches=3", short=OPTIONS)
    check(tmp_path, trained)
    assert any(len(r.generated) > len(r.samples) for r, _ in trained.values()), "some are replaced"


def test_killed_run_has_each_step_once(trained, monkeypatch, tmp_path):
    """It is killed while step 4 is written, and resumes after step 2."""
    replace = os.replace

    def killed(source, target):
        if str(target).endswith("step-00004.parquet"):
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", killed)
        train_here(tmp_path, short=OPTIONS)
    names = set(os.listdir(tmp_path / "rollouts"))
    assert ".step-00004.parquet" in names and "step-00003.parquet" in names
    train_here(tmp_path, short=OPTIONS)
    assert sorted(os.listdir(tmp_path / "rollouts")) == [
        f"step-{n:05d}.parquet" for n in (1, 2, 3, 4)
    ]
    check(tmp_path, trained)


def test_half_an_emoji_is_escaped_in_all_files(tmp_path, capsys):
    """JSON can hold it, UTF-8 cannot."""
    torn, record = "torn \ud83d", a_record(0)
    for group in record.samples.groups:
        group.prompt.columns["answer"] = torn
    save_rollouts(files_in(tmp_path), record, NAMES, LETTERS)
    rows = pyarrow.parquet.read_table(tmp_path / "rollouts").to_pylist()
    assert [json.loads(row["columns"])["answer"] for row in rows] == [torn] * 4
    logger = MetricsLogger(str(tmp_path), 0)
    logger.log_samples(record, NAMES, LETTERS)
    logger.close()
    assert read(tmp_path, "samples")[0]["columns"]["answer"] == torn
    log(one_line(ValueError(torn)))
    log(torn)
    assert capsys.readouterr().err == "ValueError: torn \\ud83d\ntorn \\ud83d\n"
    assert Ranks(torch.device("cpu")).gather_text(torn) == ["torn \\ud83d"]


def test_missing_rewards_are_null_and_failures_warn(tmp_path, capsys):
    assert not Config().run.save_rollouts
    files = files_in(tmp_path)
    save_rollouts(files, a_record(0), NAMES, LETTERS)
    rows = pyarrow.parquet.read_table(tmp_path / "rollouts").to_pylist()
    assert [row["rewards/form"] for row in rows] == [0.5, 0.5, None, None]
    assert rows[2]["text"] == "d⟦e⟧f"
    assert [row["reward"] for row in rows] == [10, 10.25, 10.5, 10.75]
    os.mkdir(tmp_path / "rollouts" / ".step-00002.parquet")
    save_rollouts(files, a_record(1), NAMES, LETTERS)
    assert "warning: the rollouts of step 2 could not be written" in capsys.readouterr().err
    files_in(tmp_path)
    assert os.listdir(tmp_path / "rollouts") == []
    assert (tmp_path / "rollouts.1" / "step-00001.parquet").exists()
    (tmp_path / "file").touch()
    assert refusal(files_in, tmp_path / "file", 1).startswith("run.save_rollouts: cannot")
