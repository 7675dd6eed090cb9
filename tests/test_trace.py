"""Recorded runs against what the runs themselves report, files, and simulations of them."""

import itertools
import os
import shutil

import numpy as np
import pytest
import torch

from bubblespec.config import Config, RunConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.records import ForwardRecord, RolloutRecord, Span, StepRecord
from bubblespec.telemetry.trace import Recorder
from bubblespec.tools.simulate.command import SECTIONS, simulated_config
from bubblespec.tools.simulate.recorded import (
    list_steps,
    load_cost,
    read_meta,
    read_table,
    read_workload,
    sections_of,
)
from bubblespec.tools.simulate.run import simulate
from bubblespec.tools.simulate.workload import SimulatedTexts
from bubblespec.types import Draft, Group, Load, Prompt, SampleId
from tests.helpers.checks import refusal
from tests.helpers.clocks import forward_seconds, train_in_virtual_time
from tests.helpers.rows import record_of, samples_of
from tests.helpers.runs import ALWAYS_DRAFT, SHORT, read

BUBBLE = ["speculative.method=bubble+suffix", ALWAYS_DRAFT]
NO_FILES = ["run.save_steps=0", "run.trace=true"]
DYNAMIC = ["rollout.dynamic_sampling_max_batches=3", "run.max_steps=2"]


def rows_of(folder, kind: str, **wanted: int) -> list[dict]:
    rows = read_table(str(folder / "trace"), kind).to_pylist()
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dynamic")
    options = ["speculative.method=none", *NO_FILES, f"run.output_dir={folder}"]
    train_in_virtual_time(*SHORT, *DYNAMIC, *options)
    return folder


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafting")
    train_in_virtual_time(*SHORT, *BUBBLE, *NO_FILES, f"run.output_dir={folder}")
    return folder


def check_against_metrics(folder) -> None:
    lines = read(folder)
    assert list_steps(str(folder / "trace")) == [line["step"] for line in lines]
    for line in lines:
        responses = rows_of(folder, "responses", step=line["step"])
        forwards = rows_of(folder, "forwards", step=line["step"])
        lengths = [len(row["tokens"]) for row in responses]
        assert np.mean(lengths) == pytest.approx(line["completions/mean_length"])
        rewards = [row["reward"] for row in responses]
        assert np.mean(rewards) == pytest.approx(line["reward"], rel=1e-12)
        clipped = np.mean([not row["stopped"] for row in responses])
        assert clipped == pytest.approx(line["completions/clipped_ratio"])
        assert sum(row["own_rows"] > 0 for row in forwards) == line["rollout/forwards"]
        for row in forwards:
            assert row["engine_s"] + row["propose_s"] <= row["end_s"] - row["begin_s"] + 1e-9


def test_dynamic_sampling_is_recorded(dynamic):
    check_against_metrics(dynamic)
    meta, lines = read_meta(str(dynamic / "trace")), read(dynamic)
    assert meta["world_size"] == 1 and meta["config"]["speculative.method"] == "none"
    assert any(line["dynamic_sampling/num_batches"] > 1 for line in lines)
    for line in lines:
        for batch in range(line["dynamic_sampling/num_batches"]):
            wanted = {"step": line["step"], "batch": batch}
            responses, forwards = (rows_of(dynamic, k, **wanted) for k in ("responses", "forwards"))
            assert all(r["draft_tokens"] is None and r["draft_version"] == -1 for r in responses)
            # Each prompt is fed once for its group, all but its last token, and then a token for
            # each token of a response.
            prompts = [len(r["prompt_tokens"]) - 1 for r in responses if r["sample"] == 0]
            assert sum(f["prompt_tokens"] for f in forwards) == sum(prompts)
            decoded = sum(f["tokens"] - f["prompt_tokens"] for f in forwards)
            assert decoded == sum(len(r["tokens"]) for r in responses)


def test_drafts_and_costs_of_a_recorded_run(drafting):
    check_against_metrics(drafting)
    lines, num_drafts = read(drafting), 0
    for before, line in itertools.pairwise(lines):
        # The store held the drafts of this step, and of others after it.
        responses = rows_of(drafting, "responses", step=line["step"])
        drafts = [row for row in responses if row["draft_tokens"] is not None]
        assert sum(len(row["draft_tokens"]) for row in drafts) <= before["bubble/store_tokens"]
        assert all(row["draft_version"] < line["step"] for row in drafts)
        num_drafts += len(drafts)
    assert num_drafts > 40
    cost = load_cost(str(drafting))
    for load in (Load(4, 4, 0, 200, 0, 0), Load(8, 60, 3, 500, 30, 10)):
        assert cost.seconds(load) == pytest.approx(forward_seconds(load), rel=0.05)


def test_recorded_run_is_simulated_on_more_ranks(drafting):
    workload, cost = read_workload(str(drafting)), load_cost(str(drafting)).seconds
    sections = sections_of(read_meta(f"{drafting}/trace")["config"], SECTIONS)
    steps = simulate(simulated_config(sections, []), workload, cost, 2)
    digests = [line["rollout/digest"] for line in read(drafting)]
    assert [step.digest for step in steps] == digests
    config = simulated_config(sections, ["tail_batching.enabled=true"])
    assert 0 < len(simulate(config, workload, cost, 2)) < workload.num_steps


