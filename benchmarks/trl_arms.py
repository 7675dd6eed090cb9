"""Training runs of this trainer and of TRL's GRPOTrainer on the same problem, each a job of its own
that measures its steps.

TRL is a dependency of these comparisons alone: pip install --no-deps trl==1.16.0 (into a folder of
its own, given by PYTHONPATH).

Arms: trl (generation by `model.generate`), trl-cb (its generation by transformers' continuous
batching), none (this trainer without speculation), bubble+suffix and bubble+suffix+drafter (with
it), all and all+drafter (with tail batching too). All have the same model, prompts in the same
order (but for tail batching, which defers some), group size, limits, reward functions, global
batch, loss (one update a batch, no KL), AdamW and clipping, in float32 on two ranks with one thread
each. Tokens differ: each samples in its own way.

A step lasts from the end of one to the end of the next, with everything in it: data, generation,
rewards, learning, logging. What is before the first step of this trainer's loop (the warm start of
a drafter) is in that step.

What TRL is given to run well on a CPU: SDPA, K/V cache, no gradient checkpointing, no logging, no
old-policy forward, and the
--trl-microbatches that suit it. What differs by design: this trainer packs without padding, and
computes no gradient where a
group's equal rewards make it zero.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from bubblespec.config import Config, flatten, load_config
from bubblespec.errors import InputError

# Of this trainer: what is switched on.
OWN = {
    "none": ("speculative.method=none",),
    "bubble+suffix": ("speculative.method=bubble+suffix",),
    "bubble+suffix+drafter": ("speculative.method=bubble+suffix+drafter",),
    "all": ("speculative.method=bubble+suffix", "tail_batching.enabled=true"),
    "all+drafter": ("speculative.method=bubble+suffix+drafter", "tail_batching.enabled=true"),
}
ARMS = ("trl", "trl-cb", *OWN)
# What the arm of TRL is not set up for.
COMPARED = {
    "loss.advantage_estimator": "grpo",
    "loss.kl_coef": 0.0,
    "loss.num_iterations": 1,
    "loss.num_minibatches": 1,
    "rollout.dynamic_sampling": False,
    "rollout.min_completion_length": 0,
    "model.dtype": "float32",
    "model.lora_r": 0,
    "loss.delta": None,
    "reward.overlong_buffer_length": 0,
    "optim.lr_scheduler": "constant",
}
STEPS_BEYOND = 16  # of the measured ones: so that drafts are made as in a long run


class Enough(Exception):
    """All steps have been measured; raised on all ranks at the same step."""


class Clock:
    """When steps begin and end; what `at_end` does between them is not measured."""

    def __init__(self, at_end: Callable[[int], None]):
        self.at_end, self.seconds, self.processor_seconds = at_end, [], []

    def begin(self) -> None:
        self.begun = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Of a step, and the next begins."""
        self.seconds.append(time.perf_counter() - self.begun[0])
        self.processor_seconds.append(time.process_time() - self.begun[1])
        self.at_end(len(self.seconds))
        self.begin()


def saver(model: torch.nn.Module, folder: str | None, every: int) -> Callable[[int], None]:
    """Saves the weights in `folder` after every so many steps, on rank 0."""

    def save(num_steps: int) -> None:
        if folder and num_steps % every == 0 and int(os.environ.get("RANK", "0")) == 0:
            torch.save(
                {name: tensor.clone() for name, tensor in model.state_dict().items()},
                weights_file(folder, num_steps),
            )

    return save


def weights_file(folder: str, num_steps: int) -> str:
    return os.path.join(folder, f"{num_steps}.pt")


def run_own(config: Config, num_steps: int, folder: str | None, every: int) -> dict:
    """Steps of this trainer, through the loop of train.py as it is. folder, every: see `saver`."""
    import train as entry
    from bubblespec import trainer as trainer_module
    from bubblespec.dist.ranks import ranks_from_environment
    from bubblespec.setup import build

    steps = []

    class Logger(trainer_module.MetricsLogger):
        def log(self, step, metrics):
            super().log(step, metrics)
            steps.append(metrics)
            clock.end()
            if len(steps) == num_steps:
                raise Enough

    trainer_module.MetricsLogger = Logger
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        trainer = build(config, ranks)
        clock = Clock(saver(trainer.learner.model, folder, every))
        clock.begin()
        try:
            entry.train(trainer)
        except Enough:
            ranks.barrier()
    rows = config.rollout.num_prompts_per_step * config.rollout.num_generations
    return {
        "seconds": clock.seconds,
        "processor_seconds": clock.processor_seconds,
        "tokens": [round(m["completions/mean_length"] * rows) for m in steps],
        "longest": [m["completions/max_length"] for m in steps],
        "median_length": [m["completions/median_length"] for m in steps],
        "rewards": [m["reward"] for m in steps],
        "zero_groups": [m["frac_reward_zero_std"] for m in steps],
    }


