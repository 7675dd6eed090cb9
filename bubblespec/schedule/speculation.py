"""Speculation over a run: the drafts, histories and estimates that live from step to step, and one step's rollout with them."""

import itertools
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from bubblespec.config import Config
from bubblespec.distributed import Ranks
from bubblespec.drafts.bubble import DraftStore, exchange
from bubblespec.drafts.suffix import SOURCE_NAMES, History
from bubblespec.engine.generator import Generator
from bubblespec.engine.sampling import SamplingParams
from bubblespec.forward_log import ForwardLog
from bubblespec.records import Prompt, Row, SampleId
from bubblespec.schedule.priority import Outlook, plan_items, undrafted
from bubblespec.schedule.progress import ProgressBoard
from bubblespec.schedule.run_ahead import RolloutStats, RunAhead, rollout
from bubblespec.schedule.speculator import ALIGNED, RowSpeculator
from bubblespec.schedule.windows import CostModel
from bubblespec.timeline import total_s

MAX_AUTO_LOOKAHEAD = 16
FOLLOWED = np.array([[100.0, 99.99], [100.0, 10.0]])  # what is believed of drafts before any was verified, see `Speculation`
RETRY_STEPS = 8  # where even the freshest drafts are refused, one step in so many drafts all the same: they may have got better
MIN_AGE_SHARE = 0.2  # drafts so old that less of them is accepted are not worth making


