"""Whole runs with a learned drafter against the same without: it changes no token, whatever happens
to it.

Whether chains are drawn and whether the drafter is trained in idle time depends on the clock; here
it does not (drafting.py).
"""

import errno
import json
import os
import shutil
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from bubblespec import set_up_drafter
from bubblespec.config import flatten, load_config
from bubblespec.dist.ranks import Ranks
from bubblespec.draft.learned import LearnedDrafts
from bubblespec.idle.train_drafter import TrainDrafter
from bubblespec.learn.idle_training import IdleTraining
from bubblespec.learn.warm_start import DRAFTER_FILE, WEIGHTS_FILE
from bubblespec.planner.stats import RunStats
from bubblespec.set_up_drafter import KEPT, MADE_BY, MADE_BY_FILE
from tests.helpers import clocks
from tests.helpers.clocks import train_in_virtual_time
from tests.helpers.drafting import chain_always, train_always
from tests.helpers.runs import SHORT, digests, read, run, weights

OPTIONS = [
    *SHORT,
    "rollout.num_prompts_per_step=6",
    "rollout.max_completion_length=24",
    "reward.functions=[tests.helpers.streaming.reward]",
    "optim.learning_rate=1e-3",
    "eval.num_prompts=4",  # which are no training prompts
    "eval.num_generations=1",
]
DRAFTER = ["drafter.warm_start=1500", "drafter.buffer_tokens=3000"]
ALWAYS = [*DRAFTER, "speculative.planning=always"]
ALL, ALONE = "speculative.method=bubble+suffix+drafter", "speculative.method=drafter"
SCRIPT = ("tests/helpers/drafting.py",)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Adam divides gradients by their size: what is rounded in small ones shows in the weights."""
    return a.keys() == b.keys() and all(
        torch.allclose(a[name], b[name], rtol=0, atol=1e-6) for name in a
    )


def assert_same_run(drafted, plain) -> None:
    lines = {
        line["step"]: line["rollout/digest"] for line in read(drafted) if "rollout/digest" in line
    }
    assert [lines[step] for step in sorted(lines)] == digests(plain) and len(
        set(digests(plain))
    ) == 4
    assert close(weights(drafted), weights(plain))


def num_drafted(folder) -> float:
    """Tokens that the drafter has proposed."""
    return sum(line.get("drafts/drafter/tokens", 0.0) for line in read(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    train_in_virtual_time(*OPTIONS, "speculative.method=none", f"run.output_dir={folder}")
    return folder


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """With chains in every forward."""
    folder = tmp_path_factory.mktemp("drafted")
    with pytest.MonkeyPatch.context() as patch:
        chain_always(patch.setattr)
        train_in_virtual_time(*OPTIONS, *ALWAYS, ALONE, f"run.output_dir={folder}")
    return folder


def test_chains_change_nothing(plain, drafted):
    assert_same_run(drafted, plain)
    lines = read(drafted)
    assert (
        num_drafted(drafted) > 100
        and sum(line["drafter/chain_length/rows_17"] == 3 for line in lines) == 4
    )
    assert all(0 <= line["drafter/accepted_5"] <= line["drafter/accepted_1"] <= 1 for line in lines)
    assert all(line["drafter/num_updates"] > 0 for line in lines)
    assert {WEIGHTS_FILE, DRAFTER_FILE} <= set(os.listdir(drafted / "checkpoint-4"))


@pytest.mark.parametrize(
    "method, token_s, rests",
    [(ALL, 1e-6, None), (ALONE, 1e-6, [0, 0, 0, 0]), (ALONE, 5e-4, [0, 1, 1, 1])],
)
def test_what_chains_win_decides_how_long_they_are(
    monkeypatch, tmp_path, plain, capfd, method, token_s, rests
):
    """They themselves take nothing in virtual time, and the tokens that they add to a forward much
    or little."""
    monkeypatch.setattr(clocks, "forward_seconds", lambda load: 5e-3 + token_s * load.tokens)
    train_in_virtual_time(*OPTIONS, *DRAFTER, method, f"run.output_dir={tmp_path}")
    assert_same_run(tmp_path, plain)
    lines = [line for line in read(tmp_path) if "drafter/rests" in line]
    has_chains = [any(key.startswith("drafter/chain_length/") for key in line) for line in lines]
    if rests is not None:
        assert [line["drafter/rests"] for line in lines] == rests and has_chains == [
            not at_rest for at_rest in rests
        ]
        assert (num_drafted(tmp_path) > 100) == (not rests[-1])
    assert capfd.readouterr().err.count("updates, accepted") == 1


@pytest.mark.parametrize("method", [ALL, ALONE])
def test_at_rest_nothing_of_it_is_left_but_the_samples(monkeypatch, tmp_path, plain, method, capfd):
    """Chains that save nothing are tried in the first step in which other sources leave any rows to
    them. Without another source rollouts are then plain, without ticks, and nothing is learnt from
    them."""
    learnt, learn = [], RunStats.observe_rollout
    monkeypatch.setattr(LearnedDrafts, "choose", lambda source, active, count: 0)
    monkeypatch.setattr(
        RunStats,
        "observe_rollout",
        lambda *args, **times: learnt.append(args) or learn(*args, **times),
    )
    train_in_virtual_time(
        *OPTIONS, *DRAFTER, method, "rollout.placement=in_turn", f"run.output_dir={tmp_path}"
    )
    assert_same_run(tmp_path, plain)
    assert len(learnt) == (1 if method == ALONE else 4)
    lines = [line for line in read(tmp_path) if "drafter/rests" in line]
    rests = [line["drafter/rests"] for line in lines]
    was_asked = [any("chain_length" in key for key in line) for line in lines]
    tried = was_asked.index(True) if any(was_asked) else len(lines)
    assert [bool(at_rest) for at_rest in rests] == [step > tried for step in range(len(lines))]
    assert [not at_rest for at_rest in rests] == [
        "idle/train_drafter/seconds" in line for line in lines
    ]
    table = capfd.readouterr().err
    assert (f"steps at rest: {sum(rests)}" in table) == any(was_asked)
    if method == ALONE:
        assert tried == 0 and [line["progress/ticks"] > 0 for line in lines] == [
            True,
            False,
            False,
            False,
        ]


def test_a_rollout_without_drafts_is_one_without_the_drafter(monkeypatch, tmp_path, plain):
    """Every second one is, so that drafts are held against it; the drafter does not rest for
    that."""
    chain_always(monkeypatch.setattr)
    train_in_virtual_time(*OPTIONS, *ALWAYS, ALONE, f"run.output_dir={tmp_path}")
    assert_same_run(tmp_path, plain)
    lines = [line for line in read(tmp_path) if "drafter/rests" in line]
    assert [line["drafter/rests"] for line in lines] == [0, 0, 0, 0]
    assert [line["progress/ticks"] > 0 for line in lines] == [True, False, True, False]
    assert [line.get("drafts/drafter/tokens", 0) > 0 for line in lines] == [
        True,
        False,
        True,
        False,
    ]


def test_slices_beside_rows_train_the_drafter_and_nothing_else(monkeypatch, tmp_path, plain):
    """As well right after a chain has used the policy's head, and after an evaluation."""
    patch = partial(monkeypatch.setattr, raising=False)
    train_always(patch)
    chain_always(patch)
    num_slices, num_offers, run_slice, offers = [], [], IdleTraining.run_slice, TrainDrafter.offers

    def noting(training, limit_s):
        num_slices.append(run_slice(training, limit_s) > 0)
        return num_slices[-1]

    def noting_offers(work, states):
        num_offers.append(len(found := offers(work, states)))
        return found

    monkeypatch.setattr(IdleTraining, "run_slice", noting)
    monkeypatch.setattr(TrainDrafter, "offers", noting_offers)
    train_in_virtual_time(*OPTIONS, *ALWAYS, ALL, "run.eval_steps=1", f"run.output_dir={tmp_path}")
    assert_same_run(tmp_path, plain)
    assert sum(num_slices) > 16 and max(num_offers) <= 2
    updates = [
        line["drafter/num_updates"] for line in read(tmp_path) if "drafter/num_updates" in line
    ]
    assert updates == sorted(updates) and updates[-1] > updates[0]


