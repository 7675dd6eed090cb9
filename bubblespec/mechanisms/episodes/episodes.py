"""Episodes in a rollout of one rank: rows whose turns an environment answers while others go on.

A row begins with the text that the environment adds to the prompt. At the end of a turn the engine
pauses it, until the observation comes that follows, or the episode is over.
"""

import atexit
import random
from collections.abc import Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.proposer import Proposer
from bubblespec.mechanisms import Run
from bubblespec.mechanisms.episodes.environments import (
    Environments,
    Observation,
    check_environment,
)
from bubblespec.mechanisms.episodes.forms import load_form
from bubblespec.mechanisms.episodes.tokens import tokenize_with
from bubblespec.planner.drafts import MAX_LOOKAHEAD
from bubblespec.records import StepRecord
from bubblespec.rollout.plan import Mechanism, RankView, RolloutPlan, RowFeed
from bubblespec.rollout.sampler import Sampler
from bubblespec.types import Prompt, Row

NAME = "episodes"
WAIT_S = 1e-3  # until a rank without anything to feed looks after other things
STOPS = ("done", "no_call", "max_turns", "length", "error")


def episode_seed(run_seed: int, prompt_id: int, draw_index: int) -> int:
    """Return the seed for the environments of a group."""
    return random.Random(f"{run_seed}/{prompt_id}/{draw_index}").getrandbits(32)


@dataclass
class EpisodeCounts:
    """Sums over the episodes of one rollout on one rank, drafts left out."""

    turns: int = 0
    """Model turns in finished episodes."""
    calls: int = 0
    failed_calls: int = 0
    environment_s: float = 0.0
    """Seconds inside environments, summed over rows."""
    waiting_s: float = 0.0
    """Seconds in which a row waited for its environment, summed over rows."""
    idle_s: float = 0.0
    """Seconds of `waiting_s` in which the rank did nothing else."""
    stops: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STOPS, 0))
    """Finished episodes by the reason for their end."""


@dataclass(eq=False)
class _Episode:
    """The unfinished episode of a row."""

    row: Row
    is_own: bool
    """Whether the row is of this step, not a draft of a coming one."""
    since_s: float
    """Time of the last request to the environment."""
    is_waiting: bool = True
    turn_begin: int = 0
    """Index in the response at which the last turn begins."""
    num_turns: int = 0
    is_broken: bool = False
    """Whether the environment failed at the beginning, so that the first turn ends the episode."""


class Episodes(RowFeed):
    """The feed of one rollout with environments."""

    def __init__(self, sampler: Sampler, environments: Environments, prompts: Iterable[Prompt]):
        """Prepare one rollout. prompts: of all rows that may be begun."""
        self.environments = environments
        self.clock, self.with_environment = sampler.ranks.clock, sampler.scorer.takes_environments
        self.seed, self.runs_drafts = sampler.config.run.seed, sampler.config.environment.draft
        self.prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self.proposer: Proposer | None = None
        self.counts = EpisodeCounts()
        self.outcomes: dict[Row, Future] = {}
        """`Outcome` of each finished episode of this step."""
        self._running: dict[Hashable, _Episode] = {}  # by row

    @property
    def is_running(self) -> bool:  # type: ignore[override]  # it depends on the episodes
        """Whether any episode is unfinished."""
        return bool(self._running)

    def start(self, view: RankView, proposer: Proposer | None) -> None:
        """Begin an episode for each row of this step."""
        self.engine, self.proposer = view.engine, proposer
        view.record.extras[NAME] = self.counts
        if self.runs_drafts:
            view.begin = partial(self.begin, is_own=False)
        for row in view.unfinished.values():
            self.begin(row)

    def begin(self, row: Row, *, is_own: bool = True) -> None:
        """Start an episode. The row enters the engine once the environment has begun."""
        row.has_turns = True
        self._running[row] = _Episode(row, is_own, self.clock.perf_counter())
        prompt, (prompt_id, draw_index, _) = self.prompts[row.id.prompt_id], row.id
        seed = episode_seed(self.seed, prompt_id, draw_index)
        self.environments.begin(row, prompt, seed, is_draft=not is_own)

    def advance(self, finished: Iterable[Row] = ()) -> list[Row]:
        """Submit turns that have ended, take in observations, and return rows that are over."""
        over: list[Row] = []
        for row in finished:
            episode = self._running.get(row)
            over += [row] if episode is None else self._submit(episode)
        for name, observation in self.environments.poll():
            over += self._take(self._running[name], observation)
        return over

    def wait(self) -> None:
        """Wait a moment for an observation."""
        begin_s = self.clock.perf_counter()
        num_waiting = sum(each.is_waiting and each.is_own for each in self._running.values())
        self.environments.wait(WAIT_S)
        self.counts.idle_s += num_waiting * (self.clock.perf_counter() - begin_s)

    def drop(self, row: Row) -> None:
        """End a row's episode; the row leaves the engine with its tokens."""
        del self._running[row]
        self.environments.end(row, with_reward=False)
        if row in self.engine.queue or row in self.engine.rows:
            self.engine.drop(row)
        row.finish = None

    def close(self) -> None:
        """End all unfinished episodes at the end of the rollout. Rows stay as they are."""
        for row in self._running:
            self.environments.end(row, with_reward=False)
        self._running.clear()

    def _submit(self, episode: _Episode) -> list[Row]:
        """Submit the turn of a row that the engine has returned; return the row if it is over."""
        row = episode.row
        episode.num_turns += row.finish == "stop"
        if row.finish == "length":
            return self._end(episode, "length")
        if episode.is_broken:
            self.engine.drop(row)
            return self._end(episode, "error")
        episode.is_waiting, episode.since_s = True, self.clock.perf_counter()
        self.environments.act(row, row.tokens[episode.turn_begin :])
        return []

    def _take(self, episode: _Episode, observation: Observation) -> list[Row]:
        """Append an observation to its row; return the row if it is over."""
        row, ids, length = episode.row, observation.ids, len(episode.row.tokens)
        episode.is_waiting = False
        if episode.is_own:
            self.counts.waiting_s += self.clock.perf_counter() - episode.since_s
            self.counts.environment_s += observation.seconds
            self.counts.calls += observation.num_calls
            self.counts.failed_calls += observation.num_failed
        if episode.num_turns == 0:
            episode.is_broken = observation.reason is not None
            row.tokens, row.logprob = ids, np.full(len(ids), np.nan, np.float32)
            self.engine.add([row])
        elif observation.reason is not None:
            self.engine.drop(row)
            if observation.reason == "too_long":
                row.finish = "length"
            return self._end(episode, observation.reason)
        else:
            self.engine.resume(row, ids)
        episode.turn_begin = len(row.tokens)
        if self.proposer is not None:
            self.proposer.extend(row, row.tokens[length:])
        return self._end(episode, "length") if row.finish == "length" else []

    def _end(self, episode: _Episode, reason: str) -> list[Row]:
        """End the episode of a row that is out of the engine; return the row."""
        row, is_own = episode.row, episode.is_own
        del self._running[row]
        outcome = self.environments.end(
            row,
            with_reward=is_own and self.environments.form.has_reward,
            with_environment=is_own and self.with_environment,
        )
        if is_own:
            self.outcomes[row] = outcome
            self.counts.turns += episode.num_turns
            self.counts.stops["length" if reason == "too_long" else reason] += 1
        return [row]