def test_recorded_drafts_are_replayed(drafting):
    workload, num_compared = read_workload(str(drafting)), 0
    assert workload.spec.run > 1
    for row in rows_of(drafting, "responses"):
        if row["draft_tokens"] and row["draft_finished"]:
            sample = SampleId(row["uid"], row["visit"], row["sample"])
            text = SimulatedTexts(workload).text(sample, 10_000)
            assert text.tolist()[: len(row["draft_tokens"])] == row["draft_tokens"]
            num_compared += 1
    assert num_compared


def one_step(step: int, drafts: dict[SampleId, Draft] | None = None) -> StepRecord:
    """Return a step of two prompts with two responses each, in two rollouts."""
    groups = [
        Group(Prompt(prompt_id, "p", (prompt_id, 2), {}), draw_index)
        for prompt_id, draw_index in ((11, 0), (7, 5))
    ]
    tokens = [np.arange(5 + i) for i in range(4)]
    rewards = np.arange(4.0).reshape(2, 2)
    truncated = np.array([True, False, False, True])
    samples = samples_of(groups, tokens, is_truncated=truncated, rewards=rewards.reshape(-1, 1))
    rows = {"own_rows": 2, "ahead_rows": 1, "looked_up_rows": 3}
    forward = ForwardRecord(10.0, 10.5, 0.375, 0.125, Load(3, 9, 2, 40, 5, 1), **rows)
    ends = [1.0, 3.0, 3.5, 4.0, 6.0]
    stages = list(map(Span, ("gen", "wait", "reward", "train"), ends, ends[1:]))
    rollouts = [RolloutRecord(10.0, 11.0, [forward]), RolloutRecord(12.0, 12.5)]
    fields = {"step": step, "stages": stages, "spans": [Span("exchange", 3.5, 3.75)]}
    fields |= {"rollouts": rollouts, "batch_sizes": [1, 1], "drafts": drafts or {}}
    return record_of(samples, rewards, owners=np.array([0, 1, 0, 0]), **fields)


def make_recorder(folder, num_updates: int = 0) -> Recorder:
    config = Config(run=RunConfig(output_dir=str(folder)))
    return Recorder(config, Ranks(torch.device("cpu")), num_updates)


def test_round_trip_of_one_step(tmp_path):
    drafts = {SampleId(7, 5, 1): Draft(np.array([4, 5], np.int32), True, version=2)}
    drafts[SampleId(7, 6, 0)] = Draft(np.array([6], np.int32), True, version=2)  # of another step
    make_recorder(tmp_path).write(one_step(3, drafts))
    found = rows_of(tmp_path, "responses")
    names = [(row["uid"], row["visit"], row["sample"]) for row in found]
    assert names == [(11, 0, 0), (11, 0, 1), (7, 5, 0), (7, 5, 1)]
    assert [row["batch"] for row in found] == [0, 0, 1, 1]
    assert [row["owner"] for row in found] == [0, 1, 0, 0]
    assert [row["tokens"] for row in found] == [list(range(5 + i)) for i in range(4)]
    assert [row["stopped"] for row in found] == [False, True, True, False]
    assert [row["draft_tokens"] for row in found] == [None, None, None, [4, 5]]
    assert found[3]["draft_finished"] and found[3]["draft_version"] == 2
    (forward,) = rows_of(tmp_path, "forwards")
    assert [forward[name] for name in Load._fields] == [3, 9, 2, 40, 5, 1]
    assert (forward["begin_s"], forward["end_s"], forward["own_rows"]) == (0.0, 0.5, 2)


def test_recording_stops_on_write_error(tmp_path, capsys):
    recorder = make_recorder(tmp_path)
    recorder.write(one_step(0))
    os.mkdir(tmp_path / "trace" / ".forwards-00002.parquet")  # where the file would go
    recorder.write(one_step(1))
    recorder.write(one_step(2))
    assert list_steps(str(tmp_path / "trace")) == [1]
    assert capsys.readouterr().err.count("Is a directory; recording stops before step 2") == 1


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("", None, "neither the folder of a recorded run nor a roofline"),
        ("meta.json", "{", "is not a trace: JSONDecodeError"),
        ("meta.json", '{"format": 99}', "not a trace of this version"),
        ("responses-00001.parquet", None, "no complete step is recorded"),
        ("forwards-00001.parquet", None, "00001.parquet: cannot be read"),
        ("other", "", "1 forwards are too few to fit a cost"),
    ],
)
def test_damaged_traces_are_refused_in_one_line(tmp_path, name, text, says):
    """text: new content of a file; None: the file, or the whole folder, is missing."""
    make_recorder(tmp_path).write(one_step(0))
    path = tmp_path / "trace" / name
    if text is not None:
        path.write_text(text)
    else:
        path.unlink() if name else shutil.rmtree(path)
    assert says in refusal(load_cost, str(tmp_path))
