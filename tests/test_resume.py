"""A run that is killed goes on with the samples of the undisturbed one: around the end of an epoch,
and where dynamic sampling has begun to replace groups.

A kill is an exception that nothing catches, out of the engine or the optimizer: what the next start
finds is what a process that is gone has left, the last checkpoint. In virtual time, so that what is
drafted ahead is the same in every run of the test.
"""

import pytest

from bubblespec.checkpoint import (
    SPECULATION_FILE,
    _check_same_run,
    list_checkpoints,
    load_arrays,
    step_of,
)
from bubblespec.config import flatten
from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.store import HEADER
from bubblespec.errors import InputError
from bubblespec.rollout.sampler import Sampler
from bubblespec.setup import build
from tests.helpers.clocks import virtual_time
from tests.helpers.runs import ALWAYS_DRAFT, SHORT, digests, read, same_weights, weights
from train import train

STEPS, PROMPTS = 5, 4
OPTIONS = [
    *SHORT,
    f"rollout.num_prompts_per_step={PROMPTS}",
    "rollout.max_completion_length=24",
    f"run.max_steps={STEPS}",
    "eval.num_prompts=0",
    "rollout.max_num_seqs=16",
]
DRAFTING = ("speculative.method=bubble+suffix", ALWAYS_DRAFT)
DYNAMIC = ("rollout.dynamic_sampling_max_batches=3",)


class Killed(BaseException):
    """The process is gone."""


class Life:
    """Runs of one folder, one after the other. `batches`: of each step the batches that its last
    run generated, each as (uid, visit) of its groups."""

    def __init__(self, monkeypatch, folder, *options: str):
        self.monkeypatch, self.folder = monkeypatch, folder
        self.options = [*OPTIONS, *options, f"run.output_dir={folder}"]
        self.batches: dict[int, list[list[tuple[int, int]]]] = {}

    def live(self, dies_at: tuple[int, int, int | str] | None = None) -> None:
        """Run on, to the end or to a kill: (step, batch of it, forward of that batch), or "update"
        in place of the forward."""
        with virtual_time() as ranks:
            self._live(ranks, dies_at)

    def _live(self, ranks: Ranks, dies_at: tuple[int, int, int | str] | None) -> None:
        trainer = build(load_config("configs/tiny_cpu_bulk.yaml", self.options), ranks)
        self.first_step, forwards = trainer.num_updates, 0
        place = None  # step and batch
        engine, optimizer = trainer.sampler.engine, trainer.learner.optimizer
        sample_groups, engine_step, update = Sampler._sample_groups, engine.step, optimizer.step

        def note(sampler, launch, step, *before):
            nonlocal place, forwards
            if place is None or place[0] != step:
                self.batches[step] = []
            place, forwards = (step, len(self.batches[step])), 0
            self.batches[step].append([(group.prompt.uid, group.visit) for group in launch.groups])
            return sample_groups(sampler, launch, step, *before)

        def forward(*arguments):
            nonlocal forwards
            if dies_at == (*place, forwards):
                raise Killed
            forwards += 1
            return engine_step(*arguments)

        def optimize(*arguments):
            if dies_at == (*place, "update"):
                raise Killed
            return update(*arguments)

        engine.step, optimizer.step = forward, optimize
        with self.monkeypatch.context() as patch:
            patch.setattr(Sampler, "_sample_groups", note)
            try:
                if dies_at is None:
                    train(trainer)
                else:
                    with pytest.raises(Killed):
                        train(trainer)
            finally:
                trainer.lock.close()

    def names(self, step: int) -> list[tuple[int, int]]:
        """All groups of a step."""
        return [name for batch in self.batches[step] for name in batch]


def check_same(life: Life, whole: Life) -> None:
    assert life.batches == whole.batches
    assert [line["step"] for line in read(life.folder)] == list(range(1, STEPS + 1))
    assert digests(life.folder) == digests(whole.folder)
    assert same_weights(weights(life.folder, STEPS), weights(whole.folder, STEPS))


