"""Code for a GPU, on CUDA tensors without values (helpers/fake_cuda.py)."""

import contextlib
import inspect
import itertools
import types
from functools import partial

import numpy as np
import pytest
import torch
from test_update import ADVANTAGES, make_config, make_samples
from transformers.models.llama import modeling_llama

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine import fused, graphs, sampling
from bubblespec.engine import runner as runner_module
from bubblespec.engine.engine import Engine
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import enable_gradient_checkpointing, forward_hidden
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.noise import gumbel, random_bits
from bubblespec.engine.packing import PAGE, pack_rows, pack_sequences
from bubblespec.engine.sampling import SamplingParams, sample, verify
from bubblespec.learn.distillation import Teacher
from bubblespec.learn.learner import Learner
from bubblespec.learn.optimizer import Optimizer
from bubblespec.rollout.board import ProgressBoard, RankState
from bubblespec.types import Row
from tests.helpers import fake_cuda
from tests.helpers.fake_cuda import DEVICE, is_on_gpu, make_fake
from tests.helpers.generation import Drafts, make_prompts, make_rows, make_runner
from tests.helpers.models import VOCAB

KERNELS = ("sdpa", "varlen", "flash_attn")


def test_mistakes_on_fake_tensors_are_seen(cuda):
    """The stand-in itself: each of these costs a program on a GPU an error or a wait."""
    values, index = torch.zeros(5, device=DEVICE), torch.arange(2)
    for mistake in (
        lambda: values + torch.zeros(5),
        lambda: values[index],
        lambda: values[values > 0],
        lambda: values.nonzero(),
        lambda: values.repeat_interleave(values.long()),
        lambda: values.bfloat16()[None] @ values[:, None],
    ):
        with pytest.raises((RuntimeError, AssertionError)):
            mistake()
    assert not cuda.waits
    for wait in (
        lambda: values.cpu(),
        lambda: values[0].item(),
        lambda: float(values[0]),
        lambda: bool(values.any()),
        lambda: values[:1].tolist(),
        lambda: torch.tensor([1, 2], device=DEVICE),
        lambda: index.to(DEVICE),
        lambda: values.new_tensor(1.0),
        lambda: values.copy_(torch.zeros(5)),
        lambda: torch.segment_reduce(
            values, "sum", lengths=torch.zeros(1, dtype=torch.int64, device=DEVICE)
        ),
    ):
        wait()
        assert len(cuda.waits) == 1, inspect.getsource(wait)
        cuda.clear()
    index.to(DEVICE, non_blocking=True)
    assert cuda.uploads == 1 and not cuda.waits


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_forwards_neither_wait_nor_widen(cuda, name, kernel):
    """Training forward and backward; prompts, single tokens and drafts over the cache."""
    model, cache, start = make_fake(name), KVCache(4, 2 * PAGE), np.zeros(3, np.int64)
    tokens = torch.zeros(60, dtype=torch.int64, device=DEVICE)
    cuda.clear()
    hidden = forward_hidden(model, tokens, pack_sequences([10, 3, 40, 7], DEVICE), kernel)
    assert is_on_gpu(hidden, torch.bfloat16) and hidden.shape == (60, 64)
    hidden.sum().backward()
    assert all(is_on_gpu(p.grad, torch.bfloat16) for p in model.base_model.parameters())
    assert cuda.calls["torch_attn::_varlen_attn"] == (kernel == "varlen")
    for count in ([9, 40, 3], [1, 1, 1], [5, 1, 0], [0, 0, 1]):
        packing = pack_rows(cache, start.copy(), np.array(count), DEVICE)
        with torch.inference_mode():
            hidden = forward_hidden(model, tokens[: sum(count)], packing, kernel)
        assert is_on_gpu(hidden, torch.bfloat16) and hidden.shape == (sum(count), 64)
        start += count
    cache.copy(0, 3, 8)
    assert cuda.products == {torch.bfloat16} and cuda.waits == [] and cuda.largest_double == 0
    for tensor in (*cache.keys.values(), *cache.values.values()):
        assert is_on_gpu(tensor, torch.bfloat16) and tensor.shape[:2] == (4, 2 * PAGE)


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, stop_token_ids=(5, 11), min_length=3),
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("at_once", [1 << 26, 3 * VOCAB])
@torch.inference_mode()
def test_sampling_and_verification_wait_once(cuda, monkeypatch, params, at_once):
    """Whole, and in chunks of three positions; nothing with a vocabulary is float64."""
    monkeypatch.setitem(sampling.MAX_LOGITS_AT_ONCE, "cuda", at_once)
    counts = np.array([0, 3, 0, 4])
    positions, drafts = int(counts.sum()) + len(counts), int(counts.sum())
    logits = torch.zeros(positions, VOCAB, dtype=torch.bfloat16, device=DEVICE)
    keys = torch.zeros(positions, 4, dtype=torch.int32, device=DEVICE)
    generated = torch.zeros(positions, dtype=torch.int64, device=DEVICE)
    draft, none = np.zeros(drafts, np.int64), np.zeros(positions, np.int64)
    cuda.clear()
    assert is_on_gpu(random_bits(keys, VOCAB), torch.int32)
    assert is_on_gpu(gumbel(keys, VOCAB), torch.float32)
    token, logprob, full_logprob = sample(logits, keys, generated, params)
    assert is_on_gpu(token, torch.int64) and len(token) == positions
    assert is_on_gpu(logprob, torch.float32) and is_on_gpu(full_logprob, torch.float32)
    assert cuda.waits == []
    for tokens, num_draft in ((draft, counts), (draft[:0], none)):
        cuda.clear()
        cuda.answer = lambda tensor: np.broadcast_to([[0.0], [-1.0], [-2.0]], tensor.shape)
        verified = verify(sample(logits, keys, generated, params), tokens, num_draft)
        assert cuda.waits == ["packing.to_host"] and cuda.largest_double == 3 * positions
        assert verified.token.dtype == np.int64 and verified.token.tolist() == [0] * positions
        assert verified.accepted.tolist() == num_draft.tolist(), "the host reads 0 everywhere"
        assert (verified.logprobs == [[-1.0], [-2.0]]).all()


