"""A learned drafter in virtual time: chains that are right for so many tokens, and what its
forwards take.

Each token of a chain is right with one chance if all before it are. How many are right where a
chain begins is a function of the sample and the position alone. It is there from the first step on:
warm start and training take no time here.
"""

from dataclasses import dataclass

import numpy as np

from bubblespec.engine.chains import CONTEXT, LONGEST
from bubblespec.engine.engine import Engine
from bubblespec.engine.noise import stream_keys
from bubblespec.errors import InputError
from bubblespec.records import Load
from bubblespec.simulate.runner import SimulatedRunner


@dataclass(frozen=True)
class DrafterModel:
    """How good a drafter is, and what it costs."""

    tokens_a_pass: float = 2.0
    """What a row gains in a forward that verifies a chain of LONGEST tokens, from 1 to 1 + LONGEST:
    `drafter/tokens_a_pass`."""
    share: float = 0.05
    """Seconds of a forward of the drafter over those of a forward of the policy with the same
    load."""

    def __post_init__(self):
        if not 1 <= self.tokens_a_pass <= 1 + LONGEST:
            raise InputError(f"tokens_a_pass: {self.tokens_a_pass} must be from 1 to {1 + LONGEST}")
        if not 0 <= self.share <= 1:
            raise InputError(f"share: {self.share} must be from 0 to 1")

    def accepted(self) -> np.ndarray:
        """Chance that the first n tokens of a chain are all right, float64 [LONGEST] for n = 1, 2,
        ..."""
        low, high = 0.0, 1.0  # 1 + p + ... + p**LONGEST grows with p
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if _powers(middle).sum() < self.tokens_a_pass - 1 else (low, middle)
            )
        return _powers(high)


def _powers(chance: float) -> np.ndarray:
    return chance ** np.arange(1, LONGEST + 1)


class SimulatedChains:
    """As `Chains`, for a `SimulatedRunner`, which knows what each row will say."""

    def __init__(self, runner: SimulatedRunner, model: DrafterModel, cost=None):
        """cost: of a rank's own forwards, by default the runner's."""
        self.runner, self.model, self.cost = runner, model, runner.cost if cost is None else cost
        self._accepted = model.accepted()

    def draft(
        self, engine: Engine, slots: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """See `Chains`."""
        runner, cached = self.runner, engine.cached[slots]
        count = np.minimum(cached - runner.drafter_knows[slots], CONTEXT)
        runner.drafter_knows[slots] = cached
        seconds = self._seconds(engine, slots, int(count.sum())) + (length - 1) * self._seconds(
            engine, slots, len(slots)
        )
        runner.world.compute(runner.rank, seconds)
        begin = (engine.length - engine.prompt_length)[slots]
        position = begin[:, None] + np.arange(length)
        end = runner.end[slots, None]
        said = runner.said[slots[:, None], np.minimum(position, end)].astype(np.int64)
        is_right = np.arange(length) < self._num_right(slots, begin)[:, None]
        # Whatever stands behind the end of a text is no token.
        return (
            np.where(is_right & (position < end), said, np.abs(said) ^ 1),
            slots,
            int(count.sum()),
        )

    def rehearse(self, num_rows: int) -> None:
        """See `Chains`."""
        seconds = self.cost.seconds(Load(num_rows, num_rows, 0, 0, 0, 0))
        self.runner.world.compute(self.runner.rank, self.model.share * seconds)

    def _num_right(self, slots: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Tokens of the chains of these slots, from a position of their responses on, that are
        right, int64."""
        bits = stream_keys(0, *self.runner.name[slots].T, position)[:, 0].view(np.uint32)
        return ((bits[:, None] + 0.5) * 2.0**-32 < self._accepted).sum(axis=1)

    def _seconds(self, engine: Engine, slots: np.ndarray, tokens: int) -> float:
        """Of a forward of the drafter."""
        load = Load(len(slots), tokens, 0, int(engine.length[slots].sum()), 0, 0)
        return self.model.share * self.cost.seconds(load)
