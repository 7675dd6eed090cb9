"""Whole runs of train.py: the tokens of every step are those of a run without drafts, and so are
the weights, whatever is used to be faster, on any number of ranks, killed, stopped and resumed.

One reference run per shape: per set of options that decide which tokens are generated.
"""

import signal

import pytest

from tests.helpers.runs import ALWAYS_DRAFT, digests, read, run, same_weights, weights

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
        "rollout.dynamic_sampling=true",
        "rollout.dynamic_sampling_max_batches=2",
    ],
}
NO_DRAFTS = ["speculative.method=none", "rollout.tp_tail_max_rows=0"]
OPTIONS = {
    "few slots": ["rollout.num_slots=3", "rollout.max_batch_tokens=5"],
    "drafts": ["speculative.method=bubble+suffix", "bubble.lookahead=2", ALWAYS_DRAFT],
    "drafter": [
        "speculative.method=bubble+suffix+drafter",
        "drafter.warm_start=1500",
        ALWAYS_DRAFT,
    ],
    "streamed": ["optim.stream_gradients=true"],
    "tp tail": ["rollout.tp_tail_max_rows=6"],
    "workers": ["reward.num_workers=1"],
}
METRICS = {  # that are above 0 where an option has been used
    "drafts": ["rollout/spec_accepted_tokens", "bubble/drafted_tokens"],
    "drafter": ["drafts/drafter/tokens"],
    "streamed": ["stream/share"],
    "tp tail": ["shared_tail/rows"],
}
SCRIPT = "tests/helpers/always.py"

# shape, options, ranks, how the run is interrupted
CASES = [
    ("in order", "few slots", 2, None),
    ("in order", "drafts", 1, "kill"),
    ("in order", "drafts+workers", 4, "stop"),
    ("in order", "drafter", 2, "kill"),
    ("in order", "streamed", 2, "kill"),
    ("in order", "tp tail+workers", 4, None),
    ("in order", "drafter+tp tail+streamed", 2, None),
    ("tail batching", "streamed", 1, None),
    ("tail batching", "drafts+tp tail", 2, "kill"),
    ("tail batching", "drafter+tp tail+streamed", 4, None),
    ("dynamic sampling", "drafts+workers", 2, "stop"),
    ("dynamic sampling", "drafter+streamed", 1, None),
]


def train(folder, ranks: int, shape: str, options, *signalled: str, check: bool = True):
    script = (SCRIPT, *signalled)
    short = [*TINY, *SHAPES[shape]]
    return run(folder, ranks, *options, script=script, short=short, check=check)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """reference(shape): the folder of an undisturbed run without drafts on two ranks."""
    folders = {}

    def of_shape(shape: str):
        if shape not in folders:
            folders[shape] = tmp_path_factory.mktemp("reference")
            train(folders[shape], 2, shape, NO_DRAFTS)
            assert len(set(digests(folders[shape]))) == STEPS, "the policy must learn something"
        return folders[shape]

    return of_shape


@pytest.mark.parametrize("shape, used, ranks, interruption", CASES)
def test_run_is_that_without_drafts(reference, tmp_path, shape, used, ranks, interruption):
    used = used.split("+")
    options = [*NO_DRAFTS, *(option for name in used for option in OPTIONS[name])]
    if interruption == "kill":
        done = train(
            tmp_path, ranks, shape, options, "--at", "3", "--kind", "ranks-die", check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    elif interruption == "stop":
        done = train(tmp_path, ranks, shape, options, "--at", "1", "--kind", "ranks", check=False)
        assert done.returncode == 0 and "told to stop" in done.stderr, done.stderr[-3000:]
        assert len(digests(tmp_path)) < STEPS
        ranks = 2  # it goes on with others than it began with
    train(tmp_path, ranks, shape, options)

    plain, lines = reference(shape), read(tmp_path)
    assert digests(tmp_path) == digests(plain)
    if ranks == 2 and "streamed" not in used and interruption != "stop":
        assert same_weights(weights(tmp_path), weights(plain))
    for ours, theirs in zip(lines, read(plain), strict=True):
        for key in {"loss", "grad_norm", "entropy", "reward"} & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-8), key
    # What is compared must have been used.
    for key in (key for name in used for key in METRICS.get(name, ())):
        assert sum(line.get(key, 0) for line in lines) > 0, key
