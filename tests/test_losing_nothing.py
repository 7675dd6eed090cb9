"""Whole runs in virtual time, with forwards like those of a fast processor core: useless drafts
lose next to nothing, good ones win."""

import numpy as np
import pytest
from bubblespec.idle.speculation import Speculation

from bubblespec.records import Load, RolloutRecord
from bubblespec.simulate.run import SimulatedStep, simulate
from bubblespec.simulate.workload import Synthetic, Workload
from tests.helpers.simulated import make_config


class FastCore:
    """A forward takes 1 ms and little beside, so that a row alone takes half as long as thirty; a
    token of a draft costs about as much to verify as to make."""

    def seconds(self, load: Load) -> float:
        seconds = 1.03e-3 + 35e-6 * load.rows + 83e-6 * load.wide_rows + 5e-9 * load.positions
        return seconds + 18e-6 * load.draft_tokens + 22e-6 * load.prompt_tokens

    def propose_seconds(self, num_rows: int) -> float:
        return 20e-6 + 2e-6 * num_rows if num_rows else 0.0


USELESS, GOOD = (
    {"run": 1.0, "tokens_a_pass": 1.0},
    {"run": 1e6},
)  # how soon drafts go wrong, and what they give after that


def run(
    method: str, num_steps: int, drafts: dict, seed: int = 0, mean: float = 80.0, **config
) -> list[SimulatedStep]:
    """64 responses a step on two ranks, lognormal, of up to 400 tokens."""
    spec = Synthetic(
        **({"mean": mean, "max": 400, "prompt": 20, "steps": num_steps, "seed": seed} | drafts)
    )
    options = {"rollout__placement": "balanced"} | config
    return simulate(make_config(method, 8, 8, 400, **options), Workload(spec, 8, 8), FastCore(), 2)


def seconds(steps: list[SimulatedStep]) -> float:
    return sum(step.seconds for step in steps)


@pytest.fixture
def settled(monkeypatch) -> list[tuple[RolloutRecord, Speculation, bool]]:
    """All rollouts of both ranks, as they are learnt from."""
    rollouts, learn = [], Speculation.learn_rollout

    def noted(speculation, record, ids, *, was_plain, **seconds):
        learn(speculation, record, ids, was_plain=was_plain, **seconds)
        rollouts.append((record, speculation, was_plain))

    monkeypatch.setattr(Speculation, "learn_rollout", noted)
    return rollouts


@pytest.mark.parametrize(
    "num_steps, seed, check_every", [(6, 1, 50), (12, 0, 50), (24, 0, 50), (24, 2, 5)]
)
def test_useless_drafts_lose_three_percent_at_most(num_steps, seed, check_every, settled):
    plain = run("none", num_steps, USELESS, seed)
    drafted = run("bubble+suffix", num_steps, USELESS, seed, speculative__check_every=check_every)
    assert [step.digest for step in drafted] == [step.digest for step in plain]
    assert seconds(drafted) <= 1.03 * seconds(plain)
    assert any(step.drafted_tokens for step in drafted), "idle time is still tried"
    assert any(was_plain for _, _, was_plain in settled) or check_every != 5


def test_good_drafts_win(settled):
    plain, drafted = (
        run(method, 12, GOOD, rollout__placement="in_turn") for method in ("none", "bubble+suffix")
    )
    assert [step.digest for step in drafted] == [step.digest for step in plain]
    assert seconds(drafted) < 0.8 * seconds(plain)
    assert not any(was_plain for _, _, was_plain in settled)
    # What the account says that drafts have brought is what they have, and it is the same on both
    # ranks.
    by_rank = [
        [record for record, speculation, _ in settled if speculation.ranks.rank == rank]
        for rank in range(2)
    ]
    uses = [
        [record.idle["draft_ahead"] for record in of_rank if "draft_ahead" in record.idle]
        for of_rank in by_rank
    ]
    assert len(uses[0]) == len(plain) - 1, "the last step drafts nothing"
    brought_s = np.array([[use.brought_s for use in of_rank] for of_rank in uses])
    saved_s = np.array([a.seconds - b.seconds for a, b in zip(plain, drafted, strict=True)])[:-1]
    np.testing.assert_array_equal(brought_s[0], brought_s[1])
    assert brought_s[0].sum() == pytest.approx(saved_s.sum(), rel=0.15)
    assert all(
        sum(getattr(use, field) for of_rank in uses for use in of_rank) > 0
        for field in ("seconds", "expected_s")
    )
    assert all(
        use.seconds <= record.total_s for use, record in zip(uses[0], by_rank[0], strict=False)
    )


def test_what_a_rollout_takes_without_drafts_is_estimated_well(settled):
    """By the cost model, from lengths alone: within a few percent of what the simulator takes,
    where nothing is drafted."""
    options = {"rollout__placement": "in_turn"}
    plain = run("none", 6, GOOD, **options)
    run("bubble+suffix", 6, GOOD, speculative__check_every=1, **options)
    factors = [speculation.account.factor for _, speculation, _ in settled]
    assert all(0.95 < factor < 1.05 for factor in factors)
    both = list(
        zip(
            *([entry for entry in settled if entry[1].ranks.rank == rank] for rank in range(2)),
            strict=True,
        )
    )
    assert [was_plain for (_, _, was_plain), _ in both] == [False, True] * 3
    for step, of_step in list(zip(plain, both, strict=True))[1::2]:
        assert max(record.total_s for record, _, _ in of_step) == pytest.approx(
            step.seconds, rel=0.01
        )
