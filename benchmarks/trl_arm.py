"""The arm of TRL in vs_trl.py: its GRPOTrainer with the settings of a configuration of ours."""

import os
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bubblespec.config import Config, flatten
from bubblespec.data.prompts import make_tokenize
from bubblespec.errors import InputError
from bubblespec.loading import load_prompts, stop_tokens
from bubblespec.mechanisms.episodes.forms import load_form
from bubblespec.mechanisms.episodes.tokens import tokenize_with
from bubblespec.rewards.functions import load_reward

# Keys of a configuration that mean the same under the same name.
SAME = [f"rollout.{name}" for name in ("num_generations", "max_completion_length", "temperature")]
SAME += ["rollout.top_p", "rollout.top_k", "loss.loss_type", "loss.importance_sampling_level"]
SAME += ["loss.mask_truncated_completions", "optim.learning_rate", "optim.warmup_steps"]
SAME += ["optim.weight_decay", "optim.adam_epsilon", "optim.max_grad_norm", "run.seed"]
# Share of a CPU's memory. Each step allocates a new cache, and a larger one takes longer.
CACHE_SHARE = 0.04


def run_trl(
    config: Config, num_steps: int, microbatches: int, make_clock: Callable, options: dict
) -> dict:
    """Make steps of TRL's trainer.

    make_clock: makes the `vs_trl.Clock` of a model; options: of GRPOConfig, on generation. Raises
    InputError for what TRL has under no option of its own."""
    rollout, optim, loss = config.rollout, config.optim, config.loss
    torch.manual_seed(config.run.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=getattr(torch, config.model.dtype), attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = list(stop_tokens(config, model, tokenizer))
    environment, form, tokenize = config.environment, None, None
    if environment.is_used:
        form = load_form(environment.factory, environment.tools)
        tokenize = tokenize_with(tokenizer, form)
    prompt_set, _ = load_prompts(config, tokenizer, tokenize)
    batches = [
        prompt_set.batch(config.run.seed, step, rollout.num_prompts_per_step)
        for step in range(num_steps)
    ]
    prompts = [prompt.text for batch in batches for prompt in batch]
    lengths: list[list[int]] = []  # of this rank, by step

    def rewarder(function: Callable) -> Callable:
        def reward(prompts, completions, completion_ids, number, **kwargs):
            chosen = [batches[i // len(batches[0])][i % len(batches[0])].columns for i in number]
            names = sorted(set().union(*chosen))
            columns = {name: [found.get(name) for found in chosen] for name in names}
            if function is functions[0] and form is None:
                lengths.append([len(ids) for ids in completion_ids])
            given = {"completions": completions, "completion_ids": completion_ids}
            return function(prompts=prompts, **given, **columns)

        reward.__name__ = function.__name__
        return reward

    functions = [load_reward(path) for path in config.reward.functions]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if "use_transformers_continuous_batching" in options and config.model.dtype == "float32":
        cache = {"max_memory_percent": CACHE_SHARE / world_size}
        options = options | {"transformers_continuous_batching_config": cache}
    rows = rollout.num_prompts_per_step * rollout.num_generations
    per_device, rest = divmod(rows, world_size * microbatches)
    if rest:
        raise InputError(
            f"--trl-microbatches: {rows} sequences on {world_size} ranks, {microbatches} parts"
        )
    rewards, clock = [], make_clock(model)
    phases: dict[str, list[float]] = {"generate": [], "reward": []}  # seconds, by step

    def timed(phase: str, function: Callable, *arguments):
        begin_s = time.perf_counter()
        found = function(*arguments)  # which waits for the GPU
        steps, number = phases[phase], len(clock.seconds)
        steps += [0.0] * (number + 1 - len(steps))
        steps[number] += time.perf_counter() - begin_s
        return found

    class Trainer(GRPOTrainer):
        def _generate(self, *arguments):
            return timed("generate", super()._generate, *arguments)

        def _calculate_rewards(self, *arguments):
            return timed("reward", super()._calculate_rewards, *arguments)

        def _tool_call_loop(self, *arguments):
            found = super()._tool_call_loop(*arguments)
            lengths.append([sum(mask) for mask in found[0]])
            return found

    class Callback(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            clock.begin_s = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            clock.end()
            rewards.append(trainer._metrics["train"]["reward"][-1])

    flat = flatten(config)
    arguments = GRPOConfig(
        output_dir=config.run.output_dir,
        use_cpu=config.model.dtype == "float32",
        bf16=config.model.dtype == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=microbatches,
        max_tool_calling_iterations=environment.max_turns - 1,
        shuffle_dataset=False,
        beta=0.0,
        num_iterations=1,
        epsilon=loss.epsilon_low,
        epsilon_high=loss.epsilon_high,
        scale_rewards=loss.scale_rewards or "group",
        reward_weights=config.reward.weights,
        lr_scheduler_type="constant_with_warmup",
        adam_beta1=optim.adam_betas[0],
        adam_beta2=optim.adam_betas[1],
        max_steps=num_steps,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **{key.partition(".")[2]: flat[key] for key in SAME},
        **options,
    )
    data = {"prompt": prompts, "number": range(len(prompts))}
    if form is not None:  # what `reset` may need
        columns = [prompt.columns for batch in batches for prompt in batch]
        names = [name for name, value in columns[0].items() if isinstance(value, str)]
        data |= {name: [of_prompt[name] for of_prompt in columns] for name in names}
    trainer = Trainer(
        model=model,
        reward_funcs=[rewarder(function) for function in functions],
        args=arguments,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
        callbacks=[Callback()],
        tools=None if form is None else form.functions,
        environment_factory=None if form is None else form.factory,
    )
    texts, tokenize = prompts[: len(batches[0])], make_tokenize(tokenizer)
    if form is not None:
        trainer._batch_environments = [None] * len(texts)
        tokenize = make_tokenize(tokenizer, form.schemas())
    given = trainer._tokenize_prompts(texts)[0]
    if [list(ids) for ids in given] != [list(tokenize(text)) for text in texts]:
        raise InputError("TRL tokenises these prompts in another way, which is other work")
    trainer.train()
    everyone = [lengths] * world_size
    if world_size > 1:
        dist.all_gather_object(everyone, lengths)
    by_step = [np.concatenate([rank[step] for rank in everyone]) for step in range(num_steps)]
    assert all(len(step) == rows for step in by_step), "a step of TRL has other sequences"
    if dist.is_initialized():
        dist.destroy_process_group()
    return {
        "seconds": clock.seconds,
        "tokens": [int(step.sum()) for step in by_step],
        "median_length": [float(np.median(step)) for step in by_step],
        "rewards": [float(r) for r in rewards],
        **phases,
        "train": [s - a - b for s, a, b in zip(clock.seconds, *phases.values(), strict=True)],
    }
