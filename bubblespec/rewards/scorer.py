"""Scoring of a rank's rows: in worker processes while others still decode, or in this process, when
it has nothing else to do or once all have finished.

A reward that fails is logged, counted, and replaced by `reward.reward_on_error`. If a function
fails for all responses of a step, on all ranks, the run ends, as there is nothing to train on.
"""

import atexit
import json
import os
import sys
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from bubblespec.config import RewardConfig
from bubblespec.dist.ranks import Ranks
from bubblespec.errors import InputError, log
from bubblespec.records import Span
from bubblespec.rewards.functions import (
    FAILURE_KINDS,
    Reward,
    RewardFailure,
    RewardFunction,
    Sample,
    score,
)
from bubblespec.rewards.workers import RewardWorkers
from bubblespec.types import Group, Row, SampleId

ERRORS_FILE = "reward_errors.jsonl"
MAX_LOGGED = 20  # failures of a batch that a rank writes to ERRORS_FILE
MAX_LOGGED_CHARACTERS = 2000  # of a prompt or completion in it
POLL_STOP_S = 0.2  # how often a waiting rank checks whether the run is to stop


class Failed(NamedTuple):
    """A reward that failed, in a batch."""

    row: Row
    function: int
    failure: RewardFailure


class Scorer:
    """The reward functions of a run and their workers, if there are any (`reward.num_workers`)."""

    def __init__(
        self,
        config: RewardConfig,
        functions: dict[str, RewardFunction],
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks,
        *,
        output_dir: str,
    ):
        self.config, self.functions, self.tokenizer = config, functions, tokenizer
        self.ranks, self.output_dir = ranks, output_dir
        self._forget_counts()
        self.workers = None
        if config.num_workers:
            self.workers = RewardWorkers(
                list(functions), config.num_workers, config.timeout_s, config.adaptive_timeout
            )
            atexit.register(self.workers.close)

    def begin(self, groups: list[Group], step: int | None = None) -> "Scoring":
        """Score responses to these groups' prompts, which are about to be generated. step: None in
        an evaluation."""
        return Scoring(self, groups, step)

    def take_metrics(self) -> dict[str, float]:
        """Failures, seconds inside the functions, and the share of these that overlapped with
        rollouts (left out if there were none), over all ranks since the last call: to be called
        once per step."""
        by_kind = dict(zip(FAILURE_KINDS, self._counts.sum(axis=0).tolist(), strict=True))
        metrics = {"reward/errors": sum(by_kind.values()), "reward/function_s": self._function_s}
        metrics |= {f"reward/errors/{kind}": count for kind, count in by_kind.items() if count}
        if self._function_s:
            metrics["reward/overlapped_share"] = self._overlapped_s / self._function_s
        self._forget_counts()
        return metrics

    def count(
        self, failed: list[Failed], num_rows: int, seconds: float, overlapped_s: float
    ) -> None:
        """Sum up what all ranks have counted. Raises InputError, on all of them, if a function has
        failed for every row.

        seconds: inside the functions; overlapped_s: those of them before the end of the rollouts.
        """
        counts = np.zeros_like(self._counts)
        for _, function, failure in failed:
            counts[function, FAILURE_KINDS.index(failure.kind)] += 1
        local = np.array([seconds, overlapped_s, num_rows, *counts.ravel()], np.float64)
        seconds, overlapped_s, num_rows, *counts = self.ranks.gather(local).sum(axis=0).tolist()
        self._counts += np.array(counts, np.int64).reshape(self._counts.shape)
        self._function_s += seconds
        self._overlapped_s += overlapped_s
        self._num_rows += int(num_rows)
        for number, path in enumerate(self.functions):
            if self._num_rows and self._counts[number].sum() == self._num_rows:
                example = next(
                    (f"; {f.failure.message}" for f in failed if f.function == number), ""
                )
                raise InputError(
                    f"reward {path}: failed for all {self._num_rows} responses of a step{example}"
                )

    def close(self) -> None:
        """End the workers. Without it they end with this process."""
        if self.workers is not None:
            atexit.unregister(self.workers.close)
            self.workers.close()

    def _forget_counts(self) -> None:
        """Counts are over all ranks and the batches of a step; failures by function and kind."""
        self._counts = np.zeros((len(self.functions), len(FAILURE_KINDS)), np.int64)
        self._num_rows, self._function_s, self._overlapped_s = 0, 0.0, 0.0


