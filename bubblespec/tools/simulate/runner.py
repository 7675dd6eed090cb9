"""What takes the place of models and environments in virtual time, by the texts of a workload.

All but the forward is the real `Engine`: queue, slots, shared prefills, budgets, drafts and their
rollback. A draft token is accepted if the row's text has it at that position.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from bubblespec.engine.arrays import ragged
from bubblespec.engine.batch import Batch, Runner, SamplerOutput, SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.pages import Pages
from bubblespec.engine.sampling import stream_keys
from bubblespec.errors import InputError
from bubblespec.mechanisms.drafter.mechanism import CONTEXT, MAX_CHAIN_LENGTH
from bubblespec.mechanisms.episodes.environments import Observation, Outcome
from bubblespec.mechanisms.reward_models.model import RewardModel
from bubblespec.planner.prices import Prices
from bubblespec.tools.simulate.workload import NOTHING, OBSERVED, SimulatedTexts
from bubblespec.tools.simulate.world import SimulatedRanks
from bubblespec.types import Load, Prompt, Row

FREE = Prices(0.0, 1.0, 0.0, 0.0, 0.0)  # nothing but forwards takes time
NO_TOKEN = -2  # follows the end of a text; no draft contains it
Text = Callable[[Row], np.ndarray]
Cost = Callable[[Load], float]


@dataclass(eq=False)
class SimulatedRunner(Runner):
    """A `Runner` of one rank; slots hold the texts of their rows instead of keys and values."""

    ranks: SimulatedRanks
    num_slots: int
    max_length: int
    max_num_batched_tokens: int
    cost: Cost  # seconds of a forward, by its load
    text: Text  # a row's tokens to its end, int [L], beginning with those so far
    together: Cost | None = None  # the same of all ranks together, if forwards are shared
    pages: Pages | None = None
    prices: Prices = FREE  # prices of what comes with forwards, see planner/prices.py
    own: frozenset[tuple[int, int]] = frozenset()  # groups of the step; others are drafted ahead

    def __post_init__(self):
        # The text of each slot, its end and its sample's name.
        self.said = np.full((self.num_slots, self.max_length + 1), NO_TOKEN, np.int32)
        self.end = np.zeros(self.num_slots, np.int64)
        self.name = np.zeros((self.num_slots, 3), np.int64)
        self.drafter_knows = np.zeros(self.num_slots, np.int64)  # positions, if there is a drafter

    def advance(self, seconds: float) -> None:
        self.ranks.world.advance(self.ranks.rank, seconds)

    def place(self, slot: int, row: Row) -> None:
        """Store the row's text in the slot."""
        text = self.text(row)[: row.max_new_tokens]
        self.end[slot] = len(text)
        self.said[slot, : len(text)] = text
        self.said[slot, len(text)] = NO_TOKEN
        self.name[slot], self.drafter_knows[slot] = row.id, 0
        if row.id[:2] not in self.own:
            self.advance(self.prices.begun_s)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one slot to another."""
        for array in (self.said, self.end, self.name, self.drafter_knows):
            array[target] = array[source]

    def launch(self, batch: Batch, params: SamplingParams) -> Callable[[], SamplerOutput]:
        """Advance the clock and read the texts; log-probabilities are 0."""
        if self.together is None:
            prices, groups = self.prices, self.name[batch.slots, :2].tolist()
            num_ahead = sum(tuple(group) not in self.own for group in groups)
            extra_s = prices.verified_s * batch.load.draft_tokens + prices.drafted_s * num_ahead
            self.advance(prices.forward * self.cost(batch.load) + extra_s)
        else:  # all ranks continue when the last one is done
            self.ranks.world.meet(self.ranks.rank, None, self.together(batch.load))
        row, offset = ragged(batch.num_draft + 1)
        slot = batch.slots[row]
        position = np.minimum(batch.generated[row] + offset, self.end[slot])
        token = self.said[slot, position].astype(np.int64)
        return lambda: SamplerOutput(token, np.zeros(len(token)))


COPY_SHARE = 0.4  # of a copy without a cost of its own, see `CopyModel`
UNSURE_RIGHT = 0.6  # of tokens that win by little, see `SimulatedChains`


@dataclass(frozen=True)
class DrafterModel:
    """Acceptance and cost of a learned drafter."""

    accept_length: float = 2.0  # tokens gained with a chain of MAX_CHAIN_LENGTH tokens
    share: float = 0.05  # seconds of a forward over those of the policy with the same load

    def __post_init__(self):
        if not 1 <= self.accept_length <= 1 + MAX_CHAIN_LENGTH:
            bounds = f"from 1 to {1 + MAX_CHAIN_LENGTH}"
            raise InputError(f"accept_length: {self.accept_length} must be {bounds}")
        if not 0 <= self.share <= 1:
            raise InputError(f"share: {self.share} must be from 0 to 1")

    @property
    def acceptance(self) -> float:
        """Chance that a token of a chain is right if all before it are, the same for all."""
        powers = np.arange(1, MAX_CHAIN_LENGTH + 1)
        gained = self.accept_length - 1
        return brentq(lambda chance: (chance**powers).sum() - gained, 0.0, 1.0)


@dataclass(frozen=True)
class CopyModel:
    """Acceptance and cost of a quantised copy of the policy."""

    acceptance: float = 0.93  # chance that a token of a chain is right if all before it are
    share: float | None = None
    """Seconds of a forward of the copy over those of the policy with the same load. None: by the
    copy's own cost, COPY_SHARE without one."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"{name}: {value} must be from 0 to 1")