def some_drafts() -> Drafts:
    """Two tokens for every other of eight rows in turn, none for the next eight."""
    is_drafted = itertools.cycle([False, True] * 4 + [False] * 8)
    return Drafts(lambda row, length: np.array([12, 13]) if next(is_drafted) else None)


def make_engine(cuda, monkeypatch, kernel: str, **options) -> Engine:
    """An engine whose forwards find tokens made up, of which some are those of the drafts."""
    rng, cuda.sampled = np.random.default_rng(0), []

    def watched(sampled, draft, num_draft):
        cuda.sampled.append(num_draft)
        assert is_on_gpu(sampled[0], torch.int64)
        return verify(sampled, draft, num_draft)

    def answer(tensor):
        tokens = rng.integers(12, 15, tensor.shape[1])
        return np.stack((tokens, *np.full((2, len(tokens)), -1.0)))

    monkeypatch.setattr(runner_module, "verify", watched)
    cuda.answer = answer
    options |= {"max_num_batched_tokens": 32, "kernel": kernel}
    return Engine(make_runner(make_fake(), 4, options.pop("length", 100), seed=0, **options))


def run_engine(cuda, engine: Engine, drafts: Drafts, rows: list[Row] = ()) -> set[int]:
    """Generate all rows, checking that each forward waits once, at its end. Return the numbers of
    copies to the device."""
    rows = rows or make_rows(make_prompts(4), 2, 7)
    engine.add(rows)
    uploads, finished = set(), []
    while not engine.is_idle:
        cuda.clear()
        calls, found = len(cuda.sampled), engine.runner.graphs
        is_captured = found is not None and bool(found._graphs)
        meanwhile = partial(cuda.waits.append, "meanwhile")
        finished += engine.step(PARAMS[2], drafts, None, meanwhile)[0]
        is_sampled = len(cuda.sampled) > calls
        assert cuda.waits == ["meanwhile", "packing.to_host" if is_sampled else "synchronize"]
        uploads.add(cuda.uploads)
        has_products = not is_captured or is_sampled  # a replay computes nothing here
        assert cuda.products == ({torch.bfloat16} if has_products else set())
        assert cuda.largest_double < 4 * 32
    assert len(finished) == len(rows)
    assert all(len(row.tokens) == row.max_new_tokens for row in finished)
    return uploads


@pytest.mark.parametrize("kernel", KERNELS)
def test_engine_step_waits_once(cuda, monkeypatch, kernel):
    """Rows with shared prompts, from admission to their end, without graphs; some forwards have
    drafts and some none."""
    engine = make_engine(cuda, monkeypatch, kernel, enforce_eager=True)
    uploads = run_engine(cuda, engine, some_drafts())
    assert {bool(num_draft.any()) for num_draft in cuda.sampled} == {False, True}
    assert engine.runner.graphs is None and len(cuda.sampled) < engine.num_forwards
    assert max(uploads) <= 11, "nothing is copied once a row or once a layer"
    cache = engine.runner.cache
    for tensor in (*cache.keys.values(), *cache.values.values()):
        assert is_on_gpu(tensor, torch.bfloat16)


