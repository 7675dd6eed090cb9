"""Simulated runs: calculations by hand, the same tokens under every method, good and bad drafts,
tail batching, a learned drafter, and the command line."""

import hashlib
import json
import sys

import numpy as np
import pytest

from bubblespec.__main__ import main
from bubblespec.engine.batch import Load
from bubblespec.planner.place import place_in_turn
from bubblespec.rollout import board as boards
from bubblespec.telemetry.timeline import KINDS
from bubblespec.tools.simulate.run import counted, simulate
from bubblespec.tools.simulate.runner import DrafterModel
from bubblespec.tools.simulate.workload import STOP, Spec, Texts, Workload
from bubblespec.tools.simulate.world import World
from bubblespec.types import Group
from tests.helpers.simulated import (
    LinearCost,
    first_mismatch,
    make_config,
    make_workload,
    run,
    true_text,
)
from tests.helpers.suffix import GroupIndex

TAIL = {"tail_batching__enabled": True, "tail_batching__over_sampling_ratio": 1.5}


def seconds_by_hand(workload: Workload, step: int, num_ranks: int) -> tuple[float, int]:
    """One response per prompt, all together from the first forward on, where every prompt fits:
    each row's first forward feeds its prompt, every further one a token. Returns the slowest rank's
    seconds, and its forwards."""
    cost, results = LinearCost(), []
    prompts = workload.batch(0, step, workload.num_prompts)
    owners = place_in_turn(workload.num_prompts, 1, num_ranks)
    for rank in range(num_ranks):
        own = [prompt for prompt, owner in zip(prompts, owners, strict=True) if owner == rank]
        rows = [(len(p.token_ids), len(workload.responses[step, p.uid, 0])) for p in own]
        seconds, count = 0.0, max(length for _, length in rows)
        for done in range(count):
            active = [prompt for prompt, length in rows if done < length]
            fed = len(active) if done else sum(active)
            positions = sum(active) + done * len(active)
            seconds += cost(Load(len(active), fed, 0, positions, 0, 0))
        results.append((seconds, count))
    return max(results)


def test_rarer_ticks_cost_no_time(monkeypatch):
    """Half as many as at a fixed distance, for the same tokens in rollouts that are no longer."""
    found, post = [], World.post
    for share in (0.0, boards.RELAXED_SHARE):
        posts: list[int] = []

        def count(world: World, rank: int, tick: int, numbers, posts=posts) -> None:
            posts.append(tick)
            post(world, rank, tick, numbers)

        monkeypatch.setattr(World, "post", count)
        monkeypatch.setattr(boards, "RELAXED_SHARE", share)
        sizes = {"prompts": 4, "generations": 2}
        config = {"longest": 1500, "rollout__tp_tail_max_rows": 0, **sizes}
        spec = {"mean": 400.0, "max": 1500, "steps": 3, **sizes}
        steps = run("bubble", cost=LinearCost(20e-3), config=config, **spec)
        seconds = sum(step.seconds for step in steps)
        found.append((len(posts), seconds, [step.digest for step in steps]))
    (often, often_s, digests), (rare, rare_s, same) = found
    assert 0 < rare < 0.5 * often and digests == same
    assert rare_s < 1.01 * often_s


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_run_without_drafts_takes_what_a_calculation_by_hand_says(num_ranks):
    workload = make_workload(prompts=13, generations=1)
    keys = {"loss__advantage_estimator": "reinforce_plus_plus", "loss__scale_rewards": "none"}
    keys |= {"rollout__max_num_seqs": 64, "rollout__placement": "in_turn"}
    steps = simulate(make_config("none", 13, 1, **keys), workload, LinearCost(), num_ranks)
    for step in steps:
        seconds, forwards = seconds_by_hand(workload, step.step, num_ranks)
        assert step.forwards == forwards
        assert step.seconds == pytest.approx(seconds + World(1).meeting_s, rel=1e-9)
    assert len({step.seconds for step in steps}) == 4


