"""Kernels and bytes of a micro-batch on a GPU, counted on meta tensors, by kind: as transformers'
modules compute it, and by the kernels of training. `python -m tests.helpers.traffic` prints both.

A kernel reads what it is given once and writes what it returns once, caches left aside."""

import os
from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

os.environ.setdefault("TRITON_INTERPRET", "1")

from benchmarks.gpu_bench import SHAPE_KEYS, SHAPES
from bubblespec.config import Config, LossConfig, ModelConfig, OptimConfig, RolloutConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine import attention, norms, ops, trained
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.model import OWN_HIDDEN, OutputHead
from bubblespec.engine.norms import replace_norms
from bubblespec.learn.learner import Learner
from bubblespec.learn.microbatch import pack_responses
from bubblespec.learn.optimizer import Optimizer, _copy_masters
from tests.helpers.models import config_of

META = torch.device("meta")
LENGTHS, PROMPT, MICROBATCHES = (
    [3328] * 4,
    512,
    3,
)  # an update: 46,000 tokens, of which 40,000 count
PRODUCTS = ("aten::mm", "aten::addmm", "aten::linear")
GATHERS = ("aten::embedding", "aten::index_select", "aten::gather")
FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::alias")
TWICE = ("_rotate", "_moved", "_head_gradient")  # first arguments read and written


def num_bytes(tensors) -> int:
    return sum(t.nbytes for t in tree_leaves(tensors) if isinstance(t, torch.Tensor))


