"""Shared by all tests: one thread, what has failed at the end of the output, fixtures."""

import json
import os
import signal
import threading
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # its distillation
# Without a GPU triton interprets its kernels, if that is set before its first import.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

SHOWN_FAILURES = 3  # at the very end: whoever reads the last lines of a log sees what has failed
SHOWN_LINES = 10
# CPU seconds of each file (`make durations`), the longest first: no worker begins with one when the
# others are done.
SECONDS = json.loads(Path(__file__).with_name("durations.json").read_text(encoding="utf-8"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: -SECONDS.get(item.path.stem, 0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    failed = (
        []
        if reporter is None
        else [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]
    )
    for report in failed[:SHOWN_FAILURES]:
        reporter.write_line(f"\n{report.nodeid} ({report.when})", red=True)
        *lines, place = report.longreprtext.splitlines() or [""]
        shown = [line for line in lines if line.startswith((">", "E"))]
        reporter.write_line("\n".join([*shown[:SHOWN_LINES], place]))
    return result


@pytest.fixture(scope="session", autouse=True)
def quick_start():
    from tests.helpers.quick import start_quickly

    start_quickly()


@pytest.fixture(autouse=True)
def _own_interrupts():
    """Each test begins with Python's handler of SIGINT, which a run replaces for good."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_screen():
    """Each test begins without the thread of another that speaks in long silences."""
    yield
    from bubblespec import progress

    progress.end()
    for thread in threading.enumerate():
        if thread.name == "progress":
            thread.join()
    progress._is_over.clear()


@pytest.fixture(autouse=True)
def _own_operations():
    """Each test begins with all kernels, and leaves them to the next one."""
    yield
    from bubblespec.engine import ops

    ops.replaced.clear()


@pytest.fixture
def exact_norms(monkeypatch):
    """RMSNorms in the precision of the model. transformers' compute in float32 whatever that is,
    forward and backward, where the last bit of a float64 may decide a float32's: two ways to sum
    the same gradient may then differ by 1e-7 of it."""

    from tests.helpers.models import norms_in_full_precision

    norms_in_full_precision(monkeypatch)


@pytest.fixture
def make_model():
    """make_model(name, dtype, max_length) -> a small random causal LM, the same at every call; with
    max_length it is prepared for the engine."""

    import torch

    from bubblespec.engine.model_checks import prepare_model
    from tests.helpers.models import random_model, small_config

    def make(name="llama", dtype=torch.float64, max_length=0):
        model = random_model(small_config(name), dtype)
        if max_length:
            prepare_model(model, max_length)
        return model

    return make
