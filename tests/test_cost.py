"""The cost of forwards: known costs recovered through noise, non-negative least squares against
SciPy's, files, the benchmark."""

import dataclasses
import itertools
import json
import os
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import scipy.optimize

from benchmarks import profile_cost
from bubblespec.errors import InputError
from bubblespec.records import Load
from bubblespec.simulate import cost as cost_module
from bubblespec.simulate.cost import RATES, ForwardCost, cost_from_trace, nonnegative
from bubblespec.telemetry.trace import COLUMNS

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def cpu(load) -> float:
    """Grows from the first token on."""
    return 3e-3 + 8e-5 * load[1] + 5e-5 * load[0] + 6e-5 * load[2] + 5e-7 * load[3] + 2e-5 * load[5]


def gpu(load) -> float:
    """Flat up to 128 tokens."""
    return 8e-3 + 4e-5 * max(load[1] - 128, 0) + 1e-5 * (load[0] + load[5]) + 1e-8 * load[3]


def random_loads(count: int, most_prompt: int = 512, seed: int = 0) -> list[Load]:
    """A third each of decoding, with drafts, with a prompt beside it."""
    rng, loads = np.random.default_rng(seed), []
    for number in range(count):
        rows = int(rng.integers(1, 65))
        wide = draft = prompt = 0
        if number % 3 == 1:
            wide = int(rng.integers(1, rows + 1))
            draft = wide * int(rng.integers(1, 16))
        elif number % 3 == 2:
            wide, prompt = 1, int(rng.integers(1, most_prompt))
        loads.append(
            Load(
                rows, rows + draft + prompt, wide, rows * int(rng.integers(20, 400)), prompt, draft
            )
        )
    return loads


def measured(truth, loads: list[Load], interrupted: float = 0.03) -> np.ndarray:
    """Times with 5% of noise; some forwards take five times as long."""
    rng = np.random.default_rng(1)
    noise = rng.lognormal(0.0, 0.05, len(loads)) * np.where(
        rng.random(len(loads)) < interrupted, 5.0, 1.0
    )
    return np.array([truth(load) for load in loads]) * noise


@pytest.mark.parametrize("truth", [cpu, gpu])
def test_known_costs_are_recovered_through_noise_and_interruptions(truth):
    loads = random_loads(1500)
    cost = ForwardCost.fit(np.array(loads), measured(truth, loads))
    for load in random_loads(300, seed=2):
        assert cost.seconds(load) == pytest.approx(truth(load), rel=0.03)
    for load in random_loads(300, most_prompt=4000, seed=3):  # far beyond what was measured
        assert cost.seconds(load) == pytest.approx(truth(load), rel=0.06)


def test_a_gpu_is_flat_up_to_saturation_and_a_cpu_is_not():
    loads = random_loads(1500)
    fits = {truth: ForwardCost.fit(np.array(loads), measured(truth, loads)) for truth in (cpu, gpu)}
    for truth, cost in fits.items():
        for a, b in itertools.pairwise((1, 8, 32, 96)):
            step = cost.seconds((1, b, 1, 500, 0, 0)) - cost.seconds((1, a, 1, 500, 0, 0))
            assert step == pytest.approx(
                truth((1, b, 1, 500, 0, 0)) - truth((1, a, 1, 500, 0, 0)), abs=4e-4
            )


def test_the_error_is_that_of_forwards_the_fit_has_not_seen():
    """5% lognormal noise has a median relative error of 3.4%; a quantity that no term has shows in
    it."""
    loads = random_loads(3000)
    exact = ForwardCost.fit(np.array(loads), measured(cpu, loads, interrupted=0.0))
    assert exact.error_median == pytest.approx(
        0.0337, rel=0.15
    ) and exact.error_p90 == pytest.approx(0.082, rel=0.15)
    hidden = np.where(np.arange(len(loads)) % 2, 1.5, 1.0)
    assert ForwardCost.fit(np.array(loads), measured(cpu, loads) * hidden).error_median > 0.1
    one_load = [loads[0]] * 50
    assert ForwardCost.fit(np.array(one_load), measured(cpu, one_load)).error_median == 0.0, (
        "nothing can be held out"
    )