class Traffic(TorchDispatchMode):
    """Context that counts kernels, and bytes in `moved`, by kind."""

    def __init__(self):
        super().__init__()
        self.kernels, self.moved, self.is_optimizer = Counter(), Counter(), False

    def add(self, kind: str, size: int) -> None:
        self.kernels[kind] += 1
        self.moved[kind] += size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.name().partition(".")[0]
        tensors = [t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
        if function.is_view or name.startswith(FREE) or not any(t.is_meta for t in tensors):
            return out
        size = 2 * num_bytes(out) if name in GATHERS else num_bytes((args, out))
        kinds = {t.dtype for t in tensors if t.is_floating_point()}
        is_addition = name == "aten::add_" and kinds == {torch.float32, torch.bfloat16}
        vocabulary = SHAPES["1.5B"][3]
        if name == "aten::_foreach_copy_":
            for target, source in zip(*args[:2], strict=True):
                self.add("bookkeeping", target.nbytes + source.nbytes)
        elif is_addition:
            self.add("bookkeeping", size)
        elif name in PRODUCTS:
            self.add("products", size)
        elif any(t.ndim == 2 and t.shape[1] == vocabulary for t in tensors):
            self.add("logits", size)
        else:
            self.add("layers", size)
        return out

    def launch(self, executor, *args, **options) -> None:
        name = executor.fn.__name__
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        size = num_bytes(list({t.untyped_storage()._cdata: t for t in tensors}.values()))
        size += tensors[0].nbytes if name in TWICE else 0
        if name == "_moved":
            size -= 0 if options["ADDS"] else tensors[0].nbytes
            self.add("bookkeeping", size)
        else:
            self.add("logits" if name.startswith("_head") else "layers", size)


class _Empty(torch.autograd.Function):
    """Stands in for one kernel, forward and backward."""

    @staticmethod
    def forward(ctx, traffic, kind, shape, *tensors):
        out = torch.empty(shape, dtype=tensors[0].dtype, device=META)
        traffic.add(kind, num_bytes((tensors, out)))
        ctx.save_for_backward(*tensors, out)
        ctx.traffic, ctx.kind = traffic, kind
        return out

    @staticmethod
    def backward(ctx, grad):
        *tensors, out = ctx.saved_tensors
        grads = [torch.empty(t.shape, dtype=t.dtype, device=META) for t in tensors]
        read = (*tensors, out, grad) if ctx.kind == "attention" else (*tensors, grad)
        ctx.traffic.add(ctx.kind, num_bytes((read, grads)))
        return None, None, None, *grads


def count(num_layers: int, has_kernels: bool) -> Traffic:
    """Count a micro-batch of the 1.5B with fewer layers, and a third of an update's copies."""
    options = dict(zip(SHAPE_KEYS, SHAPES["1.5B"], strict=True)) | {"num_hidden_layers": num_layers}
    shape = config_of("Qwen2", {}, **options)
    with torch.device(META):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()
    model.set_attn_implementation(attention.NAME)
    replace_norms_of_meta(model)
    model.to_logits = OutputHead(model.lm_head, shape.vocab_size)
    rollout = RolloutConfig(temperature=1.0)
    optim = OptimConfig(max_tokens_per_microbatch=1 << 14)
    config = Config(ModelConfig(""), rollout=rollout, loss=LossConfig(), optim=optim)
    ranks = Ranks(META)
    optimizer = Optimizer(model, optim, 1, ranks)
    learner = Learner(
        config=config, ranks=ranks, model=model, reference=None, optimizer=optimizer,
        kernel="varlen", params=SamplingParams(),
    )  # fmt: skip
    tokens = [np.ones(n, int) for n in LENGTHS]
    logprobs = [np.zeros(n, np.float32) for n in LENGTHS]
    batch = pack_responses([(1,) * PROMPT] * len(LENGTHS), tokens, logprobs, META)
    traffic, weight = Traffic(), np.ones(len(LENGTHS))

    def attend(packing, query, key, value, options):
        return _Empty.apply(traffic, "attention", query.shape, query, key, value)

    def normed(x, shape, weight, eps):
        return _Empty.apply(traffic, "layers", x.shape, x, weight)

    from triton.runtime.interpreter import GridExecutor

    def launch(executor, *args, **options):
        traffic.launch(executor, *args, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.dict(attention.KERNELS, varlen=attend))
        stack.enter_context(patch.object(norms, "rms_norm", normed))
        stack.enter_context(patch.object(GridExecutor, "__call__", launch))
        if has_kernels:
            stack.enter_context(patch.object(ops, "DEVICES", ("meta",)))
            trained.TrainedDecoder(model)  # stacks weights
            vars(model)[OWN_HIDDEN] = trained.hidden
            stack.enter_context(patch.object(trained, "join", lambda model: None))
        with traffic:
            learner.accumulate_gradient(batch, weight, weight)
            before = traffic.kernels.copy(), traffic.moved.copy()
            _copy_masters(optimizer.params, [optimizer.updated[p] for p in optimizer.params])
        for total, old in zip((traffic.kernels, traffic.moved), before, strict=True):
            for kind in total:
                total[kind] = old[kind] + (total[kind] - old[kind]) // MICROBATCHES
    return traffic


def replace_norms_of_meta(model) -> None:
    """Do what `replace_norms` does; on a meta device it cannot compare."""
    with patch.object(norms, "computes_norm", lambda module, norm: True):
        replace_norms(model)


def by_kind(has_kernels: bool) -> tuple[dict[str, int], dict[str, tuple[int, float]]]:
    """Kernels of a layer by kind, and kernels and gigabytes of a micro-batch of 28 layers."""
    one, two = (count(layers, has_kernels) for layers in (1, 2))
    num_layers = SHAPES["1.5B"][2]
    layer = {kind: two.kernels[kind] - one.kernels[kind] for kind in two.kernels}
    whole = {}
    for kind in two.moved:
        kernels, moved = (
            a[kind] + (num_layers - 1) * (b[kind] - a[kind])
            for a, b in ((one.kernels, two.kernels), (one.moved, two.moved))
        )
        whole[kind] = kernels, moved / 1e9
    return layer, whole


if __name__ == "__main__":
    for has_kernels in (False, True):
        layer, whole = by_kind(has_kernels)
        total = sum(moved for _, moved in whole.values())
        print("kernels of training" if has_kernels else "transformers' modules", f"{total:.0f} GB")
        for kind, (kernels, moved) in whole.items():
            print(f"  {kind:12} {layer[kind]:3} a layer, {kernels:5} in all, {moved:6.1f} GB")
