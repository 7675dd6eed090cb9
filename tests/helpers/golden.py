"""Tokens and weights of short runs as they were when `tests/assets/digests.json` was written: what
compares two settings of one version cannot see a change of both.

Run as a script it compares; with --accept it writes the file: only where a change of the tokens or
of the updates is wanted.
"""

import json
import os
import sys
import tempfile
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import pytest
import torch

from tests.helpers.drafting import chain_always
from tests.helpers.models import norms_in_full_precision
from tests.helpers.quick import start_quickly
from tests.helpers.runs import ALWAYS_DRAFT, digests, train_here, weights
from tests.helpers.streaming import stream_always

TOLERANCE = 1e-9
PATH = os.path.join("tests", "assets", "digests.json")
SIZES = ["model.dtype=float64", "rollout.num_prompts_per_step=6", "rollout.num_generations=3"]
SIZES += ["rollout.max_completion_length=24", "data.size=64", "optim.learning_rate=1e-3"]
SIZES += ["eval.num_prompts=0", "run.max_steps=4", "run.eval_steps=0", "run.save_steps=4"]
REWARD = "reward.functions=[tests.helpers.rewards.remainder]"
TINY, EPISODES = "configs/tiny_cpu.yaml", "configs/tiny_episodes.yaml"
RUNS = {
    "default": (TINY, [REWARD]),
    "tail batching": (TINY, [REWARD, "tail_batching.enabled=true"]),
    "dynamic sampling": (TINY, ["rollout.dynamic_sampling_max_batches=2"]),
    "streamed gradients": (TINY, [REWARD, "optim.stream_gradients=true"]),
    "drafter": (
        TINY,
        [
            REWARD,
            "speculative.method=bubble+suffix+drafter",
            "drafter.warm_start=120",
            ALWAYS_DRAFT,
        ],
    ),
    "episodes": (EPISODES, ["rollout.max_completion_length=128"]),
}


def run(name: str, folder: str) -> dict:
    """Digests of the steps, and a number for each tensor of weights that depends on all of it."""
    config, overrides = RUNS[name]
    with pytest.MonkeyPatch.context() as patch:
        start_quickly()
        norms_in_full_precision(patch)
        if name == "streamed gradients":
            stream_always(partial(patch.setattr, raising=False))
        if name == "drafter":
            chain_always(partial(patch.setattr, raising=False))
        train_here(folder, *overrides, config=config, short=SIZES)
    return {
        "digests": digests(folder),
        "weights": {key: checksum(w) for key, w in sorted(weights(folder).items())},
    }


def checksum(tensor: torch.Tensor) -> float:
    """A weighted mean: no two elements can change places."""
    flat = tensor.double().ravel()
    return float(flat @ torch.linspace(1.0, 2.0, len(flat), dtype=torch.float64) / len(flat))


def differences(name: str, found: dict, wanted: dict) -> list[str]:
    lines = []
    if found["digests"] != wanted["digests"]:
        lines.append(f"{name}: tokens differ: {found['digests']}, not {wanted['digests']}")
    for key, value in wanted["weights"].items():
        if not abs(found["weights"].get(key, float("nan")) - value) <= TOLERANCE:
            lines.append(f"{name}: {key}: {found['weights'].get(key)!r}, not {value!r}")
    return lines


def main() -> int:
    found = {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = run(name, folder)
    if sys.argv[1:] == ["--accept"]:
        with open(PATH, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
            file.write("\n")
        return 0
    with open(PATH, encoding="utf-8") as file:
        wanted = json.load(file)
    lines = [line for name in RUNS for line in differences(name, found[name], wanted[name])]
    print("\n".join(lines) or "as written")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
