"""Scoring of a rank's rows: in worker processes while others still decode, or in this process, when
it has nothing else to do or once all have finished.

A reward that fails is logged, counted, and replaced by `reward.reward_on_error`. If a function
fails for all responses of a step, on all ranks, the run ends, as there is nothing to train on.
"""

import atexit
import json
import os
import sys
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from bubblespec.config import RewardConfig
from bubblespec.dist.ranks import Ranks
from bubblespec.errors import InputError, log
from bubblespec.rewards.functions import (
    FAILURE_KINDS,
    RewardFailure,
    RewardFunction,
    Sample,
    score,
)
from bubblespec.rewards.workers import Answer, RewardWorkers
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
        # Over all ranks and the batches of a step: seconds inside the functions, seconds of these
        # before the end of the rollouts, rows, and failures by function and kind.
        self._totals = np.zeros(3 + len(functions) * len(FAILURE_KINDS))
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
        seconds, overlapped_s = self._totals[:2].tolist()
        by_kind = self._failures().sum(axis=0).astype(int).tolist()
        metrics = {"reward/errors": sum(by_kind), "reward/function_s": seconds}
        for kind, count in zip(FAILURE_KINDS, by_kind, strict=True):
            if count:
                metrics[f"reward/errors/{kind}"] = count
        if seconds:
            metrics["reward/overlapped_share"] = overlapped_s / seconds
        self._totals[:] = 0
        return metrics

    def count(self, failed: list[Failed], answers: list[Answer], num_rows: int, end_s: float):
        """Sum up what all ranks have counted; end_s: of this rank's rollouts. Raises InputError, on
        all ranks, if a function has failed for every row."""
        counts = np.zeros((len(self.functions), len(FAILURE_KINDS)))
        for _, function, failure in failed:
            counts[function, FAILURE_KINDS.index(failure.kind)] += 1
        seconds = sum(a.seconds for a in answers)
        overlapped_s = sum(max(min(a.ended_s, end_s) - a.ended_s + a.seconds, 0) for a in answers)
        local = np.append([seconds, overlapped_s, num_rows], counts)
        self._totals += self.ranks.gather(local).sum(axis=0)
        num_rows = int(self._totals[2])
        for number, path in enumerate(self.functions):
            if num_rows and self._failures()[number].sum() == num_rows:
                example = [f"; {f.failure.message}" for f in failed if f.function == number][:1]
                raise InputError(
                    f"reward {path}: failed for all {num_rows} responses of a step"
                    + "".join(example)
                )

    def _failures(self) -> np.ndarray:
        return self._totals[3:].reshape(len(self.functions), len(FAILURE_KINDS))

    def close(self) -> None:
        """End the workers. Without it they end with this process."""
        if self.workers is not None:
            atexit.unregister(self.workers.close)
            self.workers.close()


