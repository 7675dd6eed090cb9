"""What parts of a run are said to need against real tensors and measured peaks of a small model."""

import copy

import numpy as np
import pytest
import torch
import transformers
from test_update import make_learner

from bubblespec import memory_needs
from bubblespec.config import Config, ModelConfig, OptimConfig, RolloutConfig
from bubblespec.engine.chains import Chains
from bubblespec.engine.drafter import Drafter
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import enable_gradient_checkpointing, prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError
from bubblespec.learn import drafter_training
from bubblespec.learn.drafter_training import DrafterTraining, Lesson
from bubblespec.learn.optimizer import MOMENTS, Optimizer
from bubblespec.types import Group, Prompt, Row, SampleId
from tests.helpers.joint import run_together
from tests.helpers.rows import samples_of


def small(vocab: int = 512, **changes) -> transformers.PretrainedConfig:
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 4096}
    return transformers.Qwen2Config(vocab_size=vocab, **sizes | changes)


def make_config(dtype: str = "float32", max_tokens: int = 8192, **optim) -> Config:
    return Config(
        model=ModelConfig(path="x", dtype=dtype),
        rollout=RolloutConfig(
            max_prompt_length=100,
            max_completion_length=412,
            num_prompts_per_step=8,
            num_generations=4,
        ),
        optim=OptimConfig(max_tokens_per_microbatch=max_tokens, **optim),
    )


def size(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_what_lasts_is_what_the_tensors_hold(dtype, tied):
    config, torch_dtype = make_config(dtype), getattr(torch, dtype)
    model = (
        transformers.AutoModelForCausalLM.from_config(small(tie_word_embeddings=tied))
        .to(torch_dtype)
        .eval()
    )
    needs = memory_needs.work_out(config, memory_needs.meta_model(model.config, torch_dtype), 1)
    assert memory_needs.work_out(config, model, 1) == needs, (
        "the model itself says the same as its configuration"
    )
    prepare_model(model, 512)
    optimizer = Optimizer(model, config.optim, 10)
    optimizer.flat_grad.fill_(1.0)
    optimizer.step(0)
    engine = Engine(ModelRunner(model, 3, 512, seed=0))
    engine.run([Row(SampleId(0, 0, 0), (1, 2, 3), 4)], SamplingParams())

    states = optimizer.local.state.values()
    assert needs.weights == size(model.parameters())
    assert needs.gradients == size([optimizer.flat_grad])
    assert needs.masters == (size(optimizer.updated.values()) if dtype == "bfloat16" else 0)
    assert needs.moments == size(state[key] for state in states for key in MOMENTS)
    assert 3 * needs.slot == engine.runner.cache.num_bytes()
    saved = optimizer.state_dict()["parameters"].values()
    assert needs.host_while_saving == size(t for tensors in saved for t in tensors.values())


@pytest.mark.parametrize("heads, ranks", [((4, 2), 2), ((4, 2), 3), ((6, 3), 2)])
def test_rows_that_all_ranks_share_hold_what_they_are_said_to(heads, ranks):
    """On the rank with most of the key/value heads; none where one rank is alone, or nobody asks
    for a number of them."""
    config, shape = (
        make_config("float64"),
        dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True)),
    )
    shapes = small(hidden_size=96, **shape)
    config.rollout.tp_tail_max_rows = 5
    model = transformers.AutoModelForCausalLM.from_config(shapes).double().eval()
    prepare_model(model, 512)

    def of_rank(joint):
        engine = Engine(ModelRunner(copy.deepcopy(model), 5, 512, 0, tp=joint))
        engine.run([Row(SampleId(0, 0, 0), (1, 2, 3), 4)], SamplingParams())
        return engine.runner.cache.num_bytes()

    meta = memory_needs.meta_model(shapes, torch.float64)
    needs = memory_needs.work_out(config, meta, ranks)
    assert (
        needs.shared == 5 * needs.shared_row == max(run_together(ranks, of_rank)) < 5 * needs.slot
    )
    assert memory_needs.work_out(config, meta, 1).shared_row == 0
    config.rollout.tp_tail_max_rows = "auto"
    auto = memory_needs.work_out(config, meta, ranks)
    assert (auto.shared_row, auto.shared) == (needs.shared_row, 0)
    config.rollout.tp_tail_max_rows, config.model.dtype, config.model.attention = (
        5,
        "bfloat16",
        "varlen",
    )
    assert memory_needs.shared_slots(config, ranks) == 6, "padding of graphs has one of its own"


