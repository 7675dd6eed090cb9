"""A step's samples: the stages of a rollout, timed by hand; and dynamic sampling, on hand-made
rewards and in real runs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bubblespec.config import Config, ModelConfig, RolloutConfig
from bubblespec.data.prompts import PromptSet
from bubblespec.data.schedule import InOrder
from bubblespec.dist.ranks import Ranks
from bubblespec.engine.sampling import SamplingParams
from bubblespec.records import ForwardRecord, Load, RolloutRecord, Span, StepRecord
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.sampler import Sampler
from bubblespec.types import Group, Launch, Prompt, Samples
from tests.helpers.rows import launch_of, make_rows, run_loop, samples_of
from tests.helpers.runs import read, run

WANTED = 6


class ClockByHand:
    """Stands still until it is told."""

    def __init__(self, now: float):
        self.now = now

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float):
        """A function that takes so long, whatever its arguments."""
        return lambda *_: setattr(self, "now", self.now + seconds)


def make_sampler(**parts) -> Sampler:
    return Sampler(**dict.fromkeys(Sampler.__dataclass_fields__) | parts)


# One rollout


class Engine:
    """Decodes a token for each row in a forward, in (3, 2, 2) seconds; all rows have three."""

    def __init__(self, clock: ClockByHand):
        self.clock, self.queue, self.num_forwards = clock, [], 0

    def reset(self, staying) -> None:
        self.rows = list(staying)

    def add(self, rows) -> None:
        self.rows += rows

    def step(self, *_) -> tuple[list, Load]:
        self.clock.now += (3.0, 2.0, 2.0)[self.num_forwards]
        self.num_forwards += 1
        load = Load(len(self.rows), len(self.rows), 0, 10, 0, 0)
        return (self.rows if self.num_forwards == 3 else []), load


def test_a_rollout_without_speculation_is_timed_as_a_whole():
    """Three forwards in 7 s."""
    ranks = Ranks(torch.device("cpu"))
    ranks.clock = ClockByHand(50.0)
    finished, rows = [], make_rows([Group(Prompt(900, "p", (1,), {}), 0)], 2, 3)
    record = run_loop(
        RolloutLoop(Engine(ranks.clock), ranks, SamplingParams(), on_finished=finished.append), rows
    )
    assert (
        finished == rows
        and record.num_ticks == record.drafted_tokens == record.hard_forwards == 0
        and not record.waits
    )
    assert (record.own_forwards, record.own_s, record.total_s, record.wait_s) == (3, 7.0, 7.0, 0.0)
    assert record.spans == [Span("decode", 50.0, 57.0)]
    assert [(f.begin_s, f.end_s, f.engine_s, f.own_rows) for f in record.forwards] == [
        (50.0, 53.0, 3.0, 2),
        (53.0, 55.0, 2.0, 2),
        (55.0, 57.0, 2.0, 2),
    ]


def test_a_record_says_which_forwards_and_seconds_were_of_its_own_rows():
    """A prefill, a decode with a drafted row beside it, a wait, and drafting alone."""
    loads = [Load(2, 9, 2, 9, 9, 0), Load(3, 3, 0, 12, 0, 0), Load(2, 6, 1, 14, 0, 4)]
    begun, own, ahead = [10.0, 12.0, 15.0], [2, 1, 0], [0, 1, 2]
    parts = zip(begun, loads, own, ahead, strict=True)
    forwards = [
        ForwardRecord(begin, begin + 2.0, 1.0, 0.5, *load, of_step, drafted, 0)
        for begin, load, of_step, drafted in parts
    ]
    record = RolloutRecord(10.0, 18.0, forwards, [Span("wait", 14.0, 15.0)])
    assert (record.own_forwards, record.hard_forwards) == (2, 1)
    assert (record.own_s, record.wait_s, record.total_s) == (4.0, 1.0, 8.0)
    assert record.spans == [
        Span("prefill", 10.5, 12.0),
        Span("draft soft", 12.5, 14.0),
        Span("wait", 14.0, 15.0),
        Span("draft hard", 15.5, 17.0),
    ]


@pytest.mark.parametrize("is_second", [False, True])
def test_stages_of_a_rollout_follow_one_another(monkeypatch, is_second):
    """Generating takes 8 s, the slowest rank 4 s more, scoring 2 s and then the exchange of drafts
    1 s. A further rollout of the step begins where the last one ended, 0.5 s before it looks at the
    clock."""
    clock, ranks, rollout = ClockByHand(100.0), Ranks(torch.device("cpu")), RolloutRecord()
    groups = [Group(Prompt(uid, "p", (1,), {}), 0) for uid in (900, 17)]
    ranks.clock, told = clock, []

    def generate(loop, rows, standing):
        clock.now += 8
        for row in rows.values():
            row.tokens, row.logprob, row.full_logprob = (
                np.zeros(2, np.int64),
                *np.zeros((2, 2), np.float32),
            )
        return rollout

    def scored(rows) -> np.ndarray:
        clock.now += 2
        return np.arange(4.0)[:, None]

    def learn_rollout(record, ids, *, plain_s, work_s, spent_s, was_plain):
        told.append((record, ids, plain_s, was_plain))
        clock.now += 0.25

    monkeypatch.setattr(RolloutLoop, "run", generate)
    monkeypatch.setattr(ranks, "meet", clock.passes(4))
    scoring = SimpleNamespace(on_finished=None, collect=scored)
    used_so_far: list[list[Group]] = []
    speculation = SimpleNamespace(
        begin=lambda rows, step: dict(rows),
        draft_ahead=lambda step, schedule, used, num_slots: (
            used_so_far.append(used) or SimpleNamespace(merge=clock.passes(0.75))
        ),
        learn_rollout=learn_rollout,
        store={groups[1].sample(0): "a draft"},
        proposer=SimpleNamespace(
            enabled_sources=[1],
            cost=SimpleNamespace(coefficients=np.array([3.0, 0.5, 0.25, 9.0, 0.125])),
        ),
        has_drafts=False,
        is_plain=False,
        overhead_s=4.0,
        board=None,
    )
    sampler = make_sampler(
        config=Config(rollout=RolloutConfig(num_generations=2)),
        ranks=ranks,
        engine=SimpleNamespace(num_slots=4),
        scorer=SimpleNamespace(begin=lambda groups, step: told.append((groups, step)) or scoring),
        reward_weights=[3.0],
        speculation=speculation,
    )
    earlier = [Group(Prompt(99, "", (1,), {}), 0)]
    before = SimpleNamespace(stages=[Span("reward", 99.0, 99.5)], used=earlier)
    record = sampler._sample_groups(launch_of(groups, 2), 7, before if is_second else None)
    all_used = [*earlier, *groups] if is_second else groups
    assert used_so_far == [all_used] and record.used == all_used, (
        "all that the step has drawn is no coming sample"
    )
    begin_s = 99.5 if is_second else 100.0
    assert record.stages == [
        Span("gen", begin_s, 108.0),
        Span("wait", 108.0, 112.0),
        Span("reward", 112.0, 115.0),
    ]
    assert record.spans == [Span("exchange", 114.0, 115.0)] and record.seconds == 115.0 - begin_s
    assert (
        record.rewards.tolist() == [[0.0, 3.0], [6.0, 9.0]] and ranks.place == "rollout of step 7"
    )
    # Two forwards, two prompts of a token, and four rows of two tokens that attend to 1 + 2 / 2
    # positions on average.
    plain_s = 2 * 3.0 + 2 * 0.25 + 8 * (0.5 + 0.25 + 0.125 * 2)
    assert told == [
        (groups, 7),
        (rollout, record.samples.ids, plain_s, False),
    ] and record.rollouts == [rollout]
    assert speculation.overhead_s == 5.0, "the exchange"
    assert (
        record.drafts == {groups[1].sample(0): "a draft"}
        and not record.deferred
        and record.owners.tolist() == [0] * 4
    )


# Dynamic sampling


def reward_of(uid: int, sample: int, useful_every: int) -> float:
    """Groups of prompts whose uid is a multiple of `useful_every` differ, the others do not."""
    return float(sample == 1) if uid % useful_every == 0 else 1.0


def sample_with(
    monkeypatch, useful_every: int, num_prompts: int = 40, step: int = 3, max_batches: int = 4
) -> tuple[StepRecord, list[list[int]]]:
    """A step over prompts with uids 0, 1, ...: its record, and the uids of each batch generated."""
    prompts = PromptSet([Prompt(uid, str(uid), (1, 2), {}) for uid in range(num_prompts)], 0)
    rollout = RolloutConfig(
        num_prompts_per_step=WANTED,
        num_generations=2,
        dynamic_sampling=True,
        dynamic_sampling_max_batches=max_batches,
    )
    planner, batches = InOrder(prompts, 0, WANTED, 2), []
    forward = ForwardRecord(
        0.0, 1.0, 1.0, 0.0, *Load(1, 1, 0, 1, 0, 0), own_rows=1, ahead_rows=0, looked_up_rows=0
    )

    def generate(sampler, launch: Launch, step, before=None):
        groups, number = launch.groups, len(batches)
        assert not launch.selects and launch.num_generations == 2
        assert (before is None) == (number == 0)
        if before is not None:
            assert before.used == before.generated.groups
            assert [group.prompt.uid for group in before.used] == [
                uid for batch in batches for uid in batch
            ]
            assert before.stages[-1].end_s == float(number), "where the batch before it has ended"
        batches.append([group.prompt.uid for group in groups])
        rewards = np.array(
            [[reward_of(uid, j, useful_every) for j in range(2)] for uid in batches[-1]]
        )
        tokens = [np.array([uid, j], np.int32) for uid in batches[-1] for j in range(2)]
        truncated = np.array([uid % 5 == 0 for uid in batches[-1] for _ in range(2)])
        samples = samples_of(groups, tokens, is_truncated=truncated, rewards=rewards.reshape(-1, 1))
        return StepRecord(
            step=step,
            samples=samples,
            rewards=rewards,
            generated=samples,
            all_rewards=rewards,
            owners=np.repeat(batches[-1], 2),
            batch_sizes=[len(groups)],
            rollouts=[RolloutRecord(forwards=[forward] * 7)],
            stages=[Span("gen", float(number), number + 1.0)],
            spans=[Span("exchange", number + 0.5, number + 1.0)],
            drafts=dict.fromkeys(samples.ids[::3]),
            used=groups if before is None else before.used + groups,
        )

    monkeypatch.setattr(Sampler, "_sample_groups", generate)
    record = make_sampler(
        config=Config(model=ModelConfig(path=""), rollout=rollout), schedule=planner
    ).sample(step)
    drawn = planner.state_dict()
    assert drawn["uids"].tolist() == [uid for batch in batches for uid in batch], (
        "they have had their turn"
    )
    assert drawn["visits"].tolist() == [1] * len(record.generated.groups)
    return record, batches


def uids_of(samples: Samples) -> list[int]:
    return [group.prompt.uid for group in samples.groups]


def test_useless_groups_are_replaced_by_the_first_useful_ones(monkeypatch):
    record, batches = sample_with(monkeypatch, useful_every=2)
    generated = [uid for batch in batches for uid in batch]
    useful = [uid for uid in generated if uid % 2 == 0]
    assert len(batches) > 1 and len(set(generated)) == len(generated), (
        "a prompt's noise keys would be used twice"
    )
    assert uids_of(record.samples) == useful[:WANTED]
    assert (
        uids_of(record.generated) == generated
        and record.owners.tolist() == np.repeat(generated, 2).tolist()
    )
    assert record.used == record.generated.groups
    assert record.batch_sizes == [len(batch) for batch in batches]
    assert [rollout.own_forwards for rollout in record.rollouts] == [7] * len(batches)
    assert record.stages == [Span("gen", float(n), n + 1.0) for n in range(len(batches))]
    assert record.spans == [Span("exchange", n + 0.5, n + 1.0) for n in range(len(batches))]
    assert len(record.drafts) == sum(-(-2 * len(batch) // 3) for batch in batches)
    # Everything of a group goes with it.
    for samples, rewards in (
        (record.samples, record.rewards),
        (record.generated, record.all_rewards),
    ):
        for n, uid in enumerate(uids_of(samples)):
            for j in range(2):
                assert samples.tokens[2 * n + j].tolist() == [uid, j]
                assert rewards[n, j] == samples.rewards[2 * n + j, 0] == reward_of(uid, j, 2)
                assert samples.is_truncated[2 * n + j] == (uid % 5 == 0)


@pytest.mark.parametrize("useful_every", [2, 3])
@pytest.mark.parametrize("step", range(4))
def test_as_many_prompts_are_drawn_as_will_fill_the_gap(monkeypatch, useful_every, step):
    _, batches = sample_with(monkeypatch, useful_every, step=step)
    seen, useful = [], 0
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        seen += batch
        useful = sum(uid % useful_every == 0 for uid in seen)
        if following is None:
            assert useful >= WANTED or len(batches) == 4
        else:
            assert len(following) == min(
                WANTED, math.ceil((WANTED - useful) * len(seen) / useful) if useful else WANTED
            )


def test_nothing_more_is_generated_where_all_groups_are_useful(monkeypatch):
    record, batches = sample_with(monkeypatch, useful_every=1)
    assert (
        len(batches) == 1 == len(record.batch_sizes)
        and len(record.generated) == len(record.samples) == 2 * WANTED
    )


@pytest.mark.parametrize("max_batches", [1, 2, 3])
def test_what_cannot_be_replaced_stays(monkeypatch, max_batches):
    record, batches = sample_with(monkeypatch, useful_every=1000, max_batches=max_batches)
    assert len(batches) == max_batches and len(record.generated.groups) == max_batches * WANTED
    assert uids_of(record.samples) == batches[0], (
        "none is useful: the first batch is as good as any"
    )


def test_data_may_run_out(monkeypatch):
    record, batches = sample_with(
        monkeypatch, useful_every=7, num_prompts=10, step=0, max_batches=9
    )
    assert sorted(uid for batch in batches for uid in batch) == list(range(10))
    uids = uids_of(record.samples)
    assert len(uids) == WANTED and {0, 7} <= set(uids), "both useful ones, and four others"


def test_groups_that_are_kept_stay_in_their_order(monkeypatch):
    """The useful ones are not put before the others, where there are too few of them."""
    for step in range(5):
        record, batches = sample_with(
            monkeypatch, useful_every=7, num_prompts=10, step=step, max_batches=9
        )
        uids = uids_of(record.samples)
        assert uids == [uid for batch in batches for uid in batch if uid in uids]


def test_samples_of_groups_and_joined_are_the_same_samples():
    rng = np.random.default_rng(0)
    groups = [Group(Prompt(uid, "p", (uid,), {}), 3 * uid) for uid in range(4)]
    arrays = [[rng.normal(size=n).astype(np.float32) for n in range(1, 13)] for _ in range(3)]
    fields = {
        "numbers": rng.integers(0, 5, 12),
        "is_truncated": rng.random(12) < 0.5,
        "rewards": rng.normal(size=(12, 2)),
    }
    whole = Samples(
        groups, 3, tokens=arrays[0], logprob=arrays[1], full_logprob=arrays[2], **fields
    )
    again = whole.of_groups([0]) + whole.of_groups([1, 2, 3])
    assert again.groups == groups and len(again) == 12 and again.ids == whole.ids
    for name in ("numbers", "tokens", "logprob", "full_logprob", "is_truncated", "rewards"):
        assert all(
            np.array_equal(a, b)
            for a, b in zip(getattr(whole, name), getattr(again, name), strict=True)
        ), name
    swapped = whole.of_groups([2, 0])
    assert swapped.ids == whole.ids[6:9] + whole.ids[:3]
    assert uids_of(swapped) == [2, 0] and np.array_equal(
        swapped.rewards, whole.rewards[[6, 7, 8, 0, 1, 2]]
    )


DYNAMIC = (
    "rollout.dynamic_sampling=true",
    "rollout.dynamic_sampling_max_batches=3",
    "run.max_steps=3",
    "run.save_steps=0",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dynamic")
    run(folder, 2, *DYNAMIC, "speculative.method=none")
    return folder


def test_dynamic_sampling_replaces_groups_in_a_run(plain):
    lines = read(plain)
    assert any(line["dynamic_sampling/num_batches"] > 1 for line in lines)
    for line in lines:
        assert 1 <= line["dynamic_sampling/num_batches"] <= 3
        assert (line["dynamic_sampling/num_replaced"] > 0) == (
            line["dynamic_sampling/num_batches"] > 1
        )
        if line["dynamic_sampling/num_batches"] > 1:
            assert line["frac_reward_zero_std"] > 0, "over all groups, the replaced ones included"


def test_work_of_a_rollout_is_its_forwards_without_what_precedes_the_first():
    """Forwards of 1.5 s, half a second of it for proposals, with half a second beside them; plans
    take 3 s before the first. One without rows of the step does not count."""
    of_engine = SimpleNamespace(seconds=lambda rows, *load: 2.0 * rows)
    sampler = make_sampler(speculation=SimpleNamespace(proposer=SimpleNamespace(cost=of_engine)))
    load = Load(1, 1, 0, 9, 0, 0)
    times = ((0.0, 5.0, 1), (5.0, 7.0, 1), (7.0, 9.0, 1), (9.0, 11.0, 0))
    forwards = [
        ForwardRecord(begin_s, end_s, 1.0, 0.5, *load, own, 1 - own, 0)
        for begin_s, end_s, own in times
    ]
    assert sampler._work(RolloutRecord(0.0, 11.0, forwards, [])) == (
        0.5,
        3 * (2.0 + 1.0),
        3 * (1.0 + 1.0),
    )
    assert sampler._work(RolloutRecord(0.0, 11.0, forwards[3:], [])) == (0.0, 0.0, 0.0)