class Scoring:
    """The scores of one rollout's rows on one rank: row by row as they come (`take_scored`), and at
    the end those of all rows (`collect`), which are the same whatever was handed out before."""

    def __init__(self, scorer: Scorer, groups: list[Group], step: int | None):
        self.scorer, self.step = scorer, step
        self._prompts = {group.prompt.uid: group.prompt for group in groups}
        # rows without scores, with the workers' answers by function, if there are workers
        self._waiting: dict[SampleId, tuple[Row, list[Future]]] = {}
        self._answers: dict[SampleId, list[Answer]] = {}  # of the others, by function
        self._new: list[Row] = []  # scored without failures, and not handed out yet

    def on_finished(self, row: Row) -> None:
        """To be called when a row has finished that is going to be trained on: the workers may
        begin with it."""
        workers, futures = self.scorer.workers, []
        if workers is not None:
            (sample,) = self._samples([row])
            futures = [workers.submit(number, sample) for number in range(len(self._names))]
        self._waiting[row.id] = row, futures

    def take_scored(self) -> list[tuple[Row, np.ndarray]]:
        """Rows given to `on_finished` whose last score has come since the last call, with the
        scores, float64 [functions], NaN where a function does not apply. May be called by one rank
        alone, and at any time before `collect`.

        A row for which a function fails is never among them: `collect` decides what becomes of it.
        With workers this never waits. Without, it calls the functions here, once with all rows that
        have finished since the last call, however long that takes.
        """
        self._take_answers()
        rows, self._new = self._new, []
        return [(row, np.array(self._rewards(row), np.float64)) for row in rows]

    def collect(self, rows: list[Row]) -> np.ndarray:
        """Wait for the scores of rows, among them all that `on_finished` was called with: float64
        [rows, functions], NaN where a function does not apply. Called by all ranks together, once
        their rollouts are over.

        Raises InputError if failures are to end the run, and StopRequested, on all ranks, if one
        has been told to stop: pending scores are then abandoned.
        """
        scorer, rollouts_ended_s = self.scorer, self.scorer.ranks.clock.monotonic()
        for row in rows:
            if row.id not in self._answers and row.id not in self._waiting:
                self.on_finished(row)
        # in the order of the batch, not of their ends
        self._waiting = {row.id: self._waiting[row.id] for row in rows if row.id in self._waiting}
        if scorer.workers is not None:
            self._wait_for_answers()
        self._take_answers()
        if scorer.workers is not None:
            scorer.workers.end_batch()
        # Before any exchange: a rank that was told to stop lacks some scores.
        scorer.ranks.barrier_or_stop()
        failed = [
            Failed(row, function, reward)
            for row in rows
            for function, reward in enumerate(self._rewards(row))
            if isinstance(reward, RewardFailure)
        ]
        self._report(failed, len(rows))
        answers = [answer for row in rows for answer in self._answers[row.id]]
        scorer.count(failed, answers, len(rows), rollouts_ended_s)
        on_error = scorer.config.reward_on_error
        rewards = [
            [on_error if isinstance(r, RewardFailure) else r for r in self._rewards(row)]
            for row in rows
        ]
        return np.array(rewards, np.float64).reshape(len(rows), len(self._names))

    @property
    def _names(self) -> list[str]:
        """Paths of the functions."""
        return list(self.scorer.functions)

    def _rewards(self, row: Row) -> list:
        """By function."""
        return [answer.reward for answer in self._answers[row.id]]

    def _take_answers(self) -> None:
        """Note the rows to which all answers are there; without workers, score all that wait."""
        if self.scorer.workers is None:
            scored = self._score_here()
        else:
            scored = [
                (row, [future.result() for future in futures])
                for row, futures in self._waiting.values()
                if all(f.done() and not f.cancelled() and not f.exception() for f in futures)
            ]
        for row, answers in scored:
            self._answers[row.id] = answers
            del self._waiting[row.id]
            if not any(isinstance(answer.reward, RewardFailure) for answer in answers):
                self._new.append(row)

    def _score_here(self) -> list[tuple[Row, list[Answer]]]:
        """Score what has finished in this process, all in one call per function."""
        rows, clock = [row for row, _ in self._waiting.values()], self.scorer.ranks.clock
        if not rows:
            return []
        samples, by_function = self._samples(rows), []
        for function in self.scorer.functions.values():
            begin_s = clock.monotonic()
            rewards = score(function, samples)
            end_s = clock.monotonic()
            by_function.append([Answer(r, (end_s - begin_s) / len(rows), end_s) for r in rewards])
        return [(row, list(answers)) for row, *answers in zip(rows, *by_function, strict=True)]

    def _wait_for_answers(self) -> None:
        """Until all are there or the run is to stop. Raises the InputError of a worker that cannot
        be started."""
        pending = {future for _, futures in self._waiting.values() for future in futures}
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
        if not failed:
            return
        when = "evaluation" if self.step is None else f"step {self.step}"
        num_alike = Counter((function, failure.kind) for _, function, failure in failed)
        lines, samples = [], self._samples([row for row, _, _ in failed])
        for (row, function, failure), sample in zip(failed, samples, strict=True):
            uid, number = row.id.uid, row.id.sample
            name, count = self._names[function], num_alike.pop((function, failure.kind), 0)
            if count:  # the first of its kind
                where = f"({failure.kind}, {when}, prompt {uid}, sample {number})"
                warning = f"reward {name}: {failure.message} {where}"
                if self.scorer.config.reward_on_error is None:
                    # the user's own code: one line is not enough to find the mistake
                    print(failure.trace, end="", file=sys.stderr)
                    raise InputError(warning)
                log(f"warning: {warning}; {count} of {num_rows} like it, see {ERRORS_FILE}")
            line = {
                "step": self.step,
                "prompt_uid": uid,
                "sample": number,
                "function": name,
                **failure._asdict(),
                "prompt": str(sample.prompt)[-MAX_LOGGED_CHARACTERS:],
                "completion": sample.completion[-MAX_LOGGED_CHARACTERS:],
            }
            lines.append(json.dumps(line) + "\n")
        self._write("".join(lines[:MAX_LOGGED]))

    def _write(self, text: str) -> None:
        """Append to ERRORS_FILE."""
        path = os.path.join(self.scorer.output_dir, ERRORS_FILE)
        try:
            os.makedirs(self.scorer.output_dir, exist_ok=True)
            # all ranks append to it, each with one write
            with open(path, "ab", buffering=0) as file:
                file.write(text.encode())
        except OSError as error:
            log(f"warning: {path}: {error}")
