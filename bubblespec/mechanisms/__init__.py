"""The mechanisms of a run: each is a file or folder here, with keys of its own.

Set-up, the simulator and the memory table call their functions in the order of MODULES; each
mechanism has some of these:

    load(run)              before the model is checked and the data is read
    prepare(run)           once the model can be fed
    check(run, prompts)    of the data
    add_needs(needs, run)  returns memory.Needs with what the mechanism adds
    make(run)              connects it with sampler and learner; returns a Mechanism or None

Worker processes import this folder, so it imports nothing heavy here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bubblespec.config import Config
    from bubblespec.data.schedule import StepSchedule
    from bubblespec.distributed.ranks import Ranks
    from bubblespec.engine.forward import ModelForward
    from bubblespec.learn.learner import Learner
    from bubblespec.rewards.functions import OwnPool
    from bubblespec.rollout.sampler import Sampler

MODULES = (
    "batch_invariant",
    "cpu_linear",
    "tail_batching",
    "tp_tail.tail",
    "episodes.episodes",
    "stream_gradients",
    "reward_models.mechanism",
    "quantized.mechanism",
    "drafter.mechanism",
)


@dataclass
class Run:
    """A run in the making: its parts so far, and what mechanisms choose for those to come."""

    config: Config
    ranks: Ranks
    model: Any = None  # the policy; None in virtual time
    tokenizer: Any = None
    now_s: int = 0  # time that dated chat templates get, see `load_tokenizer`
    state: dict = field(default_factory=dict)  # of the checkpoint, see `read_state`
    checkpoint: str | None = None  # folder that the run resumes
    is_strict: bool = False  # see `build`
    virtual: dict[str, Any] | None = None  # in virtual time: stand-ins by the mechanism's name
    sampler: Sampler = field(init=False)
    learner: Learner = field(init=False)
    num_shared_rows: int = 0  # rows that all ranks may decode together, see `choose_slots`
    own: dict[str, Any] = field(default_factory=dict)  # kept by a mechanism for its later functions

    attention: str | None = None  # kernel of training in place of model.attention
    make_forward: type[ModelForward] | None = None
    make_schedule: Callable[..., StepSchedule] | None = None
    tokenize: Callable | None = None  # ids of a prompt, in place of the tokenizer's
    answers_turns: bool = False  # whether responses have tokens that are not sampled
    has_reward: bool = False  # whether what answers turns has a reward of its own
    rewards: dict[str, OwnPool] = field(default_factory=dict)  # of mechanisms, by path
    frozen: list[Any] = field(default_factory=list)  # their models, equal on resume
    drafts_ahead: bool = True  # whether rows of coming steps can be begun early
    chosen: dict[str, Any] = field(default_factory=dict)  # kept in checkpoints and by resumed runs
    set_kernels: Callable[[Any], None] = lambda model: None  # of another model that generates
    after_update: list[Callable[[], None]] = field(default_factory=list)  # see `Learner`
    # Contexts in which draft sources follow their rows to another engine, given that engine.
    followers: list[Callable] = field(default_factory=list)


def functions(name: str) -> list[Callable]:
    """Return the function of this name of each mechanism that has one."""
    modules = [import_module(f"{__name__}.{module}") for module in MODULES]
    return [getattr(module, name) for module in modules if hasattr(module, name)]