def test_logits_that_ranks_exchange_count():
    """By hand: 3 rows with windows of 4 on 2 ranks, 511 token ids. Logits of 15 positions: 256 of a
    rank in float32, as they are, in the sampler's precision and padded; 512 of both, 511 in a row;
    and what the sampler makes of these."""
    config, meta = make_config(), memory_needs.meta_model(small(vocab=511), torch.float32)
    config.rollout.max_batch_tokens, config.speculative.fixed_window = 15, 4
    config.rollout.tp_tail_max_rows = 3
    without = memory_needs.work_out(config, meta, 2).rollout
    config.rollout.tp_tail_max_rows = 0
    assert memory_needs.work_out(config, meta, 2).rollout == without, (
        "a rank's own forward holds more"
    )
    config.rollout.top_p, config.rollout.tp_tail_max_rows = 0.9, 3
    own, shared = 15 * 511 * (4 + 16), 15 * (256 * 3 * 4 + 512 * 4 + 511 * 4 + 511 * 16)
    assert memory_needs.work_out(config, meta, 2).rollout - without == shared - own


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_drafter_holds_what_it_is_said_to(dtype):
    """An actual one after an update, its chains, and as many responses as it may keep."""
    config = make_config(dtype)
    config.speculative.method, config.drafter.vocab_size, config.drafter.buffer_tokens = (
        "suffix+drafter",
        100,
        40,
    )
    model = transformers.AutoModelForCausalLM.from_config(small()).to(getattr(torch, dtype)).eval()
    needs = memory_needs.work_out(config, memory_needs.meta_model(model.config, model.dtype), 2)
    assert memory_needs.work_out(config, model, 2) == needs, (
        "the model itself says the same as its configuration"
    )
    config.speculative.method = "suffix"
    without = memory_needs.work_out(config, model, 2)
    assert (without.drafter, without.drafter_slot, without.host_lessons) == (0, 0, 0)
    assert (
        needs.lasting - without.lasting == needs.drafter
        and needs.slot == without.slot == without.whole_slot
    )
    assert needs.shared_row - without.shared_row == needs.drafter_slot, (
        "it follows rows that all ranks share as well"
    )

    prepare_model(model, 512)
    drafter = Drafter(model, np.arange(100))
    training = DrafterTraining(
        drafter, "sdpa", learning_rate=1e-3, temperature=1.0, max_tokens=40, seed=0
    )
    for sample in range(5):
        hidden = torch.randn(10, 128, dtype=model.dtype)
        training.lessons.add(Lesson(SampleId(0, 0, sample), 3, np.arange(11), hidden))
    training.backward(list(training.lessons))
    training.step()
    training.backward(list(training.lessons))
    for param in (
        training.params
    ):  # as after an average over ranks: the layer's own embedding, which is not used, has one too
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    gradients = [p.grad for p in training.params]
    training.step()
    states = training.optimizer.state.values()
    held = [
        *training.params,
        *gradients,
        *(state[key] for state in states for key in MOMENTS),
        drafter._head[0],
    ]
    if dtype == "bfloat16":
        held += [*training.masters, *training.masters]  # with gradients of their size
        assert {t.dtype for t in training.masters} == {torch.float32}
    assert needs.drafter == size(held)
    assert needs.host_lessons == size(lesson.hidden for lesson in training.lessons)

    engine = Engine(ModelRunner(model, 3, 512, seed=0))
    chains = engine.runner.chains = Chains(drafter, engine.runner, SamplingParams())
    engine.add([Row(SampleId(0, 0, 0), (1, 2, 3), 4)])
    engine.step(SamplingParams())
    assert chains.draft(engine, np.array([0]), 2)[0].shape == (1, 2)
    assert 3 * needs.drafter_slot == chains.cache.num_bytes() + size([chains._hidden])


