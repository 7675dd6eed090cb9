"""A plugin that measures CPU seconds of each test file, those of its processes included: `make
durations` runs all tests with it, writes tests/durations.json, which says in what order they run,
and fails where a file takes more than its budget. `make test` never does: no test depends on how
fast a machine is."""

import json
from collections import Counter
from pathlib import Path

import psutil
import pytest

BUDGET_S = 60  # of a file
PATH = Path(__file__).resolve().parents[1] / "durations.json"
OUTPUT = "seconds_by_file"

_seconds: Counter[str] = Counter()


def cpu_seconds() -> float:
    """Return CPU seconds of this process and of all that it has started."""
    own, total = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and of children that have ended
        except psutil.NoSuchProcess:
            continue
    return total


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    begin_s = cpu_seconds()
    result = yield
    _seconds[item.path.stem] += cpu_seconds() - begin_s
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """A worker of xdist has ended."""
    _seconds.update(getattr(node, "workeroutput", {}).get(OUTPUT, {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[OUTPUT] = dict(_seconds)
        return
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    known |= {name: round(seconds, 1) for name, seconds in _seconds.items()}
    names = {path.stem for path in PATH.parent.glob("test_*.py")}
    known = {name: known[name] for name in sorted(known, key=lambda n: -known[n]) if name in names}
    PATH.write_text(json.dumps(known, indent=0) + "\n")
    over = {name: seconds for name, seconds in known.items() if seconds > BUDGET_S}
    print(f"\n{sum(known.values()):.0f} CPU seconds; more than {BUDGET_S}: {over or 'no file'}")
    if over:
        session.exitstatus = 1