@dataclass
class Speculation:
    """Made once a run, by all ranks together. batch_of(step) gives the global batch of a coming step."""

    config: Config
    ranks: Ranks
    board: ProgressBoard
    speculator: RowSpeculator
    store: DraftStore
    history: History
    tokens_per_step: float = 0.0  # exponentially weighted, over all ranks
    forwards: float = 0.0  # of the slowest rank in a rollout, exponentially weighted
    accepted_by_age: dict[int, float] = field(default_factory=dict)  # share of aligned draft tokens, exponentially weighted
    outlook: Outlook = field(default_factory=Outlook)
    step: int = -1  # of the last rollout
    # Tokens and how many of them drafts gave right, up to the first mismatch and after it; exponentially weighted sums.
    followed: np.ndarray = field(default_factory=FOLLOWED.copy)
    shared_cost: np.ndarray | None = None  # coefficients of the ranks' cost models, their mean

    def lookahead(self, step: int) -> int:
        """How many steps to draft ahead of `step`."""
        bubble = self.config.bubble
        if "bubble" not in self.config.speculative.method:
            return 0
        left = self.config.run.max_steps - step - 1
        if bubble.lookahead != "auto":
            return min(int(bubble.lookahead), left)
        affordable = int(bubble.max_draft_tokens // max(self.tokens_per_step, 1.0))
        too_old = [age for age, share in self.accepted_by_age.items() if share < MIN_AGE_SHARE]
        depth = min(MAX_AUTO_LOOKAHEAD, affordable, left, *(age - 1 for age in too_old if age > 0))
        return max(depth, 1 if left and affordable and step % RETRY_STEPS == 0 else 0)

    def rollout(
        self,
        engine: Generator,
        rows: list[Row],
        params: SamplingParams,
        step: int,
        batch_of,
        on_finished=None,
        log: ForwardLog | None = None,
    ) -> tuple[RolloutStats, dict]:
        """Generate this rank's rows of `step`, and draft ahead. Returns counts, and the drafts that this rank made.

        batch_of(step): a global batch; on_finished(row): is called with each of `rows` as it is done; log: where forwards are
        noted. The weights have had `step` updates.
        """
        self.step = step
        self.speculator.begin(step)
        drafts = [self.store.get((row.id.visit, row.id.uid, row.id.sample)) for row in rows]
        for row, draft in zip(rows, drafts, strict=True):
            self.speculator.track(row, draft, version=step)
        # Where rows wait for slots, those with the most to decode must not wait.
        missing = undrafted(rows, drafts, self.outlook)
        rows = [rows[i] for i in np.argsort(-missing, kind="stable")]
        depth = self.lookahead(step)
        ahead = None
        if depth:
            batches = [(s, batch_of(s)) for s in range(step + 1, step + 1 + depth)]
            rows_a_rank = -(-len(batches[0][1]) * self.config.rollout.num_generations // self.ranks.world_size)
            ahead = self._plan(batches, step, rows_a_rank, engine.num_slots)
        return rollout(engine, rows, params, self.board, self.speculator, ahead, on_finished, log)

    def _plan(self, batches: list, step: int, num_rows: int, num_slots: int) -> RunAhead:
        worth = None
        if self.shared_cost is not None:
            kept, resumed = self.followed[:, 1] / self.followed[:, 0]
            worth = self.outlook.worth(num_rows, num_slots, self.shared_cost, kept, resumed)
        num_generations = self.config.rollout.num_generations
        planned = plan_items(batches, num_generations, self.store, self.history, self.outlook, self.forwards, worth)
        # A draft that does not pay any more is left by its holder, to whoever has nothing else to do.
        free = [item for item in planned if item.holder < 0 or not item.pays]
        return RunAhead(
            deque(item for item in free if item.pays),
            deque(item for item in free if not item.pays),
            [item for item in planned if item.holder == self.ranks.rank and item.pays],
            self.store,
            version=step,
            max_new_tokens=self.config.rollout.max_completion_length,
            max_slowdown=self.config.bubble.max_slowdown,
        )

    def learn(self, step: int, prompts: list[Prompt], tokens: list[np.ndarray], rewards: np.ndarray) -> None:
        """Take in the step's samples, the same on every rank: lengths, and histories for the prompts' next epoch."""
        lengths = np.array([len(t) for t in tokens], np.int64)
        self.tokens_per_step = _average(self.tokens_per_step or None, float(lengths.sum()))
        num_generations = len(tokens) // len(prompts)
        self.outlook.learn(np.repeat([len(prompt.token_ids) for prompt in prompts], num_generations), lengths)
        if "suffix" in self.config.speculative.method:
            for i, sample in enumerate(tokens):
                self.history.add(prompts[i // num_generations].uid, sample, float(rewards[i]), step)

    def exchange(self, drafts: dict, stats: RolloutStats) -> int:
        """All ranks' drafts into all ranks' stores, and what the ranks measured, so that all of them plan alike. Drafts of the
        step just generated go; if its rollout is abandoned there is no exchange, and they stay.

        Returns the number of tokens that all ranks offered.
        """
        ages, found = np.zeros((MAX_AUTO_LOOKAHEAD + 1, 2)), self.speculator.stats
        for age, counts in found.by_age.items():
            ages[min(age, MAX_AUTO_LOOKAHEAD)] += counts
        own = (ages.ravel(), found.aligned, found.left, [stats.own_forwards], self.speculator.cost.coefficients)
        measured = self.ranks.gather(np.concatenate(own))
        for age, (drafted, accepted) in enumerate(measured[:, : ages.size].sum(axis=0).reshape(ages.shape)):
            if drafted >= 20:
                self.accepted_by_age[age] = _average(self.accepted_by_age.get(age), accepted / drafted)
        # Where nothing is drafted any more, what was believed at the start comes back, and is tried again.
        self.followed = 0.7 * self.followed + 0.01 * FOLLOWED + measured[:, ages.size : ages.size + 4].sum(axis=0).reshape(2, 2)
        found.by_age.clear()  # taken in; the step may have a further rollout
        found.aligned, found.left = [0, 0], [0, 0]
        self.forwards = _average(self.forwards or None, float(measured[:, ages.size + 4].max()))
        self.shared_cost = measured[:, ages.size + 5 :].mean(axis=0)
        self.store.drop_until(self.step)
        return exchange(self.store, drafts, self.ranks)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Drafts, history and estimates as arrays. They change no token, only how soon it is there. All is the same on every
        rank, but for the shares of proposals accepted so far, of which any rank's will do; costs are measured anew at a start.
        """
        ages = np.array([[age, share] for age, share in self.accepted_by_age.items()], np.float64).reshape(-1, 2)
        parts = {
            "drafts": self.store.state_dict(),
            "history": self.history.state_dict(),
            "survival": self.speculator.survival.state_dict(),
        }
        flat = {f"{name}.{key}": array for name, part in parts.items() for key, array in part.items()}
        averages = np.array([self.tokens_per_step, self.forwards])
        cost = np.empty(0) if self.shared_cost is None else self.shared_cost
        shares = {"accepted_by_age": ages, "followed": self.followed}
        return flat | shares | {"lengths": self.outlook.seen, "averages": averages, "shared_cost": cost}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""
        for name, part in (("drafts", self.store), ("history", self.history), ("survival", self.speculator.survival)):
            part.load_state_dict({key.split(".", 1)[1]: array for key, array in state.items() if key.startswith(f"{name}.")})
        self.outlook.seen = state["lengths"]
        self.tokens_per_step, *_, self.forwards = map(float, state["averages"])  # older checkpoints have three
        self.accepted_by_age = {int(age): float(share) for age, share in state["accepted_by_age"]}
        self.followed = state.get("followed", FOLLOWED)  # older checkpoints have none, nor the next
        cost = state.get("shared_cost", ())
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


def profile(engine: Generator, params: SamplingParams, cost: CostModel, num_forwards: int = 3, clock=time) -> None:
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
        while engine.queue or (engine.lengths == size).any():  # some have sampled nothing yet
            engine.step(params, drafts)
        for _ in range(num_forwards):
            started = clock.perf_counter()
            if engine.rows:
                _, load = engine.step(params, drafts)
                cost.anchor(*load[:4], clock.perf_counter() - started)
    engine.reset()


def make_speculation(config: Config, ranks: Ranks, engine: Generator, params: SamplingParams) -> Speculation | None:
    """None for method none. Makes a process group and times forwards: all ranks must call it together."""
    if config.speculative.method == "none":
        return None
    speculator = RowSpeculator(config.speculative.method, CostModel(), config.speculative.fixed_window, ranks.clock)
    profile(engine, params, speculator.cost, clock=ranks.clock)
    speculator.history = History(config.speculative.max_history_tokens)
    board = ProgressBoard(ranks, config.bubble.progress_timeout_s, config.bubble.progress_backend)
    store = DraftStore(config.bubble.max_draft_tokens)
    return Speculation(config, ranks, board, speculator, store, speculator.history)


def speculation_metrics(ranks: Ranks, stats: RolloutStats, speculation: Speculation, num_response_tokens: int) -> dict:
    """The step's speculation, summed over ranks; forwards are those of the slowest rank."""
    s = speculation.speculator.stats
    times = ranks.gather(np.array([stats.own_s, stats.total_s, stats.wait_s, stats.own_forwards, s.seconds]))
    slowest = int(times[:, 0].argmax())
    rollout_s = times[slowest, 0]
    counts = [s.num_row_forwards, s.num_gained, s.num_draft, s.num_accepted, s.num_covered, stats.drafted_tokens]
    sums = ranks.gather(np.array([*counts, stats.hard_forwards, *s.accepted_lengths], np.int64)).sum(axis=0)
    row_forwards, gained, drafted, accepted, covered, run_ahead_tokens, hard_forwards = sums[:7].tolist()
    metrics = {
        "rollout/forwards": int(times[slowest, 3]),
        "rollout/spec_accept_length": gained / max(row_forwards, 1),
        "rollout/spec_accept_rate": accepted / max(drafted, 1),
        "rollout/spec_coverage": covered / max(num_response_tokens, 1),
        "rollout/spec_accepted_tokens": accepted,
        "rollout/spec_wasted_tokens": drafted - accepted,
        "rollout/spec_accepted_lengths": sums[7:].tolist(),
        "bubble/drafted_tokens": run_ahead_tokens,
        "bubble/store_tokens": speculation.store.num_tokens,
        "bubble/ratio_before_drafting": float(np.mean(1 - times[:, 0] / max(rollout_s, 1e-9))),
        "bubble/overrun_s": max(float(times[:, 1].max() - rollout_s), 0.0),
        "bubble/hard_forwards": hard_forwards,
        "progress/ticks": stats.num_ticks,
        "timing_s/propose": float(times[:, 4].mean()),
        "timing_s/exchange": total_s(stats.events, "exchange"),
    }
    sources = (ALIGNED, *SOURCE_NAMES)
    table = ranks.gather(np.array([s.by_source.get(name, [0, 0]) for name in sources], np.int64)).sum(axis=0)
    for name, (drafted, accepted) in zip(sources, table.tolist(), strict=True):
        if drafted:
            metrics[f"drafts/{name}/accept_rate"] = accepted / drafted
            metrics[f"drafts/{name}/tokens"] = drafted
    for age, share in sorted(speculation.accepted_by_age.items()):
        metrics[f"drafts/accept_rate/age_{age}"] = share
    return metrics