def expected_digests(workload: Workload) -> list[str]:
    """SHA-256 over the workload's own responses."""
    digests = []
    for step in range(workload.num_steps):
        sha = hashlib.sha256()
        for prompt in sorted(workload.batch(0, step, 0), key=lambda p: p.uid):
            for sample in range(workload.num_generations):
                tokens = workload.responses[step, prompt.uid, sample]
                name = np.array([prompt.uid, 0, sample, len(tokens)], "<i8")
                sha.update(name.tobytes() + tokens.astype("<i4").tobytes())
        digests.append(sha.hexdigest())
    return digests


@pytest.mark.parametrize(
    ("method", "num_ranks"), [("none", 1), ("bubble+suffix", 4), ("bubble+suffix+drafter", 3)]
)
def test_tokens_are_those_of_the_workload_whatever_the_method(method, num_ranks):
    steps = run(method, num_ranks, run=20.0)
    assert [step.digest for step in steps] == expected_digests(make_workload())


def test_good_drafts_save_forwards_and_idle_time():
    none, ours = (run(method, 2, steps=6, run=1e9) for method in ("none", "bubble+suffix"))
    # The first step has no drafts, and the guard makes one without them to compare with.
    drafted = [step.step for step in ours if step.proposed_tokens]
    assert len(drafted) == 4
    assert sum(ours[n].forwards for n in drafted) < 0.5 * sum(none[n].forwards for n in drafted)
    assert ours[-1].drafted_tokens == 0  # there is no step after it
    none, ours = run("none", 2), run("bubble+suffix", 2)
    for step in (*none, *ours):
        wait = KINDS.index("wait")
        idle_s = sum((lane[lane[:, 0] == wait] @ [0, -1, 1]).sum() for lane in step.lanes)
        assert step.idle_share == pytest.approx(idle_s / 2 / step.seconds, abs=1e-6)
    assert sum(s.idle_share for s in ours[:-1]) < sum(s.idle_share for s in none[:-1])


def test_an_epoch_before_saves_forwards():
    spec = {"steps": 4, "epochs": 2}
    none, suffix = (
        sum(step.forwards for step in run(method, 2, **spec)[2:]) for method in ("none", "suffix")
    )
    assert suffix < 0.8 * none


def test_a_drafter_shortens_a_tail_of_few_long_rows():
    spec = {"sigma": 1.5, "run": 1.0, "accept_length": 1.0}
    none = sum(step.seconds for step in run("none", 2, **spec))
    good, costly = (
        sum(step.seconds for step in run("drafter", 2, drafter=DrafterModel(*model), **spec))
        for model in ((3.0, 0.05), (1.05, 0.3))
    )
    assert good < 0.7 * none
    assert costly < 1.1 * none  # one that is seldom right is found out


# Tail batching


def test_tail_batching_saves_time_and_no_draft_changes_what_is_trained_on():
    spec = {"prompts": 8, "generations": 2, "steps": 8, "sigma": 1.5, "run": 30.0, "mean": 30.0}
    config = {"prompts": 8, "generations": 2}
    plain, tail, drafts = (
        run(method, 2, config=config | keys, **spec)
        for method, keys in (("none", {}), ("none", TAIL), ("bubble+suffix", TAIL))
    )
    assert [step.digest for step in tail] == [step.digest for step in drafts]
    done = counted(tail)
    assert done[-1].is_long_round and len(done) > 2

    def seconds_per_token(steps) -> float:
        return sum(s.seconds for s in steps) / sum(s.response_tokens for s in steps)

    assert seconds_per_token(done) < 0.95 * seconds_per_token(plain)


def test_a_deferred_sample_is_finished_by_later_weights():
    """It says something else from its first mismatch on; drafts of it by weights before its own
    step know nothing of that."""
    workload = make_workload(steps=6, mean=200.0, run=40.0)
    group = Group(workload.batch(0, 1, 4)[0], 0)
    sample, texts = group.sample(0), Texts(workload)
    true = workload.responses[1, sample.uid, 0]
    draft = texts.text(sample, 300)  # by the weights of step 0
    np.testing.assert_array_equal(texts.text(sample, 300, draft[:20]), draft)
    texts.begin(1, [group])
    np.testing.assert_array_equal(texts.text(sample, 300), true)
    texts.begin(3, [])
    later = texts.text(sample, 300)
    assert not np.array_equal(later, true) and not np.array_equal(later, draft)
    at = first_mismatch(later, true)
    continued = texts.text(sample, 300, true[: at + 5])
    np.testing.assert_array_equal(continued[: at + 5], true[: at + 5])
    texts.end([group])
    np.testing.assert_array_equal(texts.text(sample, 300), draft)


