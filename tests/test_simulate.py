"""Simulated runs: hand calculations, equal tokens under every method, drafts, tail batching, and
the command line."""

import hashlib
import json
import math
import sys

import numpy as np
import pytest

from bubblespec.__main__ import main
from bubblespec.planner.place import place_in_turn
from bubblespec.telemetry.timeline import KINDS
from bubblespec.tools.simulate.run import counted, simulate
from bubblespec.tools.simulate.runner import CopyModel, DrafterModel
from bubblespec.tools.simulate.workload import STOP, SimulatedTexts, Spec, Workload
from bubblespec.tools.simulate.world import World
from bubblespec.types import Group, Load
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


def digests_of(steps) -> list[str]:
    return [step.digest for step in steps]


def seconds_of(steps) -> float:
    return sum(step.seconds for step in steps)


def seconds_by_hand(workload: Workload, step: int, num_ranks: int) -> tuple[float, int]:
    """Return the slowest rank's seconds, and its forwards, for one response per prompt.

    All rows start together: each one's first forward feeds its prompt, every further one a token.
    """
    cost, results = LinearCost(), []
    prompts = workload.batch(0, step, workload.num_prompts)
    owners = place_in_turn(workload.num_prompts, 1, num_ranks)
    for rank in range(num_ranks):
        own = [prompt for prompt, owner in zip(prompts, owners, strict=True) if owner == rank]
        rows = [(len(p.token_ids), len(workload.responses[step, p.prompt_id, 0])) for p in own]
        seconds, count = 0.0, max(length for _, length in rows)
        for done in range(count):
            active = [prompt for prompt, length in rows if done < length]
            fed = len(active) if done else sum(active)
            positions = sum(active) + done * len(active)
            seconds += cost(Load(len(active), fed, 0, positions, 0, 0))
        results.append((seconds, count))
    return max(results)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_run_without_drafts_equals_hand_calculation(num_ranks):
    workload = make_workload(prompts=13, generations=1)
    keys = {"loss__advantage_estimator": "reinforce_plus_plus", "loss__scale_rewards": "none"}
    keys |= {"rollout__max_num_seqs": 64, "rollout__placement": "in_turn"}
    steps = simulate(make_config("none", 13, 1, **keys), workload, LinearCost(), num_ranks)
    for step in steps:
        seconds, forwards = seconds_by_hand(workload, step.step, num_ranks)
        assert step.forwards == forwards
        assert step.seconds == pytest.approx(seconds + World(1).meeting_s, rel=1e-9)
    assert len({step.seconds for step in steps}) == 4


@pytest.mark.parametrize(
    ("method", "num_ranks"),
    [
        ("none", 1),
        ("bubble+suffix", 4),
        ("bubble+suffix+drafter", 3),
        ("bubble+suffix+quantized", 2),
    ],
)
def test_tokens_equal_workload_under_every_method(method, num_ranks):
    workload, expected = make_workload(), []
    for step, batch in enumerate(workload.batches[: workload.num_steps]):
        sha = hashlib.sha256()
        for prompt in sorted(batch, key=lambda prompt: prompt.prompt_id):
            for sample in range(workload.num_generations):
                tokens = workload.responses[step, prompt.prompt_id, sample]
                name = np.array([prompt.prompt_id, 0, sample, len(tokens)], "<i8")
                sha.update(name.tobytes() + tokens.astype("<i4").tobytes())
        expected.append(sha.hexdigest())
    assert digests_of(run(method, num_ranks, run=20.0)) == expected


def test_good_drafts_save_forwards_and_idle_time():
    none, ours = (run(method, 2, steps=6, run=1e9) for method in ("none", "bubble+suffix"))
    # The first step has no drafts.
    drafted = [step.step for step in ours if step.proposed_tokens]
    assert drafted == [1, 2, 3, 4, 5]
    assert sum(ours[n].forwards for n in drafted) < 0.5 * sum(none[n].forwards for n in drafted)
    assert ours[-1].drafted_tokens == 0  # there is no step after it
    none, ours = run("none", 2), run("bubble+suffix", 2)
    for step in (*none, *ours):
        wait = KINDS.index("wait")
        idle_s = sum((lane[lane[:, 0] == wait] @ [0, -1, 1]).sum() for lane in step.lanes)
        # Successive waits are one span in a lane, with the ticks between them.
        assert -1e-6 < idle_s / 2 - step.idle_share * step.seconds < 0.003
    assert sum(s.idle_share for s in ours[:-1]) < sum(s.idle_share for s in none[:-1])


