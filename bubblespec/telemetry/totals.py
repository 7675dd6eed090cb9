"""Sums over the steps of one process: seconds, drafts and what they saved, deferred prompts."""

import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Totals:
    """Sums over the steps of this process, for the lines of a step and of the end."""

    seconds: float = 0.0
    set_up_s: float = 0.0
    generate_s: float = 0.0
    train_s: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    measured_s: float = 0.0
    """Seconds of rollouts in steps with drafts."""
    modelled_s: float = 0.0
    """Seconds that the cost model expects of the same rollouts without drafts."""
    without_drafts: list[float] = field(default_factory=list)
    """Measured over modelled seconds of each step in which the guard left drafts out."""
    is_without: bool = False
    """Whether the coming step is one of these."""
    num_deferred: int = 0
    """Prompts that short rounds of tail batching have left for long ones."""
    num_waiting: int = 0
    """Deferred prompts that are still to be trained on."""
    num_rounds: list[int] = field(default_factory=lambda: [0, 0])
    """Numbers of short and of long rounds of tail batching."""

    def add(self, metrics: dict[str, Any]) -> None:
        """Add a step."""
        generate_s = metrics["timing_s/gen"] + metrics["timing_s/bubble"]
        self.generate_s += generate_s
        self.train_s += metrics["timing_s/train"] + metrics["timing_s/sync"]
        accepted = metrics.get("rollout/spec_accepted_tokens", 0)
        self.draft_tokens += accepted + metrics.get("rollout/spec_wasted_tokens", 0)
        self.accepted_tokens += accepted
        if modelled_s := metrics.get("rollout/modelled_s"):
            if self.is_without:
                self.without_drafts.append(generate_s / modelled_s)
            else:
                self.measured_s += generate_s
                self.modelled_s += modelled_s
        self.is_without = metrics.get("guard/is_on") == 0
        if "tail/num_deferred" in metrics:
            self.num_rounds[metrics["tail/is_long_round"]] += 1
            waiting = metrics["tail/num_deferred"]
            self.num_deferred += max(waiting - self.num_waiting, 0)
            self.num_waiting = waiting

    @property
    def saved_s(self) -> float | None:
        """Seconds that drafts saved, negative if they lost; None before a step without drafts.

        The model, corrected by its error in steps without drafts, is compared with the clock."""
        if not self.without_drafts or not self.draft_tokens:
            return None
        return statistics.median(self.without_drafts) * self.modelled_s - self.measured_s
