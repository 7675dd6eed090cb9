"""Rewards that differ between responses, whatever the policy, and some that never do."""

from bubblespec.rewards import per_sample


@per_sample
def remainder(completion_ids, **columns) -> list[float]:
    """Of the sum of the tokens by 7."""
    return [float(sum(ids) % 7) for ids in completion_ids]


@per_sample
def nothing(completion_ids, **columns) -> list[None]:
    """A function that applies to no sample."""
    return [None] * len(completion_ids)


@per_sample
def constant(completion_ids, **columns) -> list[float]:
    """The same for all, so that nothing can be learned."""
    return [0.5] * len(completion_ids)


def better_than(prompts, completion_ids, **columns) -> list[float]:
    """How many others of its group a response leaves behind by `remainder`. Fails unless the call
    has a whole group: one prompt, at least two responses."""
    if len(set(map(str, prompts))) > 1 or len(prompts) < 2:
        raise ValueError(f"not one group: {prompts}")
    values = remainder(completion_ids)
    return [float(sum(value > other for other in values)) for value in values]
