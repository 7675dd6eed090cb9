"""A reward that differs between responses, whatever the policy."""


def remainder(completion_ids, **columns) -> list[float]:
    """Of the sum of the tokens by 7."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def nothing(completion_ids, **columns) -> list[None]:
    """A function that applies to no sample."""
    return [None] * len(completion_ids)


def constant(completion_ids, **columns) -> list[float]:
    """The same for all, so that nothing can be learned."""
    return [0.5] * len(completion_ids)
