"""Sections of the configuration for mechanisms, which change the time and not the tokens."""

from dataclasses import dataclass
from typing import Literal

from bubblespec.config.keys import SAFE, Bound, at_least, at_most, key

AUTO = "auto"  # of speculative.method
DEFAULT = ("bubble", "suffix", "quantized")


@dataclass
class SpeculativeConfig:
    """Drafts. Affects time, not tokens."""

    method: str = key(AUTO, resume=SAFE)
    """Sources of drafts, joined by +: bubble (idle time), suffix (matches in earlier text),
    quantized (a quantised copy of the policy) and drafter (a learned layer), see their sections,
    dotted paths of classes (docs/extending.md); or none. auto: bubble+suffix+quantized, and drafter
    if the model comes with one or drafter.path names one."""
    planning: Literal["by_cost", "always", "idle_only"] = key("by_cost", resume=SAFE)
    """Which drafts are co-scheduled with a rank's own rows, and how many draft tokens are verified.
    by_cost: what measured costs say is faster; always: everything, whatever it costs; idle_only:
    only waiting ranks draft."""

    @property
    def sources(self) -> list[str]:
        """The sources that are named; with auto there may be a drafter, too."""
        named = {"none": [], AUTO: list(DEFAULT)}
        return named.get(self.method, self.method.split("+"))

    @property
    def may_have_drafter(self) -> bool:
        return self.method == AUTO or "drafter" in self.sources


BITS = Bound(lambda value: value in ("auto", 8, 4), "auto, 8 or 4")


@dataclass
class QuantizedConfig:
    """The policy's quantised copy, where speculative.method names it. Affects time, not tokens."""

    bits: int | str = key("auto", BITS, resume=SAFE)
    """Bits of its weights: 8 on a CPU; 4 on a GPU, for bfloat16, with auto from 3 billion weights
    on."""


@dataclass
class DrafterConfig:
    """The learned drafter, where speculative.method has it. Affects time, not tokens."""

    path: str | None = key(None, resume=SAFE)
    """Hub name or folder of an EAGLE-3 drafter of this policy, as vLLM, SGLang and speculators have
    them; without it, the head that comes with the model. A resumed run uses that of its checkpoint.
    """
    train: bool = key(True, resume=SAFE)
    """Train it in idle time on the policy's hidden states; else it stays as it is."""
    warm_start: int = key(50_000, at_least(1), resume=SAFE)
    """Where there is none: tokens of the policy's own responses that one is trained on before the
    first step."""


@dataclass
class TailBatchingConfig:
    """Short rounds that defer their slowest prompts, and long rounds of deferred prompts."""

    enabled: bool = False
    """Train in short and long rounds instead of the data's order; the responses are the same."""
    over_sampling_ratio: int | float | str = key("auto", at_least(1, "auto"), at_most(4))
    """Prompts launched in a short round per prompt that it trains on; auto chooses by recent
    lengths."""
