"""Rows preempted at random: equal tokens and weights; near ties."""

import pytest
import torch

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.sampling import gumbel
from bubblespec.setup import build
from tests.helpers.preemption import Preemption
from tests.helpers.runs import EPOCHS, digests, max_change, same_weights, steps_of, weights
from tests.system.near_ties import NOISE, NUCLEUS, VIOLATION, judge
from train import train

STEPS = 4
OPTIONS = [
    *EPOCHS,
    "data.size=16",
    "rollout.num_prompts_per_step=6",
    "rollout.max_completion_length=32",
    "rollout.temperature=0.7",
    "rollout.top_p=0.95",
    f"run.max_steps={STEPS}",
    "run.save_steps=1",
]


def run(folder, *overrides: str, preempt: float = 0.0) -> dict[str, int]:
    """Run in this process; return the numbers of preempted rows."""
    options = [*OPTIONS, *overrides, f"run.output_dir={folder}"]
    trainer = build(load_config("configs/tiny_cpu_bulk.yaml", options), Ranks(torch.device("cpu")))
    preemption = Preemption(trainer, preempt)
    train(trainer)
    trainer.lock.close()
    return preemption.counts


def test_preemptions_leave_tokens_and_weights_unchanged(tmp_path):
    """Spoilt drafts are in test_generator.py and test_rollout_loop.py."""
    plain, preempted = tmp_path / "plain", tmp_path / "preempted"
    run(plain, "speculative.method=none")
    moved = max_change(weights(plain, 1), weights(plain, STEPS))
    assert moved > 1e-6, "the policy must have learned something"
    few = ("rollout.max_num_seqs=14", "rollout.max_num_batched_tokens=60")
    counts = run(preempted, "speculative.method=bubble+suffix", *few, preempt=0.3)
    assert len(digests(plain)) == STEPS and digests(preempted) == digests(plain)
    assert same_weights(weights(preempted, STEPS), weights(plain, STEPS))
    assert counts["own"] > 20 and counts["ahead"] > 0
    lengths = [line["rollout/spec_accept_length"] for line in steps_of(preempted)]
    assert sum(lengths) > 1.1 * STEPS


def test_first_difference_is_near_tie_or_violation():
    """Logits in which tokens 3 and 8 lead after temperature and noise, by a known gap."""
    key, params = torch.tensor([[5, 6, 7, 8]], dtype=torch.int32), SamplingParams(temperature=0.7)
    noise = gumbel(key, 20, torch.float64)[0]
    for gap, tokens, wanted in (
        (4e-4, {3, 8}, NOISE),
        (4e-4, {3, 9}, VIOLATION),
        (4e-4, {3}, VIOLATION),
        (1e-2, {3, 8}, VIOLATION),
    ):
        perturbed = torch.zeros(20, dtype=torch.float64)
        perturbed[3], perturbed[8] = 5.0, 5.0 - gap
        kind, found = judge((perturbed - noise) * 0.7, key, 0, params, tokens)
        assert kind == wanted and (kind == VIOLATION or found == pytest.approx(gap))


def test_token_at_edge_of_nucleus_may_be_in_or_out():
    """Of two tokens the less probable one has the better noise, and wins by far in the nucleus."""
    key = torch.tensor([[5, 6, 7, 8]], dtype=torch.int32)
    second, winner = gumbel(key, 20, torch.float64)[0].argsort()[[0, -1]].tolist()
    probability = torch.full((20,), 1e-9, dtype=torch.float64)
    probability[second], probability[winner] = 0.55, 0.45
    logits, before = probability.log(), float((probability / probability.sum())[second])
    for distance, wanted in ((5e-5, NUCLEUS), (-5e-5, NUCLEUS), (2e-3, VIOLATION)):
        params = SamplingParams(top_p=before + distance)
        kind, gap = judge(logits, key, 0, params, {winner, second})
        assert kind == wanted
        assert kind == VIOLATION or gap == pytest.approx(5e-5, rel=1e-3)
    assert judge(logits, key, 0, SamplingParams(), {winner, second})[0] == VIOLATION
