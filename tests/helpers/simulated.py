"""Simulated runs for tests: a cost, a configuration, a workload, and texts."""

import numpy as np

from bubblespec.engine.engine import Engine
from bubblespec.tools.simulate.command import simulated_config
from bubblespec.tools.simulate.run import simulate
from bubblespec.tools.simulate.runner import CopyModel, DrafterModel
from bubblespec.tools.simulate.workload import STOP, VOCABULARY, Spec, Workload, make_synthetic
from bubblespec.types import Load, Row


class LinearCost:
    def __init__(self, forward_s=10e-3, row_s=0.0, token_s=20e-6, position_s=10e-9):
        self.prices, self.loads = (forward_s, row_s, token_s, position_s), []

    def __call__(self, load: Load) -> float:
        self.loads.append(load)
        forward_s, row_s, token_s, position_s = self.prices
        return forward_s + row_s * load.rows + token_s * load.tokens + position_s * load.positions


def make_config(
    method: str = "bubble+suffix",
    prompts: int = 4,
    generations: int = 4,
    longest: int = 300,
    **keys,
):
    """keys: section__key=value."""
    rollout = {
        "num_prompts_per_step": prompts,
        "num_generations": generations,
        "max_completion_length": longest,
    }
    sections = {"rollout": rollout, "speculative": {"method": method}}
    return simulated_config(
        sections, [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
    )


def make_workload(prompts: int = 4, generations: int = 4, **spec) -> Workload:
    spec = {"mean": 60.0, "max": 300, "prompt": 16, "steps": 4} | spec
    return make_synthetic(Spec(**spec), prompts, generations)


def run(
    method: str,
    num_ranks: int = 2,
    cost=None,
    config: dict | None = None,
    drafter: DrafterModel | None = None,
    quantized: CopyModel | None = None,
    copy_cost=None,
    reward_cost=None,
    together=None,
    **workload,
):
    config = make_config(method, **(config or {}))
    parts = (config, make_workload(**workload), cost or LinearCost(), num_ranks)
    models = {"drafter": drafter, "quantized": quantized, "copy_cost": copy_cost}
    return simulate(*parts, together=together, reward_cost=reward_cost, **models)


def figures(steps) -> list[dict]:
    return [vars(step) | {"lanes": [lane.tolist() for lane in step.lanes]} for step in steps]


def true_text(length: int, seed: int = 0) -> np.ndarray:
    return np.append(np.random.default_rng(seed).integers(0, VOCABULARY, length - 1), STOP)


def first_mismatch(draft: np.ndarray, true: np.ndarray) -> int:
    both = min(len(draft), len(true))
    return int(np.append(np.flatnonzero(draft[:both] != true[:both]), both)[0])


def run_to_end(engine: Engine, rows: list[Row], *arguments) -> list[Load]:
    loads = []
    engine.add(rows)
    while not engine.is_idle:
        loads.append(engine.step(*arguments)[1])
    return loads