def rewritten(drafted, folder, change) -> str:
    """A drafter with other weights. change(tensor) -> tensor."""
    os.makedirs(folder)
    shutil.copy(drafted / "checkpoint-4" / DRAFTER_FILE, folder)
    tensors = load_file(drafted / "checkpoint-4" / WEIGHTS_FILE)
    save_file(
        {name: change(tensor).contiguous() for name, tensor in tensors.items()},
        os.path.join(folder, WEIGHTS_FILE),
    )
    return f"drafter.path={folder}"


CHANGES = {
    "scrambled": lambda tensor: (
        tensor.flatten()[torch.randperm(tensor.numel())].view_as(tensor) * 10
    ),
    "not a number": lambda tensor: torch.full_like(tensor, float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_spoilt_weights_change_nothing(monkeypatch, tmp_path, plain, drafted, change, capfd):
    patch = partial(monkeypatch.setattr, raising=False)
    chain_always(patch)
    train_always(patch)
    path = rewritten(drafted, tmp_path / "drafter", CHANGES[change])
    train_in_virtual_time(*OPTIONS, *ALWAYS, ALL, path, f"run.output_dir={tmp_path / 'run'}")
    assert_same_run(tmp_path / "run", plain)
    assert num_drafted(tmp_path / "run") > 0 and "updates, accepted" not in capfd.readouterr().err


@pytest.mark.parametrize("at, folder", [(3, "checkpoint-2"), (1, KEPT)])
def test_a_killed_run_goes_on_with_the_saved_drafter(tmp_path, plain, at, folder):
    """Of its newest checkpoint, or before the first one with what the warm start has made."""
    done = run(
        tmp_path,
        2,
        *ALWAYS,
        ALL,
        check=False,
        short=OPTIONS,
        script=(*SCRIPT, "--at", str(at), "--kind", "ranks-die"),
    )
    assert done.returncode == -signal.SIGKILL and done.stderr.count("updates, accepted") == 1, (
        done.stderr[-3000:]
    )
    assert ("checkpoint-2" in os.listdir(tmp_path)) == (at == 3)
    with open(tmp_path / folder / DRAFTER_FILE, encoding="utf-8") as file:
        saved = json.load(file)
    done = run(tmp_path, 2, *ALWAYS, ALL, short=OPTIONS, script=SCRIPT)
    assert "updates, accepted" not in done.stderr
    assert_same_run(tmp_path, plain)
    resumed = [line for line in read(tmp_path) if line["step"] == (2 if at == 3 else 0)][-1]
    assert resumed["drafter/num_updates"] == saved["num_updates"] and num_drafted(tmp_path) > 0
    assert resumed["drafter/accepted_1"] == pytest.approx(saved["accepted"][0])


def test_which_saved_drafter_a_run_goes_on_with(tmp_path):
    """A checkpoint's, else the one that is asked for, else what the warm start has made with these
    settings."""

    def found(*overrides: str, checkpoint: str | None = None):
        config = load_config(
            "configs/tiny_cpu.yaml", [*DRAFTER, f"run.output_dir={tmp_path}", *overrides]
        )
        return set_up_drafter.find(config, checkpoint, Ranks(torch.device("cpu")))

    assert found() is None and found("drafter.path=there") == ("there", "drafter.path")
    kept, checkpoint = tmp_path / KEPT, tmp_path / "checkpoint-2"
    for folder in (kept, checkpoint):
        folder.mkdir()
    (checkpoint / DRAFTER_FILE).touch()
    config = flatten(load_config("configs/tiny_cpu.yaml", [*DRAFTER, f"run.output_dir={tmp_path}"]))
    (kept / MADE_BY_FILE).write_text(json.dumps({key: config[key] for key in MADE_BY}))
    assert found() == (str(kept), "run.output_dir")
    assert (
        found("drafter.warm_start=1600") is None
        and found("run.resume_from_checkpoint=none") is None
    )
    assert found("drafter.path=there", checkpoint=str(checkpoint)) == (
        str(checkpoint),
        "run.resume_from_checkpoint",
    )
    (kept / MADE_BY_FILE).write_text("half")
    assert found() is None


def test_a_run_that_is_over_trains_no_drafter(tmp_path, capfd):
    options = [
        *OPTIONS,
        *DRAFTER,
        "run.max_steps=1",
        "tail_batching.enabled=true",
        f"run.output_dir={tmp_path}",
    ]
    train_in_virtual_time(*options, "speculative.method=none")
    train_in_virtual_time(*options, ALL)
    assert "updates, accepted" not in capfd.readouterr().err and not (tmp_path / KEPT).exists()


def test_a_drafter_that_cannot_be_kept_is_said_and_the_run_goes_on(
    monkeypatch, tmp_path, plain, capfd
):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(set_up_drafter, "save_drafter", full)
    train_in_virtual_time(*OPTIONS, *DRAFTER, ALONE, f"run.output_dir={tmp_path}")
    assert_same_run(tmp_path, plain)
    assert capfd.readouterr().err.count("warning: the drafter could not be kept") == 1
    assert not {KEPT, f"tmp-{KEPT}"} & set(os.listdir(tmp_path))


@pytest.mark.parametrize("place", ["responses", "training"])
def test_a_run_stopped_in_the_warm_start_ends_and_goes_on(tmp_path, plain, place):
    done = run(tmp_path, 2, *ALWAYS, ALL, short=OPTIONS, script=(*SCRIPT, "--in", place))
    assert (
        done.stderr.count("told to stop after 0 of 4 updates") == 1
        and "Traceback" not in done.stderr
    )
    assert not digests(tmp_path) and not [
        name for name in os.listdir(tmp_path) if name.startswith("checkpoint")
    ]
    run(tmp_path, 2, *ALWAYS, ALL, short=OPTIONS, script=SCRIPT)
    assert_same_run(tmp_path, plain)


SETTINGS = {
    "point_mass": ["speculative.rule=point_mass"],
    "tail batching": ["tail_batching.enabled=true", "tail_batching.over_sampling_ratio=1.5"],
    "LoRA": ["model.lora_r=4"],
    "dynamic sampling": ["rollout.dynamic_sampling=true", "rollout.dynamic_sampling_max_batches=2"],
    "freed cache": ["rollout.free_cache_engine=true"],
    "truncated": [
        "rollout.top_k=20",
        "rollout.top_p=0.9",
        "rollout.temperature=0.7",
        "rollout.min_completion_length=4",
    ],
    "streamed": ["optim.stream_gradients=true", "reward.num_workers=0"],
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_whatever_else_is_set(monkeypatch, tmp_path, setting):
    options, patch = (
        [*OPTIONS, *SETTINGS[setting], "run.max_steps=3"],
        partial(monkeypatch.setattr, raising=False),
    )
    train_in_virtual_time(
        *options, "speculative.method=none", f"run.output_dir={tmp_path / 'plain'}"
    )
    chain_always(patch)
    train_always(patch)
    train_in_virtual_time(*options, *ALWAYS, ALL, f"run.output_dir={tmp_path / 'drafted'}")
    assert (
        digests(tmp_path / "drafted") == digests(tmp_path / "plain")
        and len(set(digests(tmp_path / "plain"))) == 3
    )
    assert num_drafted(tmp_path / "drafted") > 0
