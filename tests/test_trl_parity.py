"""Loss and gradient of one off-policy batch against TRL's own GRPOTrainer (an optional dependency
of the tests).

TRL computes log-probabilities in float32, whatever the model is; that rounding is all that the
tolerances allow for."""

import copy
import dataclasses
import inspect
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from test_masked_loss import CASES as LOSSES
from test_update import ADVANTAGES, make_config, make_learner, make_samples
from torch.nn.utils.rnn import pad_sequence

from bubblespec.config.file import TRL
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.model import output_head
from bubblespec.engine.model_checks import prepare_model
from bubblespec.learn.learner import MAX_LOGITS, sampled_hidden, sum_over_ranks
from bubblespec.learn.losses import token_logprobs
from bubblespec.learn.microbatch import make_minibatches
from bubblespec.types import completion_mask
from tests.helpers.rows import with_observations

trl = pytest.importorskip("trl")

TOKENIZER = Path(__file__).parent.parent / "configs" / "tiny_policy"
# Our keys and TRL's: the same leaf names but for the KL's weight and the lower clip.
NAMES = ("grpo", "dr_grpo", "dapo", "cispo", "gspo", "dual clip", "kl")
CASES = {name: LOSSES[name] for name in NAMES}


def padded(sequences: list, side: str, dtype=torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, longest] and its mask, as TRL pads: prompts on the left, completions on the right."""
    values = [torch.as_tensor(np.asarray(sequence)).to(dtype) for sequence in sequences]
    masks = [torch.ones(len(sequence), dtype=torch.int64) for sequence in sequences]
    return tuple(pad_sequence(v, batch_first=True, padding_side=side) for v in (values, masks))


def trl_loss_and_gradient(model, samples, old: list, reference: list, loss: dict, tmp_path):
    options = dict(loss)
    kl_coef = options.pop("kl_coef", 0.0)
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=len(samples),
        num_generations=samples.num_generations,
        max_completion_length=20,
        temperature=0.8,
        epsilon=options.pop("epsilon_low", 0.2),
        epsilon_high=options.pop("epsilon_high", 0.2),
        use_bias_correction_kl=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        **options,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1"] * len(samples)}),
        processing_class=transformers.AutoTokenizer.from_pretrained(TOKENIZER),
    )
    prompt_tokens = [samples.prompt_of(i).token_ids for i in range(len(samples))]
    prompts, prompt_mask = padded(prompt_tokens, "left")
    tokens, mask = padded(samples.tokens, "right")
    tool_mask = padded([completion_mask(logprob) for logprob in samples.logprob], "right")[0]
    inputs = {"prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": tokens}
    inputs |= {"completion_mask": mask, "tool_mask": tool_mask}
    inputs |= {"advantages": torch.from_numpy(ADVANTAGES), "num_items_in_batch": tool_mask.sum()}
    inputs |= {"old_per_token_logps": padded(old, "right", torch.float64)[0]}
    inputs |= {"ref_per_token_logps": padded(reference, "right", torch.float64)[0]}
    # set so late because TRL would look for a reference model, whose log-probabilities are given
    # here
    trainer.beta = kl_coef
    trainer.current_gradient_accumulation_steps = 1  # what Trainer.train sets
    trainer.model.train()
    value = trainer.compute_loss(trainer.model, inputs)
    value.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    metrics = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    return value.item(), gradient, metrics


@pytest.mark.parametrize("has_turns", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_trl(make_model, tmp_path, name, has_turns):
    samples = with_observations(make_samples()) if has_turns else make_samples()
    config = make_config(1000, **CASES[name])
    model = make_model()
    theirs = copy.deepcopy(model)
    theirs.set_attn_implementation("sdpa")
    prepare_model(model, 64)
    ranks = Ranks(torch.device("cpu"))
    (((batch,),), weights, (factor,)) = make_minibatches(
        samples, np.ones(len(samples), bool), config=config, ranks=ranks
    )
    with torch.no_grad():
        now = token_logprobs(
            sampled_hidden(model, batch, "sdpa"),
            output_head(model),
            batch.target,
            batch.num_generated,
            SamplingParams(config.rollout.temperature),
            MAX_LOGITS,
        )
    rng = torch.Generator().manual_seed(2)
    batch.old = now + 0.3 * torch.randn(now.shape, generator=rng, dtype=torch.float64)
    batch.reference = now + 0.3 * torch.randn(now.shape, generator=rng, dtype=torch.float64)
    by_sample = [[np.zeros(len(tokens)) for tokens in samples.tokens] for _ in range(2)]
    for parts, values in zip(by_sample, (batch.old, batch.reference), strict=True):
        for i, part in zip(batch.order, values.split(batch.lengths.tolist()), strict=True):
            parts[i][completion_mask(samples.logprob[i])] = part
    wanted, wanted_gradient, wanted_metrics = trl_loss_and_gradient(
        theirs, samples, *by_sample, CASES[name], tmp_path
    )

    reference = model if config.loss.kl_coef else None  # its log-probabilities are given
    learner = make_learner(model, config, reference)
    measured = learner.accumulate_gradient(batch, ADVANTAGES, weights)
    totals = [sum_over_ranks([measured], ranks, factor)]
    metrics = learner.training_metrics(2 * totals)  # clips are those of several updates
    gradient = factor * torch.cat([p.grad.flatten() for p in model.parameters()])
    assert metrics["loss"] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert (gradient - wanted_gradient).norm() < 1e-5 * wanted_gradient.norm()
    if config.loss.kl_coef:
        assert metrics["kl"] == pytest.approx(wanted_metrics["kl"], rel=1e-5)
    if config.loss.loss_type == "cispo":
        # TRL counts capped weights of positive advantage alone.
        assert metrics["clip_ratio/high_mean"] > wanted_metrics["cispo_clip_ratio"] > 0.02
    elif config.loss.importance_sampling_level == "token":
        for clip in ("low", "high", "region"):
            key = f"clip_ratio/{clip}_mean"
            assert metrics[key] == pytest.approx(wanted_metrics[key], abs=1e-6)
            assert metrics[key] > 0.02
    else:  # TRL's mean is over sequences, ours over tokens
        assert wanted_metrics["clip_ratio/region_mean"] > 0.02
        assert metrics["clip_ratio/region_mean"] > 0.02
    if config.loss.delta is not None:
        assert metrics["clip_ratio/delta_mean"] > 0.02


def test_trl_names_exist_and_all_are_answered():
    names = set(inspect.signature(trl.GRPOTrainer).parameters)
    for arguments in (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments):
        names |= {field.name for field in dataclasses.fields(arguments)}
    assert TRL.keys() == names
