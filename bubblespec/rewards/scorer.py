"""Scoring of a rank's rows, and checks of reward functions before the first step.

Reward functions run in worker processes while other rows decode, or in this process when it is
idle or all rows have finished. A reward that fails is logged, counted, and replaced by
`reward.reward_on_error`. If a function fails for all responses of a step, on all ranks, the run
ends, as there is nothing to train on."""

import atexit
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from bubblespec.config import Config, RewardConfig
from bubblespec.data.schedule import PromptSet
from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import InputError, RewardsFailed, first_problem, log
from bubblespec.rewards.functions import (
    ARGUMENTS,
    MARK,
    Answer,
    InProcess,
    OwnPool,
    RewardFailure,
    RewardFunction,
    RewardWorkers,
    Sample,
    check_arguments,
    named_of_trl,
    sees_groups,
    takes_environments,
)
from bubblespec.types import Prompt, Row, SampleId, StepBatch

Rewards = dict[str, RewardFunction | OwnPool]  # by path
POLL_STOP_S = 0.2  # how often a waiting rank checks whether the run is to stop


class RewardManager:
    """The reward functions of a run, called in workers or here (`reward.num_workers`).

    Evaluations have functions of their own besides; see `eval.functions`."""

    def __init__(
        self,
        config: RewardConfig,
        functions: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks,
        has_environment: bool = False,
        eval_functions: Rewards | None = None,
    ):
        """has_environment: episodes have rewards of their own, which come after the functions'."""
        self.config, self.paths, self.tokenizer = config, list(functions), tokenizer
        self.ranks, self.has_environment = ranks, has_environment
        functions = functions | (eval_functions or {})
        self.all_paths = list(functions)
        self.are_of_groups = [sees_groups(function) for function in functions.values()]
        self.takes_environments = any(map(takes_environments, functions.values()))
        # Sums over all ranks and batches of a step: seconds inside the functions, the part of these
        # before the end of the rollouts, rows, and failures by function.
        self._totals = np.zeros(3 + len(self.names_of(None)))
        self.progress = (0, 0)
        """The run's progress, which samples hold; see `Sample`."""
        self.logged: dict[SampleId, dict] = {}
        """Columns that functions have logged, of all ranks' samples, until they are taken."""
        self._metrics: dict[str, list[float]] = {}
        self._has_logs = any(set(named_of_trl(f)) - {"trainer_state"} for f in functions.values())
        self.own_pools = [f for f in functions.values() if isinstance(f, OwnPool)]
        called = {path: f for path, f in functions.items() if not isinstance(f, OwnPool)}
        self.pool: RewardWorkers | InProcess
        if config.num_workers and called:
            self.pool = RewardWorkers(list(called), config.num_workers, config.timeout_s)
        else:
            self.pool = InProcess(called.values(), ranks.clock)
        submit = {path: partial(self.pool.submit, n) for n, path in enumerate(called)}
        submit |= {path: f.submit for path, f in functions.items() if isinstance(f, OwnPool)}
        self.submit: dict[str, Callable[[list[Sample]], Future]] = submit
        """Queues a call of each function, by its path; returns the future of its answers."""
        atexit.register(self.pool.close)

    def begin(self, launch: StepBatch, step: int | None = None) -> "RolloutRewards":
        """step: None in an evaluation."""
        return RolloutRewards(self, launch, step)

    @property
    def names(self) -> list[str]:
        return self.paths + ["environment"] * self.has_environment

    def names_of(self, step: int | None) -> list[str]:
        """Return the names of the scores of a step's samples, or of an evaluation's (None)."""
        return self.names + (self.all_paths[len(self.paths) :] if step is None else [])

    def sees_groups(self, step: int | None) -> bool:
        """Whether a rank must have whole groups. step: see `names_of`."""
        return any(self.are_of_groups[: None if step is None else len(self.paths)])

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of all ranks since the last call, once per step."""
        seconds, overlapped_s, _, *failures = self._totals.tolist()
        metrics = {"reward/errors": int(sum(failures)), "reward/function_s": seconds}
        if seconds:
            metrics["reward/overlapped_share"] = overlapped_s / seconds
        metrics |= {f"logged/{k}": float(np.mean(v)) for k, v in self._metrics.items()}
        self._totals[:] = 0
        self._metrics.clear()
        return metrics

    def take_logged(self) -> dict[SampleId, dict]:
        logged, self.logged = self.logged, {}
        return logged

    def gather_logs(self, rows: list[Row], answers: list[list[Answer]]) -> None:
        """Take what the functions have logged by TRL's `log_extra` and `log_metric`, on all ranks.

        answers: [rows][functions]."""
        if not self._has_logs:
            return
        pairs = zip(rows, answers, strict=True)
        own = [(row.id, dict(a.columns), a.metrics) for row, found in pairs for a in found]
        for text in self.ranks.gather_text(json.dumps(own)):
            for name, columns, metrics in json.loads(text):
                self.logged.setdefault(SampleId(*name), {}).update(columns)
                for metric, value in metrics:
                    self._metrics.setdefault(metric, []).append(value)

    def count(self, answers: list[list[Answer]], end_s: float) -> list[str]:
        """Sum up the answers of all ranks, [rows][functions]; return failed eval.functions.

        end_s: of this rank's rollouts. Raises RewardsFailed, on all ranks, if a reward has
        failed."""
        local = np.zeros_like(self._totals)
        local[2] = len(answers)
        examples = [""] * (len(local) - 3)
        for row_answers in answers:
            for number, answer in enumerate(row_answers):
                begin_s = answer.ended_s - answer.seconds
                local[0] += answer.seconds
                local[1] += max(min(answer.ended_s, end_s) - begin_s, 0)
                if isinstance(answer.reward, RewardFailure):
                    local[3 + number] += 1
                    examples[number] = f"; {answer.reward.message}"
        self._totals += self.ranks.all_gather(local).sum(axis=0)
        num_rows = int(self._totals[2])
        names, broken = self.names_of(None), list[str]()
        for path, num_failed, example in zip(names, self._totals[3:], examples, strict=True):
            if not num_rows or num_failed < num_rows:
                continue
            if path in self.names:
                raise RewardsFailed(
                    f"reward {path}: failed for all {num_rows} responses of a step{example}"
                )
            broken.append(path)
            if self.ranks.is_main:
                problem = f"{path} failed for all {num_rows} held-out responses"
                log(f"warning: eval.functions: {problem}; its metric is left out")
        return broken

    def close(self) -> None:
        """End the workers. Without it they end with this process."""
        atexit.unregister(self.pool.close)
        self.pool.close()


class RolloutRewards:
    """The scores of one rollout's rows on one rank.

    `take_scored` hands them out row by row as they come. `collect` returns those of all rows at the
    end, the same whatever was handed out before."""

    def __init__(self, scorer: RewardManager, launch: StepBatch, step: int | None):
        self.scorer, self.step, self._num_generations = scorer, step, launch.num_generations
        self._names = scorer.names_of(step)
        self._prompts = {group.prompt.prompt_id: group.prompt for group in launch.groups}
        # Of each finished row: the call of each score, by its name, and the row's index in it.
        # A function that sees groups is called once all rows of a group have finished.
        self._calls: dict[SampleId, dict[str, tuple[Future, int]]] = {}
        self._finished: dict[tuple, dict[SampleId, Sample]] = {}  # by group
        self._new: list[Row] = []  # finished rows whose last score has not come yet
        self.outcomes: dict[Row, Future] = {}
        """`Outcome` of each finished row's episode, where rows are episodes."""
        self._ending: list[Row] = []  # finished rows whose outcome has not come yet

    def on_finished(self, row: Row) -> None:
        """Begin to score a finished row that is trained on, and its group if it is complete."""
        self._new.append(row)
        self._calls[row.id] = {}
        self._ending.append(row)
        self._take_outcomes()

    def _take_outcomes(self) -> None:
        """Begin to score the rows whose outcomes have come, and those without any."""
        waiting, self._ending = self._ending, []
        for row in waiting:
            outcome = self.outcomes.get(row)
            if outcome is None:
                self._begin(row, row.tokens, {})
            elif outcome.done():
                begin = int(np.isnan(row.logprob).argmin())  # what was added to the prompt
                packed = outcome.result().environment
                self._begin(row, row.tokens[begin:], {"environment": packed} if packed else {})
                if self.scorer.has_environment:
                    self._calls[row.id]["environment"] = (_answered(outcome), 0)
            else:
                self._ending.append(row)

    def _begin(self, row: Row, tokens: np.ndarray, environment: dict) -> None:
        ids, prompt = tokens.tolist(), self._prompts[row.id.prompt_id]
        (text,) = self.scorer.tokenizer.batch_decode([ids], skip_special_tokens=True)
        more = {"progress": self.scorer.progress, **environment}
        sample = Sample(prompt.text, text, ids, prompt.columns, **more)
        group = self._finished.setdefault(row.id[:2], {})
        group[row.id] = sample
        for path, is_of_group in zip(self.scorer.all_paths, self.scorer.are_of_groups, strict=True):
            if path not in self._names:
                continue
            if not is_of_group:
                self._submit(path, {row.id: sample})
            elif len(group) == self._num_generations:
                self._submit(path, {name: group[name] for name in sorted(group)})

    def _submit(self, path: str, samples: dict[SampleId, Sample]) -> None:
        future = self.scorer.submit[path](list(samples.values()))
        for number, name in enumerate(samples):
            self._calls[name][path] = (future, number)

    def take_scored(self) -> list[tuple[Row, np.ndarray]]:
        """Return finished rows whose last score has come since the last call, with their scores.

        Scores are float64 [functions], NaN where a function does not apply. One rank alone may call
        this, at any time before `collect`, which decides about rows for which a function fails.
        With workers this never waits; without, it calls the functions here, however long that
        takes, once for all rows that have finished since the last call."""
        self._take_outcomes()
        self.scorer.ranks.call_until_stop(self.scorer.pool.run)
        waiting, self._new, taken = self._new, [], []
        for row in waiting:
            calls = self._calls[row.id]
            is_complete = len(calls) == len(self._names)
            if not is_complete or not all(future.done() for future, _ in calls.values()):
                self._new.append(row)
            elif not any(future.exception() for future, _ in calls.values()):
                rewards = [answer.reward for answer in self._answers(row)]
                if not any(isinstance(reward, RewardFailure) for reward in rewards):
                    taken.append((row, np.array(rewards, np.float64)))
        return taken

    def collect(self, rows: list[Row]) -> np.ndarray:
        """Wait for the scores of rows, which include all that `on_finished` was called with.

        Returns float64 [rows, functions], NaN where a function does not apply. All ranks call this
        together, once their rollouts are over. Raises, on all ranks, RewardsFailed if failures end
        the run, and StopRequested after a stop request; pending scores are then abandoned."""
        scorer, rollouts_ended_s = self.scorer, self.scorer.ranks.clock.monotonic()
        for row in rows:
            if row.id not in self._calls:
                self.on_finished(row)
        self._wait({self.outcomes[row] for row in self._ending})
        self._take_outcomes()
        for pool in scorer.own_pools:  # workers go on meanwhile
            pool.finish(scorer.ranks)
        scorer.ranks.call_until_stop(scorer.pool.run)
        self._wait({future for row in rows for future, _ in self._calls[row.id].values()})
        # Before any exchange: a rank that stops lacks some scores.
        scorer.ranks.barrier_or_stop()
        for name, group in self._finished.items():
            if scorer.sees_groups(self.step) and len(group) != self._num_generations:
                raise ValueError(f"{len(group)} of {self._num_generations} samples of group {name}")
        answers = [self._answers(row) for row in rows]
        self._report(rows, answers)
        broken = scorer.count(answers, rollouts_ended_s)
        scorer.gather_logs(rows, answers)
        on_error = scorer.config.reward_on_error
        rewards = [
            [on_error if isinstance(a.reward, RewardFailure) else a.reward for a in row_answers]
            for row_answers in answers
        ]
        scores = np.array(rewards, np.float64).reshape(len(rows), len(self._names))
        scores[:, [name in broken for name in self._names]] = np.nan
        return scores

    def _answers(self, row: Row) -> list[Answer]:
        calls = [self._calls[row.id][name] for name in self._names]
        return [future.result()[index] for future, index in calls]

    def _wait(self, pending: set[Future]) -> None:
        """Wait for all or a stop request. Raises InputError if a worker cannot be started."""
        while pending:
            done, pending = wait(pending, POLL_STOP_S, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if pending and self.scorer.ranks.is_told_to_stop():
                for future in pending:
                    future.cancel()
                return

    def _report(self, rows: list[Row], answers: list[list[Answer]]) -> None:
        """Warn of the first failure of each kind and function.

        Raises RewardsFailed, on all ranks, if failures end the run."""
        failed = [
            (row, path, answer.reward)
            for row, row_answers in zip(rows, answers, strict=True)
            for path, answer in zip(self._names, row_answers, strict=True)
            if isinstance(answer.reward, RewardFailure)
        ]
        when = "evaluation" if self.step is None else f"step {self.step + 1}"
        num_alike, problem = Counter((path, failure.kind) for _, path, failure in failed), None
        for row, path, failure in failed:
            count = num_alike.pop((path, failure.kind), None)
            if count is None:
                continue
            where = f"({failure.kind}, {when}, prompt {row.id.prompt_id}, sample {row.id.sample})"
            warning = f"reward {path}: {failure.message} {where}"
            if self.scorer.config.reward_on_error is None:
                # the user's own code: one line is not enough to find the mistake
                print(failure.trace, end="", file=sys.stderr)
                problem = warning
                break
            log(f"warning: {warning}; {count} of {len(rows)} such failures")
        if self.scorer.config.reward_on_error is None:
            problem = first_problem(problem, self.scorer.ranks.gather_text)
            if problem is not None:
                raise RewardsFailed(problem)


def _answered(outcome: Future) -> Future:
    reward, _, problem = outcome.result()
    future: Future[list[Answer]] = Future()
    value = reward if problem is None else RewardFailure("environment", problem)
    future.set_result([Answer(value, 0.0, 0.0)])
    return future


RESPONSE = "0"  # harmless as an answer, a text and a program
MAX_CHECKED = 1000  # rows: parsing the references of all may take minutes


def check_columns(names: Collection[str], renamed: Collection[str], source: str) -> None:
    """Raise InputError for a column named as a reward's argument. renamed: by the configuration."""
    for name in ARGUMENTS:
        if name in names and name not in renamed:
            raise InputError(
                f"data.columns: the column '{name}' of {source} is named like an argument of "
                f"reward functions; rename it, as in data.columns={{my_{name}: {name}}}"
            )


def check_references(functions: Rewards, prompts: list[Prompt], source: str) -> None:
    """Warn of rows of `source` that no function can score; raise InputError if all of them."""
    checks = [
        getattr(function, "can_score", lambda columns: True) for function in functions.values()
    ]
    prompts = prompts[:MAX_CHECKED]
    without = [p for p in prompts if not any(can_score(p.columns) for can_score in checks)]
    if not functions or not without:
        return
    row = f"{str(without[0].text)!r:.100}, answer {without[0].columns.get('answer')!r:.50}"
    if "tests" in without[0].columns:
        row += f", tests {without[0].columns['tests']!r:.100} (an empty program must not pass them)"
    line = f"no reward function can score {len(without)} of {len(prompts)} rows of {source}"
    if len(without) == len(prompts):
        raise InputError(f"reward.functions: {line}; the first is {row}")
    log(f"warning: {line}; these rows are left out of updates; the first is {row}")


def check_weights(config: Config, has_environment: bool) -> list[float]:
    count, weights = len(config.reward.functions) + has_environment, config.reward.weights
    if not count and config.loss.loss_type != "distillation":
        problem = "is empty, and environment.factory has no get_reward"
        raise InputError(f"reward.functions: {problem}; one of the two must score responses")
    if weights is not None and len(weights) != count:
        needed = f"{count} are needed, the environment's last" if has_environment else f"{count}"
        raise InputError(f"reward.weights: {len(weights)} weights, but {needed}")
    return weights or [1.0] * count


def check_prompts(
    config: Config,
    functions: Rewards,
    sources: dict[str, list[Prompt]],
    ranks: Ranks,
    eval_functions: Rewards,
    *,
    answers_turns: bool,
    has_reward: bool,
) -> None:
    """Raise InputError where functions lack columns. sources: prompts, the held-out ones last."""
    held_out = list(sources)[-1]
    for source, prompts in sources.items():
        if not prompts:
            continue
        columns = prompts[0].columns
        check_columns(columns, config.data.columns.values(), source)
        for path, function in functions.items():
            check_arguments(path, function, columns, source, answers_turns)
        if source == held_out:
            given = columns, source, answers_turns, "eval.functions"
            for path, function in eval_functions.items():
                check_arguments(path, function, *given)
        if not has_reward:  # of environments, which may score any row
            ranks.run_on_rank0(partial(check_references, functions, prompts, source))


def check_count(config: Config, train_prompts: PromptSet, ranks: Ranks) -> None:
    """Raise InputError where there are too few prompts for a step, or for its ranks."""
    num_prompts = config.rollout.num_prompts_per_step
    train_prompts.batch(config.run.seed, 0, num_prompts)  # raises where there are too few
    if num_prompts < ranks.world_size:
        shortage = f"{num_prompts} prompts for {ranks.world_size} ranks"
        raise InputError(f"rollout.num_prompts_per_step: {shortage}; each rank needs at least one")


def begin_trial(
    scorer: RewardManager,
    functions: Rewards,
    prompt: Prompt,
    num_generations: int,
) -> dict[str, Future]:
    """Submit a call of each function on responses to a prompt, but for those of environments."""
    ids = scorer.tokenizer(RESPONSE, add_special_tokens=False)["input_ids"]
    more = {"progress": scorer.progress, "is_trial": True}
    sample, trial = Sample(prompt.text, RESPONSE, ids, prompt.columns, **more), {}
    tried = {path: of for path, of in functions.items() if not takes_environments(of)}
    if tried:
        what = f"reward functions on the response {RESPONSE!r} to the first prompt"
        log(f"trying {what}; what they print begins with {MARK!r} ...")
    for path, function in tried.items():
        size = num_generations if sees_groups(function) else 2  # to see that each has its value
        trial[path] = scorer.submit[path]([sample] * size)
    return trial


def end_trial(scorer: RewardManager, trial: dict[str, Future]) -> None:
    """Wait for the calls.

    Raises InputError for a function that does not return one value per sample. Other failures are
    warnings, as real responses may have none."""
    for pool in (scorer.pool, *scorer.own_pools):
        pool.run()
    wait(trial.values(), return_when=FIRST_EXCEPTION)
    for path, future in trial.items():
        if future.cancel() or not future.done():
            continue
        reward = future.result()[0].reward  # raises where no worker can be started
        if not isinstance(reward, RewardFailure):
            continue
        problem = f"{path}: {reward.message}"
        if reward.kind == "result":
            key = "reward" if path in scorer.paths else "eval"
            raise InputError(f"{key}.functions: {problem}")
        log(f"warning: reward {problem} ({reward.kind}, in a trial on the response {RESPONSE!r})")
