"""Simulated runs for scaling.ipynb: a case is a workload and a number of ranks."""

from dataclasses import dataclass

from bubblespec.config import config_of_sections
from bubblespec.simulate.__main__ import BLANK, nested
from bubblespec.simulate.run import SimulatedStep, simulate
from bubblespec.simulate.workload import Synthetic, Workload

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


def run_case(case: Case, cost, method: str) -> list[SimulatedStep]:
    """Its steps with a speculative.method, prompts in turn. cost: see `simulate`."""
    spec = Synthetic(
        case.mean, case.longest, prompt=64, run=case.mismatch, tokens_a_pass=2.0, steps=case.steps
    )
    prompts = case.ranks * case.rows // GENERATIONS
    rollout = {
        "num_prompts_per_step": prompts,
        "num_generations": GENERATIONS,
        "max_completion_length": case.longest,
    }
    rollout["placement"] = "in_turn"
    sections = nested(BLANK) | {
        "rollout": rollout | {"max_batch_tokens": 8192},
        "speculative": {"method": method},
    }
    return simulate(
        config_of_sections(sections, [], "a case"),
        Workload(spec, prompts, GENERATIONS),
        cost,
        case.ranks,
    )


def total_s(steps: list[SimulatedStep]) -> float:
    return sum(step.seconds for step in steps)
