"""Simulated runs for scaling.ipynb: a case is a workload and a number of ranks."""

from dataclasses import dataclass

from bubblespec.tools.simulate.command import synthetic_run
from bubblespec.tools.simulate.recorded import ForwardCost
from bubblespec.tools.simulate.roofline import GPUCost
from bubblespec.tools.simulate.run import SimulatedStep, simulate
from bubblespec.tools.simulate.workload import Spec

GENERATIONS = 4


@dataclass(frozen=True)
class Case:
    """A workload with lognormal response lengths and a number of ranks."""

    mean: float
    """Response tokens."""
    longest: int
    """Response tokens at which lengths are cut."""
    mismatch: float
    """Mean tokens to a draft's first mismatch, after which it gives about 2 tokens per forward."""
    ranks: int
    rows: int
    """Responses of each rank in a step."""
    steps: int


def run_case(case: Case, cost: ForwardCost | GPUCost, method: str) -> list[SimulatedStep]:
    """Its steps with a speculative.method, prompts in turn."""
    spec = Spec(case.mean, case.longest, prompt=64, run=case.mismatch, steps=case.steps)
    prompts = case.ranks * case.rows // GENERATIONS
    overrides = [f"rollout.num_prompts_per_step={prompts}", "rollout.placement=in_turn"]
    overrides += [f"rollout.num_generations={GENERATIONS}", f"speculative.method={method}"]
    config, workload = synthetic_run(spec, overrides)
    return simulate(config, workload, cost.seconds, case.ranks)


def total_s(steps: list[SimulatedStep]) -> float:
    return sum(step.seconds for step in steps)
