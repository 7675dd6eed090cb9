"""The step's own Python work grows no faster than its tokens. Operations are counted, not seconds."""

import sys

import numpy as np
import pytest
import torch

from benchmarks import growth
from bubblespec.engine.generator import Generator
from bubblespec.engine.model import prepare_model
from bubblespec.records import Row, SampleId


def calls_in_step(monkeypatch, num_rows: int, length: int) -> tuple[int, dict]:
    """Calls that the package's own functions make in one step of the benchmark: theirs of each other, and of the libraries."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        if event in ("call", "c_call"):
            caller = frame.f_back if event == "call" else frame
            count += caller is not None and "/bubblespec/" in caller.f_code.co_filename

    monkeypatch.setattr(growth, "watch_model", lambda clock: None)
    sys.setprofile(profile)
    try:
        # Windows of a fixed size and no drafting ahead: what is planned by measured times would make the count one of times.
        result = growth.measure(num_rows, length, ["speculative.fixed_window=7", "bubble.lookahead=0"])
    finally:
        sys.setprofile(None)
    return count, result


@pytest.mark.parametrize("over", ["rows", "length"])
def test_calls_grow_at_most_linearly(monkeypatch, over):
    sizes = [(2, 24), (8, 24), (32, 24)] if over == "rows" else [(4, 16), (4, 64), (4, 256)]
    counts, results = zip(*(calls_in_step(monkeypatch, *size) for size in sizes), strict=True)
    # Four times the work twice: linear growth makes the second difference four times the first, quadratic sixteen times.
    first, second = np.diff(counts)
    assert 0 < second <= 4.4 * first
    assert all(r["same_tokens"] and r["accept_length"] > 3 for r in results), "drafts must have been verified"


class CountedRow(Row):
    comparisons = 0
    __hash__ = object.__hash__

    def __eq__(self, other):
        CountedRow.comparisons += 1
        return self is other


def test_rows_are_not_searched_for(make_model):
    model = make_model("llama", torch.float32)
    prepare_model(model, 64)
    engine = Generator(model, num_slots=64, max_length=64, seed=0)
    engine.add([CountedRow(SampleId(u, 0, 0), (1, 2, 3 + u % 8), 20) for u in range(64)])
    for _ in range(4):
        engine.step()
    CountedRow.comparisons = 0
    kept = engine.decoding()[::2]
    engine.reset(kept)
    assert sorted(row.id.uid for row in engine.rows) == sorted(row.id.uid for row in kept) and len(kept) == 32
    assert engine.decoding() and len(engine.collect()) == 32
    assert CountedRow.comparisons == 0


def test_clock_books_each_moment_once(monkeypatch):
    now = 0.0
    monkeypatch.setattr(growth.time, "process_time", lambda: now)
    clock = growth.Clock()

    def pass_time(seconds):
        nonlocal now
        now += seconds

    pass_time(1)
    with clock.part("forward"):
        pass_time(2)
        with clock.part("loop"):
            pass_time(4)
        pass_time(8)
    pass_time(16)
    assert clock.lap() == {"loop": 21.0, "forward": 10.0}
    assert clock.lap() == {"loop": 0.0}


def test_slope_is_the_exponent():
    sizes = [8, 16, 32, 64]
    assert growth.slope(sizes, [3 * n**1.5 for n in sizes]) == pytest.approx(1.5)