@pytest.mark.parametrize("has_equal_loads", [False, True])
def test_a_group_is_held_out_whole(monkeypatch, has_equal_loads):
    """Forwards of one place of a grid, or of equal loads, would else vouch for each other."""
    groups = np.arange(300) // 10
    loads = np.array(random_loads(300))
    loads = loads[10 * groups] if has_equal_loads else loads
    fitted, solve = [], cost_module._solve
    monkeypatch.setattr(
        cost_module, "_solve", lambda loads, *rest: fitted.append(loads) or solve(loads, *rest)
    )
    ForwardCost.fit(
        loads,
        measured(cpu, [Load(*load) for load in loads]),
        groups=None if has_equal_loads else groups,
    )
    seen, everything = ([tuple(load) for load in part.tolist()] for part in fitted)
    assert len(everything) == 300 and len(seen) == 240
    by_group = [
        sum(tuple(load) in set(seen) for load in loads[groups == group].tolist())
        for group in range(30)
    ]
    assert sorted(by_group) == [0] * 6 + [10] * 24


def test_more_work_never_takes_less_time():
    loads = random_loads(60)  # few and noisy: the fit alone would bend
    rng = np.random.default_rng(5)
    cost = ForwardCost.fit(
        np.array(loads), np.array([cpu(load) for load in loads]) * rng.lognormal(0, 0.5, len(loads))
    )
    for load in random_loads(200, most_prompt=5000, seed=6):
        for name in ("tokens", "wide_rows", "positions", "prompt_tokens", "draft_tokens"):
            more = load._replace(**{name: getattr(load, name) + 7})
            assert cost.seconds(more) >= cost.seconds(load) > 0


def test_plain_decoding_alone_lets_tokens_have_the_cost():
    """Where every token is a row, what a draft token costs is not known; it must not be free."""
    loads = [Load(rows, rows, 0, 100 * rows, 0, 0) for rows in range(1, 65) for _ in range(5)]
    cost = ForwardCost.fit(np.array(loads), measured(cpu, loads))
    assert cost.seconds(Load(16, 16, 0, 1600, 0, 0)) == pytest.approx(
        cpu((16, 16, 0, 1600, 0, 0)), rel=0.03
    )
    per_token = (cost.seconds((1, 64, 0, 100, 0, 0)) - cost.seconds((1, 1, 0, 100, 0, 0))) / 63
    assert per_token > 0.5 * (
        8e-5 + 5e-5 + 5e-5
    )  # of tokens, rows, and the positions that each row brings


def test_nonnegative_least_squares_is_scipys():
    rng = np.random.default_rng(0)
    for trial in range(300):
        matrix = rng.normal(size=(40, rng.integers(1, 20))) * np.exp(rng.normal(0, 3, size=1))
        if trial % 3 == 0 and matrix.shape[1] > 2:
            matrix[:, 0] = matrix[:, 1]  # not told apart
        if trial % 5 == 0:
            matrix[:, -1] = 0.0
        target = rng.normal(size=40)
        found, (wanted, residual) = (
            nonnegative(matrix.T @ matrix, matrix.T @ target),
            scipy.optimize.nnls(matrix, target),
        )
        assert (found >= 0).all()
        assert np.linalg.norm(matrix @ found - target) == pytest.approx(residual, rel=1e-7)
        assert np.allclose(matrix @ found, matrix @ wanted, atol=1e-5)


def test_an_evaluation_is_a_handful_of_operations():
    """The simulator asks for millions. Counted rather than timed: a few calls of built-ins, and no
    arrays."""
    loads = random_loads(200)
    cost, calls = ForwardCost.fit(np.array(loads), measured(cpu, loads)), []
    sys.setprofile(
        lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None
    )
    try:
        found = [cost.seconds(load) for load in loads]
    finally:
        sys.setprofile(None)
    assert len(calls) <= 6 * len(loads) and {type(seconds) for seconds in found} == {float}


