"""Whole runs: the tokens of every step are those of a run without drafts, and so are the weights,
whatever is used to be faster, on any number of ranks, killed, stopped and resumed.

One reference run per shape: per set of options that decide which tokens are generated. Ranks are
threads, and in one case processes. Idle tasks run whatever the clock says.
"""

import functools

import pytest

from tests.helpers.drafting import chain_always, train_always
from tests.helpers.late import results_come_late
from tests.helpers.runs import (
    ALWAYS_DRAFT,
    digests,
    read,
    run,
    run_until_killed,
    same_weights,
    weights,
)
from tests.helpers.streaming import stream_always
from tests.helpers.threads import Killed, train_on_threads

STEPS = 4
TINY = [
    "rollout.num_prompts_per_step=6",
    "rollout.num_generations=3",
    "rollout.max_completion_length=24",
    "data.size=64",
    f"run.max_steps={STEPS}",
    "run.eval_steps=0",
    "run.save_steps=2",
    "model.dtype=float64",
    "optim.learning_rate=1e-3",
]
REWARD = "reward.functions=[tests.helpers.rewards.remainder]"
SHAPES = {
    "in order": [REWARD],
    "tail batching": [
        REWARD,
        "tail_batching.enabled=true",
        "tail_batching.over_sampling_ratio=1.5",
    ],
    "dynamic sampling": [  # with a reward that is often the same for a whole group
        "rollout.dynamic_sampling_max_batches=2",
    ],
}
NO_DRAFTS = ["speculative.method=none", "rollout.tp_tail_max_rows=0"]
OPTIONS = {
    "few slots": ["rollout.max_num_seqs=6", "rollout.max_num_batched_tokens=9", "run.trace=true"],
    "drafts": ["speculative.method=bubble+suffix", ALWAYS_DRAFT],
    "drafter": [
        "speculative.method=bubble+suffix+drafter",
        "drafter.warm_start=300",
        ALWAYS_DRAFT,
    ],
    "copy": ["speculative.method=bubble+suffix+quantized", ALWAYS_DRAFT],
    "streamed": ["optim.stream_gradients=true"],
    "late": [],
    "tp tail": ["rollout.tp_tail_max_rows=6"],
    "workers": ["reward.num_workers=1"],
}
METRICS = {  # that are above 0 where an option has been used
    "drafts": ["rollout/spec_accepted_tokens", "bubble/drafted_tokens"],
    "drafter": ["drafts/drafter/tokens"],
    "copy": ["drafts/quantized/tokens", "quantized/chain_length"],
    "streamed": ["idle/gradients/share"],
    "tp tail": ["tp_tail/rows"],
}
# shape, options, ranks, how the run is interrupted
CASES = [
    ("in order", "few slots", 2, None),
    ("in order", "drafts+tp tail", 4, "stop"),
    ("in order", "drafter", 2, "kill"),
    ("in order", "copy", 1, None),
    ("in order", "copy+tp tail+few slots", 4, "stop"),
    ("in order", "copy", 2, "kill"),
    ("tail batching", "copy", 2, "kill"),
    ("dynamic sampling", "copy", 2, None),
    ("in order", "streamed", 2, "kill"),
    ("tail batching", "streamed", 1, None),
    ("tail batching", "drafts+tp tail", 2, "kill"),
    ("tail batching", "drafter+streamed", 2, None),
    ("dynamic sampling", "drafts", 2, "stop"),
    ("dynamic sampling", "drafter+streamed", 1, None),
    ("in order", "late+drafts+tp tail", 4, "stop"),
    ("tail batching", "late+drafts", 2, "kill"),
    ("dynamic sampling", "late+drafts+streamed", 2, None),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """reference(shape): the folder of an undisturbed run without drafts on two ranks."""
    folders = {}

    def of_shape(shape: str):
        if shape not in folders:
            folders[shape] = folder = tmp_path_factory.mktemp("reference")
            train_on_threads(2, *TINY, *SHAPES[shape], *NO_DRAFTS, f"run.output_dir={folder}")
            assert len(set(digests(folder))) == STEPS, "the policy must learn something"
        return folders[shape]

    return of_shape


def options_of(used: list[str]) -> list[str]:
    return [*NO_DRAFTS, *(option for name in used for option in OPTIONS[name])]


def check_same(folder, plain, used: list[str], *, has_same_order: bool) -> None:
    """has_same_order: gradients are summed in the same order, to the same bits."""
    lines = read(folder)
    assert digests(folder) == digests(plain)
    if has_same_order:
        assert same_weights(weights(folder), weights(plain))
    for ours, theirs in zip(lines, read(plain), strict=True):
        for key in {"loss", "grad_norm", "entropy", "reward"} & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-8), key
    # What is compared must have been used.
    for key in (key for name in used for key in METRICS.get(name, ())):
        assert sum(line.get(key, 0) for line in lines) > 0, key


@pytest.mark.parametrize("shape, used, ranks, interruption", CASES)
def test_run_equals_plain_run(reference, monkeypatch, tmp_path, shape, used, ranks, interruption):
    plain, used = reference(shape), used.split("+")
    patch = functools.partial(monkeypatch.setattr, raising=False)
    if "streamed" in used:
        stream_always(patch)
    if "late" in used:
        results_come_late(monkeypatch)
    if "drafter" in used:
        train_always(patch)
        chain_always(patch)
    options = [*TINY, *SHAPES[shape], *options_of(used), f"run.output_dir={tmp_path}"]
    if interruption == "kill":
        with pytest.raises(Killed):
            train_on_threads(ranks, *options, ends_in=3, is_killed=True)
    elif interruption == "stop":
        train_on_threads(ranks, *options, ends_in=1)
        assert len(digests(tmp_path)) < STEPS
    resumed = 2 if interruption == "stop" else ranks  # with others than it began with
    train_on_threads(resumed, *options)
    has_same_order = ranks == resumed == 2 and "streamed" not in used
    check_same(tmp_path, plain, used, has_same_order=has_same_order)


@pytest.mark.parametrize(
    "selects",
    [
        ["tail_batching.enabled=true", "tail_batching.over_sampling_ratio=1.5"],
        ["rollout.dynamic_sampling_max_batches=2"],
    ],
)
def test_comparing_rewards_see_whole_groups(monkeypatch, tmp_path, selects):
    """The function fails for anything but a whole group. Placement, streamed gradients and workers
    leave the groups together."""
    stream_always(functools.partial(monkeypatch.setattr, raising=False))
    options = [*TINY, *selects, "reward.functions=[tests.helpers.rewards.better_than]"]
    options.append("run.max_steps=2")
    train_on_threads(1, *options, *NO_DRAFTS, f"run.output_dir={tmp_path / 'plain'}")
    used = ["drafts", "streamed", "workers"]
    train_on_threads(2, *options, *options_of(used), f"run.output_dir={tmp_path / 'used'}")
    check_same(tmp_path / "used", tmp_path / "plain", used, has_same_order=False)
    for line in read(tmp_path / "used"):
        assert line["reward/errors"] == 0 and line["reward"] > 0


def test_processes_equal_threads(reference, tmp_path):
    used = ["drafts", "workers", "tp tail"]
    options = options_of(used)
    short = [*TINY, *SHAPES["in order"]]
    run_until_killed(tmp_path, 4, 3, *options, short=short)
    run(tmp_path, 2, *options, short=short)
    check_same(tmp_path, reference("in order"), used, has_same_order=False)
