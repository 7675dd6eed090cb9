"""A run that is killed goes on with the samples of the undisturbed one: around the end of an epoch,
and where dynamic sampling has begun to replace groups. Over epochs a sample's name alone decides
about its noise.

A kill is an exception that nothing catches, out of the engine or the optimizer: what the next start
finds is what a process that is gone has left, the last checkpoint. In virtual time, so that what is
drafted ahead is the same in every run of the test.
"""

import json
import os

import pytest
import torch

from bubblespec.checkpoint import (
    FORMAT,
    SPECULATION_FILE,
    STATE_FILE,
    SUMS_FILE,
    _digests,
    find_damage,
    list_checkpoints,
    load_arrays,
    step_of,
)
from bubblespec.config import load_config
from bubblespec.dist.ranks import Ranks
from bubblespec.draft.store import HEADER
from bubblespec.rollout.sampler import Sampler
from bubblespec.setup import build
from bubblespec.types import Group, Samples
from tests.helpers.checks import refusal
from tests.helpers.clocks import train_in_virtual_time, virtual_time
from tests.helpers.runs import ALWAYS_DRAFT, SHORT, digests, read, same_weights, weights
from train import train

STEPS, PROMPTS = 5, 4
OPTIONS = [
    *SHORT,
    f"rollout.num_prompts_per_step={PROMPTS}",
    "rollout.max_completion_length=24",
    f"run.max_steps={STEPS}",
    "eval.num_prompts=0",
    "rollout.num_slots=16",
]
DRAFTING = ("speculative.method=bubble+suffix", "bubble.lookahead=2", ALWAYS_DRAFT)
DYNAMIC = ("rollout.dynamic_sampling=true", "rollout.dynamic_sampling_max_batches=3")


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
    assert [line["step"] for line in read(life.folder)] == list(range(STEPS))
    assert digests(life.folder) == digests(whole.folder)
    assert same_weights(weights(life.folder, STEPS), weights(whole.folder, STEPS))


@pytest.mark.parametrize(
    "size, save_steps, kills",
    [
        # Epochs of 2 steps, of which 2 prompts are left out: they end before steps 2 and 4.
        (10, 1, [(1, 0, "update"), (2, 0, 0), (2, 0, 2), (2, 0, "update"), (4, 0, 0)]),
        # Epochs of 3 steps, and checkpoints that are not at their ends.
        (12, 2, [(2, 0, "update"), (3, 0, 2), (4, 0, 0)]),
    ],
    ids=["with a remainder", "without"],
)
def test_killed_around_the_end_of_an_epoch(monkeypatch, tmp_path, size, save_steps, kills):
    per_epoch = size // PROMPTS
    whole = Life(
        monkeypatch,
        tmp_path / "whole",
        f"data.size={size}",
        "run.save_steps=0",
        "speculative.method=none",
    )
    whole.live()
    for start in range(0, STEPS - per_epoch + 1, per_epoch):
        epoch = [uid for step in range(start, start + per_epoch) for uid, _ in whole.names(step)]
        assert len(set(epoch)) == len(epoch) == per_epoch * PROMPTS
    orders = {tuple(uid for uid, _ in whole.names(step)) for step in range(STEPS)}
    assert len(orders) == STEPS, "another order in each epoch"

    life = Life(
        monkeypatch,
        tmp_path / "run",
        f"data.size={size}",
        f"run.save_steps={save_steps}",
        "run.keep_last=9",
        *DRAFTING,
    )
    for kill in kills:
        life.live(kill)
        assert life.batches[kill[0]] == whole.batches[kill[0]], "what was being generated"
    life.live()
    assert life.first_step == kills[-1][0] // save_steps * save_steps
    check_same(life, whole)
    if save_steps == 1:  # each checkpoint has drafts of the step that comes next
        step_of_name = {name: step for step in range(STEPS) for name in whole.names(step)}
        ahead = [
            (step_of(folder) - 1, step_of_name[name])
            for folder in list_checkpoints(life.folder)
            for name in drafts_in(folder)
        ]
        assert any(step // per_epoch > saved // per_epoch for saved, step in ahead), (
            "drafts of the next epoch"
        )


def drafts_in(folder: str) -> list[tuple[int, int]]:
    """uid and visit of each draft in a checkpoint."""
    header = load_arrays(folder, SPECULATION_FILE)["drafts.header"].reshape(-1, HEADER)
    return [(uid, visit) for uid, visit in header[:, :2].tolist()]


