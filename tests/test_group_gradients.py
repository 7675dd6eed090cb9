"""Which samples a rank may stream and when: the use of idle time by itself, against groups and
rewards made by hand."""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from bubblespec.idle.gradients import NUM_WANTED, GroupGradients
from bubblespec.idle.work import RankView
from bubblespec.records import IdleUse, RolloutRecord, Span
from bubblespec.rollout.board import RankState
from bubblespec.types import Group, Launch, Prompt, Row

GROUPS = [Group(Prompt(uid, "", (1,) * 4, {}), 0) for uid in (50, 60, 70)]
TOKEN_S = 1e-3


class Piece(NamedTuple):
    row: Row
    num_tokens: int


class Stream:
    """Notes what it is given; every sample of this rank is a piece."""

    def __init__(self):
        self.is_ready, self.groups, self.slices, self.clock = True, [], [], itertools.count()

    def pieces(self, rows, rewards):
        self.groups.append((rows, rewards.tolist()))
        return [Piece(row, len(row.tokens)) for row in rows if row is not None]

    def max_tokens(self, limit_s: float) -> int:
        return int(limit_s / TOKEN_S)

    def seconds(self, num_tokens: int) -> float:
        return num_tokens * TOKEN_S

    def spared_s(self, num_tokens: int) -> float:
        return num_tokens * TOKEN_S / 2

    def add(self, pieces) -> Span:
        self.slices.append([piece.row.id for piece in pieces])
        return Span("gradient", next(self.clock), next(self.clock) + 0.5)


class World:
    """Some ranks with a launch of three groups of two; `scored` are rows that a rank has not taken
    yet."""

    def __init__(self, num_ranks: int, num_kept: int = 2, num_generations: int = 2, **options):
        self.launch = Launch(
            GROUPS, 2 if num_kept < num_generations else 3, num_generations, num_kept
        )
        self.scored = [[] for _ in range(num_ranks)]
        self.streams, self.works, self.num_takes = (
            [Stream() for _ in range(num_ranks)],
            [],
            [0] * num_ranks,
        )
        for rank in range(num_ranks):

            def take(rank=rank):
                self.num_takes[rank] += 1
                taken, self.scored[rank] = self.scored[rank], []
                return taken

            work = GroupGradients(
                self.launch, self.streams[rank], take, **{"max_slice_s": 0.010} | options
            )
            released = []
            engine = SimpleNamespace(
                is_idle=True,
                released=released,
                release=lambda released=released: released.append(True),
            )
            work.begin(RankView(rank, engine, {}, RolloutRecord(idle={"gradients": IdleUse()})))
            self.works.append(work)

    def score(self, rank: int, group: int, number: int, reward: float, length: int = 5) -> Row:
        row = Row(
            GROUPS[group].sample(number),
            GROUPS[group].prompt.token_ids,
            20,
            np.ones(length, np.int64),
        )
        self.scored[rank].append((row, reward))
        return row

    def tick(self) -> list[list]:
        """All ranks tell and hear; returns what each offers: the same."""
        facts = [work.facts() for work in self.works]
        states = [RankState(0, (work.wanted(),)) for work in self.works]
        offers = []
        for work in self.works:
            work.hear(facts)
            offers.append(work.offers(states))
        assert all(of == offers[0] for of in offers)
        return offers[0]

    def give(self, offers, rank: int, count: int) -> None:
        for offer in [offer for offer in offers if offer.rank == rank][:count]:
            for work in self.works:
                work.start(offer, rank)


def test_a_group_on_two_ranks_is_complete_once_both_have_told():
    world = World(2)
    first, second = world.score(0, 1, 0, 0.5), world.score(1, 1, 1, 2.0)
    third = world.score(0, 0, 1, 1.0)
    assert world.works[0].offers([]) == [] and world.tick() == [] and third.id.uid == 50
    assert world.streams[0].groups == [([first, None], [0.5, 2.0])]
    assert world.streams[1].groups == [([None, second], [0.5, 2.0])]
    offers = world.tick()
    assert [(offer.rank, offer.beside_rows) for offer in offers] == [(0, False), (1, False)]
    assert all(
        offer.costs_s == pytest.approx(0.005) and offer.saves_s == pytest.approx(0.00125)
        for offer in offers
    )
    assert not world.works[0].advance(), "nothing was given yet"
    world.give(offers, 0, 1)
    assert (
        world.works[0].advance() is False
        and world.streams[0].slices == [[first.id]]
        and not world.streams[1].slices
    )
    assert [offer.rank for offer in world.tick()] == [1]
    assert len(world.streams[0].groups) == 1, "a group is complete once"