def test_engine_step_with_preemption_waits_once(cuda, monkeypatch):
    """The pages that one row may need suffice for three at their beginning."""
    monkeypatch.setattr(fake_cuda, "PAGE_DIVISOR", 2)
    options = {"length": 24, "page_size": 2, "num_pages": 12, "enforce_eager": True}
    engine, placed = make_engine(cuda, monkeypatch, "varlen", **options), []
    place = engine.runner.place
    monkeypatch.setattr(engine.runner, "place", lambda *row: (placed.append(row), place(*row)))
    rows = make_rows([(7,) * 8], 4, 12)
    assert max(run_engine(cuda, engine, some_drafts(), rows)) <= 12 and len(placed) > 4
    assert engine.pages.num_free == 12 and len(engine.runner.cache.keys[0]) == 13


class Together:
    """A `TPGroup` of two ranks that are both this one."""

    rank, size, can_capture = 0, 2, True

    def __init__(self):
        self.sums = []

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device == DEVICE and tensor.is_contiguous()
        self.sums.append(tensor.numel())
        return tensor.mul_(2)

    def gather_text(self, text: str) -> list[str]:
        return [text, text]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device == DEVICE
        return torch.stack([tensor, tensor])


@pytest.mark.parametrize(
    "kernel, tp", [("varlen", None), ("flash_attn", None), ("varlen", Together())]
)
def test_graphs_read_one_input_tensor(cuda, monkeypatch, kernel, tp):
    """A captured forward neither waits nor reads from the host; a replay writes one tensor."""
    captured, sums = [], [] if tp is None else tp.sums
    sums.clear()

    def capture(run, pool):
        cuda.clear()
        before = len(sums)
        captured.append((run(), sums[before:]))
        assert cuda.waits == [] and cuda.uploads == 0 and cuda.products == {torch.bfloat16}
        return lambda: None, captured[-1][0], pool

    monkeypatch.setattr(graphs, "rehearse", lambda run: (run(), sums.append("alone")))
    monkeypatch.setattr(graphs, "capture", capture)
    engine = make_engine(cuda, monkeypatch, kernel, tp=tp)
    found = engine.runner.graphs
    with torch.inference_mode():
        found._capture()
    assert cuda.waits == []
    uploads = run_engine(cuda, engine, some_drafts())
    assert found.num_replays == engine.num_forwards and found.problem is None
    if tp is None:
        assert max(uploads) <= 7, "the input, a block table, and what verification needs"
    for shape, (hidden, own_sums) in zip(found.shapes, captured, strict=True):
        assert hidden.shape == (shape.tokens, 64) and is_on_gpu(hidden, torch.bfloat16)
        inputs = found._graphs[shape].inputs
        assert is_on_gpu(inputs, torch.int64) and inputs.shape == (6, shape.tokens + 1)
        # Behind the attention and behind the MLP.
        assert own_sums == ([] if tp is None else [64 * shape.tokens] * 2)
    if tp is not None:  # each size of sum was made once, before
        count = len(found.shapes)
        sizes = sorted({64 * shape.tokens for shape in found.shapes}, reverse=True)
        assert sums[: count + len(sizes)] == ["alone"] * count + sizes


EXTRAS = {
    "grpo": {"mask_truncated_completions": True},
    "dr_grpo": {"loss_type": "dr_grpo", "delta": 3.0},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo"},
    "gspo, updates": {"importance_sampling_level": "sequence", "num_minibatches": 2},
    "kl, checkpoints": {"kl_coef": 0.1},
    "distillation": {"loss_type": "distillation", "distillation_beta": 0.5},
}


@pytest.mark.parametrize("name", EXTRAS)
def test_update_waits_only_at_the_end(cuda, monkeypatch, name):
    """For the backward pass, sums and the norm; also with logits of 25 positions at once."""
    extra, kernel = EXTRAS[name], "varlen"
    model, config = make_fake(), make_config(100, **extra)
    reference = make_fake().requires_grad_(False) if "kl_coef" in extra else None
    teacher = Teacher(make_fake().requires_grad_(False), kernel) if name == "distillation" else None
    config.optim.max_grad_norm = 1.0
    if name in ("kl, checkpoints", "distillation"):
        monkeypatch.setattr("bubblespec.learn.learner.MAX_LOGITS", 25 * VOCAB)
    if name == "kl, checkpoints":
        config.model.gradient_checkpointing, kernel = True, "sdpa"
        enable_gradient_checkpointing(model)
    optimizer, ranks = Optimizer(model, config.optim, 10, Ranks(DEVICE)), Ranks(DEVICE)
    cuda.answer = lambda tensor: np.full(tuple(tensor.shape), 5.0)
    cuda.clear()
    ranks.sum_ = lambda tensor: cuda.waits.append("sum")
    parts = {"model": model, "reference": reference, "optimizer": optimizer, "kernel": kernel}
    parts["teacher"] = teacher
    metrics, _ = Learner(config=config, ranks=ranks, **parts).update(make_samples(), ADVANTAGES, 0)
    assert metrics["grad_norm"] == 5.0 and metrics["skipped_updates"] == 0
    updates = extra.get("num_iterations", 1) * extra.get("num_minibatches", 1)
    waits = ["synchronize", "sum", "learner.sum_over_ranks", "optimizer.step"]
    assert cuda.waits == waits * updates
    assert cuda.products == {torch.bfloat16} and cuda.largest_double < 10 * 20
    assert cuda.calls["aten::_fused_adamw_"] == 2 * updates
    assert is_on_gpu(optimizer.flat_grad, torch.float32)
    assert all(is_on_gpu(p, torch.bfloat16) for p in model.parameters())
    for param, master in optimizer.updated.items():
        moments = optimizer.local.state[master].values()
        assert param.grad is None
        assert all(is_on_gpu(tensor, torch.float32) for tensor in (master, *moments))