def test_second_epoch_needs_fewer_forwards():
    none, suffix = (run(method, 2, steps=4, epochs=2)[2:] for method in ("none", "suffix"))
    assert sum(step.forwards for step in suffix) < 0.8 * sum(step.forwards for step in none)


def test_good_model_saves_time_and_bad_one_costs_little():
    spec = {"sigma": 1.5, "run": 1.0, "accept_length": 1.0}
    none_s = seconds_of(run("none", 2, **spec))
    for model, limit in (((3.0, 0.05), 0.7), ((1.05, 0.3), 1.1)):
        assert seconds_of(run("drafter", 2, drafter=DrafterModel(*model), **spec)) < limit * none_s
    for model, limit in (((0.95, 0.3), 0.6), ((0.95, 0.7), 1.01), ((0.3, 0.5), 1.1)):
        assert seconds_of(run("quantized", 2, quantized=CopyModel(*model), **spec)) < limit * none_s


def test_tail_batching_saves_time_and_drafts_keep_tokens():
    config = {"prompts": 8, "generations": 2}
    spec = config | {"steps": 8, "sigma": 1.5, "run": 30.0, "mean": 30.0}
    plain, tail, drafts = (
        run(method, 2, config=config | keys, **spec)
        for method, keys in (("none", {}), ("none", TAIL), ("bubble+suffix", TAIL))
    )
    assert digests_of(tail) == digests_of(drafts)
    done = counted(tail)
    assert done[-1].is_long_round and len(done) > 2
    per_token = [seconds_of(s) / sum(step.response_tokens for step in s) for s in (done, plain)]
    assert per_token[0] < 0.95 * per_token[1]


@pytest.mark.parametrize("method", ["none", "bubble+suffix"])
def test_reward_model_takes_its_share_or_idle_time(method):
    """Scoring costs by tokens alone; the ranks share the rest evenly, up to one response."""
    token_s, workload = 1e-3, make_workload()
    cost = LinearCost(forward_s=0.0, token_s=token_s, position_s=0.0)
    off = {"reward__model_in_idle_time": False}
    plain = run(method)
    after, idle = run(method, reward_cost=cost, config=off), run(method, reward_cost=cost)
    assert digests_of(plain) == digests_of(after) == digests_of(idle)
    for step, (without, late, early) in enumerate(zip(plain, after, idle, strict=True)):
        sizes = [
            len(workload.responses[step, prompt.prompt_id, sample]) + len(prompt.token_ids)
            for prompt in workload.batch(0, step, workload.num_prompts)
            for sample in range(4)
        ]
        own_s = token_s * sum(sizes) / 2
        if method == "none":  # with drafts, idle time is used up either way
            assert own_s <= late.seconds - without.seconds < own_s + token_s * max(sizes) + 0.1
            assert early.idle_share < late.idle_share
    assert 0.1 < seconds_of(after) - seconds_of(idle) < seconds_of(after) - seconds_of(plain)


def test_deferred_sample_continues_under_later_weights():
    """Drafts by weights before the sample's own step do not foresee the later text."""
    workload = make_workload(steps=6, mean=200.0, run=40.0)
    group = Group(workload.batch(0, 1, 4)[0], 0)
    sample, texts = group.sample(0), SimulatedTexts(workload)
    true = workload.responses[1, sample.prompt_id, 0]
    draft = texts.text(sample, 300)  # by the weights of step 0
    np.testing.assert_array_equal(texts.text(sample, 300, draft[:20]), draft)
    texts.begin(1, [group])
    np.testing.assert_array_equal(texts.text(sample, 300), true)
    texts.begin(3, [])
    later = texts.text(sample, 300)
    assert not np.array_equal(later, true) and not np.array_equal(later, draft)
    at = first_mismatch(later, true) + 5
    np.testing.assert_array_equal(texts.text(sample, 300, true[:at])[:at], true[:at])
    texts.end([group])
    np.testing.assert_array_equal(texts.text(sample, 300), draft)


