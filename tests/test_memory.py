"""Worked-out memory against real tensors and measured peaks of a small model, the number of slots, and the printed table."""

import os
import re
import sys

import numpy as np
import pytest
import torch
import transformers
from conftest import samples_of
from test_update import make_learner

from bubblespec import memory
from bubblespec.config import Config, ModelConfig, OptimConfig, RolloutConfig, load_config
from bubblespec.engine.chains import Chains
from bubblespec.engine.drafter import Drafter
from bubblespec.engine.generator import Generator
from bubblespec.engine.model import enable_gradient_checkpointing, prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError
from bubblespec.learn import drafter_training
from bubblespec.learn.drafter_training import DrafterTraining, Lesson
from bubblespec.learn.optimizer import MOMENTS, Optimizer
from bubblespec.ranks.collectives import Ranks
from bubblespec.samples import Group, Prompt, Row, SampleId
from tests.warm import ROOT, python

CPU = Ranks(torch.device("cpu"))


def small(vocab: int = 512, **changes) -> transformers.PretrainedConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    return transformers.Qwen2Config(vocab_size=vocab, num_key_value_heads=2, max_position_embeddings=4096, **sizes | changes)


def make_config(dtype: str = "float32", max_tokens: int = 8192, **optim) -> Config:
    return Config(
        model=ModelConfig(path="x", dtype=dtype),
        rollout=RolloutConfig(max_prompt_length=100, max_completion_length=412, num_prompts_per_step=8, num_generations=4),
        optim=OptimConfig(max_tokens_per_microbatch=max_tokens, **optim),
    )


