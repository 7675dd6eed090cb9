"""A whole training step against TRL's GRPOTrainer: python benchmarks/step_vs_trl.py --config F [--json OUT] [overrides]

TRL is a dependency of this script alone: pip install --no-deps trl==1.16.0 (into a folder of its own, given by PYTHONPATH).

Arms: trl (generation by `model.generate`), trl-cb (its generation by transformers' continuous batching), none (this trainer
without speculation) and bubble+suffix (with it). All have the same model, prompts in the same order, group size, limits, reward
functions, global batch, loss (one update a batch, no KL), AdamW and clipping, in float32 on two ranks with one thread each.
Tokens differ, since each samples in its own way: so tokens a step and tokens a second are given beside the seconds.

Each arm is a job of its own; the jobs follow each other in turn, forwards and backwards. A step lasts from the end of one to the
end of the next, with everything in it: data, generation, rewards, learning, logging. The first steps of a job are not
counted, and the others' medians are taken.

What TRL is given to run well on a CPU: SDPA, K/V cache, no gradient checkpointing, no logging, no old-policy forward, and the
--trl-microbatches that suit it. What differs by design: this trainer packs without padding, and computes no gradient where a
group's equal rewards make it zero.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from bubblespec.config import Config, flatten, load_config
from bubblespec.errors import InputError

ARMS = ("trl", "trl-cb", "none", "bubble+suffix")
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
}
STEPS_BEYOND = 16  # of the measured ones: so that drafts are made as in a long run


class Enough(Exception):
    """All steps have been measured; raised on all ranks at the same step."""


def run_own(config: Config, num_steps: int) -> dict:
    """Steps of this trainer, through the loop of train.py as it is. Returns this rank's step ends and all ranks' lengths."""
    import train as entry
    from bubblespec import trainer as trainer_module
    from bubblespec.ranks.collectives import ranks_from_environment
    from bubblespec.set_up import set_up

    ends, steps, worked = [], [], [0.0]

    class Logger(trainer_module.MetricsLogger):
        def log(self, step, metrics):
            super().log(step, metrics)
            steps.append(metrics)
            ends.append(time.perf_counter())
            worked.append(time.process_time())
            if len(ends) == num_steps:
                raise Enough

    trainer_module.MetricsLogger = Logger
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        trainer = set_up(config, ranks)
        started, worked[0] = time.perf_counter(), time.process_time()
        try:
            entry.train(trainer)
        except Enough:
            ranks.barrier()
    rows = config.rollout.num_prompts_per_step * config.rollout.num_generations
    return {
        "seconds": np.diff([started, *ends]).tolist(),
        "processor_seconds": np.diff(worked).tolist(),
        "tokens": [round(m["completions/mean_length"] * rows) for m in steps],
        "longest": [m["completions/max_length"] for m in steps],
        "median_length": [m["completions/median_length"] for m in steps],
        "rewards": [m["reward"] for m in steps],
        "zero_groups": [m["frac_reward_zero_std"] for m in steps],
    }


def run_trl(config: Config, num_steps: int, microbatches: int, continuous_batching: bool) -> dict:
    """The same by TRL. Raises InputError for what TRL has under no option of its own."""
    import torch
    import torch.distributed as dist
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from bubblespec.data.prompts import make_tokenize
    from bubblespec.rewards.functions import load_reward
    from bubblespec.set_up import load_prompts, stop_tokens

    rollout, optim, loss = config.rollout, config.optim, config.loss
    torch.manual_seed(config.run.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id = list(stop_tokens(config, model, tokenizer))
    prompt_set, _ = load_prompts(config, tokenizer)
    batches = [prompt_set.batch(config.run.seed, step, rollout.num_prompts_per_step) for step in range(num_steps)]
    prompts = [prompt for batch in batches for prompt in batch]
    lengths: list[list[int]] = []  # of this rank, by step

    def rewarder(function: Callable) -> Callable:
        def reward(prompts_, completions, completion_ids, number, **kwargs):
            names = sorted({name for i in number for name in prompts[i].columns})
            columns = {name: [prompts[i].columns.get(name) for i in number] for name in names}
            return function(prompts=prompts_, completions=completions, completion_ids=completion_ids, **columns)

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
    ends, worked, rewards, zero_groups = [], [], [], []

    class Clock(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            ends.append(time.perf_counter())
            worked.append(time.process_time())

        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())
            worked.append(time.process_time())
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
        train_dataset=Dataset.from_list([{"prompt": prompt.text, "number": i} for i, prompt in enumerate(prompts)]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    given = trainer._tokenize_prompts([prompt.text for prompt in batches[0]])[0]
    tokenize = make_tokenize(tokenizer)
    if [list(ids) for ids in given] != [list(tokenize(prompt.text)) for prompt in batches[0]]:
        raise InputError("TRL tokenises these prompts in another way, so the arms would not have the same work")
    trainer.train()
    everyone = [None] * world_size
    if world_size > 1:
        dist.all_gather_object(everyone, lengths)
    else:
        everyone = [lengths]
    by_step = [np.concatenate([rank[step] for rank in everyone]) for step in range(num_steps)]
    assert all(len(step) == rows for step in by_step), "a step of TRL has another number of sequences"
    if dist.is_initialized():
        dist.destroy_process_group()
    return {
        "seconds": np.diff(ends).tolist(),
        "processor_seconds": np.diff(worked).tolist(),
        "tokens": [int(step.sum()) for step in by_step],
        "longest": [int(step.max()) for step in by_step],
        "median_length": [float(np.median(step)) for step in by_step],
        "rewards": [float(r) for r in rewards],
        "zero_groups": [float(z) for z in zero_groups],
    }


def run_arm(arguments: argparse.Namespace) -> int:
    """In a job of its own: rank 0 writes what it measured to --json."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*arguments.overrides, "run.eval_steps=0", "run.save_steps=0", f"run.output_dir={arguments.folder or folder}"]
        overrides += [f"run.max_steps={arguments.steps + STEPS_BEYOND}", f"run.logging_steps={arguments.steps + STEPS_BEYOND}"]
        if not arguments.arm.startswith("trl"):
            overrides.append(f"speculative.method={arguments.arm}")
        config = load_config(arguments.config, overrides)
        if arguments.arm.startswith("trl"):
            measured = run_trl(config, arguments.steps, arguments.trl_microbatches, arguments.arm == "trl-cb")
        else:
            measured = run_own(config, arguments.steps)
    if int(os.environ.get("RANK", "0")) == 0:
        measured["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(measured, file)
    return 0


def job(arguments: argparse.Namespace, arm: str) -> dict:
    """One arm's steps, in a job of two ranks; {"error": ...} if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = os.path.join(folder, "arm.json"), os.path.join(folder, "log")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.nproc_per_node}"]
        command += [os.path.abspath(__file__), "--arm", arm, "--config", arguments.config, "--json", out, "--folder", folder]
        command += ["--steps", str(arguments.steps), "--trl-microbatches", str(arguments.trl_microbatches), *arguments.overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(log, "wb") as file:
            code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
        if code or not os.path.exists(out):
            with open(log, encoding="utf-8", errors="replace") as file:
                lines = [line.strip() for line in file if "Error" in line or line.startswith("error")]
            return {"error": (lines or [f"exit code {code}"])[0]}
        with open(out, encoding="utf-8") as file:
            return json.load(file)


def summarise(jobs: dict[str, list[dict]], num_warmup: int) -> dict[str, dict]:
    """Medians over the counted steps of all jobs of an arm, or its error; and how much faster than TRL: all steps together, and
    the median over steps, which have the same prompts in every arm."""
    summary = {}
    base = [run["seconds"][num_warmup:] for run in jobs.get("trl", []) if "error" not in run]
    for arm, runs in jobs.items():
        errors = [run["error"] for run in runs if "error" in run]
        if errors or not runs:
            summary[arm] = {"error": (errors or ["not run"])[0]}
            continue
        counted = {
            key: [value for run in runs for value in run[key][num_warmup:]] for key in runs[0] if isinstance(runs[0][key], list)
        }
        summary[arm] = {key: statistics.median(values) for key, values in counted.items()}
        summary[arm]["tokens_per_second"] = sum(counted["tokens"]) / sum(counted["seconds"])
        summary[arm]["peak_memory_gb"] = max(run["peak_memory_gb"] for run in runs)
        summary[arm]["steps"] = len(counted["seconds"])
        seconds = [run["seconds"][num_warmup:] for run in runs]
        if len(base) == len(seconds):
            ratios = np.concatenate(base) / np.concatenate(seconds)
            summary[arm]["speedup"] = float(np.sum(base) / np.sum(seconds))
            summary[arm]["speedup_median_step"] = float(np.median(ratios))
    return summary


def print_table(summary: dict[str, dict]) -> None:
    print(
        "| arm | seconds a step | processor seconds, rank 0 | tokens a step | median, longest | tokens/s "
        "| against trl: all steps, median step | peak GB | reward |"
    )
    print("|---" * 9 + "|")
    for arm, s in summary.items():
        if "error" in s:
            print(f"| {arm} | does not run: {s['error']} | | | | | | | |")
            continue
        ratio = f"{s['speedup']:.2f}x, {s['speedup_median_step']:.2f}x" if "speedup" in s else "-"
        print(
            f"| {arm} | {s['seconds']:.2f} | {s['processor_seconds']:.2f} | {s['tokens']:.0f} "
            f"| {s['median_length']:.0f}, {s['longest']:.0f} | {s['tokens_per_second']:.0f} "
            f"| {ratio} | {s['peak_memory_gb']:.2f} | {s['rewards']:.2f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--json")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=1, help="jobs of each arm")
    parser.add_argument("--steps", type=int, default=5, help="of each job")
    parser.add_argument("--warmup", type=int, default=1, help="of these are not counted")
    parser.add_argument("--trl-microbatches", type=int, default=1, help="into which TRL splits a rank's sequences")
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)  # this process is a rank of that arm's job
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    try:
        if arguments.arm:
            return run_arm(arguments)
        config = load_config(arguments.config, arguments.overrides)
        if not 0 <= arguments.warmup < arguments.steps:
            raise InputError(f"--warmup: {arguments.warmup} of {arguments.steps} steps leaves none to count")
        for key, value in COMPARED.items():
            if flatten(config)[key] != value:
                raise InputError(f"{key}: {flatten(config)[key]}; the comparison is made for {value} alone")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    jobs: dict[str, list[dict]] = {arm: [] for arm in arguments.arms}
    order = [arm for turn in range(arguments.rounds) for arm in (arguments.arms if turn % 2 == 0 else arguments.arms[::-1])]
    for arm in tqdm(order, unit="job"):
        jobs[arm].append(job(arguments, arm))
    summary = summarise(jobs, arguments.warmup)
    print_table(summary)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"config": arguments.config, "overrides": arguments.overrides, "summary": summary, "jobs": jobs}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