@pytest.mark.parametrize("distance, drift", [(-1, 0.7), (-7, 0.0), (3, 0.0), (-7, 0.7)])
def test_first_mismatch_has_given_mean(distance, drift):
    spec, true = Spec(run=100.0, drift=drift), true_text(4000)
    texts = [spec.other((0, prompt_id, 0), true, 9000, STOP, distance) for prompt_id in range(400)]
    found = [first_mismatch(text, true) for text in texts]
    # Of a geometric distribution; 3 standard errors.
    wanted = 1 / math.expm1(abs(distance) ** drift / 100.0)
    assert np.mean(found) == pytest.approx(wanted, rel=0.15)


def test_older_weights_never_get_further():
    """So an old draft that newer weights mend only gains."""
    spec, true, found = Spec(run=50.0), true_text(300), []
    for prompt_id in range(20):
        at = [
            first_mismatch(spec.other((0, prompt_id, 0), true, 9000, STOP, -age), true)
            for age in range(9)
        ]
        assert at[0] == len(true) and at == sorted(at, reverse=True)
        found.append(at)
    assert np.mean(found, axis=0)[8] < np.mean(found, axis=0)[1]


@pytest.mark.parametrize("accept_length", [1.5, 4.0])
def test_suffix_matches_gain_given_accept_length(accept_length):
    """The real suffix index follows drafts that have left their responses at the first token."""
    tokens = forwards = 0
    for prompt_id in range(3):
        true = true_text(1000, prompt_id)
        index, done = GroupIndex(), 0
        spec = Spec(run=1.0, accept_length=accept_length)
        index.row(0, spec.diverged((0, prompt_id, 0), true, 9000, STOP, 0))
        while done < len(true):
            proposed, *_ = index.propose(0, 128)
            gained = first_mismatch(proposed, true[done:]) + 1
            index.extend(0, true[done : done + gained])
            done += gained
            forwards += 1
        tokens += done
    assert tokens / forwards == pytest.approx(accept_length, rel=0.15)


def test_synthetic_lengths_and_epochs_follow_the_spec():
    workload = make_workload(8, 16, mean=100.0, max=100_000, sigma=0.8, steps=8, epochs=2)
    lengths = [len(text) for (step, _, _), text in workload.responses.items() if step < 4]
    assert np.mean(lengths) == pytest.approx(100.0, rel=0.25)
    first, again = ([p.prompt_id for p in workload.batch(0, step, 8)] for step in (1, 5))
    assert first == again
    sample = Group(workload.batch(0, 1, 8)[0], 1).sample(0)
    assert workload.key(sample) == (5, sample.prompt_id, 0)


SMALL = ["--synthetic", "mean=30,max=100,prompt=8,run=50,steps=3", "--cost", "h200:7b"]
SMALL += ["rollout.num_prompts_per_step=4", "rollout.num_generations=2"]


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["", "simulate", *SMALL, *arguments])
    return main()


def test_command_compares_method_with_no_drafts(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--ranks", "2", "--json", str(out)]
    assert call(monkeypatch, *options) == 0
    printed, progress = capsys.readouterr()
    assert "about 1 min of one core: none, auto" in progress
    assert "not measured: Qwen2.5-7B" in printed and "speed-up of rollouts" in printed
    report = json.loads(out.read_text())
    assert list(report["methods"]) == ["none", "auto"]
    for found in report["methods"].values():
        assert found["total"]["seconds"] == sum(step["seconds"] for step in found["steps"])
    assert call(monkeypatch, *options) == 2 and "exists" in capsys.readouterr().err
    assert call(monkeypatch, "--ranks", "2", "--reward-model", "h200:0.5b") == 0
    printed, progress = capsys.readouterr()
    assert "scored after, scored in idle time" in progress and "speed-up of rollouts" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks: 0 for 4 prompts"),
        (["--drafter", "share=0.1", "speculative.method=bubble"], "has none"),
        (["--synthetic", "mean=x"], "--synthetic: mean=x is no float"),
        (["--synthetic", "steps=3,epochs=2"], "--synthetic: epochs: 3 steps are not 2 equal"),
        (["model.dtype=float64"], "give section.key=value of rollout"),
        (["rollout.max_completion_length=50"], "give it as max in --synthetic"),
        (["--cost", "nothing"], "nothing: neither the folder of a recorded run nor a roofline"),
    ],
)
def test_wrong_arguments_end_in_one_line(monkeypatch, capsys, options, message):
    assert call(monkeypatch, *options) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