def test_late_and_missing_rewards_keep_their_groups_out():
    """A reward that fails or times out is never told: the group's other samples wait for it in
    vain."""
    world = World(1)
    for group in range(3):
        world.score(0, group, 0, 1.0)
    world.score(0, 2, 1, 0.0)
    for _ in range(3):
        world.tick()
    assert [rows[0].id.uid for rows, _ in world.streams[0].groups] == [70]
    late = world.score(0, 0, 1, 0.0)
    world.tick()
    assert [rows[1].id for rows, _ in world.streams[0].groups] == [GROUPS[2].sample(1), late.id]


def test_of_a_race_the_samples_that_are_in_make_the_group():
    """Two of three count, whichever; rows that are out are never told of."""
    world = World(2, num_kept=2, num_generations=3)
    world.score(0, 0, 2, 1.0)
    world.tick()
    assert not world.streams[0].groups
    other = world.score(1, 0, 0, 3.0)
    world.tick()
    assert world.streams[1].groups == [([other, None], [3.0, 1.0])]


def test_groups_that_dynamic_sampling_replaces_are_left_alone():
    world = World(1, only_differing=True)
    for group, rewards in enumerate([(1.0, 1.0), (0.0, 1.0), (0.5, 0.5 + 1e-12)]):
        for number, reward in enumerate(rewards):
            world.score(0, group, number, reward)
    world.tick()
    assert [rows[0].id.uid for rows, _ in world.streams[0].groups] == [60]


def test_slices_hold_the_longest_that_fit():
    """10 tokens a slice. What is longer is left to the update."""
    world, lengths = World(1), [3, 30, 7, 6, 20, 2]
    for place, length in enumerate(lengths):
        world.score(0, place // 2, place % 2, float(place % 2), length)
    world.tick()
    offers = world.tick()
    assert len(offers) == 2 and world.works[0].wanted() == NUM_WANTED
    assert offers[0].costs_s == pytest.approx(0.010)
    world.give(offers, 0, NUM_WANTED)
    assert world.works[0].wanted() == 0
    assert world.works[0].advance() is True and world.works[0].advance() is False
    uids = [group.prompt.uid for group in GROUPS]
    done = [
        [lengths[2 * uids.index(name.uid) + name.sample] for name in names]
        for names in world.streams[0].slices
    ]
    assert done == [[7, 3], [6, 2]]
    assert world.tick() == [] and world.works[0].wanted() == 0
    record = world.works[0].view.record
    assert len(record.slices) == 2
    world.works[0].merge(SimpleNamespace(gather=lambda array: np.stack((array, [0.5]))))
    assert record.idle["gradients"] == IdleUse(
        seconds=pytest.approx(3.0), brought_s=pytest.approx((0.009 + 0.5) / 2)
    )


def test_rows_of_its_own_come_first():
    """Also those that have come from another rank after slices were given; and in-process rewards
    wait for them."""
    world = World(1, scores_beside_rows=False)
    for place in range(4):
        world.score(0, place // 2, place % 2, float(place % 2))
    work = world.works[0]
    work.view.unfinished[1] = None
    assert world.tick() == [] and world.num_takes == [0]
    work.view.unfinished.clear()
    world.tick()
    offers = world.tick()
    assert len(offers) == 2
    world.give(offers, 0, 2)
    work.view.unfinished[1] = None
    assert work.advance() is False and not world.streams[0].slices and work.wanted() == 0
    work.view.unfinished.clear()
    assert work.advance() is True and work.advance() is False and len(world.streams[0].slices) == 2


def test_where_memory_is_short_keys_and_values_go_first():
    world = World(1, frees_cache=True)
    for place in range(4):
        world.score(0, place // 2, place % 2, float(place % 2))
    engine = world.works[0].view.engine
    engine.is_idle = False
    world.tick()
    assert world.tick() == [], "drafts stay in it"
    engine.is_idle = True
    world.give(world.tick(), 0, 1)
    assert not engine.released
    world.works[0].advance()
    assert engine.released and world.streams[0].slices


def test_nothing_is_asked_for_before_costs_are_known_or_after_memory_ran_out():
    world = World(1)
    for place in range(4):
        world.score(0, place // 2, place % 2, float(place % 2))
    world.streams[0].is_ready = False
    world.tick()
    assert world.tick() == [] and world.works[0].wanted() == 0
    world.streams[0].is_ready = True
    world.give(world.tick(), 0, 2)
    world.streams[0].is_ready = False
    assert world.works[0].advance() is False and not world.streams[0].slices
