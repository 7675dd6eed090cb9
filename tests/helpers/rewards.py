"""Rewards that differ between responses, whatever the policy, and some that never do."""

import asyncio
import os
import signal
import sys
import time

import numpy as np

from bubblespec.rewards import per_sample


@per_sample
def remainder(completion_ids, **columns) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


@per_sample
def nothing(completion_ids, **columns) -> list[None]:
    """A function that applies to no sample."""
    return [None] * len(completion_ids)


@per_sample
def changes_settings(completion_ids, **columns) -> list[float]:
    """`remainder`, after changes of what an update depends on."""
    import torch

    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float16)
    os.chdir("/")
    return remainder(completion_ids)


def fails(completions, **columns) -> list[float]:
    raise ValueError("x" * 1_000_000)


@per_sample
def constant(completion_ids, **columns) -> list[float]:
    """The same reward for all, so that nothing can be learned."""
    return [0.5] * len(completion_ids)


def better_than(prompts, completion_ids, **columns) -> list[float]:
    """The rank of a response in its group by `remainder`. Fails unless the call has a whole group:
    one prompt, at least two responses."""
    if len(set(map(str, prompts))) > 1 or len(prompts) < 2:
        raise ValueError(f"not one group: {prompts}")
    values = remainder(completion_ids)
    return [float(sum(value > other for other in values)) for value in values]


@per_sample
def with_gaps(completion_ids, **columns) -> list[float | None]:
    """`remainder`, but None for a fifth of the responses."""
    values = zip(completion_ids, remainder(completion_ids), strict=True)
    return [None if sum(ids) % 5 == 0 else value for ids, value in values]


@per_sample
def with_few_gaps(completion_ids, **columns) -> list[float | None]:
    """`remainder`, but None for a thirteenth of the responses."""
    values = zip(completion_ids, remainder(completion_ids), strict=True)
    return [None if sum(ids) % 13 == 0 else value for ids, value in values]


async def judge(prompts, completions, **columns) -> list[float]:
    await asyncio.sleep(0.001)
    return [float(len(text) % 3) for text in completions]


def logs(completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    log_extra("size", np.array([len(ids) for ids in completion_ids]))
    log_extra("kind", [completion_ids for _ in completions])
    log_metric("mean_size", np.mean([len(ids) for ids in completion_ids]))
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


def talks(completions, **columns) -> list[float]:
    print("scoring", len(completions), end=" ")
    print("responses\n\nat once", file=sys.stdout)
    print("to the other file", file=sys.stderr)
    return [1.0] * len(completions)


def too_few(completions, **columns) -> list[float]:
    return [1.0]


def by_name(completions, **columns) -> dict[str, float]:
    """Values, but no list of them."""
    return dict.fromkeys(completions, 1.0)


def picky(completions, **columns) -> list[float]:
    """Fail for a response that no model of the tests makes."""
    if "0" in completions:
        raise ZeroDivisionError("not that one")
    return [1.0] * len(completions)


def slow_at_first(completions, **columns) -> list[float]:
    """Hangs in the first call of all, which makes the folder FIRST_CALL."""
    try:
        os.mkdir(os.environ["FIRST_CALL"])
    except FileExistsError:
        return [float(len(text)) for text in completions]
    time.sleep(600)


def ends_its_rank(completions, **columns) -> list[float]:
    """Sends this process SIGTERM, and never returns."""
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        signal.pause()