@pytest.mark.parametrize(
    "changes, vocab",
    [
        (
            {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab": 32768},
            16384,
        ),
        ({}, 100),
    ],
    ids=["logits", "layers"],
)
def test_training_a_drafter_peaks_where_it_is_said_to(changes, vocab):
    """Within 0.75 and 1.35 of it, for one piece of a response as for several."""
    config = make_config()
    config.speculative.method, config.drafter.vocab_size = "drafter", vocab
    model = transformers.AutoModelForCausalLM.from_config(small(**changes)).eval()
    needs = memory_needs.work_out(config, memory_needs.meta_model(model.config, model.dtype), 1)
    prepare_model(model, 512)
    training = DrafterTraining(
        Drafter(model, np.arange(vocab)),
        "sdpa",
        learning_rate=1e-3,
        temperature=1.0,
        max_tokens=1 << 20,
        seed=0,
    )
    length = drafter_training.CONTEXT + drafter_training.PIECE
    for count in (1, 4):
        lessons = [
            Lesson(
                SampleId(0, 0, n),
                drafter_training.CONTEXT,
                np.arange(length + 1),
                torch.randn(length, model.config.hidden_size),
            )
            for n in range(count)
        ]
        training.backward(lessons)  # makes the gradients, and the head
        measured = peak_allocated(lambda lessons=lessons: training.backward(lessons))
        assert 0.75 < count * needs.drafter_lesson / measured < 1.35, (
            count * needs.drafter_lesson,
            measured,
        )


def test_a_policy_that_can_have_no_drafter_is_refused(monkeypatch):
    config = make_config()
    config.speculative.method = "drafter"
    monkeypatch.setattr("bubblespec.engine.drafter._one_layer_config", lambda *_: {}["layers"])
    with pytest.raises(
        InputError,
        match=r"^speculative.method: no drafter for this policy: Qwen2ForCausalLM cannot be made",
    ):
        memory_needs.work_out(config, memory_needs.meta_model(small(), torch.float32), 1)


def test_working_out_leaves_the_model_as_it_is():
    model = transformers.AutoModelForCausalLM.from_config(small()).eval()
    prepare_model(model, 512)
    memory_needs.work_out(make_config(), model, 1)
    memory_needs.meta_model(model.config, torch.float32)
    assert (
        model.config._attn_implementation == "bubblespec"
        and next(model.parameters()).device.type == "cpu"
    )


def peak_allocated(run) -> int:
    """Most bytes of tensors that `run()` held at a time beyond what was there before, by PyTorch's
    own account."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
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
        (
            {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab": 32768},
            1024,
            False,
            1 << 25,
        ),
    ],
    ids=["activations", "checkpointed", "head"],
)
def test_a_gradient_step_peaks_where_it_is_said_to(
    changes, num_tokens, has_checkpoints, max_logits
):
    """Within 0.75 and 1.35 of it. Each case is dominated by one part of the sum."""
    measured = measure(changes, num_tokens, has_checkpoints, max_logits)
    config = make_config(max_tokens=num_tokens, max_logits_per_chunk=max_logits)
    config.model.gradient_checkpointing = has_checkpoints
    needs = memory_needs.work_out(
        config, memory_needs.meta_model(small(**changes), torch.float32), 1
    )
    assert 0.75 < needs.training / measured < 1.35, (needs.training, measured)


@pytest.mark.parametrize(
    "sizes, world_size, largest",
    [
        ([[8, 1, 5, 3], [2]], 1, 19),
        ([[8, 1, 5, 3], [2]], 2, 10),
        ([[8, 1, 5, 3], [2]], 3, 8),
        ([[4, 4], [1]], 2, 5),
    ],
)
def test_largest_share(sizes, world_size, largest):
    """Dealt out by hand. That this is what the optimizer does is tested with real ranks."""
    assert memory_needs.largest_share(sizes, world_size) == largest
