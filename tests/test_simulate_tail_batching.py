"""Tail batching in virtual time: the real planner, loop and sampler on made-up and on recorded
responses, whose weights drift or stay as they are."""

import json
from collections import Counter

import numpy as np
import pytest

from bubblespec.config import config_of_sections
from bubblespec.draft.suffix import GroupIndex
from bubblespec.errors import InputError
from bubblespec.simulate import __main__
from bubblespec.simulate.__main__ import BLANK, nested
from bubblespec.simulate.cost import RATES, ForwardCost
from bubblespec.simulate.deferral import Texts, make_schedule, steps_that_fit
from bubblespec.simulate.drafting import STOP, VOCABULARY, DraftModel, edit_share, tokens_a_pass_of
from bubblespec.simulate.recorded import RecordedWorkload
from bubblespec.simulate.run import _Rank, counted, simulate
from bubblespec.simulate.workload import Synthetic, Workload
from bubblespec.types import Group, SampleId, digest

NEVER = float("inf")
# 10 ms for a forward, 20 us for each token of it.
COST = ForwardCost([1], [20e-6], 10e-3, dict.fromkeys(RATES, 0.0))


def make_config(
    method: str = "none",
    tail: bool = True,
    *,
    prompts: int = 8,
    longest: int = 400,
    ratio: float | str = 1.5,
):
    rollout = {
        "num_prompts_per_step": prompts,
        "num_generations": 3,
        "max_completion_length": longest,
    }
    sections = {"rollout": rollout, "speculative": {"method": method}}
    tail_batching = {"enabled": tail, "over_sampling_ratio": ratio}
    return config_of_sections(
        nested(BLANK) | sections | {"tail_batching": tail_batching}, [], "the test"
    )


def make_workload(prompts: int = 8, **spec) -> Workload:
    return Workload(
        Synthetic(**({"mean": 40.0, "max": 400, "prompt": 8, "steps": 9} | spec)), prompts, 3
    )


@pytest.fixture
def trained(monkeypatch) -> list[tuple]:
    """(step, name, tokens) of all that simulated steps train on."""
    found, of_samples = [], digest

    def note(samples) -> str:
        found.extend(
            (name, tokens.tolist())
            for name, tokens in zip(samples.ids, samples.tokens, strict=True)
        )
        return of_samples(samples)

    monkeypatch.setattr("bubblespec.simulate.run.digest", note)
    return found


def in_order(workload: Workload, num_steps: int) -> dict[SampleId, list[int]]:
    """What each sample says at home, in the data's order."""
    ids = [name for step in range(num_steps) for name in workload.launch(step).ids]
    return {
        name: workload.response(workload.step_of(name), name.uid, name.sample).tolist()
        for name in ids
    }


@pytest.mark.parametrize("run", [20.0, NEVER])
def test_any_number_of_ranks_and_any_method_train_on_the_same(run, trained):
    """Each (name, tokens) once, of steps with the same digests; and none that plain order does not
    have by then."""
    first = None
    for method, num_ranks in (("none", 1), ("bubble+suffix", 2), ("none", 8)):
        trained.clear()
        steps = simulate(make_config(method), make_workload(run=run), COST, num_ranks)
        found = (
            sorted(trained),
            [
                (step.digest, step.is_long_round, step.num_deferred, step.response_tokens)
                for step in steps
            ],
        )
        first = first or found
        assert found == first, (method, num_ranks)
        assert sum(step.is_long_round for step in steps) == 3
        assert len({name for name, _ in trained}) == len(trained) == 9 * 8 * 3
    truth = in_order(make_workload(), 11)
    assert {name for name, _ in first[0]} < truth.keys()
    changed = sum(truth[name] != tokens for name, tokens in first[0])
    assert changed == 0 if run == NEVER else changed > 10


def test_without_drift_these_are_the_tokens_of_plain_order(trained):
    """By a step with nothing in the queue, key by key; what plain steps train on is that as
    well."""
    steps = simulate(make_config(), make_workload(run=NEVER), COST, 2)
    num_steps = max(step.step for step in steps if step.num_deferred == 0) + 1
    assert num_steps > 5 and steps[num_steps - 1].is_long_round
    by_tail = Counter(map(str, trained[: num_steps * 24]))
    trained.clear()
    plain = simulate(
        make_config(tail=False), make_workload(run=NEVER), COST, 2, num_steps=num_steps
    )
    assert Counter(map(str, trained)) == by_tail
    assert sum(step.response_tokens for step in plain) == sum(
        step.response_tokens for step in steps[:num_steps]
    )
    assert {step.length_ratio for step in steps if step.num_deferred == 0} == {1.0}


