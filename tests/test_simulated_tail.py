"""The shared tail in virtual time: the same tokens, the time that the costs say, and entered only
where it pays."""

import dataclasses

import pytest

from bubblespec.__main__ import main
from bubblespec.telemetry.timeline import KINDS
from bubblespec.tools.simulate import command
from bubblespec.tools.simulate.run import simulate
from bubblespec.tools.simulate.workload import Workload
from tests.helpers.simulated import (
    LinearCost,
    figures,
    make_config,
    make_workload,
    run,
    true_text,
)

ALONE_S, TOGETHER_S = 10e-3, 4e-3
SHORT, LONG = 20, 240  # tokens
SHAPE = {"prompts": 2, "generations": 2}
TICK_S = 1e-2


def one_long_row(steps: int = 4) -> Workload:
    """In every step one response is much longer than the three others."""
    workload = make_workload(**SHAPE, steps=steps)
    longest = {step: batch[1].uid for step, batch in enumerate(workload.batches)}
    responses = {
        (step, uid, sample): true_text(LONG if (longest[step], 0) == (uid, sample) else SHORT, step)
        for step, uid, sample in workload.responses
    }
    return dataclasses.replace(workload, responses=responses)


def simulate_one_long_row(rows: int | str, together_s: float = TOGETHER_S):
    keys = {"rollout__tp_tail_max_rows": rows, "rollout__placement": "in_turn"}
    costs = [LinearCost(seconds, 0.0, 0.0, 0.0) for seconds in (ALONE_S, together_s)]
    config = make_config("none", **SHAPE, **keys)
    return simulate(config, one_long_row(), costs[0], 2, together=costs[1])


def test_one_row_left_on_one_rank_takes_what_the_costs_say():
    """A token for each forward: alone until a tick says that the short rows are done, then
    together."""
    without, tail = simulate_one_long_row(0), simulate_one_long_row(1)
    assert [step.digest for step in tail] == [step.digest for step in without]
    for step in without:
        assert step.seconds == pytest.approx(LONG * ALONE_S, abs=5e-3) and not step.shared_forwards
    for step in tail:
        assert SHORT < step.forwards <= SHORT + 5
        assert step.forwards + step.shared_forwards == LONG
        seconds = step.forwards * ALONE_S + step.shared_forwards * TOGETHER_S
        assert seconds < step.seconds < seconds + 2 * TICK_S
        ends = [lane[lane[:, 0] == KINDS.index("shared"), 2] for lane in step.lanes]
        assert ends[0] == pytest.approx(ends[1]) and len(ends[0]) == 1, "in lockstep"


def test_with_auto_it_is_entered_once_lengths_are_known_and_a_guard_watches():
    without, tail = simulate_one_long_row(0), simulate_one_long_row("auto")
    assert [step.digest for step in tail] == [step.digest for step in without]
    assert tail[0].shared_forwards == 0, "no length is known"
    entered = [step.step for step in tail if step.shared_forwards]
    assert len(entered) >= 2
    for number in entered:
        assert tail[number].seconds < 0.7 * without[number].seconds


@pytest.mark.parametrize("together_s", [ALONE_S, 3 * ALONE_S])
def test_where_shared_forwards_are_no_faster_it_is_never_entered(together_s):
    assert figures(simulate_one_long_row("auto", together_s)) == figures(simulate_one_long_row(0))


@pytest.mark.parametrize(
    ("method", "num_ranks"), [("none", 2), ("bubble+suffix", 4), ("suffix+drafter", 3)]
)
def test_tokens_are_those_without_it(method, num_ranks):
    config = {"rollout__tp_tail_max_rows": 6}
    without = run(method, num_ranks, run=20.0)
    tail = run(method, num_ranks, config=config, together=LinearCost(5e-3), run=20.0)
    assert [step.digest for step in tail] == [step.digest for step in without]
    assert all(step.shared_forwards for step in tail)
    if method == "none":
        assert sum(step.seconds for step in tail) < sum(step.seconds for step in without)


def test_there_is_none_where_a_run_has_none():
    config, together = {"rollout__tp_tail_max_rows": 6}, LinearCost(1e-3)
    tools = {"turns": 3.0, "observation": 12, "tool_s": 0.2}
    for num_ranks, workload in ((1, {}), (2, tools)):
        steps = run("none", num_ranks, config=config, together=together, steps=1, **workload)
        assert not steps[0].shared_forwards and not together.loads


def test_the_command_line_counts_shared_forwards(monkeypatch, capsys):
    spec = "mean=30,max=100,prompt=8,run=50,steps=2"
    keys = ["rollout.num_prompts_per_step=4", "rollout.num_generations=2"]
    keys += ["rollout.tp_tail_max_rows=4", "speculative.method=none"]
    arguments = ["", "simulate", "--synthetic", spec, "--cost", "h200:7b", *keys, "--ranks"]
    monkeypatch.setattr("sys.argv", [*arguments, "2"])
    assert main() == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "of all ranks tog" in line]
    assert int(line.split()[-1]) > 0
    monkeypatch.setattr("sys.argv", [*arguments, "4"])
    monkeypatch.setattr(command, "load_shared_cost", lambda *_: None)
    assert main() == 0
    reason = "h200:7b has no forwards of 4 ranks together"
    assert f"warning: no TP tail is simulated: {reason}\n" in capsys.readouterr().err