@pytest.mark.parametrize("size", [26, 13])
def test_killed_where_groups_are_replaced(monkeypatch, tmp_path, size):
    """Of 26 prompts an epoch is longer than the run; of 13 it has 3 steps, and what replaces groups
    comes up again as well."""
    dynamic = (f"data.size={size}", *DYNAMIC)
    whole = Life(
        monkeypatch, tmp_path / "whole", *dynamic, "run.save_steps=0", "speculative.method=none"
    )
    whole.live()
    replaced = [step for step, batches in whole.batches.items() if len(batches) > 1]
    assert len(replaced) >= 3
    for step in range(STEPS):
        uids = [uid for uid, _ in whole.names(step)]
        assert len(set(uids)) == len(uids), "a prompt's noise would be used twice"
    drawn = [name for step in range(STEPS) for name in whole.names(step)]
    assert len(set(drawn)) == len(drawn) and max(visit for _, visit in drawn) >= (
        1 if size == 26 else 3
    )

    life = Life(monkeypatch, tmp_path / "run", *dynamic, "run.save_steps=1", *DRAFTING)
    for step, where in zip([*replaced[:2], replaced[-1]], (0, 5, "update"), strict=True):
        kill = (step, 1 if where == 0 else len(whole.batches[step]) - 1, where)
        life.live(kill)
        assert life.batches[step] == whole.batches[step][: kill[1] + 1]
    life.live()
    check_same(life, whole)


@pytest.mark.parametrize("dynamic", [(), DYNAMIC], ids=["all groups", "dynamic sampling"])
def test_killed_in_short_and_in_long_rounds(monkeypatch, tmp_path, dynamic):
    """Short rounds of 6 prompts, of which 4 are trained on: the third step is a long round. Over
    the end of an epoch, too."""
    tail = (
        "data.size=13",
        "rollout.max_completion_length=48",
        "tail_batching.enabled=true",
        "tail_batching.over_sampling_ratio=1.5",
        *dynamic,
    )
    whole = Life(
        monkeypatch, tmp_path / "whole", *tail, "run.save_steps=0", "speculative.method=none"
    )
    whole.live()
    rounds = [line["tail/is_long_round"] for line in read(whole.folder)]
    assert rounds == [0, 0, 1, 0, 0] and [len(whole.batches[step][0]) for step in range(STEPS)] == [
        6,
        6,
        4,
        6,
        6,
    ]
    life = Life(monkeypatch, tmp_path / "run", *tail, "run.save_steps=1", *DRAFTING)
    for kill in [(1, 0, 5), (1, 0, "update"), (2, 0, 0), (2, 0, 1), (2, 0, "update"), (3, 0, 2)]:
        if kill[2] == "update":
            kill = (kill[0], len(whole.batches[kill[0]]) - 1, "update")
        life.live(kill)
        assert life.batches[kill[0]] == whole.batches[kill[0]][: kill[1] + 1]
    life.live()
    check_same(life, whole)
    figures = [
        [{key: line[key] for key in line if key.startswith("tail/")} for line in read(x.folder)]
        for x in (life, whole)
    ]
    for figure in (figure for of_run in figures for figure in of_run):
        del figure[
            "tail/length_ratio"
        ]  # counts what deferred samples have, which hangs on how fast they came
    assert figures[0] == figures[1]


@pytest.mark.parametrize("dynamic", [(), DYNAMIC], ids=["all groups", "dynamic sampling"])
def test_every_method_gives_the_same_samples_over_an_epochs_end(tmp_path, dynamic):
    """Epochs of 2 steps: what is drafted for a prompt's next visit is not taken for this one's."""
    drafted = {}
    for method in ("none", "bubble", "suffix", "bubble+suffix"):
        options = (
            "data.size=9",
            "run.save_steps=0",
            f"speculative.method={method}",
            "bubble.lookahead=3",
            ALWAYS_DRAFT,
        )
        train_in_virtual_time(*OPTIONS, *options, *dynamic, f"run.output_dir={tmp_path / method}")
        assert (
            digests(tmp_path / method) == digests(tmp_path / "none")
            and len(digests(tmp_path / method)) == STEPS
        )
        assert same_weights(weights(tmp_path / method, STEPS), weights(tmp_path / "none", STEPS))
        lines = read(tmp_path / method)
        drafted[method] = [
            sum(line.get(f"drafts/{name}/tokens", 0) for line in lines[2:])
            for name in ("aligned", "history")
        ]
    assert drafted["none"] == [0, 0]
    assert min(drafted["bubble"][0], drafted["suffix"][1], drafted["bubble+suffix"][0]) > 50, (
        "there was something to be wrong"
    )


