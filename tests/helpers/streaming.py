"""Streaming that depends on no clock: whatever is ready is computed, at every tick and beside rows
of the rank's own."""

from concurrent.futures import wait

from bubblespec.mechanisms.stream_gradients import StreamGradients
from bubblespec.planner.batches import MicrobatchCost
from bubblespec.rewards.scorer import RolloutRewards
from bubblespec.rollout.board import ProgressSync

# of a micro-batch and of a token, whatever they are: slices are the same on any machine
SECONDS = (1e-3, 2.5e-4)
STREAMED = ("optim.stream_gradients=true", "reward.num_workers=0")


def stream_always(patch=setattr) -> None:
    """patch: as of pytest's monkeypatch, to take it back afterwards."""
    can_begin = StreamGradients.can_begin
    take_scored = RolloutRewards.take_scored

    def wait_and_take_scored(scoring):
        if scoring.scorer.config.num_workers:  # they take as long as the machine's load wants
            calls = [call for row in scoring._new for call in scoring._calls[row.id].values()]
            wait([future for future, _ in calls], timeout=60)
        return take_scored(scoring)

    def can_begin_beside_rows(task) -> bool:
        unfinished, task.view.unfinished = task.view.unfinished, {}
        try:
            return can_begin(task)
        finally:
            task.view.unfinished = unfinished

    patch(RolloutRewards, "take_scored", wait_and_take_scored)
    patch(StreamGradients, "can_begin", can_begin_beside_rows)
    patch(MicrobatchCost, "is_known", True)
    patch(MicrobatchCost, "_coefficients", property(lambda cost: SECONDS, lambda cost, value: None))
    patch(ProgressSync, "_is_too_soon", lambda board: False)
