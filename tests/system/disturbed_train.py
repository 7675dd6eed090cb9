"""train.py with disturbances: torchrun --nproc_per_node=2 tests/system/disturbed_train.py --config
F [--preempt P] [--corrupt P] [overrides]

Pre-emption: after a forward, with chance P, some rows are dropped from the engine, active or
queued, of the own batch or run ahead, and added again at the end of the queue. Corruption: a share
P of the drafts that a rank has made is spoilt before the exchange, so that all ranks still hold the
same ones, and a share P of the proposals before the engine verifies them. None of it may change a
token. The trainer is wrapped from outside and knows nothing of it; tests/system/exactness.py
compares the runs.
"""

import argparse
import dataclasses
import json
import os
import sys

import numpy as np
import transformers

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from bubblespec.config import load_config
from bubblespec.dist.ranks import Ranks, ranks_from_environment
from bubblespec.idle.draft_ahead import DraftAhead
from bubblespec.records import Load
from bubblespec.setup import build
from bubblespec.trainer import Trainer
from bubblespec.types import Draft, Row, SampleId
from train import train

COUNTS = ("own rows pre-empted", "draft rows pre-empted", "drafts corrupted", "proposals corrupted")
COUNTS_FILE = "disturbances.json"
MOST_ROWS = 4  # pre-empted after one forward


def corrupt_tokens(tokens: np.ndarray, rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """Some tokens replaced at random, or the end cut off, or garbage added to it."""
    kind = rng.choice(("replace", "cut", "extend"))
    if kind == "cut":
        return tokens[: rng.integers(len(tokens) + 1)]
    if kind == "extend" or len(tokens) == 0:
        return np.concatenate(
            (tokens, rng.integers(0, vocab_size, rng.integers(1, 20)).astype(tokens.dtype))
        )
    wrong = rng.random(len(tokens)) < 0.2
    wrong[rng.integers(len(tokens))] = True
    return np.where(wrong, rng.integers(0, vocab_size, len(tokens)), tokens).astype(tokens.dtype)


def corrupt_drafts(
    drafts: dict[SampleId, Draft],
    rng: np.random.Generator,
    share: float,
    vocab_size: int,
    max_new_tokens: int,
) -> tuple[dict[SampleId, Draft], int]:
    """A share of the drafts with other tokens, with the wrong finished flag, or swapped with
    another sample's; and how many.

    A draft that says it is unfinished keeps room for one more token: it will be drafted further,
    and the engine refuses a row that is full already.
    """
    keys, result, count = list(drafts), dict(drafts), 0
    for key in keys:
        if rng.random() >= share:
            continue
        count += 1
        kind, draft = rng.choice(("tokens", "flag", "swap"), p=(0.6, 0.2, 0.2)), result[key]
        if kind == "tokens":
            result[key] = dataclasses.replace(
                draft, tokens=corrupt_tokens(draft.tokens, rng, vocab_size)
            )
        elif kind == "flag":
            result[key] = dataclasses.replace(draft, is_finished=not draft.is_finished)
        else:
            other = keys[rng.integers(len(keys))]
            result[key], result[other] = result[other], draft
    for key, draft in result.items():
        if not draft.is_finished:
            result[key] = dataclasses.replace(draft, tokens=draft.tokens[: max_new_tokens - 1])
    return result, count


class Disturbance:
    """Disturbs a trainer's rollouts from now on. `counts`: what it has done on this rank, by the
    names in COUNTS."""

    def __init__(self, trainer: Trainer, preempt: float, corrupt: float, seed: int = 0):
        self.trainer, self.preempt, self.corrupt = trainer, preempt, corrupt
        self.rng = np.random.default_rng((seed, trainer.ranks.rank))
        self.counts = dict.fromkeys(COUNTS, 0)
        self.vocab_size = trainer.learner.model.get_input_embeddings().num_embeddings
        self.drafting: DraftAhead | None = None
        sampler, speculation = trainer.sampler, trainer.sampler.speculation
        self._step = sampler.engine.step
        sampler.engine.step = self.step
        if speculation is not None:
            # Every draft pays, so that there are many to disturb.
            items = speculation._items
            speculation._items = lambda *arguments: [
                dataclasses.replace(item, pays=True) for item in items(*arguments)
            ]
            speculation.board.interval_s = (
                0.0  # a tick at every forward: otherwise the clock chooses them
            )
            self._draft_ahead, self._propose = speculation.draft_ahead, speculation.proposer.propose
            speculation.draft_ahead, speculation.proposer.propose = self.draft_ahead, self.propose

    def step(self, *arguments) -> tuple[list[Row], Load]:
        result, engine = self._step(*arguments), self.trainer.sampler.engine
        if self.rng.random() < self.preempt:
            rows = [*engine.rows, *engine.queue]
            taken = [
                rows[i]
                for i in self.rng.permutation(len(rows))[: self.rng.integers(1, MOST_ROWS + 1)]
            ]
            for row in taken:
                engine.drop(row)
                is_draft = (
                    self.drafting is not None and id(row) not in self.drafting.view.unfinished
                )
                self.counts["draft rows pre-empted" if is_draft else "own rows pre-empted"] += 1
            engine.add(taken)
        return result

    def draft_ahead(self, *arguments) -> DraftAhead | None:
        self.drafting = drafting = self._draft_ahead(*arguments)
        if drafting is not None:
            merge = drafting.merge

            def merge_corrupted(ranks: Ranks) -> None:
                longest = self.trainer.config.rollout.max_completion_length
                drafting.drafts, count = corrupt_drafts(
                    drafting.drafts, self.rng, self.corrupt, self.vocab_size, longest
                )
                self.counts["drafts corrupted"] += count
                merge(ranks)

            drafting.merge = merge_corrupted
        return drafting

    def propose(self, *arguments) -> list[np.ndarray | None]:
        proposals = self._propose(*arguments)
        for i, tokens in enumerate(proposals):
            if tokens is not None and self.rng.random() < self.corrupt:
                proposals[i] = corrupt_tokens(tokens, self.rng, self.vocab_size)
                self.counts["proposals corrupted"] += 1
        return proposals


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--preempt", type=float, default=0.0)
    parser.add_argument("--corrupt", type=float, default=0.0)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    transformers.utils.logging.disable_progress_bar()
    config = load_config(arguments.config, arguments.overrides)
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        trainer = build(config, ranks)
        disturbance = Disturbance(trainer, arguments.preempt, arguments.corrupt)
        train(trainer)
        totals = ranks.gather(np.array(list(disturbance.counts.values()))).sum(axis=0).tolist()
        if ranks.is_main:
            with open(
                os.path.join(config.run.output_dir, COUNTS_FILE), "w", encoding="utf-8"
            ) as file:
                json.dump(dict(zip(COUNTS, totals, strict=True)), file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
