"""Speculation over a run: the drafts, histories and estimates that live from step to step, and what they say about the next one.

All of it is the same on every rank, as it is learnt from what the ranks have exchanged; so all ranks plan alike.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bubblespec.config import Config
from bubblespec.data.step_planner import StepPlanner
from bubblespec.engine.generator import Generator
from bubblespec.engine.sampling import SamplingParams
from bubblespec.idle.draft_ahead import DraftAhead
from bubblespec.idle.draft_planning import Outlook, plan_items, undrafted
from bubblespec.ranks.collectives import Ranks
from bubblespec.ranks.progress import ProgressBoard
from bubblespec.ranks.shared_board import make_board
from bubblespec.records import Draft, Group, RolloutRecord, Row, SampleId, Samples
from bubblespec.speculate.proposer import Proposer, make_proposer
from bubblespec.speculate.store import DraftStore, exchange
from bubblespec.speculate.suffix import History
from bubblespec.speculate.windows import CostModel

MAX_AUTO_LOOKAHEAD = 16
# [tokens tried, accepted] of drafts up to their first difference, and [gained, given by the draft] after it: what is believed
# before acceptance has been measured.
PRIOR_ACCEPTANCE = np.array([[100.0, 99.99], [100.0, 10.0]])
RETRY_STEPS = 8  # where even the freshest drafts are refused, one step in so many drafts all the same: they may have got better
MIN_AGE_SHARE = 0.2  # drafts so old that less of them is accepted are not worth making


@dataclass
class Speculation:
    """Made once a run, by all ranks together."""

    config: Config
    ranks: Ranks
    board: ProgressBoard
    proposer: Proposer
    store: DraftStore
    history: History
    tokens_per_step: float = 0.0
    """Of responses, over all ranks; exponentially weighted, as are all averages here."""
    forwards: float = 0.0
    """Of the slowest rank in a rollout."""
    accepted_by_age: dict[int, float] = field(default_factory=dict)
    """Share of aligned draft tokens, by the updates since the draft was last extended."""
    outlook: Outlook = field(default_factory=Outlook)
    acceptance: np.ndarray = field(default_factory=PRIOR_ACCEPTANCE.copy)
    """Sums of `Acceptance.before_divergence` and `after_divergence`, float64 [2, 2]."""
    shared_cost: np.ndarray | None = None
    """Coefficients of the ranks' cost models, their mean; None before the first rollout."""

    @property
    def has_drafts(self) -> bool:
        """Whether tokens are proposed at all; else what is known of lengths and costs serves placement alone."""
        return bool(self.proposer.sources)

    def lookahead(self, step: int) -> int:
        """How many steps to draft ahead of `step`."""
        bubble = self.config.bubble
        if "bubble" not in self.config.speculative.method:
            return 0
        remaining = self.config.run.max_steps - step - 1
        if bubble.lookahead != "auto":
            return min(int(bubble.lookahead), remaining)
        affordable = int(bubble.max_draft_tokens // max(self.tokens_per_step, 1.0))
        too_old = [age for age, share in self.accepted_by_age.items() if share < MIN_AGE_SHARE]
        depth = min(MAX_AUTO_LOOKAHEAD, affordable, remaining, *(age - 1 for age in too_old if age > 0))
        return max(depth, 1 if remaining and affordable and step % RETRY_STEPS == 0 else 0)

    def begin(self, rows: dict[int, Row], step: int) -> dict[int, Row]:
        """A rollout of these rows of `step` is about to begin, under weights that have had so many updates. Returns the rows in
        the order in which they should be generated: where rows wait for slots, those with the most to decode must not wait."""
        self.proposer.begin()
        drafts = [self.store.get(row.id) for row in rows.values()]
        for row in rows.values():
            self.track(row, step)
        missing, places = undrafted(list(rows.values()), drafts, self.outlook), list(rows)
        return {places[i]: rows[places[i]] for i in np.argsort(-missing, kind="stable").tolist()}

    def track(self, row: Row, step: int) -> None:
        """Propose for a row of `step` from now on."""
        self.proposer.track(row, self.store.get(row.id), version=step)

    def keep(self, rows: Sequence[Row], step: int) -> None:
        """The tokens of rows that will go on in a later step become drafts, in the stores of all ranks. A draft that has turned
        out right so far and is longer stays."""
        drafts = {}
        for row in rows:
            old, length = self.store.get(row.id), len(row.tokens)
            if length and not (old is not None and len(old.tokens) > length and np.array_equal(old.tokens[:length], row.tokens)):
                drafts[row.id] = Draft(row.tokens.astype(np.int32), row.finish is not None, step)
        exchange(self.store, drafts, self.ranks)

    def draft_ahead(self, step: int, planner: StepPlanner, used: list[Group], num_slots: int) -> DraftAhead | None:
        """Drafting ahead during a rollout of `step`; None where nothing is to be drafted. used: the groups that the step has
        drawn so far, those of this rollout included."""
        depth = self.lookahead(step)
        batches = planner.upcoming(step, depth, used) if depth else []
        return self._plan(batches, step, num_slots, {group.name for group in planner.deferred}) if any(batches) else None

    def _plan(self, batches: list[list[Group]], step: int, num_slots: int, deferred: set[tuple[int, int]]) -> DraftAhead:
        """deferred: names of groups that come before all others."""
        rollout, saving = self.config.rollout, None
        if self.shared_cost is not None:
            nearest = next(filter(None, batches))  # where groups are deferred, none of the next step may be known yet
            num_rows = -(-len(nearest) * rollout.num_generations // self.ranks.world_size)
            p_before, p_after = self.acceptance[:, 1] / self.acceptance[:, 0]
            saving = self.outlook.expected_saving(num_rows, num_slots, self.shared_cost, p_before, p_after=p_after)
        items = plan_items(
            batches,
            rollout.num_generations,
            self.store,
            self.history,
            outlook=self.outlook,
            forwards_per_step=self.forwards,
            saving=saving,
        )
        if self.config.tail_batching.enabled:
            # A short round has no tail that drafts beside its rows could save: they are for ranks that wait.
            idle_only = [replace(item, pays=False) for item in items]
            items = sorted(idle_only, key=lambda item: item.id[:2] not in deferred)
        return DraftAhead(
            items,
            self.store,
            self.proposer,
            version=step,
            max_new_tokens=rollout.max_completion_length,
            max_slowdown=self.config.bubble.max_slowdown,
        )

    def learn_rollout(self, record: RolloutRecord, ids: list[SampleId]) -> None:
        """Exchange what each rank has measured in a rollout, so that all of them plan alike. The drafts of its samples, `ids` of
        all ranks, go: those have had their turn. Where a rollout is abandoned this is not called, and they stay."""
        ages, counts = np.zeros((MAX_AUTO_LOOKAHEAD + 1, 2)), record.acceptance
        for age, of_age in counts.by_age.items():
            ages[min(age, MAX_AUTO_LOOKAHEAD)] += of_age
        divergence = (counts.before_divergence, counts.after_divergence)
        own = (ages.ravel(), *divergence, [record.own_forwards], self.proposer.cost.coefficients)
        measured = self.ranks.gather(np.concatenate(own))
        for age, (drafted, accepted) in enumerate(measured[:, : ages.size].sum(axis=0).reshape(ages.shape)):
            if drafted >= 20:
                self.accepted_by_age[age] = _average(self.accepted_by_age.get(age), accepted / drafted)
        # Where nothing is drafted any more, what was believed at the start comes back, and is tried again.
        news = measured[:, ages.size : ages.size + 4].sum(axis=0).reshape(2, 2)
        self.acceptance = 0.7 * self.acceptance + 0.01 * PRIOR_ACCEPTANCE + news
        self.forwards = _average(self.forwards or None, float(measured[:, ages.size + 4].max()))
        self.shared_cost = measured[:, ages.size + 5 :].mean(axis=0)
        self.store.drop(ids)

    def learn_samples(self, step: int, samples: Samples, rewards: np.ndarray) -> None:
        """Take in what a step has generated, the same on every rank: lengths, and histories for the prompts' next epoch. Its
        samples have had their turn, and need no drafts. rewards: float64 [S]."""
        self.store.drop(samples.ids)
        lengths = samples.lengths
        self.tokens_per_step = _average(self.tokens_per_step or None, float(lengths.sum()))
        self.outlook.learn(np.repeat([len(g.prompt.token_ids) for g in samples.groups], samples.num_generations), lengths)
        if "suffix" in self.config.speculative.method:
            for i, tokens in enumerate(samples.tokens):
                self.history.add(samples.prompt_of(i).uid, tokens, float(rewards[i]), step)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Drafts, history and estimates as arrays. They change no token, only how soon it is there. All is the same on every
        rank, but for the shares of proposals accepted so far, of which any rank's will do; costs are measured anew at a start.
        """
        ages = np.array([[age, share] for age, share in self.accepted_by_age.items()], np.float64).reshape(-1, 2)
        parts = {
            "drafts": self.store.state_dict(),
            "history": self.history.state_dict(),
            "survival": self.proposer.survival.state_dict(),
        }
        flat = {f"{name}.{key}": array for name, part in parts.items() for key, array in part.items()}
        averages = np.array([self.tokens_per_step, self.forwards])
        cost = np.empty(0) if self.shared_cost is None else self.shared_cost
        shares = {"accepted_by_age": ages, "acceptance": self.acceptance}
        return flat | shares | {"lengths": self.outlook.seen, "averages": averages, "shared_cost": cost}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""
        for name, part in (("drafts", self.store), ("history", self.history), ("survival", self.proposer.survival)):
            part.load_state_dict({key.split(".", 1)[1]: array for key, array in state.items() if key.startswith(f"{name}.")})
        self.outlook.seen = state["lengths"]
        self.tokens_per_step, self.forwards = map(float, state["averages"])
        self.accepted_by_age = {int(age): float(share) for age, share in state["accepted_by_age"]}
        self.acceptance = state["acceptance"]
        cost = state["shared_cost"]
        self.shared_cost = cost if len(cost) else None


def _average(old: float | None, new: float) -> float:
    return new if old is None else 0.7 * old + 0.3 * new


class _FixedDrafts:
    """Proposes meaningless drafts of one length: for timing forwards."""

    def __init__(self, length: int):
        self.length = length

    def propose(self, rows, lengths, room, budget):
        return [np.ones(self.length, np.int64)] * len(rows) if self.length else [None] * len(rows)

    def observe(self, rows, tokens, num_draft, num_accepted):
        pass


def profile(engine: Generator, params: SamplingParams, cost: CostModel, num_forwards: int = 3, *, clock=time) -> None:
    """Time forwards of few and many rows, short and long ones, with short and long drafts. Each is run once before it counts."""
    capacity, length = engine.num_slots, engine.max_length
    for count, size, window in itertools.product(
        sorted({1, max(1, capacity // 4), capacity}), sorted({min(8, length - 1), min(512, length // 2)}), (0, 3, 15)
    ):
        if count * (window + 1) > engine.max_batch_tokens or size + window + num_forwards + 2 > length:
            continue
        engine.reset()
        drafts = _FixedDrafts(window)
        engine.add([Row(SampleId(0, 0, sample), (1,) * size, length - size) for sample in range(count)])
        while engine.queue or (engine.lengths <= size).any():
            engine.step(params, drafts)
        for _ in range(num_forwards):
            started = clock.perf_counter()
            _, load = engine.step(params, drafts)
            if load is not None:
                cost.anchor(*load[:4], clock.perf_counter() - started)
    engine.reset()


def make_speculation(config: Config, ranks: Ranks, engine: Generator, params: SamplingParams) -> Speculation | None:
    """None where nothing is drafted, deferred or placed by what is expected. Makes a process group and times forwards: all ranks
    must call it together."""
    has_drafts = config.speculative.method != "none" or config.tail_batching.enabled
    if not has_drafts and config.rollout.placement == "in_turn":
        return None
    cost = CostModel()
    if has_drafts:
        profile(engine, params, cost, clock=ranks.clock)
    board = make_board(ranks, config.bubble.progress_timeout_s, config.bubble.progress_backend)
    return assemble(config, ranks, board, cost)


def assemble(config: Config, ranks: Ranks, board: ProgressBoard, cost: CostModel) -> Speculation:
    """A run's speculation at its beginning. cost: of forwards, as profiled."""
    speculative = config.speculative
    history = History(speculative.max_history_tokens)
    has_drafts = "bubble" in speculative.method or config.tail_batching.enabled
    options = {"has_drafts": has_drafts, "fixed_window": speculative.fixed_window, "clock": ranks.clock}
    proposer = make_proposer(speculative.method, history, cost, **options)
    return Speculation(config, ranks, board, proposer, DraftStore(config.bubble.max_draft_tokens), history)
