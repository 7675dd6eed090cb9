"""Runs of train.py as tests need them: a few steps of the tiny workload on real ranks, and what
they have left behind.

In float64, where tokens must be equal.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import tempfile

import torch
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.setup import build
from bubblespec.trainer import Trainer
from tests.helpers import warm
from tests.helpers.warm import launch
from train import train

# Few prompts, which come up several times: drafts are matched with earlier epochs too.
EPOCHS = ["model.dtype=float64", "data.size=60", "rollout.num_prompts_per_step=8"]
EPOCHS += ["rollout.num_generations=4", "rollout.max_completion_length=64"]
EPOCHS += ["speculative.planning=always", "eval.num_prompts=0", "run.eval_steps=0"]
EPOCHS += ["run.save_total_limit=9"]
SHORT = ["rollout.num_prompts_per_step=8", "rollout.num_generations=4"]
SHORT += ["rollout.max_completion_length=48", "data.size=200", "run.max_steps=4"]
SHORT += ["run.eval_steps=0", "run.save_steps=2", "model.dtype=float64"]
LORA_AND_TRUNCATION = ["model.lora_r=4", "rollout.top_k=20", "rollout.top_p=0.9"]
LORA_AND_TRUNCATION += ["rollout.temperature=0.7", "rollout.min_completion_length=4"]
LORA_AND_TRUNCATION += ["rollout.free_cache_engine=true"]
# Without it measured times decide whether anything is drafted.
ALWAYS_DRAFT = "speculative.planning=always"


def run(
    output_dir,
    ranks: int,
    *overrides: str,
    check: bool = True,
    config: str = "configs/tiny_cpu_bulk.yaml",
    short=SHORT,
    script=("train.py",),
) -> subprocess.CompletedProcess:
    """A run to its end, with `check` a good one; `ranks` 0 is a plain `python train.py`."""
    options = ["--config", config, *short, f"run.output_dir={output_dir}", *overrides]
    done = launch(ranks, [*script, *options])
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def launch_with_agent(
    arguments: list[str], ranks: int = 2, num_nodes: int = 1, **options: object
) -> tuple[list[int], str]:
    """torchrun's own agents, with their rendezvous and restarts, in warm processes, whose forks are
    the ranks. options: of torch's LaunchConfig. Returns exit codes, and what all have written."""
    options |= {"rdzv_backend": "c10d", "local_addr": "127.0.0.1", "start_method": "fork"}
    config = LaunchConfig(num_nodes, num_nodes, ranks, run_id="test", **options)
    with tempfile.TemporaryFile("w+") as output:
        streams = {"stdout": output.fileno(), "stderr": output.fileno()}
        agents = [warm.start(_agent, config, arguments, **streams) for _ in range(num_nodes)]
        for agent in agents:
            agent.join(warm.TIMEOUT_S)
        output.seek(0)
        return [agent.exitcode for agent in agents], output.read()


def _agent(config: LaunchConfig, arguments: list[str]) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # which may start no processes
    elastic_launch(config, _rank)(arguments)


def _rank(arguments: list[str]) -> None:
    try:
        warm._python(arguments, warm.ROOT)
    except SystemExit as end:  # the agent waits for a result
        if end.code:
            raise


def train_here(
    output_dir,
    *overrides: str,
    ranks: Ranks | None = None,
    config: str = "configs/tiny_cpu_bulk.yaml",
    short=SHORT,
) -> Trainer:
    """What `python train.py` does, in this process. Returns its parts as they are at the end."""
    ranks = ranks or Ranks(torch.device("cpu"))
    options = [*short, f"run.output_dir={output_dir}", *overrides]
    trainer = build(load_config(config, options), ranks)
    try:
        train(trainer)
    finally:
        trainer.lock.close()
    return trainer


def run_until_killed(output_dir, ranks: int, step: int, *overrides: str, **changes) -> None:
    """A run whose ranks get SIGKILL in the update of `step`."""
    script = ("tests/system/signalled_train.py", "--at", str(step), "--kind", "ranks-die")
    done = run(output_dir, ranks, *overrides, check=False, script=script, **changes)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


def read(output_dir) -> list[dict]:
    """All lines of metrics that are complete."""
    path = os.path.join(output_dir, "metrics.jsonl")
    if not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def steps_of(output_dir) -> list[dict]:
    return [line for line in read(output_dir) if "rollout/digest" in line]


def digests(output_dir) -> list[str]:
    return [line["rollout/digest"] for line in steps_of(output_dir)]


def weights(output_dir, step: int = 4) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of the policy: all weights, or with LoRA the adapter."""
    folder = os.path.join(output_dir, f"checkpoint-{step}")
    name = "adapter_model" if "adapter_model.safetensors" in os.listdir(folder) else "model"
    return load_file(os.path.join(folder, f"{name}.safetensors"))


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def max_change(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)
