"""Whole runs with streamed gradients against the same without: equal tokens, and weights equal up
to the order of summation.

Whether a slice runs depends on the clock; here it does not (streaming.py).
"""

from functools import partial

import numpy as np
import pytest
import torch

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import StopRequested
from bubblespec.learn.learner import Learner
from bubblespec.mechanisms.stream_gradients.idle_task import StreamGradients
from bubblespec.records import RolloutRecord
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.setup import build
from tests.helpers.clocks import train_in_virtual_time, virtual_time
from tests.helpers.runs import SHORT, digests, read, weights
from tests.helpers.streaming import STREAMED, stream_always
from train import train

STEPS = 4
OPTIONS = [
    *SHORT,
    "rollout.num_prompts_per_step=6",
    "rollout.max_completion_length=24",
    f"run.max_steps={STEPS}",
    "run.save_steps=0",
    "reward.functions=[tests.helpers.rewards.remainder]",
    "optim.learning_rate=1e-3",
    "reward.num_workers=0",
    "speculative.method=bubble+suffix",  # in virtual time a copy would leave few forwards
]


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Adam divides gradients by their size: what is rounded in small ones shows in the weights."""
    return all(torch.allclose(a[name], b[name], rtol=0, atol=1e-6) for name in a.keys() | b.keys())


# What decides what is trained on.
RULES = {
    "missing rewards": ["reward.functions=[tests.helpers.rewards.with_few_gaps]"],
    "failing rewards": ["reward.functions=[tests.helpers.misbehaving_rewards.fails_for_some]"],
    "masked, overlong, with KL": [
        "loss.mask_truncated_completions=true",
        "loss.kl_coef=0.05",
        "reward.overlong_buffer_length=12",
        "loss.loss_type=grpo",
    ],
}


def check_slices(records: list[RolloutRecord]) -> None:
    """Slices are between forwards: their time is not the next forward's."""
    assert sum(len(record.slices) for record in records) > 2
    for record in records:
        for span in record.slices:
            assert record.began_s <= span.begin_s <= span.end_s <= record.ended_s
            assert all(f.end_s <= span.begin_s or span.end_s <= f.begin_s for f in record.forwards)
        seconds = sum(end - begin for _, begin, end in record.slices)
        assert record.idle["gradients"].seconds == pytest.approx(seconds)
        kinds = [span.kind for span in record.spans]
        assert kinds.count("gradient") <= len(record.slices)
        assert np.all(np.diff([span.begin_s for span in record.spans]) >= 0)


@pytest.mark.parametrize("rule", RULES)
def test_streamed_run_equals_run_without_streaming(monkeypatch, tmp_path, rule):
    """Only groups that are trained on as a whole, with rewards for all samples, are streamed."""
    streamed, reference = tmp_path / "streamed", tmp_path / "reference"
    common = [*OPTIONS, *RULES[rule]]
    with monkeypatch.context() as nothing:
        nothing.setattr(StreamGradients, "can_begin", lambda task: False)
        train_in_virtual_time(*common, "optim.stream_gradients=true", f"run.output_dir={reference}")
    stream_always(partial(monkeypatch.setattr, raising=False))
    groups, update = [], Learner.update  # streamed before each update; those with a failed reward

    def noting(learner, samples, *arguments):
        pairs = zip(samples.ids, samples.tokens, strict=True)
        failed = {name[:2] for name, tokens in pairs if tokens.sum() % 16 == 0}
        groups.append(({name[:2] for name in learner.early.ids}, failed))
        return update(learner, samples, *arguments)

    records, run_loop = [], RolloutLoop.run

    def noting_record(loop, *arguments):
        records.append(run_loop(loop, *arguments))
        return records[-1]

    monkeypatch.setattr(Learner, "update", noting)
    monkeypatch.setattr(RolloutLoop, "run", noting_record)
    train_in_virtual_time(*common, *STREAMED, f"run.output_dir={streamed}")
    assert digests(streamed) == digests(reference) and len(digests(streamed)) == STEPS
    assert close(weights(streamed), weights(reference))
    for ours, theirs in zip(read(streamed), read(reference), strict=True):
        for name in ("loss", "grad_norm", "sampling/logp_difference/mean", "reward"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-8), name
    assert any(streamed_groups for streamed_groups, _ in groups)
    check_slices(records)
    if rule == "missing rewards":
        assert any("reward/left_out" in line for line in read(streamed))
    if rule == "failing rewards":
        assert any(failed for _, failed in groups)
        assert not any(streamed_groups & failed for streamed_groups, failed in groups)


def test_abandoned_step_leaves_no_gradient(monkeypatch, tmp_path):
    """Told to stop once something has been streamed; the step that is made again has the gradient
    of its samples alone."""
    stream_always(partial(monkeypatch.setattr, raising=False))
    options = [*OPTIONS, *STREAMED, "run.max_steps=1"]
    run_loop, norms = RolloutLoop.run, []
    for name, is_stopped in (("undisturbed", False), ("stopped", True)):
        with virtual_time() as ranks:
            overrides = [*options, f"run.output_dir={tmp_path / name}"]
            trainer = build(load_config("configs/tiny_cpu_bulk.yaml", overrides), ranks)
            if is_stopped:

                def stopped_run(loop, ranks=ranks):
                    record = run_loop(loop)
                    ranks.must_stop = True
                    return record

                monkeypatch.setattr(RolloutLoop, "run", stopped_run)
                with pytest.raises(StopRequested):
                    trainer.sample(0)
                monkeypatch.setattr(RolloutLoop, "run", run_loop)
                ranks.must_stop = False
                assert trainer.learner.early.ids and trainer.learner.optimizer.flat_grad.any()
            train(trainer)
            trainer.lock.close()
        norms.append(read(tmp_path / name)[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
