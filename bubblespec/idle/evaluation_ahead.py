"""Which responses of a coming evaluation to draft ahead: those that have no draft, or one that has
grown old.

In the last rollouts before an evaluation, ranks that wait and have nothing left to draft of coming
steps verify the last evaluation's responses under the weights of now, and generate them anew from
their first difference on. So the drafts are one or two updates old when the evaluation comes, and
hold for longer. What one of these rollouts has finished is not made again.
"""

import numpy as np

from bubblespec.config import Config
from bubblespec.draft.evaluation import EvaluationDrafts
from bubblespec.draft.store import DraftStore
from bubblespec.idle.draft_planning import Item, Outlook

HORIZON = 2  # rollouts before an evaluation in which it is drafted


def next_evaluation(config: Config, step: int) -> int | None:
    """The updates that the first evaluation after a rollout of `step` comes after; None where there
    is none."""
    every, last = config.run.eval_steps, config.run.max_steps
    return min((step // every + 1) * every, last) if every and step < last else None


def plan_evaluation(
    config: Config,
    step: int,
    evaluation: EvaluationDrafts,
    store: DraftStore,
    outlook: Outlook,
    cost: np.ndarray,
    *,
    num_ranks: int,
    num_slots: int,
) -> list[Item]:
    """What to draft of the coming evaluation during a rollout of `step`: the longest first, the
    samples of a prompt together.

    store: has what was drafted for it in the rollout before; cost: coefficients of a `CostModel`.
    Nothing where the evaluation is more than HORIZON rollouts away, or samples at another
    temperature than rollouts.
    """
    coming, temperature = next_evaluation(config, step), config.eval.temperature
    if (
        coming is None
        or coming - step > HORIZON
        or temperature not in (None, config.rollout.temperature)
    ):
        return []
    forward_s, row_s, token_s, *_ = cost.tolist()
    num_generations, groups = config.eval.num_generations, evaluation.groups
    # Rows that still decode when one has left its draft: they share the forward.
    num_late = min(
        max(evaluation.share_behind * len(groups) * num_generations / num_ranks, 1.0), num_slots
    )
    saved_s, made_s = (row_s + token_s + forward_s / num_rows for num_rows in (num_late, num_slots))
    guesses, _ = outlook.guess(np.array([len(group.prompt.token_ids) for group in groups]))
    planned = []
    for group, guess in zip(groups, guesses.tolist(), strict=True):
        items = []
        for name in map(group.sample, range(num_generations)):
            begun, old = store.get(name), evaluation.store.get(name)
            if begun.is_finished if begun is not None else old is not None and old.version == step:
                continue
            length, share = (
                (guess, 1.0) if old is None else (len(old.tokens), evaluation.share_behind)
            )
            costs_s = length * (share * made_s + (1 - share) * token_s)
            items.append(
                Item(
                    name,
                    group.prompt.token_ids,
                    1,
                    pays=False,
                    saves_s=share * length * saved_s,
                    costs_s=costs_s,
                )
            )
        if items:
            planned.append(items)
    planned.sort(key=lambda items: -max(item.saves_s for item in items))
    return [item for items in planned for item in items]