def seconds_per_token(steps) -> float:
    of_tail = counted(steps)
    return sum(step.seconds for step in of_tail) / sum(step.response_tokens for step in of_tail)


def test_a_heavy_tail_is_shortened():
    """Lognormal lengths of which a few are ten times as long as most: ranks wait much less."""
    spec = {"mean": 60.0, "max": 800, "sigma": 1.5, "steps": 9, "run": 100.0}
    arms = [("none", False), ("none", True), ("bubble+suffix", False), ("bubble+suffix", True)]
    found = [
        simulate(make_config(*arm, longest=800), make_workload(**spec), COST, 4) for arm in arms
    ]
    plain, tail, drafts, both = map(seconds_per_token, found)
    assert tail < plain / 1.4 and both < min(tail, drafts)
    waiting = [np.mean([step.bubble_ratio for step in steps]) for steps in found]
    assert waiting[1] < 0.6 * waiting[0] and waiting[3] < waiting[2]


def test_the_same_run_takes_the_same_time():
    def figures() -> list:
        return [
            vars(step) | {"lanes": 0}
            for step in simulate(make_config("bubble+suffix"), make_workload(run=30.0), COST, 3)
        ]

    assert figures() == figures()


def test_what_is_over_is_forgotten(monkeypatch):
    """At the end of a long run no more responses, prompts and names are kept than after a few
    steps."""
    kept, forget = [], Workload.forget

    def count(workload: Workload, step: int) -> None:
        forget(workload, step)
        kept.append((len(workload._responses), len(workload._batches)))

    of_names, run_step = [], _Rank._run_step
    monkeypatch.setattr(Workload, "forget", count)
    monkeypatch.setattr(
        _Rank,
        "_run_step",
        lambda rank, step: (run_step(rank, step), of_names.append(len(rank.texts._launched))),
    )
    simulate(make_config(longest=60), make_workload(mean=20.0, max=60, run=30.0, steps=60), COST, 2)
    kept = kept[60:]  # what was asked for before the first step, to count tokens
    assert len(kept) == 60
    for early, late in ((kept[:20], kept[40:]), (of_names[:40], of_names[80:])):
        assert np.max(late, axis=0).tolist() <= np.max(early, axis=0).tolist()
    assert max(of_names) < 2 * 8


# What samples say


def first_mismatch(one: np.ndarray, other: np.ndarray) -> int:
    both = min(len(one), len(other))
    return int(np.append(np.flatnonzero(one[:both] != other[:both]), both)[0])


def true_text(length: int, seed: int = 0) -> np.ndarray:
    return np.append(np.random.default_rng(seed).integers(0, VOCABULARY, length - 1), STOP)


@pytest.mark.parametrize(
    ("drifts", "ages", "wanted"),
    [
        (False, (0, 1), 100.0),
        (False, (0, 7), 100.0),
        (False, (1, 2), 100.0),
        (False, (3, 8), 100.0),
        (True, (0, 1), 100.0),
        (True, (0, 4), 25.0),
        (True, (1, 2), 100.0),
        (True, (2, 6), 25.0),
    ],
)
def test_responses_of_later_weights_leave_each_other_as_late_as_they_should(drifts, ages, wanted):
    """Age 0: the response at home."""
    model, true, found = DraftModel(100.0, 2.0, drifts), true_text(4000), []
    for uid in range(400):
        one, other = (
            model.later((0, uid, 0), true, 9000, STOP, age) if age else true for age in ages
        )
        found.append(first_mismatch(one, other))
    assert np.mean(found) == pytest.approx(wanted, rel=0.15)  # 3 standard errors


