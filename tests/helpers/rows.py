"""Rows to generate, samples and records by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from bubblespec.data.schedule import PromptSet
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.records import RolloutRecord, Samples, StepRecord
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.plan import RolloutPlan
from bubblespec.rollout.table import RolloutProgress
from bubblespec.types import Group, Prompt, Row, StepBatch

# A tokenizer of letters: 0 is a, 1 is b.
LETTERS = SimpleNamespace(decode=lambda ids: "".join(chr(97 + i) for i in ids))


def numbered_prompts(count: int) -> PromptSet:
    """Prompts of one token, whose uids are numbers from 0."""
    return PromptSet([Prompt(i, f"prompt {i}", (i,), {}) for i in range(count)], 0)


def launch_of(groups: list[Group], num_generations: int) -> StepBatch:
    """A rollout of these groups that trains on all it generates."""
    return StepBatch(groups, len(groups), num_generations)


def make_rows(groups: list[Group], num_generations: int, max_new_tokens: int) -> list[Row]:
    """The rows of groups, those of a group adjacent."""
    launch = launch_of(groups, num_generations)
    return list(
        RolloutProgress(launch, np.zeros(len(launch.ids), np.int64), 0)
        .make_rows(max_new_tokens)
        .values()
    )


MOST_ROWS = 64  # of a rank


def loop_of(
    engine: Engine, ranks: Ranks, params: SamplingParams, rows: list[Row], **fields
) -> RolloutLoop:
    """A loop over rows of whatever groups, with none to choose from: all of them are trained on.
    Each rank may have others, as no rank asks how long they are."""
    owners = np.full(MOST_ROWS, -1)
    owners[: len(rows)] = ranks.rank
    table = RolloutProgress(launch_of([], 0), owners, ranks.rank)
    return loop_over(engine, ranks, params, numbered(rows), table, **fields)


def numbered(rows: list[Row]) -> dict[int, Row]:
    """Rows by the numbers that they get here."""
    for number, row in enumerate(rows):
        row.number = number
    return dict(enumerate(rows))


def loop_over(
    engine: Engine,
    ranks: Ranks,
    params: SamplingParams,
    rows: dict[int, Row],
    table: RolloutProgress,
    *,
    board=None,
    on_finished=None,
    **fields,
) -> RolloutLoop:
    """A loop over a table's rows. on_finished: begins to score one; fields: of the plan."""
    scoring = None if on_finished is None else SimpleNamespace(on_finished=on_finished)
    plan = RolloutPlan(table, rows, params, scoring=scoring, **fields)
    return RolloutLoop(engine, ranks, board, plan)


def record_of(samples: Samples, rewards: np.ndarray, **fields) -> StepRecord:
    """Of one rollout, all of it trained on, but for `fields`. rewards: [groups, generations]."""
    record = {"step": 0, "samples": samples, "generated": samples}
    record |= {"rewards": rewards, "all_rewards": rewards, "stages": [], "spans": [], "drafts": {}}
    record |= {"owners": np.zeros(len(samples), np.int64), "rollouts": [RolloutRecord()]}
    return StepRecord(**record | {"batch_sizes": [len(samples.groups)]} | fields)


def samples_of(groups: list[Group], tokens: list[np.ndarray], **fields) -> Samples:
    """Responses with these tokens, as many of each group. fields: where they are not 0."""
    unknown = [np.zeros(len(of_sample), np.float32) for of_sample in tokens]
    zeros = {"is_truncated": np.zeros(len(tokens), bool), "rewards": np.zeros((len(tokens), 1))}
    zeros |= {"logprob": unknown}
    return Samples(groups, len(tokens) // len(groups), tokens=tokens, **zeros | fields)


def with_observations(samples: Samples) -> Samples:
    """The same responses as episodes, five of six: an environment has given the beginning, the
    middle, the end, both ends, or all of them."""
    logprobs = [logprob.copy() for logprob in samples.logprob]
    for i, logprob in enumerate(logprobs):
        third = len(logprob) // 3
        middle, end = slice(third, 2 * third), slice(2 * third, None)
        spans = [[], [slice(third)], [middle], [end], [slice(third), end], [slice(None)]]
        for span in spans[i % 6]:
            logprob[span] = np.nan
    return replace(samples, logprob=logprobs)
