"""Recorded runs against what the runs themselves report, and against counts worked out from the
responses alone."""

import hashlib
import json
import os
import shutil

import numpy as np
import pyarrow.parquet
import pytest
import torch

from bubblespec.config import Config, DataConfig, ModelConfig, RunConfig
from bubblespec.dist.ranks import Ranks
from bubblespec.errors import InputError
from bubblespec.records import ForwardRecord, Load, RolloutRecord, Span, StepRecord
from bubblespec.simulate.cost import cost_from_trace
from bubblespec.telemetry import trace
from bubblespec.telemetry.trace import Recorder, list_steps, read_meta, read_table
from bubblespec.types import Draft, Group, Prompt, SampleId, digest
from tests.helpers.clocks import forward_seconds, train_in_virtual_time
from tests.helpers.rows import samples_of
from tests.helpers.runs import ALWAYS_DRAFT, SHORT, digests, read, run

TRACED = "trace.enabled=true"
BUBBLE = ["speculative.method=bubble+suffix", "bubble.lookahead=1", ALWAYS_DRAFT]
DYNAMIC = [
    "rollout.dynamic_sampling=true",
    "rollout.dynamic_sampling_max_batches=3",
    "run.max_steps=3",
]


def columns(folder, kind: str, **wanted: int) -> dict[str, np.ndarray]:
    """Columns of a table, of the rows where columns have the values `wanted`. Lists are object
    arrays."""
    table = read_table(str(folder / "trace"), kind)
    found = {name: np.empty(len(table), object) for name in table.column_names}
    for name, column in found.items():
        column[:] = table[name].to_pylist()
    keep = (
        np.all([found[name] == value for name, value in wanted.items()], axis=0)
        if wanted
        else slice(None)
    )
    return {
        name: column[keep]
        if "tokens" in name and kind == "responses"
        else np.array(column[keep].tolist())
        for name, column in found.items()
    }


def digest_of(responses: dict[str, np.ndarray]) -> str:
    sha = hashlib.sha256()
    names = [responses[name] for name in ("uid", "visit", "sample")]
    for i in np.lexsort(names[::-1]):
        tokens = np.array(responses["tokens"][i], "<i4")
        sha.update(
            np.array([*(name[i] for name in names), len(tokens)], "<i8").tobytes()
            + tokens.tobytes()
        )
    return sha.hexdigest()


