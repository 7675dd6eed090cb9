"""Every method gives the same tokens: python tests/system/exactness.py [--steps N] [--ranks 1,2,4]
[--json OUT] [overrides]

Each arm is a run of train.py with real learning, in float64, on a few ranks of this machine, one
run after the other. All arms of a sampling setting must log the same `rollout/digest` at every
step, on any number of ranks, and all arms on the same number of ranks must end with the same
weights to the bit. (Another number of ranks sums gradients in another order.)

preempted       rows are dropped from the engine at random moments, and wait for one of few slots,
see disturbed_train.py corrupted       drafts and proposals are spoilt on purpose killed
SIGKILL to all processes after a checkpoint and a step beyond it, then resumed with the drafts in
the checkpoint

With --near-ties instead: float32, and all rows that differ between `none` and `bubble+suffix`, see
near_ties.py. The exit code is 1 if anything differs that should not, or if a run fails or learns
nothing.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
from safetensors.torch import load_file

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from bubblespec.checkpoint import SPECULATION_FILE, load_arrays
from tests.helpers.runs import same_weights
from tests.system.disturbed_train import COUNTS, COUNTS_FILE

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RUN_TIMEOUT_S = 1200


@dataclass(frozen=True)
class Arm:
    name: str
    method: str
    preempt: float = 0.0
    corrupt: float = 0.0
    is_killed: bool = False
    overrides: tuple[str, ...] = ()


# Fewer slots than rows: a row that is pre-empted waits behind others, and comes back into another
# slot.
FEW_SLOTS = ("rollout.num_slots=6", "rollout.max_batch_tokens=48")
# Proposals of a fixed length, or the planner would soon learn that corrupted ones do not pay, and
# propose nothing.
ALWAYS_PROPOSE = ("speculative.planning=always",)
ARMS = [
    Arm("none", "none"),
    Arm("bubble", "bubble"),
    Arm("suffix", "suffix"),
    Arm("bubble+suffix", "bubble+suffix"),
    Arm("preempted", "bubble+suffix", preempt=0.2, overrides=FEW_SLOTS),
    Arm("corrupted", "bubble+suffix", corrupt=0.5, overrides=ALWAYS_PROPOSE),
    Arm("killed", "bubble+suffix", is_killed=True),
]
SAMPLING = {
    "temperature 1": ("rollout.temperature=1.0", "rollout.top_p=1.0"),
    "temperature 0.7, top_p 0.95": ("rollout.temperature=0.7", "rollout.top_p=0.95"),
}
# Small batches of few prompts: each comes up several times, so that drafts are matched with earlier
# epochs too. Drafting may slow a rank's forwards without limit, or on one rank, which has no other
# idle time, measured times would decide whether there are drafts at all.
SHORT = (
    "model.dtype=float64",
    "data.size=60",
    "rollout.num_prompts_per_step=8",
    "rollout.num_generations=4",
    "rollout.max_completion_length=64",
    "speculative.planning=always",
    "eval.num_prompts=0",
    "run.eval_steps=0",
    "run.keep_last=9",
)


def launch(ranks: int, script: str, *arguments: str) -> list[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        "--master_port=0",
    ]
    return [
        *launcher,
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--local-addr=127.0.0.1",
        script,
        *arguments,
    ]


def environment() -> dict[str, str]:
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **loopback,
        **os.environ,
    }


def run(command: list[str]) -> None:
    """Run to its end. Raises RuntimeError with the last lines of what it has said."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}:\n{done.stderr[-3000:]}")


def run_until_killed(command: list[str], folder: str, step: int) -> None:
    """Start a run and kill all its processes as soon as it has logged `step`."""
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while len(read_metrics(folder)) <= step:
            if process.poll() is not None or time.monotonic() - started > RUN_TIMEOUT_S:
                raise RuntimeError(f"the run that was to be killed did not get to step {step}")
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_metrics(folder: str) -> list[dict]:
    """The finished lines of the steps logged so far."""
    path = os.path.join(folder, "metrics.jsonl")
    if not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    return [line for line in lines if "rollout/digest" in line]