@pytest.mark.parametrize("ages", [(0, 1), (2, 5)])
@pytest.mark.parametrize("tokens_a_pass", [1.0, 2.0, 4.0])
def test_after_that_they_share_as_much_as_a_draft_and_its_response(tokens_a_pass, ages):
    """Tokens a pass of the real suffix index, where both have left what they had in common from the
    start."""
    model, gained, passes = DraftModel(1.0, tokens_a_pass), 0, 0
    for uid in range(6):
        true, index, done = true_text(1500, uid), GroupIndex(), 0
        draft, response = (
            model.later((0, uid, 0), true, 9000, STOP, age) if age else true for age in ages
        )
        index.add_draft(0, draft)
        while done < len(response):
            proposed, *_ = index.propose(0, 128)
            count = first_mismatch(proposed, response[done:]) + 1
            index.extend(0, response[done : done + count])
            done, passes = done + count, passes + 1
        gained += len(response)
    assert gained / passes == pytest.approx(tokens_a_pass, rel=0.15)


@pytest.mark.parametrize("tokens_a_pass", [1.0, 1.05, 2.0, 5.0, 14.4, 40.0])
def test_a_share_of_edits_and_tokens_a_pass_are_each_other_the_other_way_round(tokens_a_pass):
    assert tokens_a_pass_of(edit_share(tokens_a_pass)) == pytest.approx(tokens_a_pass, rel=1e-9)


def test_earlier_drafts_know_nothing_of_later_responses():
    """A draft made before home leaves the response at home; what later weights say leaves it
    somewhere else."""
    model, true, nothing = DraftModel(100.0, 2.0), true_text(2000), np.empty(0, np.int64)
    agreed = []
    for uid in range(200):
        draft = model.text((0, uid, 0), true, 9000, STOP, 1, nothing)
        later = model.later((0, uid, 0), true, 9000, STOP, 1)
        leaves = first_mismatch(draft, true), first_mismatch(later, true)
        agreed.append(leaves[0] == leaves[1])
        assert first_mismatch(draft, later) == min(leaves) or agreed[-1]
    assert np.mean(agreed) < 0.1


def launched_at(step: int, workload: Workload, version: int) -> tuple[Texts, Group]:
    texts, group = Texts(workload), workload.launch(0).groups[0]
    texts.begin(step, [group])
    texts.begin(version, [])
    return texts, group