def test_a_prompt_gets_other_samples_at_each_visit(tmp_path):
    """Where the weights stand still: a sample is a function of its name, and of nothing else that
    has changed in between."""
    options = (
        "data.size=4",
        "run.max_steps=3",
        "optim.learning_rate=0",
        "run.save_steps=0",
        "rollout.temperature=4",
    )
    seen: list[Samples] = []
    with virtual_time() as ranks:
        trainer = build(
            load_config(
                "configs/tiny_cpu_bulk.yaml", [*OPTIONS, *options, f"run.output_dir={tmp_path}"]
            ),
            ranks,
        )
        update = trainer.update
        trainer.update = lambda record, advantages: (
            seen.append(record.samples) or update(record, advantages)
        )
        train(trainer)
        trainer.lock.close()
        by_name = {
            name: tokens.tolist()
            for samples in seen
            for name, tokens in zip(samples.ids, samples.tokens, strict=True)
        }
        assert len(by_name) == 3 * 4 * 4 and {name.visit for name in by_name} == {0, 1, 2}
        texts: dict[int, list] = {}
        for name, tokens in by_name.items():
            texts.setdefault(name.uid, []).append(tuple(tokens))
        assert len(texts) == PROMPTS
        for of_prompt in texts.values():
            assert len(set(of_prompt)) == len(of_prompt)
        for visit in (0, 1, 2):
            groups = [Group(group.prompt, visit) for group in seen[0].groups]
            again, _ = trainer.sampler.evaluate(groups, 4, trainer.sampler.params, version=3)
            assert all(
                by_name[name] == tokens.tolist()
                for name, tokens in zip(again.ids, again.tokens, strict=True)
            )


def test_a_checkpoint_of_before_is_refused(monkeypatch, tmp_path):
    """One without a format, whose noise was keyed by the step; whole in all else."""
    life = Life(
        monkeypatch, tmp_path, "run.save_steps=1", "run.max_steps=1", "speculative.method=none"
    )
    life.live()
    (folder,) = list_checkpoints(tmp_path)
    path = os.path.join(folder, STATE_FILE)
    with open(path, encoding="utf-8") as file:
        state = json.load(file)
    assert state.pop("format") == FORMAT
    with open(path, "w", encoding="utf-8") as file:
        json.dump(state, file)
    sums = _digests(
        folder, sorted(set(os.listdir(folder)) - {SUMS_FILE}, key=lambda name: name == STATE_FILE)
    )
    with open(os.path.join(folder, SUMS_FILE), "w", encoding="utf-8") as file:
        file.writelines(f"{digest}  {name}\n" for name, digest in sums.items())
    assert find_damage(folder) is None
    for wanted in ("auto", folder):
        config = load_config(
            "configs/tiny_cpu_bulk.yaml", [*life.options, f"run.resume_from_checkpoint={wanted}"]
        )
        message = refusal(build, config, Ranks(torch.device("cpu")))
        assert message.startswith(f"run.resume_from_checkpoint: {folder} is of another version")


def test_drafts_of_samples_that_have_had_their_turn_are_gone(monkeypatch, tmp_path):
    """Also where groups are replaced by others whose drafts are being made at that time; and no
    sample is twice in the engine."""
    options = [
        *OPTIONS,
        *DYNAMIC,
        *DRAFTING,
        "data.size=13",
        "run.max_steps=8",
        f"run.output_dir={tmp_path}",
    ]
    num_replacements = 0
    with virtual_time() as ranks:
        trainer = build(load_config("configs/tiny_cpu_bulk.yaml", options), ranks)
        sampler, step_engine = trainer.sampler, trainer.sampler.engine.step

        def forward(*arguments):
            names = [row.id for row in [*sampler.engine.rows, *sampler.engine.queue]]
            assert len(names) == len(set(names))
            return step_engine(*arguments)

        monkeypatch.setattr(sampler.engine, "step", forward)
        for step in range(8):
            record = trainer.sample(step)
            num_replacements += len(record.generated.groups) - PROMPTS
            visits = dict(
                zip(
                    *(array.tolist() for array in sampler.schedule.state_dict().values()),
                    strict=True,
                )
            )
            stored = list(sampler.speculation.store._drafts)
            assert stored or step >= 6
            assert all(name.visit >= visits.get(name.uid, 0) for name in stored)
        trainer.lock.close()
    assert num_replacements > 8
