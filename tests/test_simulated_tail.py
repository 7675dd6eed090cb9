"""The TP tail in virtual time: equal tokens, the time that costs imply, entered only if it pays."""

import dataclasses

import pytest

from bubblespec.__main__ import main
from bubblespec.errors import InputError
from bubblespec.telemetry.timeline import KINDS
from bubblespec.tools.simulate import command
from bubblespec.tools.simulate.run import simulate
from tests.helpers.simulated import LinearCost, figures, make_config, make_workload, run, true_text

ALONE_S, TOGETHER_S = 10e-3, 4e-3
SHORT, LONG = 20, 240  # tokens
SHAPE = {"prompts": 2, "generations": 2}
TICK_S = 1e-2


def simulate_one_long_row(rows: int | str, together_s: float = TOGETHER_S):
    """In every step one response is much longer than the three others."""
    workload = make_workload(**SHAPE, steps=4)
    long = {(step, batch[1].prompt_id, 0) for step, batch in enumerate(workload.batches)}
    responses = {
        key: true_text(LONG if key in long else SHORT, key[0]) for key in workload.responses
    }
    workload = dataclasses.replace(workload, responses=responses)
    keys = {"rollout__tp_tail_max_rows": rows, "rollout__placement": "in_turn"}
    alone, together = (LinearCost(seconds, 0.0, 0.0, 0.0) for seconds in (ALONE_S, together_s))
    return simulate(make_config("none", **SHAPE, **keys), workload, alone, 2, together=together)


@pytest.fixture(scope="module")
def without():
    """Steps without a TP tail: one forward per token."""
    steps = simulate_one_long_row(0)
    for step in steps:
        assert step.seconds == pytest.approx(LONG * ALONE_S, abs=5e-3) and not step.shared_forwards
    return steps


def test_last_row_takes_the_seconds_of_the_costs(without):
    """A tick ends the forwards of one rank alone once the short rows are done."""
    tail = simulate_one_long_row(1)
    assert [step.digest for step in tail] == [step.digest for step in without]
    for step in tail:
        assert SHORT < step.forwards <= SHORT + 5
        assert step.forwards + step.shared_forwards == LONG
        seconds = step.forwards * ALONE_S + step.shared_forwards * TOGETHER_S
        assert seconds < step.seconds < seconds + 2 * TICK_S
        ends = [lane[lane[:, 0] == KINDS.index("shared"), 2] for lane in step.lanes]
        assert ends[0] == pytest.approx(ends[1]) and len(ends[0]) == 1, "in lockstep"
        for lane in step.lanes:
            assert (lane[1:, 1] >= lane[:-1, 2] - 1e-9).all(), "who decodes the tail is not idle"


def test_auto_enters_once_lengths_are_known(without):
    tail = simulate_one_long_row("auto")
    assert [step.digest for step in tail] == [step.digest for step in without]
    assert tail[0].shared_forwards == 0, "no length is known"
    entered = [step.step for step in tail if step.shared_forwards]
    assert len(entered) >= 2
    for number in entered:
        assert tail[number].seconds < 0.7 * without[number].seconds


def test_auto_never_enters_an_unprofitable_tail(without):
    assert figures(simulate_one_long_row("auto", ALONE_S)) == figures(without)


@pytest.mark.parametrize(("method", "num_ranks"), [("none", 2), ("suffix+drafter", 3)])
def test_tail_keeps_tokens_of_every_method(method, num_ranks):
    config = {"rollout__tp_tail_max_rows": 6}
    plain = run(method, num_ranks, run=20.0)
    tail = run(method, num_ranks, config=config, together=LinearCost(5e-3), run=20.0)
    assert [step.digest for step in tail] == [step.digest for step in plain]
    assert all(step.shared_forwards for step in tail)
    if method == "none":
        assert sum(step.seconds for step in tail) < sum(step.seconds for step in plain)


def test_command_counts_shared_forwards(monkeypatch, capsys):
    spec = "mean=30,max=100,prompt=8,run=50,steps=2"
    keys = ["rollout.num_prompts_per_step=4", "rollout.num_generations=2"]
    keys += ["rollout.tp_tail_max_rows=4", "speculative.method=none"]
    arguments = ["", "simulate", "--synthetic", spec, "--cost", "h200:7b", *keys, "--ranks", "2"]
    monkeypatch.setattr("sys.argv", arguments)
    assert main() == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "of all ranks tog" in line]
    assert int(line.split()[-1]) > 0
    cost = command.load_cost

    def alone_only(name: str, num_ranks: int = 1):
        if num_ranks > 1:
            raise InputError(f"{name}: too few heads")
        return cost(name)

    monkeypatch.setattr(command, "load_cost", alone_only)
    assert main() == 0
    warning = "warning: no TP tail is simulated: h200:7b: too few heads\n"
    assert warning in capsys.readouterr().err
