"""Whole runs whose last rows are decoded by all ranks together: digests and weights of runs without
it, on 2 and 4 ranks, with drafts, and where all ranks are killed or one is told to stop in the
middle of it."""

import signal

import pytest

from tests.helpers.runs import ALWAYS_DRAFT, digests, read, run, same_weights, weights

SHARED = ("rollout.tp_tail_max_rows=12",)
PLAIN = ("speculative.method=none", "rollout.placement=in_turn", "rollout.tp_tail_max_rows=0")
DRAFTING = ("speculative.method=bubble+suffix", "bubble.lookahead=2", ALWAYS_DRAFT)
SIGNALLED = ("tests/system/signalled_train.py", "--at", "3", "--kind")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    run(folder, 2, *PLAIN)
    assert not any("shared_tail/rows" in line for line in read(folder))
    return folder


def check(folder, plain, most_rows: int = 12) -> None:
    assert digests(folder) == digests(plain) and len(digests(folder)) == 4
    shared = [line for line in read(folder) if "shared_tail/rows" in line]
    assert shared, "it must have been entered"
    for line in shared:
        assert 0 < line["shared_tail/rows"] <= most_rows and line["shared_tail/forwards"] > 0
        assert 0 < line["timing_s/shared_tail"] < line["timing_s/step"]


def test_tail_batching_shares_the_tails_of_its_long_rounds(tmp_path):
    """Short rounds leave rows unfinished, and do not."""
    tail = ("tail_batching.enabled=true", "tail_batching.over_sampling_ratio=1.5")
    found = []
    for name, rows in (("without", 0), ("with", 12)):
        options = (*tail, f"rollout.tp_tail_max_rows={rows}", "run.max_steps=4")
        run(tmp_path / name, 2, *DRAFTING, *options)
        found.append(digests(tmp_path / name))
    assert found[0] == found[1]
    rounds = {
        bool(line["tail/is_long_round"]): "shared_tail/rows" in line
        for line in read(tmp_path / "with")
        if "reward" in line
    }
    assert rounds == {True: True, False: False}


@pytest.mark.parametrize("kind, method", [("tail-dies", DRAFTING), ("tail-stops", PLAIN[:2])])
def test_killed_or_stopped_in_the_middle_of_it_and_resumed(plain, tmp_path, kind, method):
    """Entered with the first tick, with most rows of the step."""
    method = (*method, "rollout.tp_tail_max_rows=32")
    done = run(tmp_path, 2, *method, check=False, script=(*SIGNALLED, kind))
    if kind == "tail-dies":
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    else:
        assert done.returncode == 0, done.stderr[-3000:]
        assert "told to stop after 3 of 4 updates" in done.stderr
    assert len(digests(tmp_path)) == 3, "the step in which it came is not done"
    run(tmp_path, 2, *method)
    check(tmp_path, plain, most_rows=32)
    assert same_weights(weights(tmp_path), weights(plain))


def test_auto_measures_that_it_does_not_pay_over_gloo(tmp_path):
    """On a CPU the ranks' exchanges take longer than all of a tiny forward."""
    run(tmp_path, 2, *DRAFTING, "run.max_steps=2")
    assert not any("shared_tail/rows" in line for line in read(tmp_path))
