"""Episodes in virtual time: tools take the time that the workload says, and change no token."""

import numpy as np
import pytest

from bubblespec.rollout.loop import RolloutLoop
from bubblespec.tools.simulate import run as module
from bubblespec.tools.simulate.workload import OBSERVED, STOP
from tests.helpers.simulated import LinearCost, make_config, make_workload, run

TOOLS = {"turns": 3.0, "observation": 12, "tool_s": 0.2}


def test_episode_takes_forwards_and_calls(monkeypatch):
    """One row at a time: a forward per sampled token, and one wait for each call's seconds."""
    records, run_loop = [], RolloutLoop.run

    def noted_run(*arguments):
        records.append(run_loop(*arguments))
        return records[-1]

    monkeypatch.setattr(RolloutLoop, "run", noted_run)
    shape = {"prompts": 1, "generations": 2}
    workload = make_workload(**shape, **TOOLS)
    cost = LinearCost(forward_s=10e-3, token_s=0.0, position_s=0.0)
    config = make_config("none", **shape, rollout__max_num_seqs=1)
    num_calls = 0
    for number, step in enumerate(module.simulate(config, workload, cost, 1)):
        wanted_s, ends = 0.0, []
        for key, text in workload.responses.items():
            if key[0] == number:
                is_observed = np.append(text >= OBSERVED, False)
                own_ends = np.flatnonzero(~is_observed[:-1] & is_observed[1:]) + 1
                assert (text[own_ends - 1] == STOP).all(), "only a stop token ends a turn"
                wanted_s += 10e-3 * int((text < OBSERVED).sum())
                wanted_s += sum(workload.spec.tool_seconds(key, int(end)) for end in own_ends)
                ends += own_ends.tolist()
        assert step.seconds == pytest.approx(wanted_s, abs=5e-3)
        assert len(records[number].waits) == len(ends)
        num_calls += len(ends)
    assert num_calls > 4


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_tools_keep_tokens_of_every_method(num_ranks):
    plain = [step.digest for step in run("none", num_ranks, **TOOLS)]
    for keys in ({}, {"environment__draft": "false"}, {"tail_batching__enabled": "true"}):
        steps = run("bubble+suffix", num_ranks, config=keys, steps=4, **TOOLS)
        if "tail_batching__enabled" not in keys:
            assert [step.digest for step in steps] == plain
        assert sum(step.drafted_tokens for step in steps) > 0 or num_ranks == 1
