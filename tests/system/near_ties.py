"""Where float32 rows differ: torchrun --nproc_per_node=2 tests/system/near_ties.py --config F
[--json OUT] [overrides]

As in paired_rollout.py each step's batch is rolled out twice with the same weights, without and
with speculation. A forward of another shape rounds differently, so a row may leave its twin, but
only at a near tie. For each row's first difference a plain float64 forward of one sequence, by the
model's own code, gives the logits there. Either the two arms' tokens are the two best after
temperature and noise, with a gap below 1e-3; or one of them is in the nucleus of top_p only just,
by less than 1e-4 of the probability. All else is a violation, and the exit code is 1.

A row's tokens count up to its first difference: after it the two rows are different texts.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from benchmarks.paired_rollout import paired_step
from benchmarks.shared import plain_engine
from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import ranks_from_environment
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.sampling import gumbel, restrict, stream_keys
from bubblespec.setup import build
from bubblespec.trainer import Trainer
from bubblespec.types import Row

MAX_GAP = 1e-3
MAX_NUCLEUS_GAP = 1e-4
NOISE, NUCLEUS, VIOLATION = "noise", "nucleus", "violation"
KINDS = (NOISE, NUCLEUS, VIOLATION)


def first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    """The first position where two responses differ, or where one has ended; None if they are
    equal."""
    common = min(len(a), len(b))
    differs = np.flatnonzero(a[:common] != b[:common])
    if len(differs):
        return int(differs[0])
    return None if len(a) == len(b) else common


def judge(
    logits: torch.Tensor, key: torch.Tensor, position: int, params: SamplingParams, tokens: set[int]
) -> tuple[str, float]:
    """What made two samplers choose the two `tokens`, and how close it was.

    logits: float64 [V], exact; key: int32 [1, 4]; position: response tokens before this one.
    """
    scaled = (logits / params.temperature if params.temperature else logits)[None]
    noise = gumbel(key, len(logits), torch.float64) if params.temperature else 0.0
    generated = torch.tensor([position])

    def best_two(top_p: float) -> tuple[list[int], float]:
        allowed = restrict(scaled, generated, dataclasses.replace(params, top_p=top_p))
        best = (allowed + noise)[0].topk(2)
        return best.indices.tolist(), float(best.values[0] - best.values[1])

    best, gap = best_two(params.top_p)
    if set(best) == tokens and gap < MAX_GAP:
        return NOISE, gap
    if params.top_p < 1.0:
        wide, narrow = (
            best_two(params.top_p + MAX_NUCLEUS_GAP)[0][0],
            best_two(params.top_p - MAX_NUCLEUS_GAP)[0][0],
        )
        if {wide, narrow} == tokens:  # `wide` beats all others, but is it in the nucleus?
            probability = scaled[0].softmax(0)
            before = probability[probability > probability[wide]].sum()
            return NUCLEUS, abs(float(before) - params.top_p)
    return VIOLATION, gap


class NearTies:
    """Compares rows and keeps count, on this rank. differences: (prompt_id, draw_index, sample,
    position, kind, gap)."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.num_rows = self.num_tokens = 0
        self.differences: list[tuple[int, int, int, int, str, float]] = []
        self._exact: PreTrainedModel | None = None

    def inspect(self, plain: list[Row], speculative: list[Row]) -> None:
        exact = None
        for a, b in zip(plain, speculative, strict=True):
            position = first_difference(a.tokens, b.tokens)
            self.num_rows += 1
            self.num_tokens += len(a.tokens) if position is None else position + 1
            if position is not None:
                exact = exact or self._exact_model()
                self.differences.append((*a.id, position, *self._judge(exact, a, b, position)))

    def _judge(self, exact: PreTrainedModel, a: Row, b: Row, position: int) -> tuple[str, float]:
        tokens = {int(t) for row in (a, b) for t in row.tokens[position : position + 1]}
        key = stream_keys(self.trainer.config.run.seed, *(np.array([n]) for n in (*a.id, position)))
        with torch.no_grad():
            fed = torch.tensor([[*a.prompt, *a.tokens[:position].tolist()]], device=exact.device)
            logits = exact(fed, use_cache=False).logits[0, -1].cpu()
        return judge(logits, torch.from_numpy(key), position, self.trainer.sampler.params, tokens)

    def _exact_model(self) -> PreTrainedModel:
        """The model as transformers has it, in float64, with the weights of now."""
        if self._exact is None:
            config = self.trainer.config.model
            self._exact = AutoModelForCausalLM.from_pretrained(
                config.path,
                trust_remote_code=config.trust_remote_code,
                dtype=torch.float64,
                attn_implementation="eager",
            ).to(self.trainer.ranks.device)
            self._exact.eval()
        self._exact.load_state_dict(self.trainer.learner.model.state_dict())
        return self._exact

    def gathered(self) -> dict:
        """The counts and differences of all ranks, and whether none is a violation."""
        own = {"rows": self.num_rows, "tokens": self.num_tokens, "differences": self.differences}
        parts = [json.loads(text) for text in self.trainer.ranks.gather_text(json.dumps(own))]
        found = [difference for part in parts for difference in part["differences"]]
        kinds = Counter(kind for *_, kind, _ in found)
        return {
            "passed": not kinds[VIOLATION],
            "rows": sum(part["rows"] for part in parts),
            "tokens": sum(part["tokens"] for part in parts),
            **{f"num_{kind}": kinds[kind] for kind in KINDS},
            "max_gap": max((gap for *_, gap in found), default=0.0),
            "differences": found,
        }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--json")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    transformers.utils.logging.disable_progress_bar()
    config = load_config(arguments.config, arguments.overrides)
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        trainer = build(config, ranks)
        ties, plain = NearTies(trainer), plain_engine(trainer)
        for step in range(config.run.max_steps):
            result = paired_step(trainer, plain, step, ties.inspect)
            if ranks.is_main:
                print(f"step {step:3}: {result['differing_rows']} of {result['rows']} rows differ")
        summary = ties.gathered()
        if ranks.is_main:
            print({key: value for key, value in summary.items() if key != "differences"})
            if arguments.json:
                with open(arguments.json, "w", encoding="utf-8") as file:
                    json.dump(summary, file, indent=1)
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