def run_trl(
    config: Config,
    num_steps: int,
    microbatches: int,
    continuous_batching: bool,
    folder: str | None,
    every: int,
) -> dict:
    """The same by TRL. Raises InputError for what TRL has under no option of its own."""
    import torch.distributed as dist
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from bubblespec.data.prompts import make_tokenize
    from bubblespec.loading import load_prompts, stop_tokens
    from bubblespec.rewards.functions import load_reward

    rollout, optim, loss = config.rollout, config.optim, config.loss
    torch.manual_seed(config.run.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = list(stop_tokens(config, model, tokenizer))
    prompt_set, _ = load_prompts(config, tokenizer)
    batches = [
        prompt_set.batch(config.run.seed, step, rollout.num_prompts_per_step)
        for step in range(num_steps)
    ]
    prompts = [prompt for batch in batches for prompt in batch]
    lengths: list[list[int]] = []  # of this rank, by step

    def rewarder(function: Callable) -> Callable:
        def reward(prompts_, completions, completion_ids, number, **kwargs):
            names = sorted({name for i in number for name in prompts[i].columns})
            columns = {name: [prompts[i].columns.get(name) for i in number] for name in names}
            return function(
                prompts=prompts_, completions=completions, completion_ids=completion_ids, **columns
            )

        def named(prompts, completions, completion_ids, number, **kwargs):
            if function is functions[0]:
                lengths.append([len(ids) for ids in completion_ids])
            return reward(prompts, completions, completion_ids, number)

        named.__name__ = function.__name__
        return named

    functions = [load_reward(path) for path in config.reward.functions]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rows = rollout.num_prompts_per_step * rollout.num_generations
    per_device, rest = divmod(rows, world_size * microbatches)
    if rest:
        raise InputError(
            f"--trl-microbatches: {rows} sequences cannot be split into {microbatches} on each of {world_size} ranks"
        )
    rewards, zero_groups = [], []
    clock = Clock(saver(model, folder, every))

    class Callback(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            clock.begin()

        def on_step_end(self, *args, **kwargs):
            clock.end()
            rewards.append(trainer._metrics["train"]["reward"][-1])
            zero_groups.append(trainer._metrics["train"]["frac_reward_zero_std"][-1])

    batching = {"page_size": 64, "max_batch_tokens": rollout.max_batch_tokens}
    longest = rollout.max_prompt_length + rollout.max_completion_length
    batching["num_blocks"] = (rows // world_size) * (-(-longest // 64) + 1)
    arguments = GRPOConfig(
        output_dir=config.run.output_dir,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=microbatches,
        num_generations=rollout.num_generations,
        max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        use_transformers_continuous_batching=continuous_batching,
        transformers_continuous_batching_config=batching if continuous_batching else None,
        shuffle_dataset=False,
        loss_type=loss.loss_type,
        beta=0.0,
        num_iterations=1,
        epsilon=loss.epsilon_low,
        epsilon_high=loss.epsilon_high,
        scale_rewards=loss.scale_rewards or "group",
        importance_sampling_level=loss.importance_sampling_level,
        mask_truncated_completions=loss.mask_truncated_completions,
        reward_weights=config.reward.weights,
        learning_rate=optim.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optim.warmup_steps,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_epsilon=optim.adam_epsilon,
        max_grad_norm=optim.max_grad_norm,
        max_steps=num_steps,
        seed=config.run.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[rewarder(function) for function in functions],
        args=arguments,
        train_dataset=Dataset.from_list(
            [{"prompt": prompt.text, "number": i} for i, prompt in enumerate(prompts)]
        ),
        processing_class=tokenizer,
        callbacks=[Callback()],
    )
    given = trainer._tokenize_prompts([prompt.text for prompt in batches[0]])[0]
    tokenize = make_tokenize(tokenizer)
    if [list(ids) for ids in given] != [list(tokenize(prompt.text)) for prompt in batches[0]]:
        raise InputError(
            "TRL tokenises these prompts in another way, so the arms would not have the same work"
        )
    trainer.train()
    everyone = [None] * world_size
    if world_size > 1:
        dist.all_gather_object(everyone, lengths)
    else:
        everyone = [lengths]
    by_step = [np.concatenate([rank[step] for rank in everyone]) for step in range(num_steps)]
    assert all(len(step) == rows for step in by_step), (
        "a step of TRL has another number of sequences"
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    return {
        "seconds": clock.seconds,
        "processor_seconds": clock.processor_seconds,
        "tokens": [int(step.sum()) for step in by_step],
        "longest": [int(step.max()) for step in by_step],
        "median_length": [float(np.median(step)) for step in by_step],
        "rewards": [float(r) for r in rewards],
        "zero_groups": [float(z) for z in zero_groups],
    }


def run_arm(arguments: argparse.Namespace) -> int:
    """In a job of its own: rank 0 writes what it measured to --json."""
    arm, num_steps = arguments.arm, arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *arguments.overrides,
            "run.eval_steps=0",
            "run.save_steps=0",
            f"run.output_dir={arguments.folder or folder}",
        ]
        overrides.append(f"run.max_steps={num_steps + STEPS_BEYOND}")
        config = load_config(arguments.config, [*overrides, *OWN.get(arm, ())])
        if arm in OWN:
            measured = run_own(config, num_steps, arguments.weights, arguments.every)
        else:
            given = arguments.trl_microbatches, arm == "trl-cb", arguments.weights, arguments.every
            measured = run_trl(config, num_steps, *given)
    if int(os.environ.get("RANK", "0")) == 0:
        measured["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(measured, file)
    return 0


def job(
    arguments: argparse.Namespace,
    arm: str,
    overrides: list[str],
    weights: str | None = None,
    every: int = 1,
) -> dict:
    """One arm's steps, in a job of two ranks; {"error": ...} if it fails. arguments: of
    `add_arguments`. weights: a folder for the policy's, after every so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = os.path.join(folder, "arm.json"), os.path.join(folder, "log")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={arguments.nproc_per_node}",
        ]
        command += [
            os.path.abspath(__file__),
            "--arm",
            arm,
            "--config",
            arguments.config,
            "--json",
            out,
            "--folder",
            folder,
        ]
        command += [
            "--steps",
            str(arguments.steps),
            "--trl-microbatches",
            str(arguments.trl_microbatches),
            *overrides,
        ]
        command += ["--weights", weights, "--every", str(every)] if weights else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(log, "wb") as file:
            code = subprocess.run(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT
            ).returncode
        if code or not os.path.exists(out):
            with open(log, encoding="utf-8", errors="replace") as file:
                lines = [
                    line.strip() for line in file if "Error" in line or line.startswith("error")
                ]
            return {"error": (lines or [f"exit code {code}"])[0]}
        with open(out, encoding="utf-8") as file:
            return json.load(file)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `job` needs."""
    parser.add_argument("--config", required=True)
    parser.add_argument("--json")
    parser.add_argument("--steps", type=int, default=5, help="of each job")
    parser.add_argument(
        "--trl-microbatches", type=int, default=1, help="into which TRL splits a rank's sequences"
    )
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("overrides", nargs="*")


def check(config: Config) -> None:
    """Raises InputError for what the arm of TRL is not set up for."""
    for key, value in COMPARED.items():
        if flatten(config)[key] != value:
            raise InputError(
                f"{key}: {flatten(config)[key]}; the comparison is made for {value} alone"
            )
    if config.model.device != "cpu" and torch.cuda.is_available():
        raise InputError(
            f"model.device: {config.model.device}; the comparison is made on CPUs alone, give cpu"
        )


if __name__ == "__main__":  # a rank of an arm's job
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--arm", choices=ARMS, required=True)
    for name in ("--folder", "--weights"):
        parser.add_argument(name)
    parser.add_argument("--every", type=int, default=1)
    try:
        sys.exit(run_arm(parser.parse_intermixed_args()))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
