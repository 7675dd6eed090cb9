"""Recorded runs in the simulator, its command line, and the map of many runs."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest

from benchmarks import replay_map
from bubblespec.config import flatten
from bubblespec.simulate import __main__
from bubblespec.simulate.analytic import analytic_cost
from bubblespec.simulate.cost import ForwardCost
from bubblespec.simulate.drafting import STOP, VOCABULARY
from bubblespec.simulate.recorded import RecordedWorkload
from bubblespec.simulate.run import simulate
from bubblespec.simulate.workload import Workload
from bubblespec.telemetry.trace import (
    FOLDER,
    FORMAT,
    _write_table,
    list_steps,
    read_meta,
    read_table,
)
from tests.helpers.simulated import LinearCost, figures, make_config, make_workload
from tests.helpers.warm import ROOT, python


def write_trace(
    run_dir, workload: Workload, config, drafts: dict | None = None, first_step: int = 0
) -> list[str]:
    """A trace as a run would leave it that recorded from `first_step` on; drafts: (tokens,
    finished) by (step, uid, sample). Returns the digests."""
    folder = os.path.join(run_dir, FOLDER)
    os.makedirs(folder)
    meta = {
        "format": FORMAT,
        "world_size": 2,
        "hardware": {"cpu": "a test"},
        "versions": {},
        "config": flatten(config),
    }
    with open(os.path.join(folder, "meta.json"), "w") as file:
        json.dump(meta, file)
    digests = [step.digest for step in simulate(config, workload, LinearCost(), 2)]
    for step in range(first_step, workload.num_steps):
        keys = [
            (step, p.uid, sample)
            for p in workload.batch(step)
            for sample in range(workload.num_generations)
        ]
        tokens = [workload.response(*key) for key in keys]
        prompts = {p.uid: p.token_ids for p in workload.batch(step)}
        found = [(drafts or {}).get(key) for key in keys]
        responses = {
            "step": [step] * len(keys),
            "batch": [0] * len(keys),
            "uid": [uid for _, uid, _ in keys],
            "visit": [workload.visit(step, uid) for _, uid, _ in keys],
            "sample": [sample for *_, sample in keys],
            "owner": [0] * len(keys),
            "prompt_tokens": [prompts[uid] for _, uid, _ in keys],
            "tokens": tokens,
            "stopped": [t[-1] == STOP for t in tokens],
            "reward": [0.5] * len(keys),
            "draft_tokens": [None if draft is None else draft[0] for draft in found],
            "draft_finished": [draft is not None and draft[1] for draft in found],
            "draft_version": [-1] * len(keys),
        }
        _write_table(folder, "responses", step, responses)
        names = "own_s wait_s total_s gen_s meet_s reward_s train_s exchange_s step_s"
        zeros = {name: [0.0] for name in names.split()}
        steps = {
            "step": [step],
            "rank": [0],
            "digest": [digests[step]],
            "own_forwards": [1],
            "drafted_tokens": [0],
            **zeros,
        }
        _write_table(folder, "steps", step, steps)
    return digests[first_step:]


def make_format_1(run_dir) -> None:
    """A trace as it was before samples were named by their visits: without them, and with digests
    that do not cover them."""
    folder = os.path.join(run_dir, FOLDER)
    for step in list_steps(folder):
        path = os.path.join(folder, f"responses-{step:05d}.parquet")
        responses = pyarrow.parquet.read_table(path, partitioning=None).drop_columns("visit")
        pyarrow.parquet.write_table(responses, path)
        path = os.path.join(folder, f"steps-{step:05d}.parquet")
        table = pyarrow.parquet.read_table(path, partitioning=None)
        place = table.column_names.index("digest")
        table = table.set_column(place, "digest", pyarrow.array([digest_of_format_1(responses)]))
        pyarrow.parquet.write_table(table, path)
    path = os.path.join(folder, "meta.json")
    with open(path) as file:
        meta = json.load(file)
    with open(path, "w") as file:
        json.dump(meta | {"format": 1}, file)


def digest_of_format_1(responses: pyarrow.Table) -> str:
    sha = hashlib.sha256()
    for row in sorted(responses.to_pylist(), key=lambda row: (row["uid"], row["sample"])):
        sha.update(np.array([row["uid"], row["sample"], len(row["tokens"])], "<i8").tobytes())
        sha.update(np.array(row["tokens"], "<i4").tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize(("first_step", "wanted"), [(0, [0, 0, 1, 1, 2, 2]), (3, [1, 2, 2])])
def test_a_recorded_run_has_the_visits_that_were_recorded(tmp_path, first_step, wanted):
    """Recorded from the first step on, and from later on, where prompts have been drawn before that
    the trace does not have."""
    spec = {"steps": 6, "epochs": 3}
    digests = write_trace(tmp_path, make_workload(**spec), make_config(), first_step=first_step)
    recorded, made = RecordedWorkload(str(tmp_path)), make_workload(**spec)
    steps = range(first_step, 6)
    assert [{group.visit for group in recorded.launch(step).groups} for step in steps] == [
        {visit} for visit in wanted
    ]
    assert [recorded.launch(step) for step in steps] == [made.launch(step) for step in steps]
    assert {recorded.step_of(group.sample(1)) for group in recorded.launch(4).groups} == {4}
    for method in ("none", "bubble+suffix"):
        found = simulate(make_config(method), recorded, LinearCost(), 2)
        assert (
            [step.digest for step in found] == digests == [recorded.digests[step] for step in steps]
        )


def test_a_trace_of_format_1_is_simulated_as_one_of_format_2(tmp_path):
    spec = {"steps": 6, "epochs": 3}
    write_trace(tmp_path, make_workload(**spec), make_config())
    newer = RecordedWorkload(str(tmp_path))
    make_format_1(tmp_path)
    with pytest.raises(KeyError):
        read_table(str(tmp_path / FOLDER), "responses")["visit"]
    older = RecordedWorkload(str(tmp_path))
    assert older.digests == newer.digests
    assert [older.launch(step) for step in range(6)] == [newer.launch(step) for step in range(6)]
    for method in ("none", "bubble+suffix"):
        one, other = (
            simulate(make_config(method), recorded, LinearCost(), 2) for recorded in (older, newer)
        )
        assert figures(one) == figures(other)


def test_digests_of_a_run_that_was_recorded_in_format_1():
    """Those that the run itself has reported, over the responses that the trace has."""
    folder = os.path.join(ROOT, "tests", "data", "replay", "2_ranks_bubble+suffix", FOLDER)
    assert read_meta(folder)["format"] == 1
    for step in list_steps(folder):
        reported = set(read_table(folder, "steps", [step])["digest"].to_pylist())
        assert reported == {digest_of_format_1(read_table(folder, "responses", [step]))}


def test_a_recorded_run_says_what_it_said(tmp_path):
    workload, config = make_workload(), make_config()
    true = {
        (1, p.uid, j): workload.response(1, p.uid, j) for p in workload.batch(1) for j in range(4)
    }
    keys = list(true)
    wrong = (true[keys[0]] + 1) % VOCABULARY
    wrong[:3], wrong[-1] = true[keys[0]][:3], STOP
    drafts = {keys[0]: (wrong, True), keys[1]: (true[keys[1]][:2], False)}
    digests = write_trace(tmp_path, workload, config, drafts)
    recorded = RecordedWorkload(str(tmp_path))
    nothing = np.empty(0, np.int64)
    np.testing.assert_array_equal(recorded.draft(*keys[0], 1, 300, nothing), wrong)
    np.testing.assert_array_equal(recorded.draft(*keys[1], 1, 300, nothing), true[keys[1]])
    np.testing.assert_array_equal(recorded.draft(*keys[0], 0, 300, nothing), true[keys[0]])
    assert recorded.mean_run == 5.0  # 3 tokens and a mismatch, 2 tokens and none
    for method in ("none", "bubble+suffix"):
        steps = simulate(make_config(method), recorded, LinearCost(), 2)
        assert (
            [step.digest for step in steps]
            == digests
            == [recorded.digests[step] for step in range(4)]
        )


def test_a_trace_is_simulated_with_a_drafter(tmp_path):
    digests = write_trace(tmp_path, make_workload(), make_config())
    steps = simulate(
        make_config("suffix+drafter"), RecordedWorkload(str(tmp_path)), LinearCost(), 2
    )
    assert [step.digest for step in steps] == digests
    assert sum(step.proposed_tokens - step.refused_tokens for step in steps) > 200


def command(*arguments: str, cwd=ROOT) -> subprocess.CompletedProcess:
    return python("-m", "bubblespec.simulate", *arguments, folder=cwd)


def test_the_command_line(tmp_path):
    """Both methods side by side, the JSON and the picture; the same figures again from the
    functions."""
    analytic_cost("h200", "7b", 2e-3, 0.8, compute_share=0.5).save(str(tmp_path / "cost.json"))
    done = command(
        "--synthetic", "mean=40,max=200,steps=3,prompt=8", "--ranks", "2", "--cost-model", str(tmp_path / "cost.json"),
        "--json", str(tmp_path / "out.json"), "--timeline-step", "1", "--output", str(tmp_path / "pictures"),
        "rollout.num_prompts_per_step=4", "rollout.num_generations=2", "speculative.method=bubble",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "analytic, not measured" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert list(report["methods"]) == ["none", "bubble"] and report["cost_kind"] == "analytic"
    for method, found in report["methods"].items():
        assert (
            tmp_path / "pictures" / method / "timeline" / "step_00001.png"
        ).stat().st_size > 5000
        config = make_config(method, 4, 2, 200, rollout__max_batch_tokens=8192)
        workload = make_workload(4, 2, mean=40.0, max=200, steps=3, prompt=8)
        steps = simulate(config, workload, ForwardCost.load(str(tmp_path / "cost.json")), 2)
        assert [step["seconds"] for step in found["steps"]] == [step.seconds for step in steps]
        assert found["total"]["seconds"] == pytest.approx(sum(step.seconds for step in steps))
    again = command(
        "--synthetic",
        "steps=1",
        "--cost-model",
        str(tmp_path / "cost.json"),
        "--json",
        str(tmp_path / "out.json"),
    )
    assert (
        again.returncode == 2
        and again.stderr.strip() == f"error: --json: {tmp_path / 'out.json'} exists"
    )


def check_error(capsys, words: str, *arguments: str) -> None:
    old, sys.argv = sys.argv, ["simulate", *arguments]
    try:
        code = __main__.main()
    finally:
        sys.argv = old
    said = capsys.readouterr()
    assert code == 2 and said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert words in said.err


def test_wrong_arguments_end_in_one_line(tmp_path, capsys):
    cost = str(tmp_path / "cost.json")
    analytic_cost("h200", "7b", 2e-3, 0.8, compute_share=0.5).save(cost)
    synthetic = ("--synthetic", "mean=40,max=200,steps=2", "--cost-model", cost)
    check_error(capsys, "is not a trace", "--trace", str(tmp_path / "nowhere"))
    check_error(capsys, "--cost-model: give one", "--synthetic", "steps=2")
    check_error(
        capsys,
        "nowhere.json",
        "--synthetic",
        "steps=2",
        "--cost-model",
        str(tmp_path / "nowhere.json"),
    )
    check_error(capsys, "unknown name 'sizes'", "--synthetic", "sizes=2", "--cost-model", cost)
    check_error(capsys, "steps=two is no int", "--synthetic", "steps=two", "--cost-model", cost)
    check_error(capsys, "run: 0.0 must be from 1", "--synthetic", "run=0", "--cost-model", cost)
    check_error(capsys, "mean: nan must be", "--synthetic", "mean=nan", "--cost-model", cost)
    check_error(capsys, "--ranks: 0", *synthetic, "--ranks", "0")
    check_error(capsys, "--ranks: 17 ranks for 16 prompts", *synthetic, "--ranks", "17")
    check_error(capsys, "'optim.learning_rate=1'", *synthetic, "optim.learning_rate=1")
    check_error(capsys, "rollout.num_slot: unknown key", *synthetic, "rollout.num_slot=1")
    check_error(capsys, "give it as max", *synthetic, "rollout.max_completion_length=100")
    check_error(
        capsys, "--timeline-step and --output go together", *synthetic, "--timeline-step", "1"
    )
    check_error(
        capsys,
        "--timeline-step: 2 is none",
        *synthetic,
        "--timeline-step",
        "2",
        "--output",
        str(tmp_path / "o"),
    )
    check_error(
        capsys,
        "--drafter: tokens_a_pass: 7.0 must be from 1 to 6",
        *synthetic,
        "--drafter",
        "tokens_a_pass=7",
    )
    check_error(
        capsys, "--drafter: share: 2.0 must be from 0 to 1", *synthetic, "--drafter", "share=2"
    )
    check_error(
        capsys,
        "--drafter: speculative.method=bubble has none",
        *synthetic,
        "--drafter",
        "share=0.1",
        "speculative.method=bubble",
    )
    check_error(capsys, "--drafts: give its values in --synthetic", *synthetic, "--drafts", "run=5")


def test_a_damaged_trace_ends_in_one_line(tmp_path, capsys):
    write_trace(tmp_path, make_workload(), make_config())
    trace = ("--trace", str(tmp_path))
    check_error(capsys, "cut at 300", *trace, "rollout.max_completion_length=301")
    check_error(
        capsys,
        "the workload has 4",
        *trace,
        "rollout.num_generations=2",
        "--cost-model",
        saved_cost(tmp_path),
    )
    check_error(capsys, "forwards", *trace)  # none were recorded, and no cost given
    folder = tmp_path / FOLDER
    os.remove(folder / "steps-00001.parquet")
    check_error(capsys, "not consecutive", *trace)
    (folder / "meta.json").write_text(json.dumps({"format": FORMAT + 1}))
    check_error(capsys, "not a trace of this version", *trace)


def saved_cost(folder) -> str:
    path = str(folder / "cost.json")
    analytic_cost("h200", "7b", 2e-3, 0.8, compute_share=0.5).save(path)
    return path


# The map


def cell(mismatch, verification, speedup, drift=0) -> dict:
    place = {"lengths": "a", "ranks": 8, "rows": 8, "steps": 4}
    return place | {
        "mismatch": mismatch,
        "drift": drift,
        "verification": verification,
        "speedup": speedup,
    }


def test_a_cell_is_bounded_by_what_would_help_it_most():
    cells = [
        cell(None, 0.0, 2.0),
        cell(None, 4.0, 1.5),
        cell(500.0, 0.0, 1.2),
        cell(500.0, 4.0, 1.1),
        cell(500.0, 0.0, 1.9, 1),
    ]
    bounds = [replay_map.bound_of(one, cells) for one in cells]
    assert bounds == ["bubble volume", "verification", "acceptance", "acceptance", "bubble volume"]
    assert replay_map.bound_of(cells[3], cells[1:]) is None


def test_a_map_is_made_in_several_commands_and_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(replay_map, "LENGTHS", {"tiny": (20.0, 80)})
    # What a pool does, in this process, where the lengths are replaced.
    alone = SimpleNamespace(
        Pool=lambda jobs: contextlib.nullcontext(SimpleNamespace(imap_unordered=map))
    )
    monkeypatch.setattr(replay_map.multiprocessing, "get_context", lambda kind: alone)
    simulated, simulate_run = [], replay_map.simulate_run
    monkeypatch.setattr(
        replay_map, "simulate_run", lambda run: (simulated.append(run), simulate_run(run))[1]
    )
    path = str(tmp_path / "map.json")

    def command(*options: str) -> int:
        simulated.clear()
        arguments = [
            "replay_map.py",
            path,
            "--ranks",
            "2",
            "--lengths",
            "tiny",
            "--steps",
            "3",
            "--jobs",
            "1",
            *options,
        ]
        monkeypatch.setattr(sys, "argv", arguments)
        return replay_map.main()

    assert command("--mismatches", "inf", "20", "--verification", "0") == 0 and len(simulated) == 3
    assert command("--figure", str(tmp_path / "map.png")) == 0 and len(simulated) == 8, (
        "all but what was there"
    )
    assert (
        command("--drift", "--mismatches", "20", "--verification", "0") == 0 and len(simulated) == 1
    )
    cells = replay_map.cells_of(replay_map.read(path))
    speedups = {(c["mismatch"], c["drift"], c["verification"]): c["speedup"] for c in cells}
    assert len(cells) == len(speedups) == 11 and all(
        c["bound"] for c in cells if c["mismatch"] != 20.0 or not c["verification"]
    )
    assert speedups[None, 0, 0.0] > speedups[None, 0, 4.0] and speedups[None, 0, 0.0] > 1.1
    assert speedups[None, 0, 0.0] > speedups[20.0, 0, 0.0] >= speedups[20.0, 1, 0.0]
    assert (
        tmp_path / "map.png"
    ).stat().st_size > 10_000 and "| tiny | 2 | 3 | 20 / age | 0 |" in capsys.readouterr().out
    assert (
        command("--figure", str(tmp_path / "map.png")) == 2 and "exists" in capsys.readouterr().err
    )
    (tmp_path / "map.json").write_text('{"title": "of another cost", "runs": []}')
    assert command() == 2 and "of another cost" in capsys.readouterr().err
