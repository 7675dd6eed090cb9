"""A run that is killed goes on with the prompts that the undisturbed one uses: around the end of an epoch, and where dynamic
sampling has begun to replace groups.

A kill is an exception that nothing catches, out of the engine or the optimizer: what the next start finds is what a process that
is gone has left, the last checkpoint. In virtual time, so that what is drafted ahead is the same in every run of the test.
"""

import pytest

from bubblespec.checkpoint import list_checkpoints, load_speculation, step_of
from bubblespec.config import load_config
from bubblespec.ranks.collectives import Ranks
from bubblespec.rollout.placement import collect
from bubblespec.set_up import set_up
from bubblespec.speculate.store import HEADER
from tests.clocks import virtual_time
from tests.runs import ALWAYS_DRAFT, SHORT, digests, read, same_weights, weights
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


class Killed(BaseException):
    """The process is gone."""


class Life:
    """Runs of one folder, one after the other. `batches`: of each step the uids of the batches that its last run generated."""

    def __init__(self, monkeypatch, folder, *options: str):
        self.monkeypatch, self.folder, self.options = monkeypatch, folder, options
        self.batches: dict[int, list[list[int]]] = {}

    def live(self, dies_at: tuple[int, int, int | str] | None = None) -> None:
        """Run on, to the end or to a kill: (step, batch of it, forward of that batch), or "update" in place of the forward."""
        with virtual_time() as ranks:
            self._live(ranks, dies_at)

    def _live(self, ranks: Ranks, dies_at: tuple[int, int, int | str] | None) -> None:
        config = load_config("configs/tiny_cpu.yaml", [*OPTIONS, *self.options, f"run.output_dir={self.folder}"])
        trainer = set_up(config, ranks)
        self.first_step, forwards = trainer.num_updates, 0
        place = None  # step and batch
        collect_batch, engine_step, update = collect._collect_batch, trainer.engine.step, trainer.learner.optimizer.step

        def note(trainer, prompts, step, stages):
            nonlocal place, forwards
            if place is None or place[0] != step:
                self.batches[step] = []
            place, forwards = (step, len(self.batches[step])), 0
            self.batches[step].append([prompt.uid for prompt in prompts])
            return collect_batch(trainer, prompts, step, stages)

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

        trainer.engine.step, trainer.learner.optimizer.step = forward, optimize
        with self.monkeypatch.context() as patch:
            patch.setattr(collect, "_collect_batch", note)
            try:
                if dies_at is None:
                    train(trainer)
                else:
                    with pytest.raises(Killed):
                        train(trainer)
            finally:
                trainer.lock.close()


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
    whole = Life(monkeypatch, tmp_path / "whole", f"data.size={size}", "run.save_steps=0", "speculative.method=none")
    whole.live()
    for start in range(0, STEPS - per_epoch + 1, per_epoch):
        epoch = [uid for step in range(start, start + per_epoch) for uid in whole.batches[step][0]]
        assert len(set(epoch)) == len(epoch) == per_epoch * PROMPTS
    orders = {tuple(whole.batches[step][0]) for step in range(STEPS)}
    assert len(orders) == STEPS, "another order in each epoch"

    life = Life(monkeypatch, tmp_path / "run", f"data.size={size}", f"run.save_steps={save_steps}", "run.keep_last=9", *DRAFTING)
    for kill in kills:
        life.live(kill)
        assert life.batches[kill[0]] == whole.batches[kill[0]], "what was being generated"
    life.live()
    assert life.first_step == kills[-1][0] // save_steps * save_steps
    check_same(life, whole)
    if save_steps == 1:  # each checkpoint has drafts of the step that comes next
        ahead = [pair for folder in list_checkpoints(life.folder) for pair in drafts_ahead(folder)]
        assert any(step // per_epoch > saved // per_epoch for saved, step in ahead), "drafts of the next epoch"


def drafts_ahead(folder: str) -> list[tuple[int, int]]:
    """Of each draft in a checkpoint the last step before it was saved, and the step that it is for."""
    header = load_speculation(folder)["drafts.header"].reshape(-1, HEADER)
    return [(step_of(folder) - 1, step) for step in header[:, 0].tolist()]


def test_killed_where_groups_are_replaced(monkeypatch, tmp_path):
    dynamic = ("data.size=26", "rollout.dynamic_sampling=true", "rollout.dynamic_sampling_max_batches=3")
    whole = Life(monkeypatch, tmp_path / "whole", *dynamic, "run.save_steps=0", "speculative.method=none")
    whole.live()
    replaced = [step for step, batches in whole.batches.items() if len(batches) > 1]
    assert len(replaced) >= 3
    for batches in whole.batches.values():
        uids = [uid for batch in batches for uid in batch]
        assert len(set(uids)) == len(uids), "a prompt's noise would be used twice"

    life = Life(monkeypatch, tmp_path / "run", *dynamic, "run.save_steps=1", *DRAFTING)
    for step, where in zip(replaced, (0, 5, "update"), strict=False):
        kill = (step, 1 if where == 0 else len(whole.batches[step]) - 1, where)
        life.live(kill)
        assert life.batches[step] == whole.batches[step][: kill[1] + 1]
    life.live()
    check_same(life, whole)