@pytest.fixture
def saved(tmp_path):
    loads = random_loads(200)
    cost = ForwardCost.fit(np.array(loads), measured(gpu, loads), kind="analytic")
    cost.propose, cost.hardware, cost.versions, cost.model = (
        [1e-4, 2e-5],
        {"gpu": "x"},
        {"torch": "2.13"},
        "m, float32",
    )
    cost.save(str(tmp_path / "cost.json"))
    return cost, tmp_path / "cost.json"


def test_files_hold_all_of_it(saved):
    cost, path = saved
    again = ForwardCost.load(str(path))
    assert again == cost and again.kind == "analytic"
    assert all(again.seconds(load) == cost.seconds(load) for load in random_loads(50))
    assert again.propose_seconds(0) == 0.0 and again.propose_seconds(5) == pytest.approx(2e-4)


def changed(path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "break_it, says",
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_text("{"), "not valid JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
        (lambda path: path.write_text("[]"), 'no "format": 1'),
        (lambda path: changed(path, format=2), 'no "format": 1'),
        (lambda path: changed(path, extra=1), "extra missing or unknown"),
        (lambda path: changed(path, knots=[1, 1]), "knots must ascend"),
        (lambda path: changed(path, slopes=[]), "knots must ascend"),
        (lambda path: changed(path, knots=[], slopes=[]), "knots must ascend"),
        (lambda path: changed(path, constant=-1.0), "-1.0 must be a number"),
        (lambda path: changed(path, constant=float("nan")), "nan must be a number"),
        (lambda path: changed(path, constant="1"), "'1' must be a number"),
        (lambda path: changed(path, constant=True), "True must be a number"),
        (lambda path: changed(path, rates={"rows": 1.0}), "rates must be those of rows"),
        (lambda path: changed(path, rates=[1.0]), "must be objects"),
        (lambda path: changed(path, propose=0.0), "must be lists"),
        (lambda path: changed(path, propose=[0.0]), "propose must be two numbers"),
        (lambda path: changed(path, kind="guessed"), "kind must be measured or analytic"),
        (lambda path: changed(path, model=None), "model must be a text"),
    ],
)
def test_bad_files_are_refused_in_one_line(saved, break_it, says):
    _, path = saved
    break_it(path)
    with pytest.raises(InputError) as error:
        ForwardCost.load(str(path))
    assert (
        says in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)
    )


def test_too_few_forwards_are_an_error():
    with pytest.raises(ValueError, match="3 forwards are too few"):
        ForwardCost.fit(np.ones((3, 6)), np.ones(3))


def test_a_trace_gives_the_time_between_forwards_and_that_of_proposals(tmp_path):
    """A trace made by hand: 1 ms of host work a forward is in the cost, 0.2 ms and 30 us a row of
    looking up are beside it."""
    loads = random_loads(900)
    rng = np.random.default_rng(0)
    looked_up = np.where(np.arange(900) % 2, [load.rows for load in loads], 0)
    propose_s = np.where(looked_up > 0, 2e-4 + 3e-5 * looked_up, 1e-6)
    spent = np.array([cpu(load) for load in loads]) + 1e-3 + propose_s * (looked_up > 0)
    spent, propose_s = spent * rng.lognormal(0, 0.02, 900), propose_s * rng.lognormal(0, 0.02, 900)
    numbers = dict(zip(Load._fields, np.array(loads).T, strict=True)) | {
        "looked_up_rows": looked_up,
        "propose_s": propose_s,
    }
    numbers |= {
        "begin_s": np.cumsum(spent) - spent,
        "end_s": np.cumsum(spent),
        "engine_s": spent - 1e-3 - propose_s,
    }
    for step, part in enumerate((slice(0, 500), slice(500, 900))):
        count = part.stop - part.start
        table = {
            name: numbers.get(name, np.zeros(900, np.int64))[part] for name in COLUMNS["forwards"]
        }
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / f"forwards-{step:05d}.parquet")
        pyarrow.parquet.write_table(
            pyarrow.table({"step": [step] * count}), tmp_path / f"steps-{step:05d}.parquet"
        )
    meta = {
        "format": 1,
        "hardware": {"cpu": "c"},
        "versions": {"numpy": "2"},
        "config": {"model.path": "m", "model.dtype": "d"},
    }
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    cost = cost_from_trace(str(tmp_path))
    for load in random_loads(100, seed=7):
        assert cost.seconds(load) == pytest.approx(cpu(load) + 1e-3, rel=0.03)
    assert cost.propose == pytest.approx([2e-4, 3e-5], rel=0.05)
    assert (cost.hardware, cost.versions, cost.model) == ({"cpu": "c"}, {"numpy": "2"}, "m, d")


