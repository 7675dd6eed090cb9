"""Runs of train.py as tests need them: a few steps of the tiny workload on real ranks, and what
they have left behind.

In float64, where tokens must be equal.
"""

import json
import os
import signal
import subprocess

import torch
from safetensors.torch import load_file

from tests.helpers.warm import launch

SHORT = [
    "rollout.num_prompts_per_step=8",
    "rollout.num_generations=4",
    "rollout.max_completion_length=48",
    "data.size=200",
    "run.max_steps=4",
    "run.eval_steps=0",
    "run.save_steps=2",
    "model.dtype=float64",
]


# Whatever a forward takes on this machine: without it measured times decide whether anything is
# drafted.
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
    """A run to its end, which with `check` must be a good one; `ranks` 0 is a plain `python
    train.py`."""
    done = launch(
        ranks, [*script, "--config", config, *short, f"run.output_dir={output_dir}", *overrides]
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def run_until_killed(output_dir, ranks: int, step: int, *overrides: str, **changes) -> None:
    """A run whose ranks get SIGKILL in the update of `step`."""
    script = ("tests/system/signalled_train.py", "--at", str(step), "--kind", "ranks-die")
    done = run(output_dir, ranks, *overrides, check=False, script=script, **changes)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


def read(output_dir) -> list[dict]:
    with open(os.path.join(output_dir, "metrics.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def digests(output_dir) -> list[str]:
    return [line["rollout/digest"] for line in read(output_dir) if "rollout/digest" in line]


def weights(output_dir, step: int = 4) -> dict[str, torch.Tensor]:
    return load_file(os.path.join(output_dir, f"checkpoint-{step}", "model.safetensors"))


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
