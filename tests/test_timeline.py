"""Timelines: forwards named after what the engine really fed, stages around finer spans, trace,
picture, a run of two ranks."""

import json

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bubblespec.dist.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.records import ForwardRecord, Load, RolloutRecord, Span
from bubblespec.telemetry.timeline import COLOURS, KINDS, draw, gather_lanes, step_spans, trace
from bubblespec.types import Row, SampleId
from tests.helpers.models import VOCAB
from tests.helpers.runs import read, run

SPANS = [
    Span("prefill", 10.5, 11.0),
    Span("decode", 11.0, 13.0),
    Span("exchange", 15.5, 15.75),
    Span("sync", 17.0, 17.5),
    Span("sync", 18.5, 19.0),
]
STAGES = [
    Span("gen", 10.0, 13.25),
    Span("wait", 13.25, 15.0),
    Span("reward", 15.0, 16.0),
    Span("train", 16.0, 19.0),
]
WHOLE = [
    ("prefill", 10.5, 11.0),
    ("decode", 11.0, 13.0),
    ("wait", 13.25, 15.0),
    ("reward", 15.0, 15.5),
    ("exchange", 15.5, 15.75),
    ("reward", 15.75, 16.0),
    ("train", 16.0, 17.0),
    ("sync", 17.0, 17.5),
    ("train", 17.5, 18.5),
    ("sync", 18.5, 19.0),
]


def lane(*events: tuple[str, float, float]) -> np.ndarray:
    return np.array([(KINDS.index(kind), begin, end) for kind, begin, end in events])


def complete_events(found: dict) -> list[dict]:
    return [event for event in found["traceEvents"] if event["ph"] == "X"]


def share_of_colour(picture: np.ndarray, kind: str) -> float:
    """Share of a picture's pixels that have exactly the kind's colour. picture: uint8 [height,
    width, 4]."""
    colour = np.rint(255 * np.array(matplotlib.colors.to_rgba(COLOURS[kind]))).astype(np.uint8)
    return float((picture == colour).all(axis=2).mean())


def forward(end_s: float, load: Load, own_rows: int = 4, ahead_rows: int = 0) -> ForwardRecord:
    """It takes a second: 0.125 s of the host's, 0.25 s for proposals, the rest in the engine."""
    return ForwardRecord(
        end_s - 1.0, end_s, 0.625, 0.25, *load, own_rows, ahead_rows, looked_up_rows=0
    )


def test_neighbours_of_one_kind_are_joined():
    plain = Load(4, 4, 0, 100, 0, 0)
    forwards = [forward(end_s, plain) for end_s in (1.0, 2.25, 4.0)]
    waits = [Span("wait", 2.25, 2.5), Span("wait", 2.5, 3.0)]
    found = RolloutRecord(0.0, 4.0, forwards, waits).spans
    assert found == [("decode", 0.125, 2.25), ("wait", 2.25, 3.0), ("decode", 3.125, 4.0)]


@pytest.mark.parametrize(
    "own_rows, ahead_rows, prompt_tokens, draft_tokens, kind",
    [
        (4, 0, 7, 3, "prefill"),
        (4, 0, 0, 3, "verify"),
        (4, 0, 0, 0, "decode"),
        (1, 7, 0, 3, "draft soft"),
        (0, 7, 9, 0, "draft hard"),
    ],
)
def test_forwards_have_the_kind_of_what_they_are_for(
    own_rows, ahead_rows, prompt_tokens, draft_tokens, kind
):
    load = Load(4, 20, 2, 100, prompt_tokens, draft_tokens)
    assert forward(1.0, load, own_rows, ahead_rows).kind == kind


PARAMS = SamplingParams(stop_token_ids=(5, 11))


def make_engine(make_model, num_slots: int, max_batch_tokens: int) -> Engine:
    model = make_model()
    prepare_model(model, 100)
    options = {"max_length": 100, "seed": 5, "max_batch_tokens": max_batch_tokens}
    return Engine(ModelRunner(model, num_slots, **options))


def make_rows() -> list[Row]:
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(1, VOCAB, length).tolist()) for length in (2, 40, 9, 17, 30)]
    return [
        Row(SampleId(u, 0, j), prompt, 12) for u, prompt in enumerate(prompts) for j in range(4)
    ]


@pytest.mark.parametrize("num_slots, max_batch_tokens", [(64, 64), (6, 8)])
def test_prompt_tokens_are_said_of_the_forwards_that_compute_them_and_no_others(
    make_model, num_slots, max_batch_tokens
):
    """Against what the engine plans: prompt tokens before the last one, whose forward already
    samples. Slots are refilled, and prompts are fed in parts, copied from other slots, or still
    held by the slot."""
    engine = make_engine(make_model, num_slots, max_batch_tokens)
    forward, planned = engine.runner.forward, []

    def noted_forward(batch, params) -> tuple:
        prompt_length = np.array([len(row.prompt) for row in engine.rows])
        planned.append(bool((batch.count[batch.start < prompt_length - 1] > 0).any()))
        return forward(batch, params)

    engine.runner.forward = noted_forward
    engine.add(make_rows())
    said = []
    while not engine.is_idle:
        _, load = engine.step(PARAMS)
        said.append(load.prompt_tokens > 0)
    assert said == planned and True in said and False in said


def test_stages_fill_what_finer_spans_leave():
    assert step_spans(SPANS, STAGES) == WHOLE