class Scoring:
    """The scores of one rollout's rows on one rank: row by row as they come (`take_scored`), and at
    the end those of all rows (`collect`), which are the same whatever was handed out before."""

    def __init__(self, scorer: Scorer, groups: list[Group], step: int | None):
        self.scorer, self.step = scorer, step
        self._prompts = {group.prompt.uid: group.prompt for group in groups}
        self._unscored: dict[SampleId, Row] = {}  # told of by `on_finished`
        self._pending: dict[SampleId, list[Future]] = {}  # workers' answers to these, by function
        self._rewards: dict[SampleId, list[Reward]] = {}  # of the others, by function
        self._new: list[Row] = []  # scored without failures, and not handed out yet
        self._calls: list[Span] = []  # of the functions, by the ranks' clock's monotonic

    def on_finished(self, row: Row) -> None:
        """To be called when a row has finished that is going to be trained on: the workers may
        begin with it."""
        self._unscored[row.id] = row
        workers = self.scorer.workers
        if workers is not None:
            (sample,) = self._samples([row])
            numbers = range(len(self.scorer.functions))
            self._pending[row.id] = [workers.submit(number, sample) for number in numbers]

    def take_scored(self) -> list[tuple[Row, np.ndarray]]:
        """Rows given to `on_finished` whose last score has come since the last call, with the
        scores, float64 [functions], NaN where a function does not apply. May be called by one rank
        alone, and at any time before `collect`.

        A row for which a function fails is never among them: `collect` decides what becomes of it.
        With workers this never waits. Without, it calls the functions here, once with all rows that
        have finished since the last call, however long that takes.
        """
        if self.scorer.workers is None:
            self._score_here()
        else:
            self._note_answers()
        rows, self._new = self._new, []
        return [(row, np.array(self._rewards[row.id], np.float64)) for row in rows]

    def collect(self, rows: list[Row]) -> np.ndarray:
        """Wait for the scores of rows, among them all that `on_finished` was called with: float64
        [rows, functions], NaN where a function does not apply. Called by all ranks together, once
        their rollouts are over.

        Raises InputError if failures are to end the run, and StopRequested, on all ranks, if one
        has been told to stop: pending scores are then abandoned.
        """
        scorer, rollouts_ended_s = self.scorer, self.scorer.ranks.clock.monotonic()
        for row in rows:
            if row.id not in self._rewards and row.id not in self._unscored:
                self.on_finished(row)
        # in the order of the batch, not of their ends
        self._unscored = {row.id: row for row in rows if row.id in self._unscored}
        if scorer.workers is None:
            self._score_here()
        else:
            self._wait_for_answers()
            self._note_answers()
            scorer.workers.end_batch()
        scorer.ranks.meet()  # before any exchange: a rank that was told to stop lacks some scores
        failed = [
            Failed(row, function, reward)
            for row in rows
            for function, reward in enumerate(self._rewards[row.id])
            if isinstance(reward, RewardFailure)
        ]
        self._report(failed, len(rows))
        scorer.count(
            failed,
            len(rows),
            sum(call.end_s - call.begin_s for call in self._calls),
            sum(max(min(c.end_s, rollouts_ended_s) - c.begin_s, 0.0) for c in self._calls),
        )
        on_error = scorer.config.reward_on_error
        rewards = [
            [on_error if isinstance(r, RewardFailure) else r for r in self._rewards[row.id]]
            for row in rows
        ]
        return np.array(rewards, np.float64).reshape(len(rows), len(scorer.functions))

    def _score_here(self) -> None:
        """Score what has finished in this process, all in one call per function."""
        rows, clock = list(self._unscored.values()), self.scorer.ranks.clock
        if not rows:
            return
        samples, begin_s = self._samples(rows), clock.monotonic()
        by_function = [score(function, samples) for function in self.scorer.functions.values()]
        self._calls.append(Span("reward", begin_s, clock.monotonic()))
        for row, *rewards in zip(rows, *by_function, strict=True):
            self._note(row, rewards)

    def _note_answers(self) -> None:
        """Take in the rows to which all answers are there."""
        for name, futures in list(self._pending.items()):
            if not all(f.done() and not f.cancelled() and not f.exception() for f in futures):
                continue
            answers = [future.result() for future in self._pending.pop(name)]
            self._calls += [Span("reward", a.ended_s - a.seconds, a.ended_s) for a in answers]
            self._note(self._unscored[name], [answer.reward for answer in answers])

    def _note(self, row: Row, rewards: list[Reward]) -> None:
        self._rewards[row.id] = rewards
        del self._unscored[row.id]
        if not any(isinstance(reward, RewardFailure) for reward in rewards):
            self._new.append(row)

    def _wait_for_answers(self) -> None:
        """Until all are there or the run is to stop. Raises the InputError of a worker that cannot
        be started."""
        pending = {future for futures in self._pending.values() for future in futures}
        while pending:
            done, pending = wait(pending, POLL_STOP_S, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if pending and self.scorer.ranks.is_told_to_stop():
                for future in pending:
                    future.cancel()
                return

    def _samples(self, rows: list[Row]) -> list[Sample]:
        ids = [row.tokens.tolist() for row in rows]
        texts = self.scorer.tokenizer.batch_decode(ids, skip_special_tokens=True)
        prompts = [self._prompts[row.id.uid] for row in rows]
        return [
            Sample(prompt.text, text, row_ids, prompt.columns)
            for prompt, text, row_ids in zip(prompts, texts, ids, strict=True)
        ]

    def _report(self, failed: list[Failed], num_rows: int) -> None:
        """Write failures to the file, and one warning for each kind of each function. Raises
        InputError if they end the run."""
        when = "evaluation" if self.step is None else f"step {self.step}"
        alike: dict[tuple[int, str], list[Failed]] = {}
        for each in failed:
            alike.setdefault((each.function, each.failure.kind), []).append(each)
        for (function, kind), group in alike.items():
            row, _, failure = group[0]
            line = (
                f"reward {list(self.scorer.functions)[function]}: {failure.message} "
                f"({kind}, {when}, prompt {row.id.uid}, sample {row.id.sample})"
            )
            if self.scorer.config.reward_on_error is None:
                # the user's own code: one line is not enough to find the mistake
                print(failure.trace, end="", file=sys.stderr)
                raise InputError(line)
            log(f"warning: {line}; {len(group)} of {num_rows} like it, see {ERRORS_FILE}")
        if failed:
            self._write(failed[:MAX_LOGGED])

    def _write(self, failed: list[Failed]) -> None:
        """Append to ERRORS_FILE."""
        lines = []
        samples = self._samples([row for row, _, _ in failed])
        for (row, function, failure), sample in zip(failed, samples, strict=True):
            line = {
                "step": self.step,
                "prompt_uid": row.id.uid,
                "sample": row.id.sample,
                "function": list(self.scorer.functions)[function],
                "kind": failure.kind,
                "message": failure.message,
                "prompt": str(sample.prompt)[-MAX_LOGGED_CHARACTERS:],
                "completion": sample.completion[-MAX_LOGGED_CHARACTERS:],
                "trace": failure.trace,
            }
            lines.append(json.dumps(line) + "\n")
        path = os.path.join(self.scorer.output_dir, ERRORS_FILE)
        try:
            os.makedirs(self.scorer.output_dir, exist_ok=True)
            # all ranks append to it, each with one write
            with open(path, "ab", buffering=0) as file:
                file.write("".join(lines).encode())
        except OSError as error:
            log(f"warning: {path}: {error}")