def check_against_metrics(folder, world_size: int, is_virtual: bool = False) -> None:
    """What must hold of any trace. In virtual time the end of the last own forward is that of the
    own rows."""
    lines = read(folder)
    assert list_steps(str(folder / "trace")) == [line["step"] for line in lines]
    for line in lines:
        step = line["step"]
        responses, steps = (
            columns(folder, "responses", step=step),
            columns(folder, "steps", step=step),
        )
        assert digest_of(responses) == line["rollout/digest"] == steps["digest"][0]
        assert responses["reward"].mean() == pytest.approx(line["reward"], rel=1e-12)
        lengths = np.array([len(tokens) for tokens in responses["tokens"]])
        assert lengths.mean() == pytest.approx(line["completions/mean_length"])
        assert 1 - responses["stopped"].mean() == pytest.approx(line["completions/clipped_ratio"])
        for rank in range(world_size):
            row = {name: value[rank] for name, value in steps.items()}
            key = f"/rank_{rank}" if world_size > 1 else ""
            assert row["gen_s"] - row["wait_s"] == pytest.approx(
                line[f"timing_s/gen{key}"], abs=1e-9
            )
            assert row["meet_s"] + row["wait_s"] == pytest.approx(
                line[f"timing_s/bubble{key}"], abs=1e-9
            )
            assert row["reward_s"] == pytest.approx(line[f"timing_s/reward{key}"], abs=1e-9)
            assert row["gen_s"] + row["meet_s"] + row["reward_s"] + row["train_s"] == pytest.approx(
                row["step_s"], rel=1e-6
            )
            assert (
                row["own_s"] <= row["total_s"] <= row["gen_s"]
                and row["exchange_s"] <= row["reward_s"]
            )
            forwards = columns(folder, "forwards", step=step, rank=rank)
            assert (forwards["own_rows"] > 0).sum() == row["own_forwards"] > 0
            spent = forwards["end_s"] - forwards["begin_s"]
            assert (spent > 0).all() and (
                forwards["engine_s"] + forwards["propose_s"] <= spent + 1e-9
            ).all()
            last_of_batch = np.flatnonzero(np.append(np.diff(forwards["batch"]), 1))
            inner = np.setdiff1d(np.arange(len(spent)), last_of_batch)
            assert (forwards["begin_s"][inner + 1] >= forwards["end_s"][inner]).all()
            ends = [
                forwards["end_s"][(forwards["batch"] == b) & (forwards["own_rows"] > 0)]
                for b in set(forwards["batch"])
            ]
            last_s = sum(end[-1] for end in ends if len(end))
            assert last_s <= row["own_s"] + 1e-9 and (
                not is_virtual or last_s == pytest.approx(row["own_s"], abs=1e-4)
            )
        assert line["timing_s/step"] == pytest.approx(steps["step_s"][0], abs=1e-9)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One process in virtual time, no speculation, several batches a step."""
    folder = tmp_path_factory.mktemp("plain")
    train_in_virtual_time(
        *SHORT, *DYNAMIC, "speculative.method=none", TRACED, f"run.output_dir={folder}"
    )
    return folder


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """Two ranks that draft one step ahead."""
    folder = tmp_path_factory.mktemp("drafting")
    run(folder, 2, *BUBBLE, TRACED, "rollout.placement=in_turn")
    return folder


@pytest.fixture(scope="module")
def drafting_alone(tmp_path_factory):
    """One process in virtual time that drafts one step ahead."""
    folder = tmp_path_factory.mktemp("drafting_alone")
    train_in_virtual_time(*SHORT, *BUBBLE, TRACED, f"run.output_dir={folder}")
    return folder


def test_plain_run_is_recorded_as_it_was(plain):
    check_against_metrics(plain, 1, is_virtual=True)
    meta, lines = read_meta(str(plain / "trace")), read(plain)
    assert (
        meta["world_size"] == 1
        and meta["config"]["speculative.method"] == "none"
        and meta["hardware"]["threads"] == 1
    )
    assert any(line["dynamic_sampling/num_batches"] > 1 for line in lines)
    for line in lines:
        responses, forwards = (
            columns(plain, kind, step=line["step"]) for kind in ("responses", "forwards")
        )
        assert (
            set(responses["batch"])
            == set(forwards["batch"])
            == set(range(line["dynamic_sampling/num_batches"]))
        )
        assert (
            all(draft is None for draft in responses["draft_tokens"])
            and (responses["draft_version"] == -1).all()
        )
        # Each prompt is fed once for its group, all but its last token, and then a token for each
        # token of a response.
        for batch in set(responses["batch"]):
            inside, fed = responses["batch"] == batch, forwards["batch"] == batch
            firsts = inside & (responses["sample"] == 0)
            assert forwards["prompt_tokens"][fed].sum() == sum(
                len(p) - 1 for p in responses["prompt_tokens"][firsts]
            )
            decoded = forwards["tokens"][fed] - forwards["prompt_tokens"][fed]
            assert decoded.sum() == sum(len(tokens) for tokens in responses["tokens"][inside])
            # All rows have slots; those that wait for their group's first to have fed the prompt
            # are one forward behind it.
            forwards_of_row = [len(tokens) for tokens in responses["tokens"][inside]] + (
                responses["sample"][inside] > 0
            )
            left = [int((forwards_of_row > n).sum()) for n in range(forwards_of_row.max())]
            assert forwards["own_rows"][fed].tolist() == left
        assert (forwards["draft_tokens"] == 0).all() and (forwards["looked_up_rows"] == 0).all()


def check_drafts(folder, owners: list[int]) -> int:
    """What must hold of a trace of a run that drafts one step ahead, however much. Returns the
    number of drafts."""
    lines = read(folder)
    num_drafts = 0
    for line in lines:
        responses, forwards, steps = (
            columns(folder, kind, step=line["step"]) for kind in ("responses", "forwards", "steps")
        )
        assert responses["owner"].tolist() == owners
        slowest = steps["own_s"].argmax()
        assert steps["own_forwards"][slowest] == line["rollout/forwards"]
        assert steps["drafted_tokens"].sum() == line["bubble/drafted_tokens"]
        of_own_rows = line["rollout/spec_accepted_tokens"] + line["rollout/spec_wasted_tokens"]
        assert forwards["draft_tokens"].sum() >= of_own_rows
        nothing_ahead = forwards["draft_tokens"][forwards["ahead_rows"] == 0].sum()
        assert nothing_ahead <= of_own_rows
        if line["step"] == 0:
            continue
        # One step is looked ahead, so the store held the drafts of this step and no others.
        drafts = [draft for draft in responses["draft_tokens"] if draft is not None]
        assert sum(map(len, drafts)) == lines[line["step"] - 1]["bubble/store_tokens"]
        has_draft = np.array([draft is not None for draft in responses["draft_tokens"]])
        assert (responses["draft_version"] == np.where(has_draft, line["step"] - 1, -1)).all()
        num_drafts += len(drafts)
        for i in np.flatnonzero(has_draft & responses["draft_finished"]):
            assert (
                responses["draft_tokens"][i][-1] == 0 or len(responses["draft_tokens"][i]) == 48
            ), "ends as a response does"
        same = [
            next(
                (n for n, (a, b) in enumerate(zip(d, t, strict=False)) if a != b),
                min(len(d), len(t)),
            )
            for d, t in zip(
                responses["draft_tokens"][has_draft], responses["tokens"][has_draft], strict=True
            )
        ]
        assert sum(same) >= 0.5 * sum(map(len, drafts)), "drafts of the right responses"
    return num_drafts


def test_drafting_run_is_recorded_as_it_was(drafting):
    check_against_metrics(drafting, 2)
    check_drafts(drafting, 4 * ([0] * 4 + [1] * 4))
    assert columns(drafting, "forwards")["looked_up_rows"].sum() > 0
    cost = cost_from_trace(str(drafting / "trace"))
    assert (
        cost.seconds((4, 4, 0, 200, 0, 0)) > 0
        and cost.propose_seconds(4) > 0
        and cost.model.endswith("float64")
    )


def test_drafts_and_costs_of_a_recorded_run(drafting_alone):
    check_against_metrics(drafting_alone, 1, is_virtual=True)
    assert check_drafts(drafting_alone, [0] * 32) > 40
    cost = cost_from_trace(str(drafting_alone / "trace"))
    for load in (
        Load(4, 4, 0, 200, 0, 0),
        Load(16, 16, 0, 1000, 0, 0),
        Load(16, 40, 5, 1000, 0, 24),
        Load(8, 60, 3, 500, 30, 10),
    ):
        assert cost.seconds(load) == pytest.approx(forward_seconds(load), rel=0.02)
    assert (
        1e-6 < cost.propose_seconds(4) < 1e-4
    )  # two looks at the clock for each of proposing and observing


def test_recording_leaves_tokens_as_they_are_and_a_continued_run_records_the_rest(
    drafting, tmp_path
):
    """Without recording up to the second step, with it from there on: recording is no other run."""
    run(tmp_path, 2, *BUBBLE)
    assert digests(tmp_path) == digests(drafting) and not (tmp_path / "trace").exists()
    continued = tmp_path / "continued"
    shutil.copytree(drafting, continued)
    shutil.rmtree(continued / "checkpoint-4")
    before = {
        step: columns(drafting, "responses", step=step)["tokens"].tolist() for step in range(4)
    }
    (continued / "trace" / "steps-00003.parquet").write_bytes(b"torn")
    for name in ("steps-00007.parquet", "forwards-00003.parquet.tmp"):
        (continued / "trace" / name).touch()
    run(continued, 2, "speculative.method=none", TRACED)
    check_against_metrics(continued, 2)
    assert all(
        columns(continued, "responses", step=step)["tokens"].tolist() == before[step]
        for step in range(4)
    )
    assert len(os.listdir(continued / "trace")) == 1 + 3 * 4
    assert read_meta(str(continued / "trace"))["config"]["speculative.method"] == "none"


def one_step(step: int, drafts: dict[SampleId, Draft] | None = None) -> StepRecord:
    """Of two prompts with two responses each, in two rollouts; the second prompt was drawn
    before."""
    groups = [Group(Prompt(uid, "p", (uid, 2), {}), visit) for uid, visit in ((11, 0), (7, 5))]
    tokens = [np.arange(5 + i) for i in range(4)]
    rewards = np.arange(4.0).reshape(2, 2)
    truncated = np.array([True, False, False, True])
    samples = samples_of(groups, tokens, is_truncated=truncated, rewards=rewards.reshape(-1, 1))
    forward = ForwardRecord(
        10.0,
        10.5,
        0.375,
        0.125,
        *Load(3, 9, 2, 40, 5, 1),
        own_rows=2,
        ahead_rows=1,
        looked_up_rows=3,
    )
    stages = [
        Span("gen", 1.0, 3.0),
        Span("wait", 3.0, 3.5),
        Span("reward", 3.5, 4.0),
        Span("train", 4.0, 6.0),
    ]
    return StepRecord(
        step=step,
        samples=samples,
        rewards=rewards,
        generated=samples,
        all_rewards=rewards,
        owners=np.array([0, 1, 0, 0]),
        batch_sizes=[1, 1],
        rollouts=[RolloutRecord(10.0, 11.0, [forward]), RolloutRecord(12.0, 12.5)],
        stages=stages,
        spans=[Span("exchange", 3.5, 3.75)],
        drafts=drafts or {},
        used=groups,
    )


def make_recorder(folder) -> Recorder:
    config = Config(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d"),
        run=RunConfig(output_dir=str(folder)),
    )
    return Recorder(config, Ranks(torch.device("cpu")), 0)


def test_round_trip_of_one_step(tmp_path):
    drafts = {SampleId(7, 5, 1): Draft(np.array([4, 5], np.int32), True, version=2)}
    drafts[SampleId(7, 6, 0)] = Draft(np.array([6], np.int32), True, version=2)  # of another step
    make_recorder(tmp_path).write(one_step(3, drafts))
    found = columns(tmp_path, "responses")
    assert found["uid"].tolist() == [11, 11, 7, 7] and found["sample"].tolist() == [0, 1, 0, 1]
    assert found["visit"].tolist() == [0, 0, 5, 5]
    assert found["batch"].tolist() == [0, 0, 1, 1] and found["owner"].tolist() == [0, 1, 0, 0]
    assert found["prompt_tokens"].tolist() == [[11, 2], [11, 2], [7, 2], [7, 2]]
    assert found["tokens"].tolist() == [list(range(5 + i)) for i in range(4)]
    assert found["stopped"].tolist() == [False, True, True, False] and found["reward"].tolist() == [
        0.0,
        1.0,
        2.0,
        3.0,
    ]
    assert found["draft_tokens"].tolist() == [None, None, None, [4, 5]]
    assert found["draft_finished"].tolist() == [False, False, False, True]
    assert found["draft_version"].tolist() == [-1, -1, -1, 2]
    (forward,) = read_table(str(tmp_path / "trace"), "forwards").to_pylist()
    counts = dict(zip(Load._fields, (3, 9, 2, 40, 5, 1), strict=True)) | {
        "own_rows": 2,
        "ahead_rows": 1,
        "looked_up_rows": 3,
    }
    counts |= {
        "step": 3,
        "rank": 0,
        "batch": 0,
        "begin_s": 0.0,
        "end_s": 0.5,
        "engine_s": 0.375,
        "propose_s": 0.125,
    }
    assert forward == counts
    (step,) = read_table(str(tmp_path / "trace"), "steps").to_pylist()
    assert (step["gen_s"], step["meet_s"], step["reward_s"], step["train_s"], step["step_s"]) == (
        2.0,
        0.5,
        0.5,
        2.0,
        5.0,
    )
    assert (
        step["own_s"],
        step["wait_s"],
        step["total_s"],
        step["exchange_s"],
        step["own_forwards"],
    ) == (0.5, 0.0, 1.5, 0.25, 1)
    assert step["digest"] == digest(one_step(3).generated) == digest_of(found)


def test_types_are_those_of_the_format(tmp_path):
    make_recorder(tmp_path).write(one_step(0))
    schema = pyarrow.parquet.read_schema(tmp_path / "trace" / "responses-00000.parquet")
    assert [str(schema.field(name).type) for name in ("step", "uid", "visit", "sample")] == [
        "int32",
        "int64",
        "int32",
        "int16",
    ]
    assert str(schema.field("reward").type) == "double"
    assert str(schema.field("draft_tokens").type) == "list<element: int32>"
    schema = pyarrow.parquet.read_schema(tmp_path / "trace" / "forwards-00000.parquet")
    assert [str(schema.field(name).type) for name in ("begin_s", "positions", "rows")] == [
        "double",
        "int64",
        "int32",
    ]


def test_recording_stops_where_it_is_full_and_says_so_once(tmp_path, monkeypatch, capsys):
    make_recorder(tmp_path / "one").write(one_step(0))
    size = sum(path.stat().st_size for path in (tmp_path / "one" / "trace").iterdir())
    monkeypatch.setattr(trace, "MOST_BYTES", size)
    recorder = make_recorder(tmp_path / "two")
    for step in range(4):
        recorder.write(one_step(step))
    assert list_steps(str(tmp_path / "two" / "trace")) == [0, 1] and not recorder.is_on
    err = capsys.readouterr().err
    assert (
        err.count("warning: ") == 1 and "recording stops before step 2, and the run goes on" in err
    )


def test_recording_stops_where_it_cannot_write_and_the_run_goes_on(tmp_path, capsys):
    recorder = make_recorder(tmp_path)
    recorder.write(one_step(0))
    os.mkdir(tmp_path / "trace" / "forwards-00001.parquet.tmp")  # where the file would go
    recorder.write(one_step(1))
    recorder.write(one_step(2))
    assert list_steps(str(tmp_path / "trace")) == [0]
    assert (
        capsys.readouterr().err.count(
            "Is a directory; recording stops before step 1, and the run goes on"
        )
        == 1
    )


@pytest.mark.parametrize(
    "break_it, says",
    [
        (lambda folder: shutil.rmtree(folder), "is not a trace: meta.json: No such file"),
        (lambda folder: (folder / "meta.json").write_text("{"), "meta.json: not valid JSON"),
        (
            lambda folder: (folder / "meta.json").write_text('{"format": 99}'),
            "not a trace of this version",
        ),
        (lambda folder: (folder / "steps-00000.parquet").unlink(), "no step is recorded there"),
        (
            lambda folder: (folder / "forwards-00000.parquet").unlink(),
            "forwards-00000.parquet: cannot be read",
        ),
        (
            lambda folder: (folder / "forwards-00000.parquet").write_bytes(b"PAR1 no"),
            "forwards-00000.parquet: cannot be read",
        ),
        (
            lambda folder: shutil.copy(
                folder / "steps-00000.parquet", folder / "forwards-00000.parquet"
            ),
            "columns are not those",
        ),
        (lambda folder: None, "1 forwards are too few to fit their cost"),
    ],
)
def test_damaged_traces_are_refused_in_one_line(tmp_path, break_it, says):
    make_recorder(tmp_path).write(one_step(0))
    break_it(tmp_path / "trace")
    with pytest.raises(InputError) as error:
        cost_from_trace(str(tmp_path / "trace"))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path):
    (tmp_path / "trace").write_text("in the way")
    with pytest.raises(InputError, match=r"trace\.enabled: cannot write to .*: File exists"):
        make_recorder(tmp_path)


def test_meta_is_plain_json(tmp_path):
    make_recorder(tmp_path)
    meta = json.loads((tmp_path / "trace" / "meta.json").read_text(encoding="utf-8"))
    assert (
        meta["hardware"]["gpu"] is None
        and meta["hardware"]["cores"] >= 1
        and meta["hardware"]["cpu"]
    )
    assert (
        set(meta["versions"]) == {"python", "torch", "transformers", "numpy"}
        and meta["config"]["trace.enabled"] is False
    )