def profile(monkeypatch, *arguments) -> int:
    model = os.path.join(ROOT, "configs", "tiny_policy")
    monkeypatch.setattr(sys, "argv", ["profile_cost.py", "--model", model, *map(str, arguments)])
    return profile_cost.main()


def test_the_benchmark_times_the_loads_it_names(monkeypatch, tmp_path, capsys):
    places = []
    measure = profile_cost.measure
    monkeypatch.setattr(
        profile_cost, "measure", lambda *arguments: places.extend(measure(*arguments)) or places
    )
    grid = [
        "--rows",
        "1,3",
        "--lengths",
        "5,20",
        "--windows",
        "0,4",
        "--chunks",
        "6,30",
        "--repeats",
        2,
        "--device",
        "cpu",
    ]
    assert profile(monkeypatch, *grid, "--json", tmp_path / "cost.json") == 0
    assert len(places) == 2 * (1 + 1) + 2 * (1 + 2) + 2 * 3
    for (name, num_rows, length, *rest), forwards in places:
        loads = [load for load, _ in forwards]
        assert all(seconds > 0 for _, seconds in forwards)
        if name == "decode":
            drafting, window = rest
            assert len(loads) == 2 and all(
                load.rows == num_rows and load.prompt_tokens == 0 for load in loads
            )
            assert all(
                load.draft_tokens == drafting * window == load.tokens - num_rows for load in loads
            )
            assert all(
                num_rows * length <= load.positions <= num_rows * (length + 4 * (window + 1))
                for load in loads
            )
        else:
            (chunk,) = rest
            assert len(loads) == 2 * 2 and all(
                load.rows == num_rows + 1 and load.prompt_tokens == chunk for load in loads
            )
            assert all(load.tokens == num_rows + chunk for load in loads)
    cost = ForwardCost.load(str(tmp_path / "cost.json"))
    assert (
        cost.kind == "measured"
        and set(cost.rates) == set(RATES)
        and cost.model.endswith("tiny_policy, float32")
    )
    out = capsys.readouterr().out
    assert "| ms measured | ms fitted | ratio |" in out and out.count("\n| ") == 1 + len(places)
    assert profile(monkeypatch, *grid, "--json", tmp_path / "cost.json") == 2
    assert "is there already" in capsys.readouterr().err
    assert cost == ForwardCost.load(str(tmp_path / "cost.json"))


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--model", "no/such/folder"], "error: --model: no folder no/such/folder"),
        (["--device", "cuda"], "error: --device: cuda, but torch sees no GPU"),
    ],
)
def test_the_benchmark_refuses_bad_input_in_one_line(monkeypatch, capsys, arguments, says):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert profile(monkeypatch, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(says) and err.count("\n") == 1


def test_all_fields_are_in_the_file(saved):
    _, path = saved
    assert json.loads(path.read_text()).keys() == {
        "format",
        *(f.name for f in dataclasses.fields(ForwardCost)),
    }
