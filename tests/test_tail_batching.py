"""Tail batching: the planner's books against a list of all that was drawn, and whole steps of an
engine, whose weights stay as they are, against plain order."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from bubblespec.config.file import load_config
from bubblespec.data.schedule import PromptSet, StepSchedule
from bubblespec.distributed.ranks import Ranks
from bubblespec.mechanisms.tail_batching import TailBatching, best_num_launched, scaled
from bubblespec.records import Samples
from bubblespec.rewards.scorer import RolloutRewards
from bubblespec.setup import build
from bubblespec.types import StepBatch, ids_of
from tests.helpers.rows import numbered_prompts, samples_of
from tests.helpers.runs import SHORT

SEED = 5


def length_of(name, scale: int = 6) -> int:
    """A heavy tail, by name alone."""
    rng = random.Random(str(tuple(name)))
    return min(1 + int(scale * rng.paretovariate(1.2)), 400)


def play(planner, step: int) -> tuple[StepBatch, Samples, dict]:
    """A step of a planner: launch, selection by final lengths, finish."""
    launch = planner.launch(step)
    lengths = [
        [length_of(group.sample(n)) for n in range(launch.num_generations)]
        for group in launch.groups
    ]
    order = sorted(range(len(lengths)), key=lambda g: (max(lengths[g]), g))
    chosen = sorted(order[: launch.num_trained])
    cut = max(max(lengths[g]) for g in chosen)
    deferred = {
        group.sample(n): min(lengths[g][n], cut + 1)
        for g, group in enumerate(launch.groups)
        for n in range(launch.num_generations)
        if g not in chosen
    }
    groups = [launch.groups[g] for g in chosen]
    names = ids_of(groups, launch.num_generations)
    samples = samples_of(groups, [np.zeros(length_of(name), np.int32) for name in names])
    planner.finish(samples, deferred)
    return launch, samples, deferred


def make_planner(size: int = 23, ratio: float | str = 1.5) -> TailBatching:
    return TailBatching(numbered_prompts(size), SEED, 4, 3, over_sampling_ratio=ratio)


@pytest.mark.parametrize("size, ratio", [(23, 1.75), (5, 2.0), (40, 1.0), (12, "auto")])
def test_every_group_of_data_order_is_trained_on_once(size, ratio):
    """Over many epochs: what was trained on and what is queued are the first groups of plain order,
    under the same names. Metrics are those of a list of all that was launched."""
    planner, plain = make_planner(size, ratio), StepSchedule(numbered_prompts(size), SEED, 4, 3)
    trained, was_deferred, longs, lengths, waiting = [], [], 0, [], {}
    for step in range(80):
        queue = [group.name for group in planner.deferred]
        taken = {
            group.prompt.prompt_id for group in (*planner.deferred, *planner.launch(step).groups)
        }
        others = planner.replacements(step, size, planner.launch(step).groups)
        assert {group.prompt.prompt_id for group in others} == set(range(size)) - taken
        launch, samples, deferred = play(planner, step)
        names = [group.name for group in samples.groups]
        assert len(names) == 4
        is_long = len(queue) >= 4
        longs += is_long
        if is_long:
            assert names == queue[:4], "the oldest first, all of them"
        elif ratio != "auto":
            assert len(launch.groups) == scaled(4, ratio)
        trained += names
        was_deferred += [group.name for group in launch.groups if group.name not in names]
        lengths += samples.lengths.tolist()
        waiting = {name: since for name, since in waiting.items() if name not in names}
        for name, length in deferred.items():
            waiting.setdefault(name[:2], (step, []))[1].append(length)
        launched = lengths + [length for _, of_group in waiting.values() for length in of_group]
        since = [begin for begin, _ in waiting.values()]
        assert planner.metrics() == {
            "tail/is_long_round": is_long,
            "tail/num_deferred": len(waiting),
            "tail/oldest_deferred_steps": step + 1 - min(since, default=step + 1),
            "tail/cut_length": samples.lengths.max(),
            "tail/length_ratio": pytest.approx(np.mean(lengths) / np.mean(launched), rel=1e-12),
        }
    assert len(set(was_deferred)) == len(was_deferred), "no group is deferred twice"
    seen = trained + [group.name for group in planner.deferred]
    in_order = [g.name for step in range(len(seen) // 4 + 1) for g in play(plain, step)[1].groups]
    assert Counter(seen) == Counter(in_order[: len(seen)])
    assert ratio == "auto" or (longs > 5) == (ratio > 1)


def test_loaded_tail_batching_continues_from_any_step():
    planner = make_planner(23, "auto")
    for step in range(50):
        again = make_planner(23, "auto")
        again.load_state_dict(planner.state_dict())
        assert play(again, step)[0] == play(planner, step)[0]
        assert again.metrics() == planner.metrics()


def test_upcoming_groups_are_predicted_where_determined():
    planner, foreseen = make_planner(23, 1.5), {}
    for step in range(30):
        for ahead, batch in enumerate(planner.upcoming(step, 5)):
            foreseen[step, step + 1 + ahead] = [group.name for group in batch]
        head = [group.name for group in planner.deferred[4 if planner.is_long_round else 0 :]]
        assert foreseen[step, step + 1][: len(head)] == head
        launch, *_ = play(planner, step)
        names = [group.name for group in launch.groups]
        for before in range(max(step - 5, 0), step):
            coming = foreseen[before, step]
            if not planner.metrics()["tail/is_long_round"]:
                assert names == [name for name in coming if name in names]
            elif before < step - 1:
                assert set(coming) <= set(names)
    assert planner.upcoming(30, 0) == []


def expected_tokens(
    rng: np.random.Generator, longest: np.ndarray, prompts: int, launched: int, steps: int = 1000
) -> float:
    """Sequential tokens for each group trained on, by playing steps with fresh draws: a deferred
    group keeps what it has, and verifying 64 tokens of its 8 responses takes as long as decoding
    one after all others; or it is decoded again."""
    queue, tokens, trained = [], 0.0, 0
    for _ in range(steps):
        if len(queue) >= prompts:
            again = max(longest - cut for longest, cut in queue[:prompts]) + sum(
                8 * cut / 64 for _, cut in queue[:prompts]
            )
            tokens += min(again, max(longest for longest, _ in queue[:prompts]))
            del queue[:prompts]
        else:
            ordered = np.sort(rng.choice(longest, launched)).tolist()
            tokens += ordered[prompts - 1]
            queue += [(longest, ordered[prompts - 1]) for longest in ordered[prompts:]]
        trained += prompts
    return tokens / trained


@pytest.mark.parametrize("tail", ["heavy", "light", "bimodal", "none"])
@pytest.mark.parametrize("prompts", [4, 16, 32])
def test_auto_ratio_never_loses(tail, prompts):
    """Where nothing is gained, as with many responses of one length, it is 1."""
    rng = np.random.default_rng(7)
    longest = {
        "heavy": np.exp(rng.normal(4, 1, 512)),
        "light": rng.integers(90, 100, 512),
        "bimodal": np.where(rng.random(512) < 0.05, 380, 40),
        "none": np.full(512, 50),
    }[tail].astype(np.int64)
    count = best_num_launched(longest, prompts, 8)
    plain = expected_tokens(rng, longest, prompts, prompts)
    chosen = expected_tokens(rng, longest, prompts, count)
    assert chosen <= plain * 1.01
    if tail in ("heavy", "bimodal"):
        assert count > prompts and chosen < plain / 1.15
    elif prompts > 4:
        assert count == prompts


OPTIONS = [*SHORT, "rollout.num_prompts_per_step=4", "eval.num_prompts=0"]
OPTIONS += ["rollout.max_num_seqs=24", "speculative.method=none", "data.size=60"]
TAIL = ["tail_batching.enabled=true", "tail_batching.over_sampling_ratio=1.5"]


def sampler_of(folder, *options: str):
    options = [*OPTIONS, f"run.output_dir={folder}", *options]
    trainer = build(load_config("configs/tiny_cpu.yaml", options), Ranks(torch.device("cpu")))
    return trainer.sampler


def tokens_by_name(samples: Samples) -> dict:
    return {name: tokens.tolist() for name, tokens in zip(samples.ids, samples.tokens, strict=True)}


def test_fixed_weights_train_on_same_samples(tmp_path, monkeypatch):
    """Over an epoch's end: key by key the tokens of plain order, and what is queued has a beginning
    of them. Only what is trained on is scored."""
    plain, truth = sampler_of(tmp_path / "plain"), {}
    for step in range(15):
        truth |= tokens_by_name(plain.sample(step).generated)
    scored, collect = [], RolloutRewards.collect

    def noting(scoring, rows):
        scored.extend(row.id for row in rows)
        return collect(scoring, rows)

    monkeypatch.setattr(RolloutRewards, "collect", noting)
    sampler, trained = sampler_of(tmp_path / "tail", *TAIL), {}
    for step in range(10):
        new = tokens_by_name(sampler.sample(step).generated)
        assert not new.keys() & trained.keys()
        trained |= new
    assert {name: truth[name] for name in trained} == trained and scored == list(trained)
    queue = {group.sample(n) for group in sampler.schedule.deferred for n in range(4)}
    assert queue | trained.keys() == set(list(truth)[: len(queue) + len(trained)])
    assert not queue & trained.keys()
    drafts = {name: draft.tokens.tolist() for name in queue if (draft := sampler.store.get(name))}
    assert drafts and all(truth[name][: len(tokens)] == tokens for name, tokens in drafts.items())
    assert len(drafts) == len(sampler.store), "nothing else is kept"


def test_deferred_groups_without_rows_are_dropped():
    """A run that continues with other data, which it has been allowed to."""
    planner = make_planner()
    play(planner, 0)
    state, waiting = planner.state_dict(), [group.prompt.prompt_id for group in planner.deferred]
    assert len(waiting) == 2
    left = [prompt for prompt in numbered_prompts(23).prompts if prompt.prompt_id != waiting[0]]
    continued = TailBatching(PromptSet(left, 0), SEED, 4, 3, over_sampling_ratio=1.5)
    continued.load_state_dict(state)
    assert [group.prompt.prompt_id for group in continued.deferred] == waiting[1:]
    for step in range(1, 20):
        _, samples, _ = play(continued, step)
        assert waiting[0] not in {group.prompt.prompt_id for group in samples.groups}
