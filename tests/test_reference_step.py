"""Whole steps of the trainer, speculation included, against reference_step.py: tokens, rewards,
advantages, updates, weights."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import train as script
from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.setup import build
from bubblespec.trainer import Trainer
from tests.helpers.reference_step import grpo_step
from tests.helpers.rewards import remainder
from tests.helpers.runs import read

CONFIG = "configs/tiny_cpu_bulk.yaml"
STEPS = 2
SHORT = [
    "model.dtype=float64",
    "data.tasks=[{name: chain_sum, weight: 1.0, "
    "config: {min_terms: 2, max_terms: 5, min_digits: 1, max_digits: 1}}]",
    # the second step has the same prompts, for which the first one's responses are drafts
    "data.size=4",
    "reward.functions=[tests.helpers.rewards.remainder]",
    "rollout.num_prompts_per_step=4",
    "rollout.num_generations=3",
    "rollout.max_completion_length=24",
    "rollout.stop_token_ids=[0]",
    "eval.num_prompts=0",
    "run.eval_steps=0",
    f"run.max_steps={STEPS}",
    "run.seed=12345678901",
    "speculative.planning=always",  # whatever a forward takes on this machine
]
GAPS = "reward.functions=[tests.helpers.rewards.with_gaps]"  # left out: those with a sum of 5 n
RECIPES = {
    "GRPO": """
        rollout.temperature=0.8 rollout.top_p=0.98 rollout.top_k=40
        rollout.min_completion_length=12
        loss.loss_type=grpo loss.kl_coef=0.1 loss.num_iterations=2 loss.num_minibatches=2
        loss.epsilon_low=0.02 loss.epsilon_high=0.03 loss.mask_truncated_completions=true
        optim.learning_rate=2e-4 optim.weight_decay=0.1 optim.lr_scheduler_type=cosine
        optim.warmup_steps=0
    """,
    "GSPO, leave-one-out": """
        rollout.temperature=1.1
        loss.loss_type=dr_grpo loss.advantage_estimator=rloo loss.num_iterations=2
        loss.importance_sampling_level=sequence loss.epsilon_low=0.01 loss.epsilon_high=0.01
        optim.learning_rate=2e-4 optim.warmup_steps=3 optim.max_grad_norm=0
    """,
    "groups left out, means of groups": f"""
        {GAPS} optim.learning_rate=2e-4 optim.warmup_steps=0
        loss.loss_type=grpo loss.kl_coef=0.1 loss.mask_truncated_completions=true
    """,
    "groups left out, statistics of the batch": f"""
        {GAPS} optim.learning_rate=2e-4 optim.warmup_steps=0
        loss.loss_type=dr_grpo loss.advantage_estimator=reinforce_plus_plus
    """,
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("exact_norms")
def test_trainer_steps_equal_reference_step(tmp_path, monkeypatch, name):
    config = load_config(CONFIG, [*SHORT, *RECIPES[name].split(), f"run.output_dir={tmp_path}"])
    trainer, seen, update = build(config, Ranks(torch.device("cpu"))), [], Trainer.update

    def noting(trainer, record, advantages):
        metrics = update(trainer, record, advantages)
        seen.append((record, np.array(advantages), dict(metrics)))
        return metrics

    monkeypatch.setattr(Trainer, "update", noting)
    script.train(trainer)
    trainer.lock.close()

    plain = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64).eval()
    reference = copy.deepcopy(plain) if config.loss.kl_coef else None
    initial, moments, clipped, truncated, left_out = copy.deepcopy(plain), {}, 0, 0, []
    for step, (record, advantages, metrics) in enumerate(seen):
        samples, generated = record.samples, record.generated
        sums = np.array([tokens.sum() for tokens in generated.tokens])
        has_gap = (sums.reshape(-1, generated.num_generations) % 5 == 0).any(axis=1)
        is_out = has_gap & (GAPS in RECIPES[name])
        left_out.append(is_out.sum())
        prompts = [
            (group.prompt.prompt_id, group.draw_index, list(group.prompt.token_ids))
            for group, is_left_out in zip(generated.groups, is_out, strict=True)
            if not is_left_out
        ]
        assert {draw_index for _, draw_index, _ in prompts} == {step}, "each step is an epoch"
        groups, rewards, wanted, updates = grpo_step(
            plain, reference, prompts, remainder, config=config, step=step, moments=moments
        )
        responses = [response for group in groups for response in group]
        assert [tokens.tolist() for tokens in samples.tokens] == [
            response.tokens for response in responses
        ]
        assert samples.is_truncated.tolist() == [response.is_truncated for response in responses]
        assert samples.rewards.tolist() == [[value] for group in rewards for value in group]
        np.testing.assert_allclose(advantages, np.ravel(wanted), rtol=1e-9, atol=1e-13)
        losses, norms = (
            [getattr(update, key) for update in updates] for key in ("loss", "grad_norm")
        )
        assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-9, abs=1e-12)
        assert metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-9)
        assert metrics["learning_rate"] == pytest.approx(updates[-1].learning_rate, rel=1e-12)
        assert metrics["skipped_updates"] == 0
        clipped += sum(
            int(is_clipped.sum())
            for update in updates
            for clips in update.clips
            for is_clipped in clips.values()
        )
        truncated += sum(response.is_truncated for response in responses)
    assert len(seen) == STEPS
    named = dict(plain.named_parameters())
    for key, parameter in trainer.learner.model.named_parameters():
        torch.testing.assert_close(parameter, named[key], rtol=1e-9, atol=1e-9, msg=key)
        assert (named[key] - initial.get_parameter(key)).abs().max() > 1e-4, key
    has_gaps, lines = GAPS in RECIPES[name], read(tmp_path)
    assert (sum(left_out) > 0) == has_gaps and min(left_out) < len(is_out)
    assert [line.get("reward/left_out", 0) for line in lines] == left_out
    missing = sum(line.get("rewards/with_gaps/missing", 0) for line in lines)
    assert missing >= sum(left_out)
    assert clipped > 0 or has_gaps, "clips must show"
    assert 0 < truncated < len(responses) * STEPS, "the length limit must show"
    assert sum(line["rollout/spec_accepted_tokens"] for line in lines) > 0, "so must drafts"
