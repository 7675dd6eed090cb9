"""Training steps of this trainer and of TRL's GRPOTrainer on the same problem: python
benchmarks/vs_trl.py --config F [--json OUT] [--every N --picture PNG] [overrides]

TRL is a dependency of this comparison alone: pip install --no-deps trl==1.16.0 (into a folder of
its own, given by PYTHONPATH). Arms: trl (generation by `model.generate`), trl_batched (by
transformers' continuous batching), trl_vllm (by vLLM in the same process, where it is installed),
none (this trainer without speculation), default (as the configuration says), and tail (with tail
batching too). All have the same model, prompts in the same order (but for tail batching, which
defers some), group size, limits, reward functions, global batch, loss (one update per batch, no
KL), AdamW and clipping, in float32 on two ranks with one thread each. Tokens differ: each samples
in its own way.
On a GPU (--nproc-per-node 1 model.device=cuda) all are in bfloat16. --random-weights FOLDER takes a
model of the shape in the folder's config.json, whose responses all have the maximum length:

python benchmarks/vs_trl.py --config configs/tiny_cpu.yaml --nproc-per-node 1 --minutes 10 --arms
trl_batched trl_vllm trl default --random-weights configs/shapes/Qwen2.5-1.5B --json OUT --
model.device=cuda model.dtype=bfloat16 rollout.num_prompts_per_step=16 rollout.num_generations=8
rollout.max_completion_length=512 rollout.max_num_seqs=128 rollout.max_num_batched_tokens=2048
optim.max_tokens_per_microbatch=8192 optim.learning_rate=1e-6

TRL gets SDPA, a K/V cache, no gradient checkpointing, no logging and no old-policy forward. Each
arm has a job of its own for each of --seeds; a seed given twice shows the noise. A step lasts from
the end of one to the end of the next. With tail batching steps differ in size, so what counts there
are tokens per second. With --tool-game responses are episodes of `tool_game.py`: TRL's environment
class, run by both. Its tokens are the policy's own.

With --every N the weights after every N steps are evaluated as well, on this trainer's held-out
problems with the same noise for all arms; --picture draws the rewards over the seconds of training.
Neither saving nor evaluating counts.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import shared, tool_game
from bubblespec.config import Config, flatten
from bubblespec.config.file import load_config
from bubblespec.errors import InputError
from bubblespec.loading import with_dtype
from bubblespec.records import StepRecord
from bubblespec.telemetry.trace import describe_hardware
from bubblespec.trainer import Trainer
from notebooks.reading import time_to
from notebooks.report_pictures import draw_rewards

OWN = {  # arms of this trainer, and what is switched
    "none": ("speculative.method=none",),
    "default": (),
    "tail": ("tail_batching.enabled=true",),
}
OF_TRL: dict[str, dict] = {  # arms of TRL, and their options of GRPOConfig
    "trl": {},
    "trl_batched": {"use_transformers_continuous_batching": True},
    "trl_vllm": {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4},
}
ARMS = (*OF_TRL, *OWN)
PHASES = ("generate", "reward", "train")
LABELS = {
    "trl": "TRL 1.16 (generate)",
    "trl_batched": "TRL 1.16 (continuous batching)",
    "trl_vllm": "TRL 1.16 (vLLM)",
    "none": "ours, no drafts",
    "default": "ours, with drafts (the default)",
    "tail": "ours, with drafts and tail batching",
}
COMPARED = {  # what the arm of TRL is set up for
    "loss.advantage_estimator": "grpo",
    "loss.kl_coef": 0.0,
    "loss.num_iterations": 1,
    "loss.num_minibatches": 1,
    "rollout.dynamic_sampling_max_batches": 1,
    "rollout.min_completion_length": 0,
    "model.lora_r": 0,
    "loss.delta": None,
    "reward.overlong_buffer_length": 0,
    "optim.lr_scheduler_type": "constant",
}
STEPS_BEYOND = 16  # after the measured ones, so that drafts are made as in a long run
COLUMNS = {
    "arm": "{arm}",
    "seconds per step": "{seconds:.2f}",
    "generate, reward, train": "{generate:.2f}, {reward:.2f}, {train:.2f}",
    "tokens per step": "{tokens:.0f}",
    "median length": "{median_length:.0f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "of each job": "{by_job}",
    "against trl: all steps, median step, by tokens": "{against}",
    "peak GB": "{peak_memory_gb:.2f}",
    "reward": "{rewards:.2f}",
}


class Enough(Exception):
    """All steps have been measured; raised on all ranks at the same step."""


class Clock:
    """Seconds of steps. Rank 0 saves weights after every `every` steps, if there is a folder."""

    def __init__(self, model: torch.nn.Module, folder: str | None, every: int):
        self.model, self.folder, self.every = model, folder, every
        self.seconds: list[float] = []
        self.begin_s = time.perf_counter()

    def end(self) -> None:
        """End a step and begin the next, without the time to save weights."""
        self.seconds.append(time.perf_counter() - self.begin_s)
        number = len(self.seconds)
        if self.folder and number % self.every == 0 and os.environ.get("RANK", "0") == "0":
            torch.save(self.model.state_dict(), weights_file(self.folder, number))
        self.begin_s = time.perf_counter()


def weights_file(folder: str, num_steps: int) -> str:
    return os.path.join(folder, f"{num_steps}.pt")


def run_own(config: Config, num_steps: int, make_clock: Callable) -> dict:
    """Make steps in the loop of train.py. make_clock: makes the `Clock` of a model."""
    import train as entry

    steps, report = [], Trainer.report

    def timed_report(trainer: Trainer, record: StepRecord, metrics: dict) -> None:
        report(trainer, record, metrics)
        steps.append(metrics)
        clock.end()
        if len(steps) == num_steps:
            raise Enough

    Trainer.report = timed_report
    with shared.open_trainer(config) as trainer:
        clock = make_clock(trainer.learner.model)
        with contextlib.suppress(Enough):
            entry.train(trainer)
        trainer.ranks.barrier()
    rows = config.rollout.num_prompts_per_step * config.rollout.num_generations
    return {
        "seconds": clock.seconds,
        "tokens": [round(m["completions/mean_length"] * rows) for m in steps],
        "median_length": [m["completions/median_length"] for m in steps],
        "rewards": [m["reward"] for m in steps],
        "generate": [m["timing_s/gen"] + m["timing_s/bubble"] for m in steps],
        "reward": [m["timing_s/reward"] for m in steps],
        "train": [m["timing_s/train"] + m["timing_s/sync"] for m in steps],
    }


def run_arm(arguments: argparse.Namespace, folder: str) -> None:
    """Measure an arm, as one rank of its job; rank 0 writes the result to --json."""
    arm, num_steps = arguments.arm, arguments.steps
    keys = ["run.eval_steps=0", "run.save_steps=0", f"run.max_steps={num_steps + STEPS_BEYOND}"]
    overrides = [*arguments.overrides, *keys, f"run.output_dir={folder}", *OWN.get(arm, ())]
    config = load_config(arguments.config, overrides)
    clock = partial(Clock, folder=arguments.weights, every=arguments.every)
    if arm in OWN:
        measured = run_own(config, num_steps, clock)
    else:
        from benchmarks.trl_arm import run_trl  # not in the memory of the other arms

        config = with_dtype(config, device_of(config))
        measured = run_trl(config, num_steps, arguments.trl_microbatches, clock, OF_TRL[arm])
    if os.environ.get("RANK", "0") == "0":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if device_of(config) == "cuda":
            free, total = torch.cuda.mem_get_info()  # vLLM's memory is not torch's
            peak = max(torch.cuda.max_memory_reserved(), total - free)
        measured["peak_memory_gb"] = peak / 1e9
        shared.write_json(arguments.json, measured)


def run_job(arguments: argparse.Namespace, arm: str, seed: int, folder: str) -> dict:
    """Measure an arm in a job of several ranks. Return its result, or its error.

    A job that is not done when --minutes are over is ended."""
    out, log = os.path.join(folder, "arm.json"), os.path.join(folder, "log")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={arguments.nproc_per_node}", os.path.abspath(__file__)]
    command += ["--arm", arm, "--config", arguments.config, "--json", out]
    command += [f"--steps={arguments.steps}", f"--trl-microbatches={arguments.trl_microbatches}"]
    if arguments.every:
        command += ["--weights", folder, f"--every={arguments.every}"]
    command += ["--", *arguments.overrides, f"run.seed={seed}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "wb") as file:
        streams = {"stdout": file, "stderr": subprocess.STDOUT}
        job = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        try:
            job.wait(max(arguments.end_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)  # torchrun, which ends the ranks
            job.wait()
            return {"error": f"not done after {arguments.minutes:g} minutes of all arms"}
    if job.returncode or not os.path.exists(out):
        with open(log, encoding="utf-8", errors="replace") as file:
            found = re.search(r"^(error|\w*Error| *exitcode) *:.*", file.read(), re.MULTILINE)
        return {"error": found[0].strip() if found else f"exit code {job.returncode}"}
    with open(out, encoding="utf-8") as file:
        return json.load(file)


def check(config: Config) -> None:
    """Raise InputError for what the arm of TRL is not set up for."""
    for key, value in COMPARED.items():
        found = flatten(config)[key]
        if found != value:
            raise InputError(f"{key}: {found}; the comparison is made for {value} alone")
    device = device_of(config)
    found = with_dtype(config, device).model.dtype
    if found != (wanted := {"cpu": "float32", "cuda": "bfloat16"}[device]):
        raise InputError(f"model.dtype: {found}; on {device} the comparison is made for {wanted}")


def device_of(config: Config) -> str:
    """Return where a run is: cuda or cpu."""
    return "cuda" if config.model.device != "cpu" and torch.cuda.is_available() else "cpu"


def make_random_policy(shape: str, tokenizer: str, folder: str) -> list[str]:
    """Save a model with random weights, and a tokenizer. Return the overrides that make it run.

    shape: folder of its config.json. No response ends before the maximum length, but for one in as
    many tokens as the vocabulary has."""
    config = AutoConfig.from_pretrained(shape)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return shared.random_policy(folder, config.vocab_size)


def summarise(jobs: dict[str, list[dict]], num_warmup: int) -> dict[str, dict]:
    """Return medians over the counted steps of all jobs of an arm, or its error, by arm.

    Speed-ups over TRL are those of all steps together, of the median step, which has the same
    prompts in every arm without tail batching, and of tokens per second."""
    summary = {}
    base = [run["seconds"][num_warmup:] for run in jobs.get("trl", []) if "error" not in run]
    for arm, runs in jobs.items():
        if errors := [run["error"] for run in runs if "error" in run]:
            summary[arm] = {"error": errors[0]}
            continue
        counted = {
            key: np.concatenate([run[key][num_warmup:] for run in runs])
            for key, value in runs[0].items()
            if isinstance(value, list)
        }
        total_s = counted["seconds"].sum()
        found = {key: float(np.median(values)) for key, values in counted.items()}
        found["tokens_per_second"] = float(counted["tokens"].sum() / total_s)
        found["tokens_per_second_by_job"] = [
            sum(run["tokens"][num_warmup:]) / sum(run["seconds"][num_warmup:]) for run in runs
        ]
        found["peak_memory_gb"] = max(run["peak_memory_gb"] for run in runs)
        found["steps"] = len(counted["seconds"])
        if len(base) == len(runs):
            ratios = np.concatenate(base) / counted["seconds"]
            found["speedup"] = float(np.sum(base) / total_s)
            found["speedup_median_step"] = float(np.median(ratios))
        summary[arm] = found
    trl = summary.get("trl", {}).get("tokens_per_second")
    for found in summary.values():
        if trl and "tokens_per_second" in found:
            found["speedup_by_tokens"] = found["tokens_per_second"] / trl
    return summary


def print_table(summary: dict[str, dict]) -> None:
    """Print figures by arm; arms that do not run come last."""
    rows, ratios = [], ("speedup", "speedup_median_step", "speedup_by_tokens")
    for arm, found in sorted(summary.items(), key=lambda each: "error" in each[1]):
        against = [f"{found[name]:.2f}x" for name in ratios if name in found]
        by_job = " ".join(f"{rate:.0f}" for rate in found.get("tokens_per_second_by_job", ()))
        rows.append({"arm": arm, "against": ", ".join(against) or "-", "by_job": by_job} | found)
    print(shared.tabulate(rows, COLUMNS))


def curve_of(job: dict, trainer: Trainer, folder: str, every: int) -> list[tuple[float, float]]:
    """Return seconds and held-out reward of each evaluation, the first before the first step."""
    ends = [0.0, *np.cumsum(job["seconds"]).tolist()]
    numbers = range(every, len(ends), every)
    before = {name: tensor.clone() for name, tensor in trainer.learner.model.state_dict().items()}
    rewards = [trainer.evaluate().metrics["eval/reward"]]
    for number in numbers:
        trainer.learner.model.load_state_dict(torch.load(weights_file(folder, number)))
        rewards.append(trainer.evaluate().metrics["eval/reward"])
    trainer.learner.model.load_state_dict(before)
    return list(zip([0.0, *(ends[number] for number in numbers)], rewards, strict=True))


def heading_of(arguments: argparse.Namespace, model: torch.nn.Module) -> str:
    """Return the size of the policy, the machine, and what TRL generates without."""
    size = f"policy of {sum(map(torch.numel, model.parameters())) / 1e6:.1f} M parameters\n"
    hardware = describe_hardware(torch.device("cpu"))
    ways = {"trl_vllm": "vLLM", "trl_batched": "continuous batching"}
    without = " and ".join(name for arm, name in ways.items() if arm not in arguments.arms)
    machine = f"{size}{arguments.nproc_per_node} ranks with one thread each on {hardware['cpu']}"
    return f"{machine}; TRL without {without}" if without else machine


def report_curves(curves: dict[str, list[list]], reward: float) -> None:
    """Print the seconds until a reward, against the first arm."""
    times = {arm: [time_to(curve, reward) for curve in found] for arm, found in curves.items()}
    first, rows = next(iter(times.values())), []
    for arm, found in curves.items():
        ratios = [a / b for a, b in zip(first, times[arm], strict=True) if a and b]
        row = {"arm": arm}
        row["held-out reward at the end"] = " ".join(f"{curve[-1][1]:.3f}" for curve in found)
        until = ["-" if t is None else f"{t:.1f}" for t in times[arm]]
        row[f"seconds until {reward}"] = " ".join(until)
        rows.append(row | {"ratio": f"{np.median(ratios):.2f}x" if ratios else "-"})
    print(f"\n{shared.markdown(rows)}")


def run(arguments: argparse.Namespace, base: str) -> None:
    if arguments.arm:
        run_arm(arguments, base)
        return
    if not 0 <= arguments.warmup < arguments.steps:
        raise InputError(f"--warmup: {arguments.warmup} of {arguments.steps} steps leaves none")
    if not 0 <= arguments.every <= arguments.steps or (arguments.picture and not arguments.every):
        raise InputError("--every: give 1 to --steps to evaluate, and to draw a --picture")
    config, policy = (
        load_config(arguments.config, arguments.overrides),
        os.path.join(base, "policy"),
    )
    if arguments.tool_game:
        tool_game.make_policy(config.model.path, policy)
        arguments.overrides += [*tool_game.OVERRIDES, f"model.path={policy}"]
    if arguments.random_weights:
        shape = arguments.random_weights
        arguments.overrides += make_random_policy(shape, config.model.path, policy)
    check(load_config(arguments.config, arguments.overrides))
    if arguments.every and device_of(config) == "cuda":
        raise InputError("--every: the evaluations' engine would take the GPU's memory; leave out")
    arguments.end_s = time.monotonic() + 60 * arguments.minutes
    jobs: dict[str, list[dict]] = {arm: [] for arm in arguments.arms}
    curves: dict[str, list[list]] = {arm: [] for arm in arguments.arms}
    # Weights come and go: no copies of them for other kernels.
    options = [*arguments.overrides, "model.cpu_linear=torch", "speculative.method=none"]
    config = load_config(arguments.config, [*options, f"run.output_dir={base}/held_out"])
    with contextlib.ExitStack() as stack:
        trainer = None
        if arguments.every:
            trainer = stack.enter_context(shared.open_trainer(config))
        for turn, seed in enumerate(tqdm(arguments.seeds, unit="seed")):
            for arm in arguments.arms[:: -1 if turn % 2 else 1]:
                folder = os.path.join(base, f"{arm}_{turn}")
                os.mkdir(folder)
                job = run_job(arguments, arm, seed, folder)
                jobs[arm].append(job)
                if trainer is not None and "error" not in job:
                    curves[arm].append(curve_of(job, trainer, folder, arguments.every))
    summary = summarise(jobs, arguments.warmup)
    print_table(summary)
    if any(curves.values()):
        curves = {arm: found for arm, found in curves.items() if len(found) == len(jobs[arm])}
        report_curves(curves, arguments.reward)
        if arguments.picture:
            labelled = {LABELS[arm]: found for arm, found in curves.items()}
            heading = heading_of(arguments, trainer.learner.model)
            draw_rewards(labelled, heading).savefig(arguments.picture, dpi=120)
    shared.write_result(arguments, {"summary": summary, "jobs": jobs, "curves": curves})


def main() -> int:
    parser = shared.make_parser(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=("trl", *OWN))
    parser.add_argument("--steps", type=int, default=5, help="of each job")
    parser.add_argument("--warmup", type=int, default=1, help="first steps that are not counted")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a job of each arm each")
    parser.add_argument("--every", type=int, default=0, help="steps between two evaluations")
    parser.add_argument("--reward", type=float, default=0.8, help="compare the seconds until it")
    parser.add_argument("--picture", help="PNG of held-out reward over seconds")
    parser.add_argument("--trl-microbatches", type=int, default=1, help="of a rank's sequences")
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--random-weights", metavar="FOLDER", help="shape of the policy")
    parser.add_argument("--minutes", type=float, default=600.0, help="end what is running then")
    parser.add_argument("--tool-game", action="store_true", help="episodes with a tool")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)  # a rank of a job
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    return shared.main(run, parser)


if __name__ == "__main__":
    sys.exit(main())
