"""Whole runs: the tokens of every step are those of a run without drafts, and so are the weights,
whatever is used to be faster, on any number of ranks, killed, stopped and resumed.

One reference run per shape: per set of options that decide which tokens are generated. Ranks are
threads, and in one case processes. Idle tasks run whatever the clock says."""

import functools

import pytest

from bubblespec.mechanisms import batch_invariant
from tests.helpers.drafting import chain_always, train_always
from tests.helpers.late import results_come_late
from tests.helpers.plain import NO_DRAFTS, REWARD, STEPS, TINY, check_same, plain_run
from tests.helpers.runs import (
    ALWAYS_DRAFT,
    LORA_AND_TRUNCATION,
    digests,
    read,
    run,
    run_until_killed,
)
from tests.helpers.streaming import stream_always
from tests.helpers.threads import train_on_threads

HYBRID = "model.path=configs/tiny_hybrid"  # two of its three layers have a state
SHAPES = {
    "in order": [REWARD],
    "tail batching": [
        REWARD,
        "tail_batching.enabled=true",
        "tail_batching.over_sampling_ratio=1.5",
    ],
    "dynamic sampling": [  # with a reward that is often the same for a whole group
        "rollout.dynamic_sampling_max_batches=2"
    ],
    "hybrid": [REWARD, HYBRID, "loss.kl_coef=0.02"],
    "hybrid, lora": [REWARD, HYBRID, *LORA_AND_TRUNCATION, "model.gradient_checkpointing=true"],
    "lora and truncation": [REWARD, *LORA_AND_TRUNCATION, "loss.kl_coef=0.02"],
}
OPTIONS = {
    "few slots": ["rollout.max_num_seqs=6", "rollout.max_num_batched_tokens=9", "run.trace=true"],
    "drafts": ["speculative.method=bubble+suffix", ALWAYS_DRAFT],
    "drafter": ["speculative.method=bubble+suffix+drafter", "drafter.warm_start=100", ALWAYS_DRAFT],
    "copy": ["speculative.method=bubble+suffix+quantized", ALWAYS_DRAFT],
    "streamed": ["optim.stream_gradients=true"],
    "sharded": ["optim.shard_state=true"],  # needs processes
    "late": [],
    "tp tail": ["rollout.tp_tail_max_rows=6"],
    "workers": ["reward.num_workers=1"],
    "invariant": ["model.batch_invariant=true"],
}
METRICS = {  # that are above 0 where an option has been used
    "drafts": ["rollout/spec_accepted_tokens", "bubble/drafted_tokens"],
    "drafter": ["drafts/drafter/tokens", "drafter/num_updates"],
    "copy": ["drafts/quantized/tokens", "quantized/chain_length"],
    "streamed": ["idle/gradients/share"],
    "tp tail": ["tp_tail/rows"],
}
# shape, options, ranks, how the run is interrupted
CASES = [
    ("in order", "few slots+streamed", 2, "kill"),
    ("in order", "late+drafts+tp tail", 4, "stop"),
    ("in order", "drafter", 2, "kill"),
    ("in order", "copy+tp tail+few slots", 4, "stop"),
    ("in order", "drafter+invariant", 1, "stop"),
    ("tail batching", "copy+streamed", 2, "kill"),
    ("tail batching", "drafts+tp tail", 2, None),
    ("tail batching", "late+drafts", 2, "kill"),
    ("dynamic sampling", "drafts", 2, "stop"),
    ("dynamic sampling", "late+drafts+streamed", 2, None),
    ("dynamic sampling", "copy+invariant", 2, None),
    ("hybrid", "drafts+few slots+streamed", 2, "kill"),
    ("hybrid", "late+drafter", 3, "stop"),
    ("hybrid", "drafter", 1, None),
    ("hybrid, lora", "drafts", 2, "kill"),
    ("lora and truncation", "drafter", 1, None),
    ("lora and truncation", "copy", 2, "kill"),
]


def options_of(used: list[str]) -> list[str]:
    return [*NO_DRAFTS, *(option for name in used for option in OPTIONS[name])]


def check_used(folder, used: list[str]) -> None:
    for key in (key for name in used for key in METRICS.get(name, ())):
        assert sum(line.get(key, 0) for line in read(folder)) > 0, key


@pytest.mark.parametrize("shape, used, ranks, interruption", CASES)
def test_run_equals_plain_run(
    tmp_path_factory, monkeypatch, tmp_path, shape, used, ranks, interruption
):
    shape, used = [*TINY, *SHAPES[shape]], used.split("+")
    plain = plain_run(tmp_path_factory, *shape)
    patch = functools.partial(monkeypatch.setattr, raising=False)
    patch(batch_invariant, "NUM_PARTS", 0)
    if "streamed" in used:
        stream_always(patch)
    if "late" in used:
        results_come_late(monkeypatch)
    if "drafter" in used:
        train_always(patch)
        chain_always(patch)
    options = [*shape, *options_of(used), f"run.output_dir={tmp_path}"]
    if interruption == "kill":
        train_on_threads(ranks, *options, ends_in=STEPS - 1, is_killed=True)
    elif interruption == "stop":
        train_on_threads(ranks, *options, ends_in=1)
        assert len(digests(tmp_path)) < STEPS
    resumed = 2 if interruption == "stop" else ranks  # with others than it began with
    train_on_threads(resumed, *options)
    check_same(tmp_path, plain, is_exact=ranks == resumed == 2 and "streamed" not in used)
    check_used(tmp_path, used)


def test_comparing_rewards_see_whole_groups(tmp_path_factory, monkeypatch, tmp_path):
    """The function fails for anything but a whole group. Placement, streamed gradients and workers
    leave the groups together."""
    stream_always(functools.partial(monkeypatch.setattr, raising=False))
    function = "reward.functions=[tests.helpers.rewards.better_than]"
    options = [*TINY, *SHAPES["tail batching"][1:], function]
    used = ["drafts", "streamed", "workers"]
    train_on_threads(2, *options, *options_of(used), f"run.output_dir={tmp_path}")
    check_same(tmp_path, plain_run(tmp_path_factory, *options))
    check_used(tmp_path, ["streamed"])
    assert sum(line["rollout/spec_accepted_tokens"] for line in read(tmp_path)) > 0
    for line in read(tmp_path):
        assert line["reward/errors"] == 0 and line["reward"] > 0


@pytest.mark.parametrize(
    "shape, used", [("in order", "drafts+workers+tp tail"), ("hybrid", "drafts+sharded")]
)
def test_processes_equal_threads(tmp_path_factory, tmp_path, shape, used):
    used, short = used.split("+"), [*TINY, *SHAPES[shape]]
    options = options_of(used)
    run_until_killed(tmp_path, 4, STEPS - 1, *options, short=short)
    run(tmp_path, 2, *options, short=short)
    check_same(tmp_path, plain_run(tmp_path_factory, *short))
    check_used(tmp_path, used)