# Texts


@pytest.mark.parametrize("distance", [-7, 3])
def test_the_first_mismatch_comes_as_late_as_it_should(distance):
    model, true = Spec(run=100.0), true_text(4000)
    texts = [model.other((0, uid, 0), true, 9000, STOP, distance) for uid in range(400)]
    found = [first_mismatch(text, true) for text in texts]
    assert np.mean(found) == pytest.approx(100.0, rel=0.15)  # 3 standard errors


@pytest.mark.parametrize("accept_length", [1.5, 4.0])
def test_matching_gains_about_the_accept_length(accept_length):
    """The real suffix index on drafts that have left their responses at the first token."""
    tokens = forwards = 0
    for uid in range(3):
        true = true_text(1000, uid)
        index, done = GroupIndex(), 0
        model = Spec(run=1.0, accept_length=accept_length)
        index.add_draft(0, model.diverged((0, uid, 0), true, 9000, STOP, 0))
        while done < len(true):
            proposed, *_ = index.propose(0, 128)
            gained = first_mismatch(proposed, true[done:]) + 1
            index.extend(0, true[done : done + gained])
            done += gained
            forwards += 1
        tokens += done
    assert tokens / forwards == pytest.approx(accept_length, rel=0.15)


def test_synthetic_lengths_have_the_mean_and_epochs_repeat_prompts():
    workload = make_workload(8, 16, mean=100.0, max=100_000, sigma=0.8, steps=8, epochs=2)
    lengths = [
        len(workload.responses[step, prompt.uid, sample])
        for step in range(4)
        for prompt in workload.batch(0, step, 8)
        for sample in range(16)
    ]
    assert np.mean(lengths) == pytest.approx(100.0, rel=0.25)
    prompts = [[p.uid for p in workload.batch(0, step, 8)] for step in (1, 5)]
    assert prompts[0] == prompts[1]
    sample = Group(workload.batch(0, 1, 8)[0], 1).sample(0)
    assert workload.key(sample) == (5, sample.uid, 0)


# The command line

SMALL = "mean=30,max=100,prompt=8,run=50,steps=3"
ROWS = ["rollout.num_prompts_per_step=4", "rollout.num_generations=2"]


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["", "simulate", *arguments])
    return main()


def test_the_command_line_compares_the_method_with_no_drafts(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--synthetic", SMALL, "--ranks", "2", "--cost", "h200:7b", "--json", str(out), *ROWS]
    assert call(monkeypatch, *options) == 0
    printed = capsys.readouterr().out
    assert "roofline, not measured: Qwen2.5-7B" in printed and "speed-up of rollouts" in printed
    report = json.loads(out.read_text())
    assert list(report["methods"]) == ["none", "bubble+suffix"]
    for found in report["methods"].values():
        assert found["total"]["seconds"] == sum(step["seconds"] for step in found["steps"])
    assert call(monkeypatch, *options) == 2 and "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ranks", "0"], "--ranks: 0 for 4 prompts"),
        (["--drafter", "share=0.1"], "has none"),
        (["--synthetic", "mean=x"], "--synthetic: mean=x is no float"),
        (["--synthetic", "means=1"], "--synthetic: unknown name 'means'"),
        (["--synthetic", "max=2"], "--synthetic: max: 2 must be at least 4"),
        (["--synthetic", "steps=3,epochs=2"], "--synthetic: epochs: 3 steps are not 2 equal"),
        (["model.dtype=float64"], "give section.key=value of rollout"),
        (["rollout.max_completion_length=50"], "give it as max in --synthetic"),
        (["--cost", "nothing"], "nothing: neither the folder of a recorded run nor a roofline"),
    ],
)
def test_wrong_arguments_end_in_one_line(monkeypatch, capsys, options, says):
    arguments = ["--synthetic", SMALL, *ROWS, "--cost", "h200:7b", *options]
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and says in error
