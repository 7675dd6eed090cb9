"""A run that is killed in each step goes on with the samples of the undisturbed one: over the end
of an epoch, where groups are replaced, and in short and long rounds of tail batching."""

import pytest

from bubblespec.checkpoint import _check_same_run
from bubblespec.config import flatten
from bubblespec.config.file import load_config
from bubblespec.errors import InputError
from bubblespec.setup import build
from tests.helpers.clocks import virtual_time
from tests.helpers.plain import REWARD, STEPS, TINY, check_same, plain_run
from tests.helpers.runs import ALWAYS_DRAFT, SHORT, read, steps_of
from tests.helpers.threads import train_on_threads

DRAFTING = ("speculative.method=bubble+suffix", ALWAYS_DRAFT)
DYNAMIC = ("rollout.dynamic_sampling_max_batches=3",)
TAIL = ("tail_batching.enabled=true", "tail_batching.over_sampling_ratio=1.5")
# Of 13 rows an epoch has two steps, or one and what replaces groups.
SHAPES = {
    "end of an epoch": (REWARD, "data.size=13"),
    "replaced groups": (*DYNAMIC, "data.size=13"),
    "rounds": (*DYNAMIC, *TAIL, "data.size=13"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_killed_run_goes_on_with_the_same_samples(tmp_path_factory, tmp_path, shape):
    options = [*TINY, *SHAPES[shape], "run.save_steps=1", "run.eval_steps=1"]
    plain = plain_run(tmp_path_factory, *options)
    options += [*DRAFTING, f"run.output_dir={tmp_path}"]
    for step in range(1, STEPS):
        train_on_threads(2, *options, ends_in=step, is_killed=True)
        assert [line["step"] for line in steps_of(tmp_path)] == list(range(1, step + 1))
    train_on_threads(2, *options)
    lines = steps_of(tmp_path)
    # Not the length ratio: it counts what deferred samples have, which depends on forwards.
    keys = {key for key in lines[0] if key.startswith(("tail/", "dynamic_sampling/"))}
    check_same(tmp_path, plain, keys - {"tail/length_ratio"} | {"loss", "reward"}, is_exact=True)
    rates = [line["eval/spec_accept_rate"] for line in read(tmp_path) if "eval/digest" in line]
    assert len(rates) == STEPS + 1 and min(rates[1:]) > 0.3, "by drafts of the one before"
    assert lines[-1]["epoch"] > 1 and lines[-1]["rollout/spec_accepted_tokens"] > 0
    if shape != "end of an epoch":
        assert sum(line["dynamic_sampling/num_replaced"] for line in lines) > 2
    if shape == "rounds":
        assert [line["tail/is_long_round"] for line in lines] == [0, 0, 1]


def test_drafts_of_trained_samples_are_dropped(monkeypatch, tmp_path):
    """Also where groups are replaced by others whose drafts are being made at that time; and no
    sample is twice in the engine."""
    prompts, steps, num_replacements = 4, 5, 0
    options = [*SHORT, *DYNAMIC, *DRAFTING, f"rollout.num_prompts_per_step={prompts}"]
    options += ["rollout.max_completion_length=24", "rollout.max_num_seqs=16", "data.size=13"]
    options += [f"run.max_steps={steps}", "eval.num_prompts=0", f"run.output_dir={tmp_path}"]
    with virtual_time() as ranks:
        trainer = build(load_config("configs/tiny_cpu_bulk.yaml", options), ranks)
        sampler, step_engine = trainer.sampler, trainer.sampler.engine.step

        def forward(*arguments):
            names = [row.id for row in [*sampler.engine.rows, *sampler.engine.queue]]
            assert len(names) == len(set(names))
            return step_engine(*arguments)

        monkeypatch.setattr(sampler.engine, "step", forward)
        for step in range(steps):
            record = trainer.sample(step)
            num_replacements += len(record.generated.groups) - prompts
            state = (array.tolist() for array in sampler.schedule.state_dict().values())
            visits = dict(zip(*state, strict=True))
            stored = list(sampler.store._texts)
            assert stored or step >= steps - 2
            assert all(name.draw_index >= visits.get(name.prompt_id, 0) for name in stored)
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
