"""Drafts at given prices, in virtual time: what a run pays besides forwards, planned by them.

The first GPU run (docs/lab/h200.md): SmolLM2, 128 rows on one rank, of which one or two mostly
reach the limit of 256 tokens, and whose drafts cost more than they saved."""

import numpy as np

from bubblespec.planner.prices import Prices
from bubblespec.tools.simulate.command import arms_of, synthetic_run
from bubblespec.tools.simulate.run import simulate
from bubblespec.tools.simulate.workload import Spec

LENGTHS = {"mean": 28, "max": 256, "sigma": 1.1, "prompt": 60, "accept_length": 1.3, "steps": 40}
SHAPE = ["rollout.num_prompts_per_step=16", "rollout.num_generations=8", "rollout.max_num_seqs=256"]
MEASURED = Prices(0.163, 1.0, 4e-5, 4e-5, 0.0)  # fitted to that run, with 2.7 ms per forward


def seconds_of(run: float, forward_s: float, prices: Prices) -> tuple[float, float]:
    """run: tokens to a mismatch."""
    keys = [*SHAPE, "speculative.method=bubble+suffix", "rollout.tp_tail_max_rows=0"]
    config, workload = synthetic_run(Spec(run=run, **LENGTHS), keys)
    arms = arms_of(config).values()
    steps = [simulate(arm, workload, lambda load: forward_s, 1, prices=prices) for arm in arms]
    assert [s.digest for s in steps[0]] == [s.digest for s in steps[1]]
    plain_s, drafted_s = (sum(step.seconds for step in of_arm) for of_arm in steps)
    return plain_s, drafted_s


def test_first_gpu_run_would_lose_little():
    """It lost 16%. Few drafts hold to the end of the longest response, and each costs too much."""
    plain_s, drafted_s = seconds_of(60, 2.7e-3, MEASURED)
    assert drafted_s < 1.03 * plain_s


def test_cheap_drafts_that_hold_gain():
    plain_s, drafted_s = seconds_of(1500, 1e-3, Prices(0.02, 1.0, 4e-6, 4e-6, 0.0))
    assert plain_s > 1.5 * drafted_s


def test_prices_are_charged():
    """A rollout without drafts pays for itself and its forwards alone."""
    keys = [*SHAPE, "speculative.method=none", "rollout.tp_tail_max_rows=0"]
    config, workload = synthetic_run(Spec(**LENGTHS | {"steps": 2}), keys)
    seconds = []
    for prices in (Prices(0.0, 1.0, 0.0, 0.0, 0.0), Prices(0.5, 3.0, 1.0, 1.0, 1.0)):
        steps = simulate(config, workload, lambda load: 1e-2, 1, prices=prices)
        seconds.append(np.array([step.seconds for step in steps]))
    np.testing.assert_allclose(seconds[1], 0.5 + 3.0 * seconds[0], rtol=0.02)
