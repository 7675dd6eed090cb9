"""Timelines: what forwards are named after, stages around finer spans, clocks of several ranks, and
a run of two ranks."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from bubblespec.records import ForwardRecord, RolloutRecord, Span
from bubblespec.telemetry.timeline import KINDS, LABELS, draw_lanes, gather_lanes, step_spans
from bubblespec.types import Load
from tests.helpers.runs import read, run


def spans_of(*texts: str) -> list[Span]:
    return [Span(kind, float(begin), float(end)) for kind, begin, end in map(str.split, texts)]


FORWARDS = spans_of("prefill 10.5 11", "decode 11 13")
SPANS = FORWARDS + spans_of("exchange 15.5 15.75", "sync 17 17.5", "sync 18.5 19")
STAGES = spans_of("gen 10 13.25", "wait 13.25 15", "reward 15 16", "train 16 19")
WHOLE = FORWARDS + spans_of("wait 13.25 15", "reward 15 15.5", "exchange 15.5 15.75")
WHOLE += spans_of("reward 15.75 16", "train 16 17", "sync 17 17.5", "train 17.5 18.5")
WHOLE += spans_of("sync 18.5 19")


def lane(*events: tuple[str, float, float]) -> np.ndarray:
    return np.array([(KINDS.index(kind), begin, end) for kind, begin, end in events])


def forward(end_s: float, load: Load, own_rows: int = 4, ahead_rows: int = 0) -> ForwardRecord:
    """Return a forward of a second: 0.125 s of the host's, 0.25 s for proposals."""
    rows = (own_rows, ahead_rows, 0)
    return ForwardRecord(end_s - 1.0, end_s, 0.625, 0.25, load, *rows)


def test_neighbours_of_one_kind_are_joined():
    forwards = [forward(end_s, Load(4, 4, 0, 100, 0, 0)) for end_s in (1.0, 2.25, 4.0)]
    waits = spans_of("wait 2.25 2.5", "wait 2.5 3")
    found = RolloutRecord(0.0, 4.0, forwards, waits).spans
    assert found == spans_of("decode 0.125 2.25", "wait 2.25 3", "decode 3.125 4")


def test_forward_kind_follows_load():
    for own_rows, ahead_rows, prompt_tokens, draft_tokens, kind in [
        (4, 0, 7, 3, "prefill"),
        (4, 0, 0, 3, "verify"),
        (4, 0, 0, 0, "decode"),
        (1, 7, 0, 3, "draft (co-scheduled)"),
        (0, 7, 9, 0, "draft (idle)"),
    ]:
        load = Load(4, 20, 2, 100, prompt_tokens, draft_tokens)
        assert forward(1.0, load, own_rows, ahead_rows).kind == kind


def test_pictures_show_kinds_and_idle_shares():
    ends = [4.0 - 0.5 * rank for rank in range(8)]
    lanes = [lane(("decode", 0.0, end), ("wait", end, 4.0)) for end in ends]
    axes = Figure().subplots()
    assert [patch.get_label() for patch in draw_lanes(axes, lanes)] == ["generate", "idle"]
    apart = [lanes[1].copy()]
    apart[0][-1, 1:] += 1.0
    *_, gaps = [patch.get_label() for patch in draw_lanes(Figure().subplots(), apart)]
    assert gaps == "between forwards"
    shares = [text.get_text() for text in axes.texts]
    assert shares == [f"idle {share}%" for share in (0, 12, 25, 38, 50, 62, 75, 88)]
    assert len(set(LABELS.values())) == len(KINDS), "a trace is read by its labels"


def test_stages_fill_gaps_between_spans():
    assert step_spans(SPANS, STAGES) == WHOLE


class TwoMachines:
    """Rank 1, whose clock is 1000 s ahead of rank 0's. Rank 0 began the step 0.25 s before it, and
    left some barriers late."""

    rank = 1

    def barrier(self) -> None:
        pass

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        if array.ndim:
            late_s = np.where(np.arange(len(array)) % 3 == 1, 0.5, 0.0)
            return np.stack([array - 1000.0 + late_s, array])
        return np.stack([array - 1000.25, array])

    def gather_ragged(self, array: np.ndarray) -> list[np.ndarray]:
        return [np.zeros(0), array]


def test_lanes_with_different_clocks_are_aligned():
    _, found = gather_lanes(TwoMachines(), SPANS, STAGES)
    wanted = lane(*((kind, begin - 9.75, end - 9.75) for kind, begin, end in WHOLE))
    assert np.allclose(found, wanted, rtol=0, atol=1e-9)


def test_two_ranks_write_timelines_of_chosen_steps(tmp_path):
    keys = ["speculative.method=bubble+suffix", "run.timeline_steps=[2,9]", "run.max_steps=2"]
    run(tmp_path, 2, *keys, "run.save_steps=0")
    names = ["step_00002.json", "step_00002.png"]
    assert sorted(path.name for path in (tmp_path / "timeline").iterdir()) == names
    kinds, line, zeros = set(), read(tmp_path)[1], []
    text = (tmp_path / "timeline" / "step_00002.json").read_text(encoding="utf-8")
    for rank in range(2):
        events = [e for e in json.loads(text)["traceEvents"] if (e["ph"], e["tid"]) == ("X", rank)]
        kinds |= {event["name"] for event in events}
        begin = np.array([event["ts"] for event in events])
        end = begin + [event["dur"] for event in events]
        assert (begin >= 0).all() and (end >= begin).all()
        assert (begin[1:] >= end[:-1] - 1e-4).all(), "in order, no overlaps"
        seconds = dict.fromkeys(LABELS.values(), 0.0)
        for event in events:
            seconds[event["name"]] += event["dur"] / 1e6
        names = ("gen", "bubble", "reward", "train", "sync")
        timing = {name: line[f"timing_s/{name}/rank_{rank}"] for name in names}
        # When this rank began the step, which ends with its training.
        zeros.append(end[-1] / 1e6 - sum(timing.values()))
        assert begin[0] / 1e6 >= zeros[-1] - 1e-5
        assert seconds["sum gradients"] == pytest.approx(timing["sync"], abs=1e-5)
        assert seconds["train"] == pytest.approx(timing["train"], abs=1e-5)
        rewards_s = seconds["reward"] + seconds["exchange drafts"]
        assert rewards_s == pytest.approx(timing["reward"], abs=1e-5)
        assert seconds["idle"] >= timing["bubble"] - 1e-5
    assert min(zeros) == pytest.approx(0, abs=1e-5), "time counts from the first rank's start"
    # Whether anything is drafted and verified is up to the machine; test_train.py has it in virtual
    # time.
    wanted = {"prefill", "idle", "reward", "exchange drafts", "train", "sum gradients"}
    assert wanted <= kinds <= set(LABELS.values())