def test_killed_around_the_end_of_an_epoch(monkeypatch, tmp_path):
    """Epochs of 2 steps, of which 2 prompts are left out: they end before steps 2 and 4."""
    per_epoch, data = 2, "data.size=10"
    undisturbed = (data, "run.save_steps=0", "speculative.method=none")
    whole = Life(monkeypatch, tmp_path / "whole", *undisturbed)
    whole.live()
    for start in range(0, STEPS - per_epoch + 1, per_epoch):
        epoch = [uid for step in range(start, start + per_epoch) for uid, _ in whole.names(step)]
        assert len(set(epoch)) == len(epoch) == per_epoch * PROMPTS
    orders = {tuple(uid for uid, _ in whole.names(step)) for step in range(STEPS)}
    assert len(orders) == STEPS, "another order in each epoch"

    saved = (data, "run.save_steps=1", "run.save_total_limit=9")
    life = Life(monkeypatch, tmp_path / "run", *saved, *DRAFTING)
    for kill in [(1, 0, "update"), (2, 0, 2), (4, 0, 0)]:
        life.live(kill)
        assert life.batches[kill[0]] == whole.batches[kill[0]], "what was being generated"
    life.live()
    assert life.first_step == 4
    check_same(life, whole)
    step_of_name = {name: step for step in range(STEPS) for name in whole.names(step)}
    ahead = [
        (step_of(folder) - 1, step_of_name[name])
        for folder in list_checkpoints(life.folder)
        for name in drafts_in(folder)
    ]
    of_next_epoch = [step // per_epoch > saved // per_epoch for saved, step in ahead]
    assert any(of_next_epoch), "checkpoints have drafts of the next epoch"


def drafts_in(folder: str) -> list[tuple[int, int]]:
    """uid and visit of each draft in a checkpoint."""
    header = load_arrays(folder, SPECULATION_FILE)["drafts.header"].reshape(-1, HEADER)
    return [(uid, visit) for uid, visit in header[:, :2].tolist()]


def test_killed_where_groups_are_replaced(monkeypatch, tmp_path):
    """An epoch has 3 steps, and what replaces groups comes up again as well."""
    dynamic = ("data.size=13", *DYNAMIC)
    undisturbed = (*dynamic, "run.save_steps=0", "speculative.method=none")
    whole = Life(monkeypatch, tmp_path / "whole", *undisturbed)
    whole.live()
    replaced = [step for step, batches in whole.batches.items() if len(batches) > 1]
    assert len(replaced) >= 3
    for step in range(STEPS):
        uids = [uid for uid, _ in whole.names(step)]
        assert len(set(uids)) == len(uids), "a prompt's noise would be used twice"
    drawn = [name for step in range(STEPS) for name in whole.names(step)]
    assert len(set(drawn)) == len(drawn) and max(visit for _, visit in drawn) >= 3

    life = Life(monkeypatch, tmp_path / "run", *dynamic, "run.save_steps=1", *DRAFTING)
    for step, where in zip([replaced[0], replaced[-1]], (2, "update"), strict=True):
        kill = (step, len(whole.batches[step]) - 1, where)
        life.live(kill)
        assert life.batches[step] == whole.batches[step][: kill[1] + 1]
    life.live()
    check_same(life, whole)


def test_killed_in_short_and_in_long_rounds(monkeypatch, tmp_path):
    """Short rounds of 6 prompts, of which 4 are trained on: the third step is a long round. Over
    the end of an epoch, and with groups that are replaced."""
    tail = ("tail_batching.enabled=true", "tail_batching.over_sampling_ratio=1.5", *DYNAMIC)
    tail = ("data.size=13", "rollout.max_completion_length=48", *tail)
    undisturbed = (*tail, "run.save_steps=0", "speculative.method=none")
    whole = Life(monkeypatch, tmp_path / "whole", *undisturbed)
    whole.live()
    rounds = [line["tail/is_long_round"] for line in read(whole.folder)]
    assert rounds == [0, 0, 1, 0, 0]
    assert [len(whole.batches[step][0]) for step in range(STEPS)] == [6, 6, 4, 6, 6]
    life = Life(monkeypatch, tmp_path / "run", *tail, "run.save_steps=1", *DRAFTING)
    last = len(whole.batches[2]) - 1
    for kill in [(1, 0, 5), (2, 0, 1), (2, last, "update"), (3, 0, 2)]:
        life.live(kill)
        assert life.batches[kill[0]] == whole.batches[kill[0]][: kill[1] + 1]
    life.live()
    check_same(life, whole)
    # Not the length ratio: it counts what deferred samples have, which depends on forwards.
    for line, other in zip(read(life.folder), read(whole.folder), strict=True):
        names = {key for key in line if key.startswith("tail/")} - {"tail/length_ratio"}
        assert names and {key: line[key] for key in names} == {key: other[key] for key in names}


def test_drafts_of_trained_samples_are_dropped(monkeypatch, tmp_path):
    """Also where groups are replaced by others whose drafts are being made at that time; and no
    sample is twice in the engine."""
    options = [*OPTIONS, *DYNAMIC, *DRAFTING, "data.size=13", f"run.max_steps={STEPS}"]
    options += [f"run.output_dir={tmp_path}"]
    num_replacements = 0
    with virtual_time() as ranks:
        trainer = build(load_config("configs/tiny_cpu_bulk.yaml", options), ranks)
        sampler, step_engine = trainer.sampler, trainer.sampler.engine.step

        def forward(*arguments):
            names = [row.id for row in [*sampler.engine.rows, *sampler.engine.queue]]
            assert len(names) == len(set(names))
            return step_engine(*arguments)

        monkeypatch.setattr(sampler.engine, "step", forward)
        for step in range(STEPS):
            record = trainer.sample(step)
            num_replacements += len(record.generated.groups) - PROMPTS
            state = (array.tolist() for array in sampler.schedule.state_dict().values())
            visits = dict(zip(*state, strict=True))
            stored = list(sampler.store._drafts)
            assert stored or step >= STEPS - 2
            assert all(name.visit >= visits.get(name.uid, 0) for name in stored)
        trainer.lock.close()
    assert num_replacements > 4


def test_other_data_keys_need_permission():
    saved = flatten(load_config("configs/tiny_cpu.yaml"))
    changed = ["data.as_chat=true", "model.chat_template_path=README.md"]
    for change, key in zip(changed, ("data.as_chat", "model.chat_template_path"), strict=True):
        config = load_config("configs/tiny_cpu.yaml", [change])
        with pytest.raises(InputError, match=f"{key}: "):
            _check_same_run(config, saved, "a checkpoint")
    changed.append("run.allow_changed_data=true")
    config = load_config("configs/tiny_cpu.yaml", changed)
    assert _check_same_run(config, saved, "a checkpoint") == []
    config.model.path = "README.md"
    with pytest.raises(InputError, match=r"model\.path: "):
        _check_same_run(config, saved, "a checkpoint")