class SimulatedChains:
    """A `DraftModelRunner` for a `SimulatedRunner`; warm start, training and renewals take no time.

    The sample and the position decide whether a token is right, and its lead: UNSURE_RIGHT of the
    tokens with a small lead are, and almost all others. Where fewer are right, all leads are
    small."""

    graphs = None
    copy = SimpleNamespace(renew=lambda clock, limit_s: 0.0, note_update=None)

    def __init__(self, engine: Engine, acceptance: float, cost: Cost, *, catches_up: bool = False):
        """cost: of the model's forwards; catches_up: whether it feeds what was verified before."""
        self.engine, self.acceptance, self.cost = engine, acceptance, cost
        self.runner: Any = engine.runner  # a SimulatedRunner
        self.catches_up = catches_up
        self._unsure = min((1 - acceptance) / (1 - UNSURE_RIGHT), 1.0)
        self._unsure_right = 1 - (1 - acceptance) / max(self._unsure, 1e-9)

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        """Whether chains can begin, as `DraftModelRunner.can_draft` does."""
        return slots >= 0

    def draw(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Propose a token for each of some rows, as `DraftModelRunner.draw` does."""
        engine, runner, fed = self.engine, self.runner, len(slots)
        if self.catches_up and number == 0:
            cached = engine.cached[slots]
            fed = int(np.minimum(cached - runner.drafter_knows[slots], CONTEXT).sum())
            runner.drafter_knows[slots] = cached
        positions = int(engine.length[slots].sum()) + number * len(slots)
        runner.advance(self.cost(Load(len(slots), fed, 0, positions)))
        generated = (engine.length - engine.prompt_length)[slots] + number
        prompt_id, draw_index, sample = runner.name[slots].T
        bits = stream_keys(1, prompt_id, draw_index, sample, generated)[:, :2].view(np.uint32)
        unsure, right = ((bits + 0.5) * 2.0**-32).T
        is_unsure = unsure < self._unsure
        is_right, end = ~is_unsure | (right < self._unsure_right), runner.end[slots]
        said = runner.said[slots, np.minimum(generated, end)].astype(np.int64)
        # Behind a wrong token the text goes on elsewhere.
        before = runner.said[slots, np.minimum(np.maximum(generated - 1, 0), end)]
        is_right &= (generated < end) & ((before == tokens) | (generated == 0))
        return np.where(is_right, said, np.abs(said) ^ 1), np.where(is_unsure, 0.3, 3.0), fed

    def run_once(self, num_rows: int) -> None:
        """Advance the clock by a forward of so many rows."""
        self.runner.advance(self.cost(Load(num_rows, num_rows)))


def drafter_chains(engine: Engine, model: DrafterModel) -> Any:
    """Return a `DrafterRunner` in virtual time."""
    cost = engine.runner.cost  # type: ignore[attr-defined]  # a SimulatedRunner
    return SimulatedChains(
        engine, model.acceptance, lambda load: model.share * cost(load), catches_up=True
    )


def copy_chains(engine: Engine, model: CopyModel, cost: Cost | None = None) -> Any:
    """Return a `CopyRunner` in virtual time. cost: of its forwards, if the model has no share."""
    share = COPY_SHARE if model.share is None else model.share
    if model.share is None and cost is not None:
        return SimulatedChains(engine, model.acceptance, cost)
    policy = engine.runner.cost  # type: ignore[attr-defined]  # a SimulatedRunner
    return SimulatedChains(engine, model.acceptance, lambda load: share * policy(load))


class SimulatedRewardModel(RewardModel):
    """A reward model of one rank, whose forwards take time and whose logits are 0."""

    path, batching, num_truncated = "virtual/reward-model", "packed", 0

    def __init__(self, ranks: SimulatedRanks, cost: Cost, max_tokens: int):
        """max_tokens: of a forward of several sequences."""
        self.ranks, self.cost, self.max_tokens = ranks, cost, max_tokens
        self.model: Any = SimpleNamespace(dtype=torch.bfloat16)

    def tokens_of(self, prompt: Sequence, completion: Sequence) -> np.ndarray:
        return np.zeros(len(prompt) + len(completion), np.int64)

    def logits(self, sequences: Sequence[np.ndarray]) -> list[float]:
        for chosen in self.batches([len(ids) for ids in sequences]):
            size = sum(len(sequences[index]) for index in chosen)
            self.ranks.clock.sleep(self.cost(Load(len(chosen), size, 0, size)))
        return [0.0] * len(sequences)


class SimulatedEnvironments:
    """`Environments` of one rank, whose episodes are named by their rows.

    Turns are those of the workload's texts, and a tool call takes its seconds."""

    form = SimpleNamespace(adds_text=False, has_reward=False)

    def __init__(self, ranks: SimulatedRanks, texts: SimulatedTexts, num_workers: int):
        """num_workers: workers with one call at a time each, and as many for drafts."""
        self.ranks, self.texts = ranks, texts
        self._free_s = {is_draft: [0.0] * num_workers for is_draft in (False, True)}
        self._is_draft: dict[Row, bool] = {}  # of the running episodes
        self._coming: list[tuple[float, int, Row, Observation]] = []  # a heap, by time
        self._numbers = itertools.count()

    def begin(self, row: Row, prompt: Prompt, seed: int, *, is_draft: bool = False) -> None:
        """Start an episode, which adds nothing to the prompt."""
        self._is_draft[row] = is_draft
        self._put(row, self._now, Observation(NOTHING, None))

    def act(self, row: Row, ids: Sequence[int]) -> None:
        """Queue the observation that follows the row's tokens in its text, if there is one."""
        rest = self.texts.of_row(row)[len(row.tokens) :]
        is_own = rest < OBSERVED
        count = int(is_own.argmax()) if is_own.any() else len(rest)
        if not count:
            self._put(row, self._now, Observation(NOTHING, "no_call"))
            return
        workload, workers = self.texts.workload, self._free_s[self._is_draft[row]]
        seconds = workload.spec.tool_seconds(workload.key(row.id), len(row.tokens))
        end_s = max(self._now, workers[0]) + seconds
        heapq.heapreplace(workers, end_s)
        self._put(row, end_s, Observation(rest[:count], None, int(seconds > 0), 0, seconds))

    def poll(self) -> list[tuple[Row, Observation]]:
        """Return the observations of running episodes that are due."""
        come = []
        while self._coming and self._coming[0][0] <= self._now:
            _, _, row, observation = heapq.heappop(self._coming)
            if row in self._is_draft:
                come.append((row, observation))
        return come

    def wait(self, timeout_s: float) -> None:
        """Advance the clock to the next observation, or by `timeout_s`."""
        until = self._now + timeout_s
        if self._coming:
            until = min(until, self._coming[0][0])
        self.ranks.world.wait(self.ranks.rank, max(until, self._now))

    def end(self, row: Row, *, with_reward: bool = True, with_environment: bool = False) -> Future:
        """End an episode without a reward."""
        del self._is_draft[row]
        future: Future = Future()
        future.set_result(Outcome(None, None, None))
        return future

    @property
    def _now(self) -> float:
        return self.ranks.clock.perf_counter()

    def _put(self, row: Row, at_s: float, observation: Observation) -> None:
        heapq.heappush(self._coming, (at_s, next(self._numbers), row, observation))