@pytest.mark.parametrize("drift", [0, 1])
def test_a_deferred_sample_goes_on_from_what_it_has(drift):
    """Whatever tokens a draft of it has, what comes after them begins with them, ends as a response
    does, and once more so under still later weights."""
    workload, nothing, differ = (
        make_workload(run=40.0, mean=200.0, drift=drift),
        np.empty(0, np.int64),
        0,
    )
    texts, group = launched_at(0, workload, 0)
    for sample in map(group.sample, range(3)):
        texts.version = 0
        home = texts.response(sample, 400)
        np.testing.assert_array_equal(home, workload.response(0, sample.uid, sample.sample))
        texts.version = 2
        later = texts.response(sample, 400)
        np.testing.assert_array_equal(texts.text(sample, 400, nothing), later)
        differ += not np.array_equal(later, home)
        for cut in (1, len(home) // 2, len(home) - 1):
            texts.version = 1
            draft = texts.text(sample, 400, home[:cut])
            np.testing.assert_array_equal(draft[:cut], home[:cut])
            for have in (draft[: min(cut + 5, len(draft) - 1)], draft[:-1]):
                texts.version = 2
                again = texts.text(sample, 400, have)
                np.testing.assert_array_equal(again[: len(have)], have)
                assert len(have) < len(again) <= 400 and (again[-1] == STOP or len(again) == 400)
                assert STOP not in again[:-1]
                if np.array_equal(have, later[: len(have)]):
                    np.testing.assert_array_equal(again, later)
    assert differ > 0
    texts.end([group])
    assert not texts._launched


def test_before_it_is_launched_a_sample_is_drafted_as_ever():
    """Also where tail batching launches it sooner than the data's order does."""
    workload = make_workload(run=40.0, mean=200.0)
    texts = Texts(workload)
    sample = workload.launch(3).groups[1].sample(2)
    truth = workload.response(3, sample.uid, 2)
    draft = workload.draft(3, sample.uid, 2, 1, 400, truth[:0])
    for version in (1, 2, 3):
        texts.begin(version, [])
        np.testing.assert_array_equal(texts.text(sample, 400, truth[:0]), draft)
    texts.begin(2, [workload.launch(3).groups[1]])
    np.testing.assert_array_equal(texts.text(sample, 400, truth[:0]), truth)
    assert not np.array_equal(draft, truth)


# Recorded runs and the command line

RECORDED = "tests/data/replay/2_ranks_none"


def test_a_recorded_run_is_simulated_as_far_as_its_prompts_reach(trained):
    """Each response that it trains on as it was recorded, in fewer steps."""
    workload = RecordedWorkload(RECORDED)
    workload.drafts = DraftModel(NEVER)
    config = config_of_sections(
        nested(workload.config),
        ["speculative.method=none", "tail_batching.enabled=true"],
        "the recorded run",
    )
    for ratio, fewer in ((1.25, 2), (1.0, 1), ("auto", 2)):
        config.tail_batching.over_sampling_ratio = ratio
        assert steps_that_fit(config, workload) == workload.num_steps - fewer
    config.tail_batching.over_sampling_ratio = 1.5
    trained.clear()
    steps = simulate(config, workload, COST, 2)
    assert len(steps) == workload.num_steps - 2 and any(step.is_long_round for step in steps)
    names = [name for name, _ in trained]
    assert (
        len(set(names))
        == len(names)
        == len(steps) * workload.num_prompts * workload.num_generations
    )
    for name, tokens in trained:
        assert workload.response(workload.step_of(name), name.uid, name.sample).tolist() == tokens


def test_a_trace_that_starts_late_goes_on_with_its_visits():
    """Prompts are named by how often the run had drawn them, also before its first recorded
    step."""
    workload = RecordedWorkload(RECORDED)
    workload._visits = {(step, uid): visit + 3 for (step, uid), visit in workload._visits.items()}
    planner = make_schedule(make_config(), workload)
    assert [group.name for group in planner.launch(0).groups[:8]] == [
        group.name for group in workload.launch(0).groups
    ]
    assert {group.visit for group in planner.launch(0).groups} == {3}


def test_what_cannot_be_simulated_is_refused():
    workload, config = RecordedWorkload(RECORDED), make_config()
    assert steps_that_fit(make_config(tail=False), workload) == workload.num_steps
    workload.config["rollout.dynamic_sampling"] = True
    with pytest.raises(InputError, match=r"tail_batching.enabled: .* rollout.dynamic_sampling"):
        steps_that_fit(config, workload)
    workload = RecordedWorkload(RECORDED)
    workload.num_steps = 2
    with pytest.raises(InputError, match="2 recorded steps; at least 3"):
        steps_that_fit(config, workload)
    config.tail_batching.response_over_sampling_ratio = 1.5
    with pytest.raises(InputError, match="response_over_sampling_ratio"):
        simulate(config, make_workload(), COST, 2)


def test_the_command_line_compares_seconds_per_trained_token(tmp_path, monkeypatch, capsys):
    """Of as many steps of both, up to the last long round; the same figures again from the
    functions."""
    COST.save(str(tmp_path / "cost.json"))
    arguments = [
        "--synthetic",
        "mean=40,max=400,steps=8,prompt=8,run=30",
        "--cost-model",
        str(tmp_path / "cost.json"),
    ]
    arguments += [
        "--ranks",
        "2",
        "--json",
        str(tmp_path / "out.json"),
        "tail_batching.enabled=true",
    ]
    arguments += [
        "tail_batching.over_sampling_ratio=1.5",
        "rollout.num_prompts_per_step=8",
        "rollout.num_generations=3",
    ]
    monkeypatch.setattr("sys.argv", ["simulate", *arguments, "speculative.method=none"])
    assert __main__.main() == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    plain, tail = report["methods"]["none"], report["methods"]["tail"]
    steps = simulate(make_config(), make_workload(steps=8, run=30.0), COST, 2)
    assert [step["seconds"] for step in tail["steps"]] == [step.seconds for step in steps]
    assert (
        len(counted(steps)) == 6
        and steps[5].is_long_round
        and len(steps) == len(plain["steps"]) == 8
    )
    assert tail["total"]["seconds_per_token"] == pytest.approx(seconds_per_token(steps), rel=1e-12)
    assert plain["total"]["seconds"] == pytest.approx(
        sum(step["seconds"] for step in plain["steps"][:6]), rel=1e-12
    )
    ratio = plain["total"]["seconds_per_token"] / tail["total"]["seconds_per_token"]
    assert (
        next(line.split()[-1] for line in printed.splitlines() if line.startswith("rollout "))
        == f"{ratio:.2f}x"
    )
    assert "step 5, a long round" in printed and "step 4 " in printed
    assert report["config"]["tail_batching"]["over_sampling_ratio"] == 1.5
