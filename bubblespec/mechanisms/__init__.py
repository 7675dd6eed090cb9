"""The mechanisms of a run: each is a file or folder here, and a section or key of the configuration.

`setup.py`, the simulator and the memory table call their functions, in the order of MODULES. A
mechanism has some of these:

    load(run)              before the model is checked and the data is read
    prepare(run)           once the model can be fed
    check(run, prompts)    of the data
    add_needs(needs, run)  memory.Needs with what the mechanism adds
    make(run)              Mechanism | None: connects it with the finished sampler and learner

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
    from bubblespec.rollout.sampler import Sampler

MODULES = (
    "batch_invariant",
    "cpu_linear",
    "tail_batching",
    "tp_tail.tail",
    "episodes.episodes",
    "stream_gradients",
    "quantized.mechanism",
    "drafter.mechanism",
)


@dataclass
class Run:
    """A run in the making: its parts so far, and what mechanisms choose for those to come."""

    config: Config
    ranks: Ranks
    model: Any = None
    """The policy; None in virtual time."""
    tokenizer: Any = None
    state: dict = field(default_factory=dict)
    """State of the checkpoint, see `read_state`."""
    checkpoint: str | None = None
    """Folder that the run resumes."""
    virtual: dict[str, Any] | None = None
    """In virtual time, what takes the place of a mechanism's model or processes, by its name."""
    sampler: Sampler = field(init=False)
    learner: Learner = field(init=False)
    own: dict[str, Any] = field(default_factory=dict)
    """What a mechanism keeps from one of its functions for a later one, by its name."""
    num_shared_rows: int = 0
    """Rows that all ranks may decode together, see `choose_slots`."""

    attention: str = ""
    """Attention kernel of training; "": that of model.attention."""
    make_forward: Callable[..., ModelForward] | None = None
    make_schedule: Callable[..., StepSchedule] | None = None
    tokenize: Callable | None = None
    """Returns the ids of a prompt; None: the tokenizer's."""
    is_deterministic: bool = False
    """Whether backward passes add in a fixed order."""
    answers_turns: bool = False
    """Whether responses have tokens that are not sampled."""
    has_reward: bool = False
    """Whether `answers_turns` comes with a reward, besides the functions'."""
    drafts_ahead: bool = True
    """Whether samples of coming steps can be drafted from their prompts."""
    needs_ticks: bool = False
    """Whether ranks exchange progress in rollouts even without drafts."""
    ends_by_cost: bool = False
    """Whether measured costs decide when all ranks finish a rollout together."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """Choices that a checkpoint keeps in its state, and a resumed run keeps."""
    set_kernels: Callable[[Any], None] = lambda model: None
    """Chooses kernels of linear layers for another model that generates."""
    after_update: list[Callable[[], None]] = field(default_factory=list)
    """See `Learner.after_update`."""
    followers: list[Callable] = field(default_factory=list)
    """Contexts in which draft sources follow rows to another engine, given that engine."""


def functions(name: str) -> list[Callable]:
    """Return the function of this name of each mechanism that has one."""
    modules = [import_module(f"{__name__}.{module}") for module in MODULES]
    return [getattr(module, name) for module in modules if hasattr(module, name)]
