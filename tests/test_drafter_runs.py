"""Whole runs with a drafter against the same without: it changes no token, whatever happens to it.

Whether chains are drawn and whether the drafter is trained in idle time depends on the clock; here
it does not (helpers/drafting.py).
"""

import os
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from bubblespec.draft.drafter import DrafterRunner
from bubblespec.draft.drafter_training import DRAFTER_FILE, DrafterTraining
from bubblespec.rollout.sampler import Sampler
from tests.helpers import clocks
from tests.helpers.clocks import train_in_virtual_time
from tests.helpers.drafting import chain_always, train_always
from tests.helpers.runs import SHORT, digests, read, run, weights

OPTIONS = [
    *SHORT,
    "rollout.num_prompts_per_step=6",
    "rollout.max_completion_length=24",
    "reward.functions=[tests.helpers.rewards.remainder]",
    "optim.learning_rate=1e-3",
    "eval.num_prompts=4",  # which are no training prompts
    "eval.num_generations=1",
]
DRAFTER = ["drafter.warm_start=600"]
ALL, ALONE = "speculative.method=bubble+suffix+drafter", "speculative.method=drafter"
SCRIPT = ("tests/helpers/drafting.py",)
TRAINED = "drafter: trained with"


def assert_same_run(drafted, plain) -> None:
    """Adam divides gradients by their size: what is rounded in small ones shows in the weights."""
    assert digests(drafted)[-4:] == digests(plain) and len(set(digests(plain))) == 4
    ours, wanted = weights(drafted), weights(plain)
    assert ours.keys() == wanted.keys()
    assert all(torch.allclose(ours[n], wanted[n], rtol=0, atol=1e-6) for n in wanted)


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
        train_in_virtual_time(*OPTIONS, *DRAFTER, ALONE, f"run.output_dir={folder}")
    return folder


def test_chains_change_nothing(plain, drafted, capfd):
    assert_same_run(drafted, plain)
    lines = read(drafted)
    assert num_drafted(drafted) > 100
    assert [line["drafter/chain_length"] for line in lines] == [3] * 4
    for line in lines:
        assert 0 <= line["drafter/accepted_5"] <= line["drafter/accepted_1"] <= 1
        assert line["drafter/num_updates"] > 0
    assert DRAFTER_FILE in os.listdir(drafted / "checkpoint-4")
    # A run that is over needs no drafter.
    train_in_virtual_time(*OPTIONS, *DRAFTER, ALONE, f"run.output_dir={plain}")
    assert TRAINED not in capfd.readouterr().err


@pytest.mark.parametrize("method", [ALL, ALONE])
@pytest.mark.parametrize("token_s, has_chains", [(1e-6, True), (5e-3, False)])
def test_costs_decide_how_long_chains_are(
    monkeypatch, tmp_path, plain, capfd, method, token_s, has_chains
):
    """Chains take nothing in virtual time, and the tokens that they add to a forward much or
    little."""
    monkeypatch.setattr(clocks, "forward_seconds", lambda load: 5e-3 + token_s * load.tokens)
    train_in_virtual_time(*OPTIONS, *DRAFTER, method, f"run.output_dir={tmp_path}")
    assert_same_run(tmp_path, plain)
    if method == ALONE or not has_chains:
        assert (num_drafted(tmp_path) > 100) == has_chains
    assert capfd.readouterr().err.count(TRAINED) == 1


@pytest.mark.parametrize("ranks, method", [(2, ALONE), (4, ALL)])
def test_ranks_chain_and_train_together(tmp_path, plain, ranks, method):
    run(tmp_path, ranks, *DRAFTER, method, short=OPTIONS, script=SCRIPT)
    assert_same_run(tmp_path, plain)
    lines = read(tmp_path)
    assert num_drafted(tmp_path) > 0
    assert sum(line["idle/train_drafter/seconds"] for line in lines) > 0
    assert lines[-1]["drafter/num_updates"] > lines[0]["drafter/num_updates"]


