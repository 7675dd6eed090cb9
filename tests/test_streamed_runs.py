"""Whole runs with streamed gradients against the same without: equal tokens, and weights equal up
to the order of summation.

Whether a slice runs depends on the clock; here it does not (streaming.py).
"""

from functools import partial

import numpy as np
import pytest

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import StopRequested
from bubblespec.learn.learner import Learner
from bubblespec.records import RolloutRecord
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.setup import build
from tests.helpers.clocks import train_in_virtual_time, virtual_time
from tests.helpers.plain import REWARD, TINY, check_same, plain_run
from tests.helpers.runs import read
from tests.helpers.streaming import STREAMED, stream_always
from train import train

# With few slots, rows of every length end before the last ones do, and are streamed.
OPTIONS = [*TINY, "reward.num_workers=0", "run.save_steps=0", "rollout.max_num_seqs=6"]
# In virtual time a copy would leave few forwards.
DRAFTS = "speculative.method=bubble+suffix"
# What decides what is trained on.
RULES = {
    "missing rewards": ["reward.functions=[tests.helpers.rewards.with_few_gaps]"],
    "failing rewards": ["reward.functions=[tests.helpers.misbehaving_rewards.fails_for_some]"],
    "masked, overlong, with KL": [
        REWARD,
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
def test_streamed_run_equals_run_without_streaming(tmp_path_factory, monkeypatch, tmp_path, rule):
    """Only groups that are trained on as a whole, with rewards for all samples, are streamed."""
    reference = plain_run(tmp_path_factory, *OPTIONS, *RULES[rule])
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
    options = [*OPTIONS, *RULES[rule], *STREAMED, DRAFTS]
    train_in_virtual_time(*options, f"run.output_dir={tmp_path}")
    keys = ("loss", "grad_norm", "sampling/logp_difference/mean", "reward")
    check_same(tmp_path, reference, keys)
    assert any(streamed_groups for streamed_groups, _ in groups)
    check_slices(records)
    if rule == "missing rewards":
        assert any("reward/left_out" in line for line in read(tmp_path))
    if rule == "failing rewards":
        assert any(failed for _, failed in groups)
        assert not any(streamed_groups & failed for streamed_groups, failed in groups)


def test_abandoned_step_leaves_no_gradient(monkeypatch, tmp_path):
    """Told to stop once something is streamed; the step made again is whole."""
    stream_always(partial(monkeypatch.setattr, raising=False))
    options = [*OPTIONS, REWARD, *STREAMED, DRAFTS, "run.max_steps=1"]
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