def test_optimizer_state_survives_the_host(cuda):
    """Moments and masters are read once each, and are float32 on the device again."""
    model, config, states = make_fake(), make_config(), []
    cuda.answer = lambda tensor: np.ones(tuple(tensor.shape))
    for _ in range(2):
        optimizer = Optimizer(model, config.optim, 10, Ranks(DEVICE))
        if states:
            on_host = {
                name: {k: torch.zeros(v.shape) for k, v in t.items()}
                for name, t in states[0]["parameters"].items()
            }
            optimizer.load_state_dict({"num_updates": 3, "parameters": on_host})
        else:
            optimizer.step(0)
        cuda.clear()
        states.append(optimizer.state_dict())
        assert cuda.waits == ["optimizer._to_main"] * 3 * len(optimizer.params)
    saved = [t for p in states[1]["parameters"].values() for t in p.values()]
    assert all(t.dtype == torch.float32 and t.device.type == "cpu" for t in saved)
    for master in optimizer.updated.values():
        moments = optimizer.local.state[master].values()
        assert all(is_on_gpu(tensor, torch.float32) for tensor in (master, *moments))


def test_model_is_checked_on_the_device(cuda, monkeypatch):
    """The host reads verdicts alone, once at the start."""
    monkeypatch.setattr(fused, "gives", lambda call, *wanted: True)  # on the host: no fake numbers
    rotary = fused.ROTARY  # is put back afterwards
    monkeypatch.setattr(modeling_llama, rotary, getattr(modeling_llama, rotary))
    model = make_fake()
    cuda.answer = lambda tensor: np.full(tuple(tensor.shape), tensor.dtype == torch.bool)
    prepare_model(model, 100)
    assert cuda.waits and cuda.products == {torch.bfloat16}


def test_collectives_send_device_tensors(cuda, monkeypatch):
    """One rank exchanges nothing; two ranks send tensors of the device."""
    ranks = Ranks(DEVICE)
    tensor = torch.zeros(3, device=DEVICE)
    assert ranks.sum_(tensor) is tensor and not cuda.waits
    assert ranks.gather(np.arange(3)).tolist() == [[0, 1, 2]] and not cuda.waits
    sent = []

    def all_gather(everyone, own, async_op, group=None):
        assert is_on_gpu(everyone, own.dtype) and own.device == DEVICE
        assert everyone.numel() == 2 * own.numel()
        sent.append(own.numel())
        return types.SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    monkeypatch.setattr("bubblespec.distributed.ranks.all_gather", all_gather)
    monkeypatch.setattr("bubblespec.rollout.board.all_gather", all_gather)
    monkeypatch.setattr("torch.distributed.new_group", lambda **options: options)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: device)
    monkeypatch.setattr("torch.cuda.stream", contextlib.nullcontext)
    ranks.world_size, ranks.watchdog = 2, types.SimpleNamespace(enter=lambda place: None)
    cuda.answer = lambda tensor: np.ones(tuple(tensor.shape))
    assert ranks.gather(np.zeros((2, 3))).shape == (2, 2, 3)
    assert ranks.gather_text("a") == ["\x01"] * 2
    assert cuda.waits == ["ranks.gather"] * 6  # of three collectives: there and back
    board = ProgressBoard(ranks, 60.0)
    for num_facts in (0, 5, 5, 0):  # another number of them needs other buffers
        cuda.clear()
        board.begin()
        states = board.poll(lambda count=num_facts: RankState(0, facts=np.zeros(count)), True)
        assert [state[:2] for state in states] == [(1, True)] * 2
        assert all(state.facts.tolist() == [1.0] * num_facts for state in states)
        assert cuda.waits == ["board.receive"] and cuda.uploads == 1
        assert sent[-1] == 2 + num_facts
