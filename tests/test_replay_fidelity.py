"""Simulated rollouts against the measured ones of recorded runs.

tests/data/replay holds traces of the tiny policy, 12 steps with 32 rows, on 1 and 2 ranks of a machine with 2 cores: of three
runs of each method the one with the median rollout time. docs/LOG.md has all of them.
"""

from pathlib import Path

import pytest

from benchmarks.replay_fidelity import compare
from bubblespec.errors import InputError

DATA = Path(__file__).parent / "data" / "replay"


def runs(ranks: str) -> list[str]:
    return [str(DATA / f"{ranks}_{method}") for method in ("none", "bubble+suffix")]


def test_one_rank():
    found = compare(runs("1_rank"))
    for method in found["methods"].values():
        assert abs(method["error"]) < 0.10
        assert abs(method["forwards"] / method["measured_forwards"][0] - 1) < 0.10
    assert abs(found["ratio_error"]) < 0.05
    assert found["measured_ratio"] > 1.2, "drafts made a difference that the simulation had to find"


def test_two_ranks():
    """Without drafts to the forward. With them it makes a few more than the run did: what a rank drafts follows from the times of
    single forwards, which differ between runs too."""
    found = compare(runs("2_ranks"))
    none, ours = found["methods"].values()
    assert none["forwards"] == none["measured_forwards"][0]
    assert abs(none["error"]) < 0.10 and abs(ours["error"]) < 0.10
    assert abs(found["ratio_error"]) < 0.05
    assert found["measured_ratio"] > 1.4, "drafts made a difference that the simulation had to find"


@pytest.mark.parametrize(
    "chosen, says",
    [
        (["1_rank_none"], "methods none; give runs of none and of one other"),
        (["1_rank_none", "2_ranks_bubble+suffix"], "numbers of ranks differ"),
        (["nothing"], "not a trace"),
    ],
)
def test_runs_that_do_not_belong_together(chosen, says):
    with pytest.raises(InputError, match=says):
        compare([str(DATA / name) for name in chosen])
