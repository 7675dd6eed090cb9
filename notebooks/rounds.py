"""Lengths that different rules train on, with a constant policy: for tail_batching.ipynb.

`python -m notebooks.rounds` lets SmolLM2 (`make smollm2`) answer the prompts of its first steps,
and keeps the lengths in data/lengths.npz. The notebook plays the rules on those: the trainer's own
planner and selection, and RollPacker's.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bubblespec.config.file import load_config
from bubblespec.data.schedule import PromptSet, StepSchedule
from bubblespec.mechanisms.tail_batching import TailBatching
from bubblespec.records import Samples
from bubblespec.rollout.table import RolloutProgress
from bubblespec.types import Group, Prompt, StepBatch

FILE = os.path.join(os.path.dirname(__file__), "data", "lengths.npz")
CONFIG = "configs/smollm2_135m_cpu.yaml"
NUM_STEPS, NUM_SPARE = 20, 3  # steps, and further ones from which short rounds draw before them
ANEW = 1  # the visit under which a deferred prompt is drawn anew

Lengths = Callable[[Group, int], int]
"""Length of a group's sample, by its number."""


class DrawnAnew(TailBatching):
    """RollPacker's own: a deferred prompt is answered anew in its long round."""

    def launch(self, step: int) -> StepBatch:
        """See `StepSchedule`."""
        launch = super().launch(step)
        if self.is_long_round:
            launch = launch._replace(groups=[Group(group.prompt, ANEW) for group in launch.groups])
            self._launched = launch
        return launch


@dataclass
class Played:
    """Samples that a rule has trained on."""

    lengths: list[np.ndarray]
    """Lengths by step, int64 [samples]."""
    is_long: list[bool]
    """Whether a step was a long round."""
    sequential: int
    """Tokens of the longest response of each rollout, without those of an earlier rollout."""


def rules(num_prompts: int, num_generations: int, prompts: PromptSet, seed: int) -> dict:
    """Return planners by rule."""
    order = (prompts, seed, num_prompts, num_generations)
    return {
        "no tail batching": StepSchedule(*order),
        "deferred, same samples (ours)": TailBatching(*order, over_sampling_ratio=1.25),
        "deferred, resampled (RollPacker)": DrawnAnew(*order, over_sampling_ratio=1.25),
    }


def play(planner, length_of: Lengths, num_steps: int) -> Played:
    """Run steps of a planner whose responses have known lengths."""
    played, before = Played([], [], 0), {}
    for step in range(num_steps):
        launch = planner.launch(step)
        played.is_long.append(getattr(planner, "is_long_round", False))
        n = launch.num_generations
        lengths = np.array([length_of(group, i) for group in launch.groups for i in range(n)])
        table = RolloutProgress(launch, np.zeros(len(lengths), np.int64), 0)
        table.generated, table.is_finished = lengths, np.ones(len(lengths), bool)
        is_in = table.cutoff().is_in
        chosen = np.flatnonzero(is_in)
        groups = [launch.groups[place // n] for place in chosen[::n].tolist()]
        cut = int(lengths[chosen].max())
        so_far = [before.pop(name, 0) for name in launch.ids]
        played.lengths.append(lengths[chosen])
        played.sequential += int((lengths - so_far)[chosen].max())
        others = np.flatnonzero(~is_in).tolist()
        deferred = {launch.ids[place]: min(int(lengths[place]), cut) for place in others}
        if type(planner) is TailBatching:  # what is drawn anew has nothing to go on from
            before |= deferred
        tokens = [np.empty(length, np.int32) for length in lengths[chosen].tolist()]
        none = np.empty((len(tokens), 0))
        columns = (tokens, tokens, none, none)
        planner.finish(Samples(groups, n, *columns), deferred)
    return played


def ratios(played: Played, true_mean: float) -> np.ndarray:
    """Return the mean length up to each step, over the policy's, float64 [steps]."""
    totals = np.cumsum([lengths.sum() for lengths in played.lengths])
    return totals / np.cumsum([len(lengths) for lengths in played.lengths]) / true_mean


def load() -> tuple[dict, Lengths, float]:
    """Return the rules over the recorded prompts, the lengths, and their mean in a plain run."""
    recorded = np.load(FILE)
    prompt_ids, table = recorded["uids"], recorded["lengths"]
    seed, num_prompts, num_generations = recorded["order"].tolist()
    prompts = PromptSet([Prompt(prompt_id, "", (0,), {}) for prompt_id in prompt_ids.tolist()], 0)
    in_order = prompts.prompts
    # as they were drawn
    prompts.batch = lambda seed, step, count: in_order[step * count : (step + 1) * count]
    row_of = {prompt_id: row for row, prompt_id in enumerate(prompt_ids.tolist())}
    num_drawn = NUM_STEPS * num_prompts
    true_mean = float(table[:num_drawn, 0, :num_generations].mean())

    def length_of(group: Group, number: int) -> int:
        return int(table[row_of[group.prompt.prompt_id], group.draw_index, number])

    return rules(num_prompts, num_generations, prompts, seed), length_of, true_mean


def record() -> None:
    """Answer the prompts and keep the lengths."""
    import tempfile

    import torch
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from bubblespec.distributed.ranks import Ranks
    from bubblespec.loading import load_prompts
    from bubblespec.setup import build

    with tempfile.TemporaryDirectory() as folder:
        overrides = ["speculative.method=none", f"run.output_dir={folder}", "reward.num_workers=0"]
        config = load_config(CONFIG, overrides)
        trainer = build(config, Ranks(torch.device("cpu")))
        trainer.lock.close()
    prompts, _ = load_prompts(config, AutoTokenizer.from_pretrained(config.model.path))
    rollout, seed = config.rollout, config.run.seed
    steps, count = range(NUM_STEPS + NUM_SPARE), rollout.num_prompts_per_step
    drawn = [prompt for step in steps for prompt in prompts.batch(seed, step, count)]
    lengths = np.zeros((len(drawn), 2, rollout.num_generations), np.int16)
    for begin in tqdm(range(0, len(drawn), 16), desc="answers", unit="batch"):
        for draw_index in (0, ANEW):
            groups = [Group(prompt, draw_index) for prompt in drawn[begin : begin + 16]]
            samples, _ = trainer.evaluator.generate(
                groups, rollout.num_generations, trainer.sampler.params, version=0
            )
            lengths[begin : begin + 16, draw_index] = samples.lengths.reshape(len(groups), -1)
    order = np.array([seed, count, rollout.num_generations])
    prompt_ids = np.array([prompt.prompt_id for prompt in drawn])
    np.savez_compressed(FILE, prompt_ids=prompt_ids, lengths=lengths, order=order)


if __name__ == "__main__":
    record()