def test_slices_train_the_drafter_alone_and_evaluations_keep_nothing_for_it(
    monkeypatch, tmp_path, plain
):
    """Slices beside rows, right after a chain has used the policy's head, and after evaluations,
    which copy no hidden states."""
    patch = partial(monkeypatch.setattr, raising=False)
    train_always(patch)
    chain_always(patch)
    num_slices, kept, run_slice = [], [], DrafterTraining.run_slice
    evaluate, note = Sampler.evaluate, DrafterRunner.note

    def noted(training, limit_s):
        num_slices.append(run_slice(training, limit_s) > 0)
        return num_slices[-1]

    def watched(sampler, *arguments):
        before = len(kept)
        result = evaluate(sampler, *arguments)
        assert len(kept) == before and sampler.drafter.source.runner._hidden is None
        return result

    patch(DrafterTraining, "run_slice", noted)
    patch(DrafterRunner, "note", lambda *arguments: kept.append(1) or note(*arguments))
    patch(Sampler, "evaluate", watched)
    train_in_virtual_time(*OPTIONS, *DRAFTER, ALL, "run.eval_steps=1", f"run.output_dir={tmp_path}")
    assert_same_run(tmp_path, plain)
    assert sum(num_slices) > 16 and len(kept) > 16
    updates = [x["drafter/num_updates"] for x in read(tmp_path) if "drafter/num_updates" in x]
    assert updates == sorted(updates) and updates[-1] > updates[0]


def test_spoilt_weights_change_nothing(monkeypatch, tmp_path, plain, drafted, capfd):
    patch = partial(monkeypatch.setattr, raising=False)
    chain_always(patch)
    train_always(patch)
    source, spoilt = drafted / "checkpoint-4", tmp_path / "drafter"
    spoilt.mkdir()
    tensors = load_file(source / DRAFTER_FILE)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    save_file(tensors, spoilt / DRAFTER_FILE)
    folder = tmp_path / "run"
    path = f"drafter.path={spoilt}"
    train_in_virtual_time(*OPTIONS, *DRAFTER, ALL, path, f"run.output_dir={folder}")
    assert_same_run(folder, plain)
    assert num_drafted(folder) > 0 and TRAINED not in capfd.readouterr().err


def test_a_killed_run_continues_with_the_drafter_of_its_checkpoint(tmp_path, plain):
    script = (*SCRIPT, "--at", "3", "--kind", "ranks-die")
    done = run(tmp_path, 2, *DRAFTER, ALL, check=False, short=OPTIONS, script=script)
    assert done.returncode == -signal.SIGKILL and done.stderr.count(TRAINED) == 1, done.stderr
    saved = load_file(tmp_path / "checkpoint-2" / DRAFTER_FILE)
    path = "drafter.path=/nowhere"  # the checkpoint's comes first
    done = run(tmp_path, 2, *DRAFTER, ALL, path, short=OPTIONS, script=SCRIPT)
    assert TRAINED not in done.stderr
    lines = {line["step"]: line for line in read(tmp_path)}  # the latest of each step
    assert [lines[step]["rollout/digest"] for step in range(4)] == digests(plain)
    assert (
        lines[2]["drafter/num_updates"] == int(saved["num_updates"]) and num_drafted(tmp_path) > 0
    )


def test_a_run_stopped_in_the_warm_start_ends_and_continues(tmp_path, plain):
    script = (*SCRIPT, "--in", "training")
    done = run(tmp_path, 2, *DRAFTER, ALL, short=OPTIONS, script=script)
    assert done.stderr.count("told to stop after 0 of 4 updates") == 1
    assert "Traceback" not in done.stderr and not digests(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("checkpoint")]
    run(tmp_path, 2, *DRAFTER, ALL, short=OPTIONS, script=SCRIPT)
    assert_same_run(tmp_path, plain)


SETTINGS = {
    "point mass, LoRA, truncated": [
        "speculative.rule=point_mass",
        "model.lora_r=4",
        "rollout.top_k=20",
        "rollout.top_p=0.9",
        "rollout.temperature=0.7",
        "rollout.min_completion_length=4",
    ],
    "tail batching, freed cache": [
        "tail_batching.enabled=true",
        "tail_batching.over_sampling_ratio=1.5",
        "rollout.free_cache_engine=true",
    ],
    "dynamic sampling": ["rollout.dynamic_sampling=true", "rollout.dynamic_sampling_max_batches=2"],
    "streamed": ["optim.stream_gradients=true", "reward.num_workers=0"],
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_whatever_else_is_set(monkeypatch, tmp_path, setting):
    options = [*OPTIONS, *SETTINGS[setting], "run.max_steps=3"]
    patch = partial(monkeypatch.setattr, raising=False)
    without, folder = tmp_path / "without", tmp_path / "drafted"
    train_in_virtual_time(*options, "speculative.method=none", f"run.output_dir={without}")
    chain_always(patch)
    train_always(patch)
    train_in_virtual_time(*options, *DRAFTER, ALL, f"run.output_dir={folder}")
    assert digests(folder) == digests(without) and len(set(digests(without))) == 3
    assert num_drafted(folder) > 0
