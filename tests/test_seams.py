"""Objects of the core hold nothing of a mechanism but at the seams of docs/architecture.md: what
imports do not show, as a method that a mechanism hands to the planner."""

from functools import partial
from types import ModuleType

from bubblespec.config.file import load_config
from bubblespec.setup import build
from tests.helpers.clocks import virtual_time
from tests.helpers.runs import SHORT

SEAMS = {"Sampler.mechanisms", "DraftModelSource.runner", "ModelRunner.forward"}
SEAMS |= {"ModelRunner.followers", "Learner.after_update", "Learner.early", "Learner.on_hidden"}
PARTS = ["speculative.method=bubble+suffix+quantized", "speculative.planning=always"]
PARTS += ["optim.stream_gradients=true"]


def is_of_mechanism(value: object) -> bool:
    """Whether a value is a mechanism's object, class or function, or a method bound to one."""
    while isinstance(value, partial):
        value = value.func
    owner = getattr(value, "__self__", None)
    found = [value] if owner is None or isinstance(owner, ModuleType) else [value, owner]
    modules = [x.__module__ if hasattr(x, "__qualname__") else type(x).__module__ for x in found]
    return any(str(module).startswith("bubblespec.mechanisms") for module in modules)


def edges_of(root: object) -> set[str]:
    """Return the fields, as Class.name, by which objects of the core reach one of a mechanism."""
    seen, edges, to_visit = set(), set(), [(root, "")]
    while to_visit:
        value, field = to_visit.pop()
        if is_of_mechanism(value):
            edges.add(field)
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                to_visit += [(each, field) for each in value.values()]
            elif isinstance(value, list | tuple | set):
                to_visit += [(each, field) for each in value]
            elif type(value).__module__.startswith("bubblespec"):
                fields = getattr(value, "__dict__", {}).items()
                to_visit += [(each, f"{type(value).__name__}.{name}") for name, each in fields]
    return edges


def test_core_reaches_mechanisms_by_seams_alone(tmp_path):
    overrides = [*SHORT, *PARTS, f"run.output_dir={tmp_path}"]
    with virtual_time() as ranks:
        made = build(load_config("configs/tiny_cpu_bulk.yaml", overrides), ranks)
        made.lock.close()
    found = edges_of(made)
    assert {"Sampler.mechanisms", "DraftModelSource.runner", "Learner.early"} <= found <= SEAMS
    made.sampler.stats.chains = made.sampler.mechanisms[-1].metrics
    assert edges_of(made) - found == {"RunStats.chains"}
