"""Whole runs with a drafter against the same without, independent of the clock (drafting.py)."""

import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from bubblespec.checkpoint import SUMS_FILE, find_damage
from bubblespec.config import Config
from bubblespec.mechanisms.drafter import mechanism as drafter_mechanism
from bubblespec.mechanisms.drafter.eagle3 import CONFIG_FILE, WEIGHTS_FILE, Eagle3
from bubblespec.mechanisms.drafter.mechanism import DRAFTER_FOLDER, DrafterRunner
from bubblespec.mechanisms.drafter.training import DrafterTraining
from bubblespec.rollout.evaluate import Evaluator
from tests.helpers.clocks import train_in_virtual_time
from tests.helpers.drafting import chain_always, train_always
from tests.helpers.plain import REWARD, STEPS, TINY, check_same, plain_run
from tests.helpers.runs import digests, read
from tests.helpers.threads import train_on_threads

OPTIONS = [*TINY, REWARD]
DRAFTER = ["drafter.warm_start=200"]
ALL, ALONE = "speculative.method=bubble+suffix+drafter", "speculative.method=drafter"
TRAINED = "drafter: trained with"


def num_drafted(folder) -> float:
    return sum(line.get("drafts/drafter/tokens", 0.0) for line in read(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return plain_run(tmp_path_factory, *OPTIONS)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """With chains in every forward."""
    folder = tmp_path_factory.mktemp("drafted")
    with pytest.MonkeyPatch.context() as patch:
        chain_always(patch.setattr)
        train_in_virtual_time(*OPTIONS, *DRAFTER, ALONE, f"run.output_dir={folder}")
    return folder


def test_chains_change_no_token(plain, drafted, capfd):
    check_same(drafted, plain)
    lines = read(drafted)
    assert num_drafted(drafted) > 100
    assert all(3 < line["drafter/chain_length"] <= 5 for line in lines)
    for line in lines:
        assert 0 <= line["drafter/accepted_5"] <= line["drafter/accepted_1"] <= 1
        assert line["drafter/num_updates"] > 0
    checkpoint = drafted / f"checkpoint-{STEPS}"
    # A loader takes every such file next to the weights.
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["model.safetensors"]
    sums = (checkpoint / SUMS_FILE).read_text()
    assert all(f"  {DRAFTER_FOLDER}/{name}\n" in sums for name in (CONFIG_FILE, WEIGHTS_FILE))
    assert find_damage(str(checkpoint)) is None
    # A run that is over needs no drafter.
    train_in_virtual_time(*OPTIONS, *DRAFTER, ALONE, f"run.output_dir={drafted}")
    assert TRAINED not in capfd.readouterr().err


def test_slices_and_evaluations_change_no_token(monkeypatch, tmp_path, plain):
    """Train beside rows, after a chain and after evaluations, which keep no hidden states."""
    patch = partial(monkeypatch.setattr, raising=False)
    train_always(patch)
    chain_always(patch)
    num_slices, kept, run_slice = [], [], DrafterTraining.run_slice
    evaluate, note = Evaluator.evaluate, DrafterRunner.note

    def noted(training, limit_s):
        num_slices.append(run_slice(training, limit_s) > 0)
        return num_slices[-1]

    def watched(evaluator, *arguments):
        before = len(kept)
        result = evaluate(evaluator, *arguments)
        (drafter,) = (m for m in evaluator.sampler.mechanisms if m.name == "drafter")
        assert len(kept) == before and drafter.runner._hidden is None
        return result

    patch(DrafterTraining, "run_slice", noted)
    patch(DrafterRunner, "note", lambda *arguments: kept.append(1) or note(*arguments))
    patch(Evaluator, "evaluate", watched)
    train_in_virtual_time(*OPTIONS, *DRAFTER, ALL, "run.eval_steps=1", f"run.output_dir={tmp_path}")
    assert digests(tmp_path) == digests(plain)
    assert sum(num_slices) > 6 and len(kept) > 16
    updates = [x["drafter/num_updates"] for x in read(tmp_path) if "drafter/num_updates" in x]
    assert updates == sorted(updates) and updates[-1] > updates[0]


def test_resumed_run_has_the_drafter_of_the_checkpoint(monkeypatch, tmp_path, drafted, capfd):
    """Before drafter.path; and a frozen one stays as it is."""
    folder = shutil.copytree(drafted, tmp_path / "run")
    checkpoint = folder / f"checkpoint-{STEPS}"
    saved = load_file(checkpoint / DRAFTER_FOLDER / WEIGHTS_FILE)
    patch = partial(monkeypatch.setattr, raising=False)
    chain_always(patch)
    train_always(patch)
    options = [*OPTIONS, *DRAFTER, ALONE, "drafter.path=/nowhere", "run.save_steps=1"]
    for further, is_frozen in ((1, True), (4, False)):
        steps = STEPS + further
        last = [f"run.max_steps={steps}", f"drafter.train={str(not is_frozen).lower()}"]
        train_in_virtual_time(*options, *last, f"run.output_dir={folder}")
        assert TRAINED not in capfd.readouterr().err
        assert read(folder)[-1]["step"] == steps and read(folder)[-1]["drafter/chain_length"] > 1
        now = load_file(folder / f"checkpoint-{steps}" / DRAFTER_FOLDER / WEIGHTS_FILE)
        assert now.keys() == saved.keys()
        assert all(torch.equal(now[name], saved[name]) for name in saved) == is_frozen


def test_a_stop_in_the_warm_start_ends_the_run(monkeypatch, tmp_path, capfd):
    train_drafter = drafter_mechanism.warm_up

    def stopped(training, examples, ranks):
        ranks.must_stop |= ranks.rank == 1
        train_drafter(training, examples, ranks)

    monkeypatch.setattr(drafter_mechanism, "warm_up", stopped)
    train_on_threads(2, *OPTIONS, *DRAFTER, ALL, f"run.output_dir={tmp_path}")
    assert capfd.readouterr().err.count("stopped after 0 of 3 updates") == 1
    assert not digests(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("checkpoint")]


def test_complete_run_has_no_drafter_to_move():
    """An evaluation of a run that is complete may still enter the TP tail."""
    sampler = SimpleNamespace(config=None, ranks=SimpleNamespace(is_main=True), params=None)
    drafter = drafter_mechanism.DrafterMechanism(sampler, None, None, id)
    with drafter.moved_to(engine=None):
        assert drafter.training is None


@pytest.mark.parametrize("has_failed", [False, True])
def test_failed_drafter_is_neither_used_nor_saved(monkeypatch, tmp_path, has_failed):
    enabled, saved = [], []
    monkeypatch.setattr(
        drafter_mechanism, "save_eagle3", lambda *arguments: saved.append(arguments)
    )
    parts = {"ranks": SimpleNamespace(is_main=True), "params": None}
    sampler = SimpleNamespace(config=Config(), **parts)
    drafter = drafter_mechanism.DrafterMechanism(sampler, None, None, id)
    drafter.source = SimpleNamespace(problem=None)
    drafter.runner = SimpleNamespace(enable=enabled.append)
    state = {"has_failed": has_failed, "drafter": Eagle3.__new__(Eagle3)}
    drafter.training = SimpleNamespace(clock=None, **state)
    plan = SimpleNamespace(without=frozenset(), step=1, works=[])
    drafter.begin_rollout(plan)
    drafter.save(str(tmp_path))
    drafter.begin_rollout(SimpleNamespace(without=frozenset(["drafter"]), step=1, works=[]))
    assert enabled == [not has_failed, False] and not drafter.training.is_enabled
    assert len(plan.works) == len(saved) == (not has_failed)