def size(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_what_lasts_is_what_the_tensors_hold(dtype, tied):
    config, torch_dtype = make_config(dtype), getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_config(small(tie_word_embeddings=tied)).to(torch_dtype).eval()
    needs = memory.work_out(config, memory.meta_model(model.config, torch_dtype), 1)
    assert memory.work_out(config, model, 1) == needs, "the model itself says the same as its configuration"
    prepare_model(model, 512)
    optimizer = Optimizer(model, config.optim, 10)
    optimizer.flat_grad.fill_(1.0)
    optimizer.step(0)
    engine = Generator(ModelRunner(model, 3, 512, seed=0))
    engine.run([Row(SampleId(0, 0, 0), (1, 2, 3), 4)], SamplingParams())

    states = optimizer.local.state.values()
    assert needs.weights == size(model.parameters())
    assert needs.gradients == size([optimizer.flat_grad])
    assert needs.masters == (size(optimizer.updated.values()) if dtype == "bfloat16" else 0)
    assert needs.moments == size(state[key] for state in states for key in MOMENTS)
    assert 3 * needs.slot == engine.runner.cache.num_bytes()
    saved = optimizer.state_dict()["parameters"].values()
    assert needs.host_while_saving == size(t for tensors in saved for t in tensors.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_drafter_holds_what_it_is_said_to(dtype):
    """An actual one after an update, its chains, and as many responses as it may keep."""
    config = make_config(dtype)
    config.speculative.method, config.drafter.vocab_size, config.drafter.buffer_tokens = "suffix+drafter", 100, 40
    model = transformers.AutoModelForCausalLM.from_config(small()).to(getattr(torch, dtype)).eval()
    needs = memory.work_out(config, memory.meta_model(model.config, model.dtype), 2)
    assert memory.work_out(config, model, 2) == needs, "the model itself says the same as its configuration"
    config.speculative.method = "suffix"
    without = memory.work_out(config, model, 2)
    assert (without.drafter, without.drafter_slot, without.host_lessons) == (0, 0, 0)
    assert needs.lasting - without.lasting == needs.drafter and needs.slot == without.slot == without.whole_slot

    prepare_model(model, 512)
    drafter = Drafter(model, np.arange(100))
    training = DrafterTraining(drafter, "sdpa", learning_rate=1e-3, temperature=1.0, max_tokens=40, seed=0)
    for sample in range(5):
        hidden = torch.randn(10, 128, dtype=model.dtype)
        training.lessons.add(Lesson(SampleId(0, 0, sample), 3, np.arange(11), hidden))
    training.backward(list(training.lessons))
    training.step()
    training.backward(list(training.lessons))
    for param in training.params:  # as after an average over ranks: the layer's own embedding, which is not used, has one too
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    gradients = [p.grad for p in training.params]
    training.step()
    states = training.optimizer.state.values()
    held = [*training.params, *gradients, *(state[key] for state in states for key in MOMENTS), drafter._head[0]]
    if dtype == "bfloat16":
        held += [*training.masters, *training.masters]  # with gradients of their size
        assert {t.dtype for t in training.masters} == {torch.float32}
    assert needs.drafter == size(held)
    assert needs.host_lessons == size(lesson.hidden for lesson in training.lessons)

    engine = Generator(ModelRunner(model, 3, 512, seed=0))
    chains = engine.runner.chains = Chains(drafter, engine.runner, SamplingParams())
    engine.add([Row(SampleId(0, 0, 0), (1, 2, 3), 4)])
    engine.step(SamplingParams())
    assert chains.draft(engine.scheduler, np.array([0]), 2)[0].shape == (1, 2)
    assert 3 * needs.drafter_slot == chains.cache.num_bytes() + size([chains._hidden])


@pytest.mark.parametrize(
    "changes, vocab",
    [({"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab": 32768}, 16384), ({}, 100)],
    ids=["logits", "layers"],
)
def test_training_a_drafter_peaks_where_it_is_said_to(changes, vocab):
    """Within 0.75 and 1.35 of it, for one piece of a response as for several."""
    config = make_config()
    config.speculative.method, config.drafter.vocab_size = "drafter", vocab
    model = transformers.AutoModelForCausalLM.from_config(small(**changes)).eval()
    needs = memory.work_out(config, memory.meta_model(model.config, model.dtype), 1)
    prepare_model(model, 512)
    training = DrafterTraining(
        Drafter(model, np.arange(vocab)), "sdpa", learning_rate=1e-3, temperature=1.0, max_tokens=1 << 20, seed=0
    )
    length = drafter_training.CONTEXT + drafter_training.PIECE
    for count in (1, 4):
        lessons = [
            Lesson(
                SampleId(0, 0, n), drafter_training.CONTEXT, np.arange(length + 1), torch.randn(length, model.config.hidden_size)
            )
            for n in range(count)
        ]
        training.backward(lessons)  # makes the gradients, and the head
        measured = peak_allocated(lambda lessons=lessons: training.backward(lessons))
        assert 0.75 < count * needs.drafter_lesson / measured < 1.35, (count * needs.drafter_lesson, measured)


def test_a_policy_that_can_have_no_drafter_is_refused(monkeypatch):
    config = make_config()
    config.speculative.method = "drafter"
    monkeypatch.setattr("bubblespec.engine.drafter._one_layer_config", lambda *_: {}["layers"])
    with pytest.raises(InputError, match=r"^speculative.method: no drafter for this policy: Qwen2ForCausalLM cannot be made"):
        memory.work_out(config, memory.meta_model(small(), torch.float32), 1)


def test_working_out_leaves_the_model_as_it_is():
    model = transformers.AutoModelForCausalLM.from_config(small()).eval()
    prepare_model(model, 512)
    memory.work_out(make_config(), model, 1)
    memory.meta_model(model.config, torch.float32)
    assert model.config._attn_implementation == "bubblespec" and next(model.parameters()).device.type == "cpu"


def peak_allocated(run) -> int:
    """Most bytes of tensors that `run()` held at a time beyond what was there before, by PyTorch's own account."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(sizes).max())


def measure(changes: dict, num_tokens: int, has_checkpoints: bool, max_logits: int) -> int:
    """Peak of the memory of one gradient step, after one that has made what lasts."""
    model = transformers.AutoModelForCausalLM.from_config(small(**changes)).eval()
    prepare_model(model, 512)
    if has_checkpoints:
        enable_gradient_checkpointing(model)
    config = make_config(max_tokens=num_tokens, max_logits_per_chunk=max_logits)
    config.model.gradient_checkpointing = has_checkpoints
    learner = make_learner(model, config)

    def step(count: int) -> None:
        tokens = [np.ones(252, np.int32)] * count
        samples = samples_of([Group(Prompt(0, "x", (1, 2, 3, 4), {}), 0)], tokens)
        learner.update(samples, np.ones(count), 0)

    step(1)
    return peak_allocated(lambda: step(num_tokens // 256))


@pytest.mark.parametrize(
    "changes, num_tokens, has_checkpoints, max_logits",
    [
        ({}, 4096, False, 1 << 20),
        ({"num_hidden_layers": 8}, 8192, True, 1 << 20),
        ({"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab": 32768}, 1024, False, 1 << 25),
    ],
    ids=["activations", "checkpointed", "head"],
)
def test_a_gradient_step_peaks_where_it_is_said_to(changes, num_tokens, has_checkpoints, max_logits):
    """Within 0.75 and 1.35 of it. Each case is dominated by one part of the sum."""
    measured = measure(changes, num_tokens, has_checkpoints, max_logits)
    config = make_config(max_tokens=num_tokens, max_logits_per_chunk=max_logits)
    config.model.gradient_checkpointing = has_checkpoints
    needs = memory.work_out(config, memory.meta_model(small(**changes), torch.float32), 1)
    assert 0.75 < needs.training / measured < 1.35, (needs.training, measured)


@pytest.mark.parametrize(
    "sizes, world_size, largest",
    [([[8, 1, 5, 3], [2]], 1, 19), ([[8, 1, 5, 3], [2]], 2, 10), ([[8, 1, 5, 3], [2]], 3, 8), ([[4, 4], [1]], 2, 5)],
)
def test_largest_share(sizes, world_size, largest):
    """Dealt out by hand. That this is what the optimizer does is tested with real ranks."""
    assert memory.largest_share(sizes, world_size) == largest


# The number of slots


class Ranks3:
    """Rank 0 of three, of which the others have room for 5 and 7 slots."""

    world_size, device = 3, torch.device("cuda")

    def gather(self, array):
        return np.stack([array, np.full_like(array, 5), np.full_like(array, 7)])


def slots_on_cuda(monkeypatch, config: Config, free: float, has_moments: bool = True, ranks=Ranks3) -> int:
    """`free` bytes of a card of 1 GB, of which the allocator holds some itself."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - 1000, 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 51_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50_000)
    return memory.choose_num_slots(config, memory.meta_model(small(), torch.float32), has_moments, ranks())


def test_slots_fill_what_is_free_and_all_ranks_take_the_least(monkeypatch):
    config = make_config(max_tokens=512)
    config.rollout.max_batch_tokens = 4000
    needs = memory.work_out(config, memory.meta_model(small(), torch.float32), 3)
    assert needs.rollout > needs.training
    base = needs.rollout + memory.HEADROOM * 1e9
    assert slots_on_cuda(monkeypatch, config, base + 4.5 * needs.slot) == 4
    assert slots_on_cuda(monkeypatch, config, base + 5.5 * needs.slot) == 5
    assert slots_on_cuda(monkeypatch, config, base + 9.5 * needs.slot) == 5, "the least of all ranks"
    assert slots_on_cuda(monkeypatch, config, base + 4.5 * needs.slot + needs.moments, has_moments=False) == 4
    with pytest.raises(InputError, match=r"^rollout.num_slots: .* optim.max_tokens_per_microbatch"):
        slots_on_cuda(monkeypatch, config, base + 0.5 * needs.slot)
    config = make_config(max_tokens=8192)  # now the gradient step needs more
    needs = memory.work_out(config, memory.meta_model(small(), torch.float32), 3)
    assert needs.training > needs.rollout + 20 * needs.slot
    free = needs.training + memory.HEADROOM * 1e9 + 2.5 * needs.slot
    assert slots_on_cuda(monkeypatch, config, free) == 2
    config.rollout.free_cache_engine = True
    assert slots_on_cuda(monkeypatch, config, free) == 5
    with pytest.raises(InputError, match=r"^rollout.num_slots: "):
        slots_on_cuda(monkeypatch, config, free - 3 * needs.slot)


def slots_that_fit(config: Config) -> list[int]:
    """By card, as the table has them, keys and values not freed."""
    lines = memory.table(config, memory.meta_model(small(), torch.float32), 2).splitlines()
    return [int(line.split("slots: ")[1].split(" fit")[0]) for line in lines if "slots: " in line]


def test_streamed_gradients_are_there_beside_forwards(monkeypatch):
    """Both count; where keys and values are given back before the first slice, what is freed is as without streaming."""
    config = make_config(max_tokens=8192)
    config.optim.stream_gradients = True
    needs = memory.work_out(config, memory.meta_model(small(), torch.float32), 3)
    free = needs.training + needs.rollout + memory.HEADROOM * 1e9 + 2.5 * needs.slot
    assert slots_on_cuda(monkeypatch, config, free) == 2
    with_streaming = slots_that_fit(config)
    config.rollout.free_cache_engine = True
    assert slots_on_cuda(monkeypatch, config, needs.training + memory.HEADROOM * 1e9 + 2.5 * needs.slot) == 5
    config.optim.stream_gradients, config.rollout.free_cache_engine = False, False
    room = 80e9
    assert needs.room_for_cache(room, False, True) == needs.room_for_cache(room, False) - min(needs.rollout, needs.training)
    assert needs.room_for_cache(room, True, True) == needs.room_for_cache(room, True) == room - needs.rollout
    without = slots_that_fit(config)
    assert len(without) == 2 and all(a < b for a, b in zip(with_streaming, without, strict=True))


def test_a_drafter_takes_room_from_slots(monkeypatch):
    """It is not there yet when they are chosen; each slot has its part of it."""
    config = make_config(max_tokens=512)
    config.rollout.max_batch_tokens = 4000
    without = slots_that_fit(config)
    config.speculative.method = "bubble+suffix+drafter"
    needs = memory.work_out(config, memory.meta_model(small(), torch.float32), 3)
    slot = needs.slot + needs.drafter_slot
    assert needs.drafter > 2 * slot > 2 * needs.slot
    free = max(needs.rollout, needs.training) + needs.drafter + memory.HEADROOM * 1e9 + 4.5 * slot
    assert slots_on_cuda(monkeypatch, config, free) == 4
    assert slots_on_cuda(monkeypatch, config, free - slot) == 3
    assert all(a > b for a, b in zip(without, slots_that_fit(config), strict=True))
    printed = memory.table(config, memory.meta_model(small(), torch.float32), 2)
    assert f"{needs.host_lessons / 1e9:.1f} GB of responses for its drafter" in printed


def test_graphs_take_a_slot_for_their_padding(monkeypatch):
    config = make_config(max_tokens=512)
    config.rollout.max_batch_tokens = 4000
    needs = memory.work_out(config, memory.meta_model(small(), torch.float32), 3)
    free = needs.rollout + memory.HEADROOM * 1e9 + 4.5 * needs.slot
    config.model.dtype = "bfloat16"  # the kernels' type; float32 has no graphs
    assert slots_on_cuda(monkeypatch, config, free) == 3
    config.rollout.enforce_eager = True
    assert slots_on_cuda(monkeypatch, config, free) == 4
    config.rollout.enforce_eager, config.model.attention = False, "sdpa"
    assert slots_on_cuda(monkeypatch, config, free) == 4


def test_slots_are_never_more_than_are_of_use():
    model = memory.meta_model(small(), torch.float32)

    def slots(method: str, num_slots: int | str, max_batch_tokens: int = 2048) -> int:
        config = make_config()  # 8 prompts x 4 responses
        config.speculative.method, config.rollout.num_slots = method, num_slots
        config.rollout.max_batch_tokens = max_batch_tokens
        return memory.choose_num_slots(config, model, True, CPU)

    assert slots("none", "auto") == slots("suffix", "auto") == 32
    assert slots("bubble", "auto") == slots("bubble+suffix", "auto") == 64
    assert slots("bubble", "auto", max_batch_tokens=40) == 40
    assert [slots("bubble", 500), slots("none", 500), slots("none", 7)] == [500, 32, 7]
    config = make_config()
    config.speculative.method = "none"
    most = [memory.most_slots(config, 1), memory.most_slots(config, 2)]
    config.rollout.placement = "in_turn"
    most.append(memory.most_slots(config, 2))
    config.tail_batching.enabled = True
    assert [*most, memory.most_slots(config, 2)] == [32, 32, 16, 32], (
        "of 32, 16 and 16 rows a rank, and with deferred ones 16 more"
    )


def test_rows_that_all_ranks_share_take_what_slots_leave(monkeypatch):
    config, model = make_config(max_tokens=512), memory.meta_model(small(), torch.float32)
    config.rollout.max_batch_tokens = 4000
    needs, key_heads = memory.work_out(config, model, 3), model.config.num_key_value_heads
    row = memory.shared_row_bytes(config, model, 3)
    assert row == needs.slot * -(-key_heads // 3) // key_heads
    base = needs.rollout + memory.HEADROOM * 1e9 + 2 * needs.slot

    def chosen(room: float, wanted="auto", num_slots: int = 2) -> int:
        slots_on_cuda(monkeypatch, config, base + room)
        config.rollout.shared_tail_rows = wanted
        return memory.choose_shared_rows(config, model, True, num_slots, Ranks3())

    assert [chosen(3.5 * row), chosen(0.5 * row), chosen(-0.5 * row)] == [3, 0, 0]
    assert chosen(40 * row) == 5, "the least of all ranks"
    assert chosen(0.5 * row, wanted=9) == 9


def test_released_keys_and_values_are_made_again():
    model = transformers.AutoModelForCausalLM.from_config(small()).double().eval()
    prepare_model(model, 512)
    engine = Generator(ModelRunner(model, 3, 64, seed=0))

    def generate() -> list[list[int]]:
        rows = [Row(SampleId(1, 0, j), (1, 2, 3), 20) for j in range(4)]
        return [row.tokens.tolist() for row in engine.run(rows, SamplingParams())]

    wanted = generate()
    assert engine.runner.cache.num_bytes() > 0
    engine.add([Row(SampleId(9, 0, 0), (7, 8), 20)])
    engine.step(SamplingParams())
    engine.release()
    assert engine.runner.cache.num_bytes() == 0 and engine.is_idle
    assert generate() == wanted


# The command


def test_the_command_prints_the_sum(tmp_path):
    small().save_pretrained(tmp_path)
    done = python("-m", "bubblespec.memory", "--config", "configs/qwen2.5_7b.yaml", "--world-size", "4", f"model.path={tmp_path}")
    assert done.returncode == 0, done.stderr
    said = {name: float(number) for number, name in re.findall(r"^ *(\d+\.\d+)  (\w+)", done.stdout, re.MULTILINE)}
    assert {"weights", "gradients", "master", "moments", "lasting", "activations", "loss", "keys"} <= said.keys()
    config = load_config(os.path.join(ROOT, "configs/qwen2.5_7b.yaml"))
    needs = memory.work_out(config, memory.meta_model(small(), torch.bfloat16), 4)
    assert said["activations"] == pytest.approx(needs.activations / 1e9, abs=0.005)
    assert "4 x 80 GB: fits" in done.stdout and "4 x 141 GB: fits" in done.stdout
    assert needs.masters < needs.gradients, "sharded"


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["model.path=/nowhere"], "model.path: cannot read the configuration of /nowhere"),
        (["--world-size", "0"], "--world-size: 0 must be at least 1"),
    ],
)
def test_bad_input_is_one_line(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory", "--config", os.path.join(ROOT, "configs/qwen2.5_7b.yaml"), *arguments])
    assert memory.main() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {says}") and error.count("\n") == 1


def test_what_does_not_fit_is_said():
    config = make_config("bfloat16")
    model = memory.meta_model(
        small(vocab=50_000, hidden_size=8192, intermediate_size=20_000, num_hidden_layers=10), torch.bfloat16
    )
    printed = memory.table(config, model, 8).splitlines()
    assert "8 x 80 GB: DOES NOT FIT" in printed[-3] and "8 x 141 GB: DOES NOT FIT" in printed[-2]
    config.optim.shard_state = True
    printed = memory.table(config, model, 8).splitlines()
    assert "8 x 80 GB: DOES NOT FIT" in printed[-3] and "8 x 141 GB: fits" in printed[-2]
