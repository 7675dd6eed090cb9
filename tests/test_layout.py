"""The package's structure, read from its imports: they point down, nothing imports in a circle, and
docs/architecture.md shows it as it is."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "bubblespec"
# A room is a file or a folder of the package. It may import rooms on the floors below it, and
# within itself.
FLOORS = [
    {"doctor", "play"},
    {"setup"},
    {"trainer", "simulate"},
    {"rollout", "checkpoint"},
    {"memory"},
    {"idle", "telemetry", "rewards", "loading"},
    {"draft", "environments"},
    {"learn", "planner", "data"},
    {"engine"},
    {"dist", "config"},
    {"config_combinations"},
    {"config_checks", "config_names"},
    {"records"},
    {"errors", "types"},
]


def name_of(path: Path) -> str:
    return ".".join(("bubblespec", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """The package's modules that a file imports: anywhere in it, also in functions and for type
    checking alone."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names & modules


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    files = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    return {name: imports_of(path, set(files)) - {name} for name, path in files.items()}


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_has_a_floor(graph):
    assert {room(name) for name in graph if name != "bubblespec"} == set().union(*FLOORS)


def test_imports_point_down(graph):
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    for module, imported in graph.items():
        upward = [
            other
            for other in imported - {"bubblespec"}
            if module != "bubblespec"
            and room(other) != room(module)
            and floor[room(other)] <= floor[room(module)]
        ]
        assert not upward, f"{module} imports {upward}, which are not on a floor below it"


def test_no_imports_in_a_circle(graph):
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in graph[module] - {"bubblespec"}:
                if not other.startswith(f"{module}.") and not module.startswith(
                    f"{other}."
                ):  # a package and what it exports
                    visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_architecture_shows_every_room():
    """Folders of the package are lines of the layout; files next to them are named in it."""
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    layout = text[text.index("## How it is laid out") :].split("```")[1]
    for path in PACKAGE.iterdir():
        if path.is_dir() and any(path.glob("*.py")):
            assert f"\n  {path.name}/ " in layout, path.name
        elif path.suffix == ".py" and path.stem != "__init__":
            assert path.name in layout, path.name