def test_a_step_may_generate_twice():
    names = (("gen", 16.0, 17.0), ("wait", 17.0, 18.0), ("reward", 18.0, 18.5))
    again = [Span(*name) for name in (*names, ("train", 18.5, 19.0))]
    first, second = Span("decode", 10.5, 13.0), Span("decode", 16.0, 17.0)
    found = step_spans([first, second], [*STAGES[:3], *again])
    assert found == [first, *STAGES[1:3], second, *again[1:]]


def test_lanes_count_from_the_start_of_the_step():
    (found,) = gather_lanes(Ranks(torch.device("cpu")), SPANS, STAGES)
    assert np.array_equal(found, lane(*((kind, a - 10, b - 10) for kind, a, b in WHOLE)))


class TwoMachines:
    """Rank 1, whose clock is 1000 s ahead of rank 0's. Rank 0 began the step 0.25 s before it, and
    left some barriers late."""

    rank = 1

    def barrier(self) -> None:
        pass

    def gather(self, array: np.ndarray) -> np.ndarray:
        if array.ndim:
            late_s = np.where(np.arange(len(array)) % 3 == 1, 0.5, 0.0)
            return np.stack([array - 1000.0 + late_s, array])
        return np.stack([array - 1000.25, array])

    def gather_ragged(self, array: np.ndarray) -> list[np.ndarray]:
        return [np.zeros(0), array]


def test_lanes_of_ranks_with_different_clocks_are_aligned():
    _, found = gather_lanes(TwoMachines(), SPANS, STAGES)
    wanted = lane(*((kind, begin - 9.75, end - 9.75) for kind, begin, end in WHOLE))
    assert np.allclose(found, wanted, rtol=0, atol=1e-9)


def test_trace_is_in_microseconds_with_a_named_thread_a_rank():
    lanes = [lane(("decode", 0.0, 0.1), ("wait", 0.1, 0.3)), lane(("draft hard", 1e-9, 0.3))]
    found = json.loads(json.dumps(trace(lanes, "step 3")))
    threads = [event for event in found["traceEvents"] if event["name"] == "thread_name"]
    assert [(e["tid"], e["args"]["name"]) for e in threads] == [(0, "rank 0"), (1, "rank 1")]
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in complete_events(found)] == [
        (0, "decode", 0.0, 100_000.0),
        (0, "wait", 100_000.0, 200_000.0),
        (1, "draft hard", 0.001, 299_999.999),
    ]


def test_picture_has_each_kind_in_its_colour_in_proportion_to_its_time():
    first = lane(("decode", 0.0, 3.0), ("wait", 3.0, 4.0))
    picture = draw([first, lane(("verify", 0.0, 1.0), ("draft hard", 2.0, 4.0))], "title")
    area = {kind: share_of_colour(picture, kind) for kind in KINDS}
    shown = {kind for kind in KINDS if area[kind] > 0.005}  # text is less
    assert shown == {"decode", "wait", "verify", "draft hard"}
    for kind, seconds in (("wait", 1), ("verify", 1), ("draft hard", 2)):
        assert area[kind] / area["decode"] == pytest.approx(seconds / 3, rel=0.1), kind


def test_two_ranks_leave_a_trace_and_a_picture_of_the_chosen_steps_only(tmp_path):
    keys = ["speculative.method=bubble+suffix", "run.timeline_steps=[1,9]", "run.max_steps=2"]
    run(tmp_path, 2, *keys, "run.save_steps=0")
    names = ["step_00001.json", "step_00001.png"]
    assert sorted(path.name for path in (tmp_path / "timeline").iterdir()) == names
    kinds, line, zeros = set(), read(tmp_path)[1], []
    text = (tmp_path / "timeline" / "step_00001.json").read_text(encoding="utf-8")
    for rank in range(2):
        events = [e for e in complete_events(json.loads(text)) if e["tid"] == rank]
        kinds |= {event["name"] for event in events}
        begin = np.array([event["ts"] for event in events])
        end = begin + [event["dur"] for event in events]
        assert (begin >= 0).all() and (end >= begin).all()
        assert (begin[1:] >= end[:-1] - 1e-4).all(), "in order, no overlaps"
        seconds = dict.fromkeys(KINDS, 0.0)
        for event in events:
            seconds[event["name"]] += event["dur"] / 1e6
        names = ("gen", "bubble", "reward", "train", "sync")
        timing = {name: line[f"timing_s/{name}/rank_{rank}"] for name in names}
        # When this rank began the step, which ends with its training.
        zeros.append(end[-1] / 1e6 - sum(timing.values()))
        assert begin[0] / 1e6 >= zeros[-1] - 1e-5
        assert seconds["sync"] == pytest.approx(timing["sync"], abs=1e-5)
        assert seconds["train"] == pytest.approx(timing["train"], abs=1e-5)
        rewards_s = seconds["reward"] + seconds["exchange"]
        assert rewards_s == pytest.approx(timing["reward"], abs=1e-5)
        assert seconds["wait"] >= timing["bubble"] - 1e-5
    picture = matplotlib.image.imread(tmp_path / "timeline" / "step_00001.png")
    assert share_of_colour(np.rint(255 * picture).astype(np.uint8), "train") > 0.01
    assert min(zeros) == pytest.approx(0, abs=1e-5), "time counts from the first rank's start"
    # Whether anything is drafted and verified is up to the machine; test_train.py has it in virtual
    # time.
    assert {"prefill", "wait", "reward", "exchange", "train", "sync"} <= kinds <= set(KINDS)
    images = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Images("timeline")
    assert [image.step for image in images] == [1]