class EpisodesMechanism(Mechanism):
    """Rows whose turns an environment answers."""

    name = NAME

    def __init__(self, sampler: Sampler, environments: Environments):
        self.sampler, self.environments = sampler, environments

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """Feed the rollout's rows, and those drafted for coming steps, through environments."""
        batches = [plan.launch.groups]
        if plan.step is not None:
            batches += self.sampler.schedule.upcoming(plan.step, MAX_LOOKAHEAD, plan.used)
        prompts = [group.prompt for batch in batches for group in batch]
        plan.feed = episodes = Episodes(self.sampler, self.environments, prompts)
        if plan.scoring is not None:
            plan.scoring.outcomes = episodes.outcomes

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict:
        """Return the metrics of the step's episodes on this rank, with TRL's frequencies."""
        counts: list[EpisodeCounts] = [rollout.extras[NAME] for rollout in record.rollouts]
        own = []
        for each in counts:
            *sums, stops = vars(each).values()
            own.append([*sums, *stops.values()])
        sums = np.array(own, np.float64).sum(axis=0).tolist()
        turns, calls, failed, environment_s, waiting_s, idle_s, *stops = sums
        total = sum(stops)
        metrics = {
            "tools/call_frequency": (calls, total),
            "tools/failure_frequency": (failed, calls),
            "episodes/turns": (turns, total),
            "timing_s/environment": (environment_s, total),
        }
        if waiting_s:
            metrics["episodes/covered_share"] = waiting_s - idle_s, waiting_s
        shares = zip(STOPS, stops, strict=True)
        return metrics | {f"episodes/stop/{reason}": (count, total) for reason, count in shares}


def load(run: Run) -> None:
    """Load the environment, which decides how prompts become ids. Raises InputError."""
    config = run.config.environment
    if run.virtual is not None or not config.is_used:
        return
    form = load_form(config.factory, config.tools)
    run.tokenize = tokenize_with(run.tokenizer, form)
    run.answers_turns, run.has_reward = True, form.has_reward
    # An environment may add text before the first turn: drafts then need copies of it.
    run.drafts_ahead = not form.adds_text or config.draft


def check(run: Run, prompts: list[Prompt]) -> None:
    """Try an episode of the first prompt. Raises InputError."""
    if run.config.environment.is_used:
        first = prompts[0]
        check_environment(run.config.environment, run.tokenizer, first.text, first.columns)


def make(run: Run) -> EpisodesMechanism | None:
    """Start the environments' processes; in virtual time, take what stands in for them."""
    if run.virtual is not None:
        given = run.virtual.get(NAME)
        return given and EpisodesMechanism(run.sampler, given)
    if not run.config.environment.is_used:
        return None
    environments = Environments(run.config.environment, run.tokenizer)
    atexit.register(environments.close)
    return EpisodesMechanism(run.sampler, environments)
