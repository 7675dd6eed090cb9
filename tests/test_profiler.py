"""run.profile_steps: a trace of each rank, of the chosen steps alone."""

import json

import torch

from bubblespec.config import Config, RunConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.telemetry.reporter import RunReporter
from tests.helpers.runs import run, train_here


def operations(path) -> set[str]:
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "cpu_op"}


def test_two_ranks_profile_the_chosen_steps(tmp_path):
    run(tmp_path, 2, "run.profile_steps=[2,9]", "run.max_steps=3", "run.save_steps=0")
    names = [f"step-00002-rank-{rank}.json" for rank in range(2)]
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == names
    for name in names:
        found = operations(tmp_path / "profile" / name)
        assert any("scaled_dot_product" in operation for operation in found)
        assert any(operation.startswith("autograd::engine") for operation in found)


def test_abandoned_step_leaves_no_trace(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(torch.profiler.profile, "stop", lambda profile: ended.append(profile))
    monkeypatch.setattr(torch.profiler.profile, "start", lambda profile: None)
    config = Config(run=RunConfig(output_dir=str(tmp_path), profile_steps=[1]))
    parts = dict.fromkeys(("learner", "schedule", "tokenizer", "log_to"))
    parts |= {"functions": [], "num_held_out": 0, "began_s": 0.0}
    reporter = RunReporter(config, Ranks(torch.device("cpu")), **parts)
    reporter.close()
    assert not ended
    reporter.begin_step(0)
    reporter.close()
    assert len(ended) == 1 and not any(tmp_path.iterdir())


def test_write_error_is_a_warning(tmp_path, capsys):
    (tmp_path / "profile").touch()
    train_here(tmp_path, "run.profile_steps=[1]", "run.max_steps=1", "run.save_steps=0")
    assert "step-00001-rank-0.json could not be written" in capsys.readouterr().err
