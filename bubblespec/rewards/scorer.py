"""Scoring of a rank's rows: in worker processes while others still decode, or in this process, when
it has nothing else to do or once all have finished.

A reward that fails is logged, counted, and replaced by `reward.reward_on_error`. If a function
fails for all responses of a step, on all ranks, the run ends, as there is nothing to train on.
"""

import atexit
import json
import os
import sys
import time

import numpy as np
from transformers import PreTrainedTokenizerBase

from bubblespec.config import RewardConfig
from bubblespec.dist.ranks import Ranks
from bubblespec.errors import InputError
from bubblespec.records import Span
from bubblespec.rewards.functions import FAILURE_KINDS, RewardFailure, RewardFunction, Sample, score
from bubblespec.rewards.workers import Answer, RewardWorkers
from bubblespec.types import Group, Row, SampleId

ERRORS_FILE = "reward_errors.jsonl"
MOST_LOGGED = 20  # failures of a batch that a rank writes to ERRORS_FILE
LONGEST_LOGGED = 2000  # characters of a prompt or completion in it

Failed = tuple[int, int, RewardFailure]  # row, function, why


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
        # Over all ranks and the batches of a step.
        self._counts, self._num_rows = np.zeros((len(functions), len(FAILURE_KINDS)), np.int64), 0
        self._function_s = self._overlapped_s = 0.0
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
        rollouts (left out where there were none), over all ranks since the last call: to be called
        once a step."""
        by_kind = self._counts.sum(axis=0).tolist()
        metrics = {"reward/errors": sum(by_kind), "reward/function_s": self._function_s}
        metrics |= {
            f"reward/errors/{kind}": count
            for kind, count in zip(FAILURE_KINDS, by_kind, strict=True)
            if count
        }
        if self._function_s:
            metrics["reward/overlapped_share"] = self._overlapped_s / self._function_s
        self._counts[:], self._num_rows, self._function_s, self._overlapped_s = 0, 0, 0.0, 0.0
        return metrics

    def count(
        self, failures: list[Failed], num_rows: int, seconds: float, overlapped_s: float
    ) -> None:
        """Sum up what all ranks have counted. Raises InputError, on all of them, if a function has
        failed for every row.

        seconds: inside the functions; overlapped_s: those of them before the end of the rollouts.
        """
        local = np.zeros(self._counts.shape)
        for _, number, failure in failures:
            local[number, FAILURE_KINDS.index(failure.kind)] += 1
        total = self.ranks.gather(np.array([*local.ravel(), seconds, overlapped_s, num_rows])).sum(
            axis=0
        )
        self._counts += total[:-3].reshape(local.shape).astype(np.int64)
        self._function_s += float(total[-3])
        self._overlapped_s += float(total[-2])
        self._num_rows += int(total[-1])
        for number, path in enumerate(self.functions):
            if self._num_rows and self._counts[number].sum() == self._num_rows:
                example = next((f"; {failure}" for _, of, failure in failures if of == number), "")
                raise InputError(
                    f"reward {path}: failed for all {self._num_rows} responses of a step{example}"
                )

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
        self._told: dict[SampleId, Row] = {}  # what `on_finished` was called with
        self._rewards: dict[
            SampleId, np.ndarray
        ] = {}  # float64 [functions], by row; with workers, as far as they have come
        self._num_missing: dict[SampleId, int] = {}  # answers of workers, by row
        self._failures: dict[
            SampleId, list[tuple[int, RewardFailure]]
        ] = {}  # functions and why, by row
        self._scored: list[SampleId] = []  # complete, without failures, and not handed out yet
        self._calls: list[Span] = []  # of the functions, by time.monotonic

    def on_finished(self, row: Row) -> None:
        """To be called when a row has finished that is going to be trained on: the workers may
        begin with it."""
        self._told[row.id] = row
        if self.scorer.workers is None:
            return
        num_functions = len(self.scorer.functions)
        self._rewards[row.id], self._num_missing[row.id] = (
            np.full(num_functions, np.nan),
            num_functions,
        )
        sample = self._samples([row])[0]
        for number in range(num_functions):
            self.scorer.workers.submit((row.id, number), number, sample)

    def take_scored(self) -> list[tuple[Row, np.ndarray]]:
        """Rows given to `on_finished` of which the last score has come since the last call, with
        the scores, float64 [functions], NaN where a function does not apply. May be called by one
        rank alone, and at any time before `collect`.

        A row for which a function fails is never among them: `collect` decides what becomes of it.
        With workers this never waits. Without, it calls the functions here, once with all rows that
        have finished since the last call, however long that takes.
        """
        if self.scorer.workers is None:
            self._score_here([row for row in self._told.values() if row.id not in self._rewards])
        else:
            for (name, number), answer in self.scorer.workers.take():
                self._note(name, number, answer)
        names, self._scored = self._scored, []
        return [(self._told[name], self._rewards[name].copy()) for name in names]

    def collect(self, rows: list[Row]) -> np.ndarray:
        """Wait for the scores of rows, among them all that `on_finished` was called with: float64
        [rows, functions], NaN where a function does not apply. Called by all ranks together, once
        their rollouts are over.

        Raises InputError if failures are to end the run, and StopRequested, on all ranks, if one
        has been told to stop: pending scores are then abandoned.
        """
        self.rows, rollouts_ended_s = rows, time.monotonic()
        for row in rows:
            if row.id not in self._told:
                self.on_finished(row)
        if self.scorer.workers is None:
            is_strict = self.scorer.config.reward_on_error is None
            # A failure that ends the run ends it with the message of the one call for all rows that
            # there is without take_scored.
            again = is_strict and bool(self._failures)
            self._score_here(
                [row for row in rows if again or row.id not in self._rewards], is_strict
            )
        else:
            for (name, number), answer in self.scorer.workers.collect(
                self.scorer.ranks.is_told_to_stop
            ):
                self._note(name, number, answer)
        # before any exchange: a rank that was told to stop lacks some scores
        self.scorer.ranks.meet()
        failures = [
            (i, *failed) for i, row in enumerate(rows) for failed in self._failures.get(row.id, ())
        ]
        failures.sort(key=lambda failed: failed[:2])
        self._report(failures)
        overlapped_s = sum(
            max(min(call.end_s, rollouts_ended_s) - call.begin_s, 0.0) for call in self._calls
        )
        self.scorer.count(
            failures,
            len(rows),
            sum(call.end_s - call.begin_s for call in self._calls),
            overlapped_s,
        )
        rewards = np.array([self._rewards[row.id] for row in rows], np.float64).reshape(
            len(rows), len(self.scorer.functions)
        )
        for i, number, _ in failures:
            rewards[i, number] = self.scorer.config.reward_on_error
        return rewards

    def _score_here(self, rows: list[Row], is_strict: bool = False) -> None:
        """Score rows in this process, all in one call. Strict: raises InputError at the first
        failure instead of noting it."""
        if not rows:
            return
        begin_s, failures = time.monotonic(), []
        rewards = score(self.scorer.functions, self._samples(rows), None if is_strict else failures)
        self._calls.append(Span("reward", begin_s, time.monotonic()))
        self._rewards |= {row.id: values for row, values in zip(rows, rewards, strict=True)}
        for i, number, failure in failures:
            self._failures.setdefault(rows[i].id, []).append((number, failure))
        self._scored += [row.id for row in rows if row.id not in self._failures]

    def _note(self, name: SampleId, number: int, answer: Answer) -> None:
        """Take in a worker's answer: of function `number`, to the row of this name."""
        self._calls.append(Span("reward", answer.ended_s - answer.seconds, answer.ended_s))
        if answer.failure is not None:
            self._failures.setdefault(name, []).append((number, answer.failure))
        elif answer.value is not None:
            self._rewards[name][number] = answer.value
        self._num_missing[name] -= 1
        if not self._num_missing[name] and name not in self._failures:
            self._scored.append(name)

    def _samples(self, rows: list[Row]) -> list[Sample]:
        ids = [row.tokens.tolist() for row in rows]
        texts = self.scorer.tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []
        prompts = [self._prompts[row.id.uid] for row in rows]
        return [
            Sample(p.text, text, row_ids, p.columns)
            for p, text, row_ids in zip(prompts, texts, ids, strict=True)
        ]

    def _report(self, failures: list[Failed]) -> None:
        """Write failures to the file, and one warning for each kind of each function. Raises
        InputError if they end the run."""
        paths = list(self.scorer.functions)
        examples: dict[tuple[int, str], list[Failed]] = {}
        for failed in failures:
            examples.setdefault((failed[1], failed[2].kind), []).append(failed)
        for (number, kind), alike in examples.items():
            i, _, failure = alike[0]
            row = self.rows[i]
            when = "evaluation" if self.step is None else f"step {self.step}"
            line = f"reward {paths[number]}: {failure} ({kind}, {when}, prompt {row.id.uid}, sample {row.id.sample})"
            if self.scorer.config.reward_on_error is None:
                print(failure.trace, end="", file=sys.stderr)
                raise InputError(line)
            print(
                f"warning: {line}; {len(alike)} of {len(self.rows)} like it, see {ERRORS_FILE}",
                file=sys.stderr,
            )
        if failures:
            self._log(failures[:MOST_LOGGED])

    def _log(self, failures: list[Failed]) -> None:
        lines = []
        for (i, number, failure), sample in zip(
            failures, self._samples([self.rows[i] for i, _, _ in failures]), strict=True
        ):
            row = self.rows[i]
            line = {"step": self.step, "prompt_uid": row.id.uid, "sample": row.id.sample}
            line |= {
                "function": list(self.scorer.functions)[number],
                "kind": failure.kind,
                "message": failure.message,
            }
            line |= {
                "prompt": str(sample.prompt)[-LONGEST_LOGGED:],
                "completion": sample.completion[-LONGEST_LOGGED:],
            }
            lines.append(json.dumps(line | {"trace": failure.trace}) + "\n")
        path = os.path.join(self.scorer.output_dir, ERRORS_FILE)
        try:
            os.makedirs(self.scorer.output_dir, exist_ok=True)
            with open(
                path, "ab", buffering=0
            ) as file:  # all ranks append to it, each with one write
                file.write("".join(lines).encode())
        except OSError as error:
            print(f"warning: {path}: {error}", file=sys.stderr)