def read_weights(folder: str, step: int) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of the policy: all weights, or with LoRA the adapter."""
    paths = [
        os.path.join(folder, f"checkpoint-{step}", f"{name}.safetensors")
        for name in ("model", "adapter_model")
    ]
    return load_file(next(path for path in paths if os.path.isfile(path)))


def largest_change(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


def first_difference(a: list[dict], b: list[dict]) -> int | None:
    """The first step whose digests differ, or that one of the two runs does not have."""
    for step in range(max(len(a), len(b))):
        if step >= min(len(a), len(b)) or a[step]["rollout/digest"] != b[step]["rollout/digest"]:
            return step
    return None


def run_arm(arm: Arm, ranks: int, folder: str, steps: int, options: list[str]) -> dict:
    """Run an arm; returns what it has done with drafts, to show that there was something to be
    wrong about."""
    middle = steps // 2
    overrides = [
        *options,
        f"run.max_steps={steps}",
        f"run.save_steps={middle}",
        f"run.output_dir={folder}",
    ]
    overrides += [f"speculative.method={arm.method}", *arm.overrides]
    if arm.preempt or arm.corrupt:
        disturbances = ("--preempt", str(arm.preempt), "--corrupt", str(arm.corrupt))
        command = launch(ranks, "tests/system/disturbed_train.py", *disturbances, *overrides)
    else:
        command = launch(ranks, "train.py", *overrides)
    result = {}
    if arm.is_killed:
        run_until_killed(command, folder, middle)
        if len(read_metrics(folder)) == steps:
            raise RuntimeError("the run had ended before it was killed")
        state = load_arrays(os.path.join(folder, f"checkpoint-{middle}"), SPECULATION_FILE) or {}
        result["draft tokens in the checkpoint"] = sum(
            a.size for name, a in state.items() if name.startswith("drafts.tokens")
        )
    run(command)
    lines = read_metrics(folder)
    fed = sum(
        value
        for line in lines
        for key, value in line.items()
        if key.startswith("drafts/") and key.endswith("/tokens")
    )
    result |= {
        "verified": fed,
        "accepted": sum(line.get("rollout/spec_accepted_tokens", 0) for line in lines),
    }
    result["drafted"] = sum(line.get("bubble/drafted_tokens", 0) for line in lines)
    counts = os.path.join(folder, COUNTS_FILE)
    if os.path.isfile(counts):
        with open(counts, encoding="utf-8") as file:
            result |= json.load(file)
    return result


def what_was_learned(folder: str, steps: int) -> dict:
    """Of a reference run. Equal digests mean little where the policy stands still."""
    lines = read_metrics(folder)
    moved = largest_change(read_weights(folder, steps // 2), read_weights(folder, steps))
    rewards = [line["reward"] for line in lines]
    return {
        "weight_change": moved,
        "distinct_rewards": len(set(rewards)),
        "first_reward": rewards[0],
        "last_reward": rewards[-1],
    }


def compare(
    arms: list[Arm], rank_counts: list[int], steps: int, options: list[str], folder: str
) -> list[dict]:
    """Run all arms under both sampling settings; prints a line and returns a record for each."""
    columns = f"{'digests':>9}{'weights':>9}{'verified':>10}{'accepted':>10}{'drafted':>9}{'s':>6}"
    print(f"{'sampling':28}{'ranks':>6}  {'arm':15}{columns}", flush=True)
    records = []
    for sampling, sampling_options in SAMPLING.items():
        reference_lines = None
        for ranks in rank_counts:
            reference_weights = None
            for arm in arms:
                own = os.path.join(folder, f"{len(records)}")
                record = {
                    "sampling": sampling,
                    "ranks": ranks,
                    "arm": arm.name,
                    "digests_equal": False,
                    "weights_equal": False,
                }
                records.append(record)
                started = time.monotonic()
                try:
                    record |= run_arm(arm, ranks, own, steps, [*options, *sampling_options])
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    record["error"] = str(error)
                    print(f"{sampling:28}{ranks:6}  {arm.name:15}failed: {error}", flush=True)
                    continue
                record["seconds"] = time.monotonic() - started
                lines, weights = read_metrics(own), read_weights(own, steps)
                if reference_lines is None:
                    reference_lines = lines
                    record |= what_was_learned(own, steps)
                if reference_weights is None:
                    reference_weights = weights
                record["first_differing_step"] = first_difference(lines, reference_lines)
                record["digests_equal"] = record["first_differing_step"] is None
                record["weights_equal"] = same_weights(weights, reference_weights)
                print(line_of(record), flush=True)
    return records


def line_of(record: dict) -> str:
    step = record["first_differing_step"]
    digests = "yes" if step is None else f"step {step}!"
    weights = "yes" if record["weights_equal"] else "no!"
    counts = ", ".join(
        f"{record[name]} {name}"
        for name in (*COUNTS, "draft tokens in the checkpoint")
        if record.get(name)
    )
    return (
        f"{record['sampling']:28}{record['ranks']:6}  {record['arm']:15}{digests:>9}{weights:>9}{record['verified']:10}"
        f"{record['accepted']:10}{record['drafted']:9}{record['seconds']:6.0f}  {counts}"
    ).rstrip()


def summarise(records: list[dict]) -> dict:
    learned = [record for record in records if "weight_change" in record]
    wrong = [r for r in records if not (r["digests_equal"] and r["weights_equal"])]
    still = [r for r in learned if not (r["weight_change"] > 0 and r["distinct_rewards"] > 1)]
    for r in learned:
        print(
            f"{r['sampling']}: reward {r['first_reward']:.3f} at the first step and {r['last_reward']:.3f} at the last; weights "
            f"moved by up to {r['weight_change']:.1e} in the second half{' (nothing learned!)' if r in still else ''}"
        )
    print(f"{len(records) - len(wrong)} of {len(records)} runs are equal")
    return {
        "equal": len(records) - len(wrong),
        "of": len(records),
        "passed": not wrong and not still and len(learned) > 0,
    }


def near_ties(
    config: str, rank_counts: list[int], steps: int, overrides: list[str], folder: str
) -> list[dict]:
    """near_ties.py on each number of ranks, with what it prints; its records."""
    records = []
    fixed = [f"run.max_steps={steps}", "run.eval_steps=0", "speculative.method=bubble+suffix"]
    for ranks in rank_counts:
        path = os.path.join(folder, f"near_ties_{ranks}.json")
        options = [*fixed, f"run.output_dir={folder}/{ranks}", *overrides]
        command = launch(
            ranks, "tests/system/near_ties.py", "--config", config, "--json", path, *options
        )
        code = subprocess.run(command, cwd=ROOT, env=environment()).returncode
        record = {"ranks": ranks, "passed": False, "error": f"exit code {code}"}
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                record = {"ranks": ranks, **json.load(file)}
        records.append(record)
    return records


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/tiny_cpu_bulk.yaml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", help="numbers of ranks, by default 1,2,4; with --near-ties 2")
    parser.add_argument(
        "--arms", help=f"some of: {','.join(arm.name for arm in ARMS)}; none is always run"
    )
    parser.add_argument("--near-ties", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_intermixed_args()
    if arguments.steps < 3 and not arguments.near_ties:
        parser.error("--steps: at least 3, as a run is killed and resumed in its middle")
    wanted = arguments.arms.split(",") if arguments.arms else [arm.name for arm in ARMS]
    if unknown := set(wanted) - {arm.name for arm in ARMS}:
        parser.error(f"--arms: there is no {', '.join(sorted(unknown))}")
    rank_counts = [
        int(n) for n in (arguments.ranks or ("2" if arguments.near_ties else "1,2,4")).split(",")
    ]
    folder = tempfile.mkdtemp(prefix="exactness-")
    if arguments.near_ties:
        records = near_ties(
            arguments.config, rank_counts, arguments.steps, arguments.overrides, folder
        )
        summary = {"passed": all(record["passed"] for record in records)}
    else:
        arms = [arm for arm in ARMS if arm.name in ("none", *wanted)]
        options = ["--config", arguments.config, *SHORT, *arguments.overrides]
        records = compare(arms, rank_counts, arguments.steps, options, folder)
        summary = summarise(records)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            chosen = {
                "config": arguments.config,
                "steps": arguments.steps,
                "overrides": arguments.overrides,
            }
            json.dump({**summary, **chosen, "runs": records}, file, indent=1)
    if summary["passed"]:
        shutil.rmtree(folder)
    else:
        print(f"the runs are kept in {folder}")
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
