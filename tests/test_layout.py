"""The package's structure, read from its imports: they point down, the core imports no mechanism,
and what has to be loaded to read one file stays small. `python tests/test_layout.py` prints it."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "bubblespec"
# A room is a file or a folder of the package. It may import rooms on the floors below it, and
# within itself.
FLOORS = [
    {"__main__"},
    {"tools"},
    {"setup"},
    {"mechanisms"},
    {"trainer"},
    {"rollout", "checkpoint"},
    {"memory"},
    {"telemetry", "rewards", "loading"},
    {"draft"},
    {"learn", "planner", "data"},
    {"engine"},
    {"distributed", "config"},
    {"records"},
    {"folders", "progress"},
    {"errors", "types", "metrics"},
]
# Lines of the package to load, by the file that is read: they may only fall.
CEILINGS = {
    "bubblespec.engine.runner": 5373,
    "examples.minimal_loop": 7447,
    "bubblespec.rollout.loop": 4146,
    "bubblespec.rollout.sampler": 7560,
    "bubblespec.trainer": 13925,
    "bubblespec.checkpoint": 2724,
}
# The same for a file, the package and the tests; the aim is 18,000 and 21,000.
MAX_LINES = {"file": 600, "package": 31235, "tests": 33500}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
SOURCES = FILES | {"examples.minimal_loop": ROOT / "examples" / "minimal_loop.py"}


def imports_of(path: Path) -> set[str]:
    """The package's modules that a file imports: anywhere in it, also in functions and for type
    checking alone."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names & set(FILES)


GRAPH = {name: imports_of(path) - {name} for name, path in SOURCES.items()}
NUM_LINES = {name: len(path.read_text().splitlines()) for name, path in SOURCES.items()}


def room(module: str) -> str:
    return module.split(".")[1]


def mechanism(module: str) -> str | None:
    """The mechanism that a module belongs to: a folder or file of bubblespec/mechanisms/."""
    parts = module.split(".")
    return parts[2] if parts[1] == "mechanisms" and len(parts) > 2 else None


def loaded(module: str) -> set[str]:
    """What has to be loaded for a module: itself, and its imports with theirs."""
    found, to_visit = set(), [module]
    while to_visit:
        if (name := to_visit.pop()) not in found:
            found.add(name)
            to_visit += GRAPH[name]
    return found - {"examples.minimal_loop"}


def lines_to_load(module: str) -> int:
    return sum(NUM_LINES[name] for name in loaded(module))


def test_every_room_has_a_floor():
    assert {room(name) for name in FILES if name != "bubblespec"} == set().union(*FLOORS)


def test_imports_point_down():
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    for module in FILES:
        upward = [
            other
            for other in GRAPH[module] - {"bubblespec"}
            if module != "bubblespec"
            and room(other) != room(module)
            and floor[room(other)] <= floor[room(module)]
        ]
        assert not upward, f"{module} imports {upward}, which are not on a floor below it"


def test_no_imports_in_a_circle():
    done: set[str] = set()

    def draw_index(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in GRAPH[module] - {"bubblespec"}:
                if not other.startswith(f"{module}.") and not module.startswith(
                    f"{other}."
                ):  # a package and what it exports
                    draw_index(other, (*path, module))
            done.add(module)

    for module in FILES:
        draw_index(module, ())


def test_only_tools_import_mechanisms():
    for module in FILES:
        if module != "bubblespec" and room(module) == "tools":
            continue
        own = mechanism(module) if module != "bubblespec" else None
        others = {n for n in GRAPH[module] - {"bubblespec"} if mechanism(n) not in (None, own)}
        assert not others, f"{module} imports {sorted(others)}"


def words_in_code(path: Path) -> str:
    """Names and texts of a file in lower case, without comments and docstrings."""
    source, docs = path.read_text(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs |= set(range(node.lineno, node.end_lineno + 1))
    kinds = tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.NAME)
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    words = [of.string for of in found if of.type in kinds and of.start[0] not in docs]
    return " ".join(words).lower()


# Mechanisms that are named outside mechanisms/, config/ and tools/, by file, and why.
NAMED = {
    # A function may have the argument `environments`, as in TRL, and an environment has a reward.
    "bubblespec.rewards.functions": {"environment"},
    "bubblespec.rewards.scorer": {"environment"},
    # The timeline's legend.
    "bubblespec.telemetry.timeline": {"drafter"},
    # How many queries' keys attention sums in splits, which decides its memory.
    "bubblespec.memory": {"batch_invariant"},
    # Variables of a process, and Jinja's class.
    "bubblespec.distributed.ranks": {"environment"},
    "bubblespec.loading": {"environment"},
}


def test_mechanisms_are_named_in_their_own_rooms_alone():
    modules = FILES.keys() - {"bubblespec"}
    names = {of.removesuffix("s") for of in map(mechanism, modules) if of} | {"environment"}
    found: dict[str, set[str]] = {}
    for module in modules:
        if room(module) not in ("mechanisms", "config", "tools"):
            words = words_in_code(FILES[module])
            if named := {name for name in names if name in words}:
                found[module] = named
    assert found == NAMED


@pytest.mark.parametrize("module", CEILINGS)
def test_lines_to_load_stay_below_ceiling(module):
    assert lines_to_load(module) <= CEILINGS[module]


def test_files_and_totals_stay_small():
    tests = [len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")]
    assert {n: c for n, c in NUM_LINES.items() if c > MAX_LINES["file"]} == {}
    assert sum(NUM_LINES[name] for name in FILES) <= MAX_LINES["package"]
    assert sum(tests) <= MAX_LINES["tests"]


def test_architecture_shows_every_room():
    """Folders of the package are lines of the layout; files next to them are named in it."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    layout = text[text.index("## How it is laid out") :].split("```")[1]
    for path in PACKAGE.iterdir():
        if path.is_dir() and any(path.glob("*.py")):
            assert f"\n  {path.name}/ " in layout, path.name
        elif path.suffix == ".py" and path.stem != "__init__":
            assert path.name in layout, path.name


def test_architecture_says_how_far_to_read():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rings = text[text.index("| ring | read") :].partition("| 3 |")[0]
    shown = [int(number.replace(",", "")) for number in re.findall(r"\b\d+,\d{3}\b", rings)]
    engine = loaded("bubblespec.engine.engine") | loaded("bubblespec.engine.runner")
    found = [sum(NUM_LINES[name] for name in engine)]
    found += [CEILINGS[name] for name in list(CEILINGS)[1:5]]
    assert len(shown) == len(found)
    assert all(0 <= said - lines < 100 for said, lines in zip(shown, found, strict=True))


if __name__ == "__main__":
    for target, ceiling in CEILINGS.items():
        print(f"{lines_to_load(target):6d} of {ceiling:6d}  {target}")
    print(f"{sum(NUM_LINES[name] for name in FILES):6d} of {MAX_LINES['package']:6d}  package")
