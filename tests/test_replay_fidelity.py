"""Simulated rollouts against the measured ones of recorded runs.

tests/data/fidelity holds traces of the tiny policy, 12 steps with 32 rows, on 1 and 2 ranks of a
machine with 2 cores, one run of each method: train.py with configs/tiny_cpu_bulk.yaml,
rollout.num_prompts_per_step=8, rollout.num_generations=4 and speculative.check_every=0. There two
runs of the same thing differ by up to a fifth with drafts and a twentieth without.
"""

from pathlib import Path

import pytest

from benchmarks.replay_fidelity import compare
from bubblespec.errors import InputError

DATA = Path(__file__).parent / "data" / "fidelity"


def runs(ranks: str) -> list[str]:
    return [str(DATA / f"{ranks}_{method}") for method in ("none", "bubble+suffix")]


@pytest.mark.parametrize("ranks", ["1_rank", "2_ranks"])
def test_time_is_within_a_tenth(ranks):
    """Without drafts to the forward. With them what a rank drafts follows from the times of single
    forwards, which differ between runs too."""
    found = compare(runs(ranks))
    none, ours = found["methods"].values()
    assert none["forwards"] == none["measured_forwards"][0]
    assert (
        abs(none["error"]) < 0.10 and abs(ours["error"]) < 0.10 and abs(found["ratio_error"]) < 0.10
    )
    assert abs(ours["forwards"] / ours["measured_forwards"][0] - 1) < 0.25
    assert ours["forwards"] < 0.75 * none["forwards"], (
        "drafts made a difference that the simulation had to find"
    )


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
