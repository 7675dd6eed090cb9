"""Whole runs with the TP tail on two ranks in virtual time: records of its forwards, and
evaluations, one of which is stopped in the middle of the tail."""

from types import SimpleNamespace

import pytest

from bubblespec.engine.sampling import EVALUATION
from bubblespec.mechanisms.tp_tail.tail import TPTail
from bubblespec.planner.stats import RunStats
from bubblespec.tools.simulate.command import SECTIONS, simulated_config
from bubblespec.tools.simulate.recorded import (
    load_cost,
    read_meta,
    read_table,
    read_workload,
    sections_of,
)
from bubblespec.tools.simulate.run import simulate
from bubblespec.types import Load
from tests.helpers.checks import refusal
from tests.helpers.clocks import forward_seconds
from tests.helpers.runs import digests, read
from tests.helpers.threads import train_on_threads

OPTIONS = ["rollout.num_prompts_per_step=6", "rollout.num_generations=3"]
OPTIONS += ["rollout.max_completion_length=96", "data.size=64", "eval.num_prompts=4"]
OPTIONS += ["eval.num_generations=2", "run.max_steps=3", "run.eval_steps=1", "run.save_steps=0"]
OPTIONS += ["model.dtype=float64", "optim.learning_rate=1e-3", "speculative.method=none"]
OPTIONS += ["reward.functions=[tests.helpers.rewards.remainder]"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of a run without and one with the tail, and the calls of the tail. In that
    of the second evaluation rank 1 gets a stop request, and the run is continued."""
    plain, shared = (tmp_path_factory.mktemp(name) for name in ("plain", "shared"))
    train_on_threads(2, *OPTIONS, "rollout.tp_tail_max_rows=0", f"run.output_dir={plain}")
    calls, run = [], TPTail.run
    observed, observe = [], RunStats.observe_rollout

    def noted(tail, loop):
        own = list(loop.unfinished.values())
        call = SimpleNamespace(rank=tail.ranks.rank, num_rows=len(own))
        call.is_evaluation = loop.table.launch.groups[0].draw_index == EVALUATION
        others = [c for c in calls if c.rank == 1 and c.is_evaluation]
        call.stops = call.is_evaluation and call.rank == 1 and len(others) == 1
        tail.ranks.must_stop |= call.stops
        before = tail.engine.num_forwards
        loop.engine.collect()
        call.tokens = -sum(len(row.tokens) for row in own)
        run(tail, loop)
        call.forwards = tail.engine.num_forwards - before
        call.tokens += sum(len(row.tokens) for row in own)
        calls.append(call)

    keys = ["rollout.tp_tail_max_rows=6", "run.trace=true", f"run.output_dir={shared}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TPTail, "run", noted)
        note = lambda *of, **named: observed.append(of) or observe(*of, **named)  # noqa: E731
        patch.setattr(RunStats, "observe_rollout", note)
        train_on_threads(2, *OPTIONS, *keys)
        assert any(call.stops for call in calls) and len(digests(shared)) == 1
        train_on_threads(2, *OPTIONS, *keys)
    assert len(observed) == 2 * len(digests(shared)), "nothing is learned from an evaluation"
    return SimpleNamespace(plain=plain, shared=shared, calls=calls)


def table_of(folder) -> list[dict]:
    return read_table(str(folder / "trace"), "forwards").to_pylist()


def test_digests_with_and_without_tail_are_equal(runs):
    assert digests(runs.shared) == digests(runs.plain)
    found = [
        [line["eval/digest"] for line in read(folder) if "eval/digest" in line]
        for folder in (runs.plain, runs.shared)
    ]
    assert found[0] == found[1] and len(set(found[0])) > 1, "the policy must learn something"
    evaluated = [call for call in runs.calls if call.is_evaluation]
    assert sum(call.forwards > 0 for call in evaluated) >= 4, "on both ranks"


def test_forwards_of_the_tail_are_recorded(runs):
    table, lines = table_of(runs.shared), [line for line in read(runs.shared) if "reward" in line]
    trained = [call for call in runs.calls if not call.is_evaluation]
    of_ranks = [[call for call in trained if call.rank == rank] for rank in range(2)]
    of_ranks = [[call for call in calls if call.forwards] for calls in of_ranks]
    steps = sorted({row["step"] for row in table if row["together"]})
    assert len(steps) == len(of_ranks[0]) == len(of_ranks[1]) > 1
    for step, *calls in zip(steps, *of_ranks, strict=True):
        lanes = [
            [row for row in table if (row["step"], row["rank"]) == (step, rank)]
            for rank in range(2)
        ]
        shared = [[row for row in lane if row["together"]] for lane in lanes]
        for call, lane, own in zip(calls, lanes, shared, strict=True):
            assert len(own) == call.forwards and own[0]["own_rows"] == call.num_rows
            assert [row["begin_s"] for row in lane] == sorted(row["begin_s"] for row in lane)
            # For each token that a row gains one is fed, and none again.
            fed = sum(row["tokens"] - row["prompt_tokens"] for row in own)
            assert fed == sum(call.tokens for call in calls)
            assert all(row["engine_s"] <= row["end_s"] - row["begin_s"] + 1e-9 for row in own)
        loads = [[[row[name] for name in Load._fields] for row in own] for own in shared]
        assert loads[0] == loads[1], "all ranks have the same rows in it"
        (line,) = [line for line in lines if line["step"] == step]
        assert line["tp_tail/forwards"] == len(shared[0])
        assert line["tp_tail/rows"] == shared[0][0]["rows"] == sum(c.num_rows for c in calls)
        own = [len(lane) - len(of_lane) for lane, of_lane in zip(lanes, shared, strict=True)]
        assert line["rollout/forwards"] == max(own)


def test_forwards_of_the_tail_have_another_cost(runs):
    folder = str(runs.shared)
    cost, shared_cost = load_cost(folder), load_cost(folder, 2)
    for load in (Load(4, 4, 0, 200, 0, 0), Load(8, 8, 0, 500, 0, 0)):
        assert cost.seconds(load) == pytest.approx(forward_seconds(load), rel=0.05)
    decoded = [row for row in table_of(runs.shared) if row["together"] and row["rows"] == 1]
    seconds = [row["end_s"] - row["begin_s"] for row in decoded]
    fitted = [shared_cost.seconds([row[name] for name in Load._fields]) for row in decoded]
    assert sum(fitted) == pytest.approx(sum(seconds), rel=0.1)
    assert "no forwards of 3 ranks together" in refusal(load_cost, folder, 3)


def test_run_with_tail_is_simulated(runs):
    folder = str(runs.shared)
    config = simulated_config(sections_of(read_meta(f"{folder}/trace")["config"], SECTIONS))
    costs = load_cost(folder).seconds, load_cost(folder, 2).seconds
    steps = simulate(config, read_workload(folder), costs[0], 2, together=costs[1])
    assert [step.digest for step in steps] == digests(runs.shared)
    assert sum(step.shared_forwards for step in steps) > 0
