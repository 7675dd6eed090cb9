"""Norms and rotary embeddings in fewer kernels: the same functions, recognised by comparison, and
how many operations a layer then has."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from bubblespec.engine import fused
from bubblespec.engine.fused import (
    ROTARY,
    FusedRMSNorm,
    computes_rms_norm,
    computes_rotary,
    fuse,
    rotate_together,
)
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.packing import PAGE, pack_rows, pack_sequences
from bubblespec.engine.pages import Pages
from tests.helpers.fake_cuda import DEVICE, FakeCuda, make_fake

FILES = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}
OTHER_FILES = {"phi3": phi3, "olmo2": olmo2}
NUM_NORMS = {"llama": 5, "qwen2": 5, "qwen3": 9}  # of two layers and the end
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def restored(monkeypatch):
    """The modeling files are as they were afterwards."""
    for file in (FILES | OTHER_FILES).values():
        monkeypatch.setattr(file, ROTARY, getattr(file, ROTARY))


def fused_norm(size: int, dtype: torch.dtype) -> FusedRMSNorm:
    norm = qwen2.Qwen2RMSNorm(size, eps=1e-4).to(dtype)
    norm.__class__ = FusedRMSNorm
    return norm


def test_norm_equals_the_formula():
    """Its gradient is checked by differences."""
    norm = fused_norm(8, torch.float64)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    wanted = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-4).sqrt()
    torch.testing.assert_close(norm(x), wanted, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(norm, (x,))


def test_rotary_equals_transformers():
    shapes = (1, 6, 7, 16), (1, 2, 7, 16), (1, 7, 16), (1, 7, 16)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found, wanted = rotate_together(*given), llama.apply_rotary_pos_emb(*given)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = [
        torch.autograd.grad(sum((part**3).sum() for part in parts), given)
        for parts in (found, wanted)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "name, dtype",
    [*((n, torch.float64) for n in FILES), *((n, torch.bfloat16) for n in FILES | OTHER_FILES)],
)
def test_fused_model_equals_plain_logits(make_model, monkeypatch, restored, name, dtype):
    """Up to rounding: transformers' norms compute in float32. OLMo's cos and sin are float32 where
    its queries and keys are bfloat16."""
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    monkeypatch.setattr(fused, "HALF", (dtype,))
    tokens, model, plain = torch.arange(1, 30), make_model(name, dtype), make_model(name)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        wanted = torch.cat([plain(part[None]).logits[0] for part in tokens.split([20, 9])])
        prepare_model(model, 64)
        hidden = forward_hidden(model, tokens, pack_sequences([20, 9], tokens.device))
        got = model.get_output_embeddings()(hidden)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float64 else 0.05
    assert (got - wanted).abs().max() < tolerance * wanted.abs().max()
    norms = [module for module in model.modules() if isinstance(module, FusedRMSNorm)]
    assert len(norms) == NUM_NORMS.get(name, len(norms)) > 0
    if name in FILES:
        before = getattr(FILES[name], ROTARY)
        fuse(model)
        assert hasattr(before, "original") and getattr(FILES[name], ROTARY) is before, "once"


class Lookalike(qwen2.Qwen2RMSNorm):
    """Subtracts the mean, as a LayerNorm does."""

    def forward(self, hidden_states):
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


def test_other_functions_are_not_replaced(make_model):
    assert computes_rms_norm(llama.LlamaRMSNorm(8)) and computes_rms_norm(qwen3.Qwen3RMSNorm(8))
    assert not computes_rms_norm(Lookalike(8))
    gemma = GemmaRMSNorm(8)
    gemma.variance_epsilon = gemma.eps
    assert not computes_rms_norm(gemma), "it multiplies by 1 + weight"
    assert computes_rotary(llama.apply_rotary_pos_emb)
    assert not computes_rotary(cohere.apply_rotary_pos_emb), "it rotates neighbours"
    assert not computes_rotary(lambda query, cos, sin: query), "it takes other arguments"
    kinds = {type(module) for module in make_model("qwen2").modules()}
    model = make_model("qwen2", max_length=64)
    assert {type(module) for module in model.modules()} == kinds, "on a CPU nothing changes"


def test_partial_rotary_uses_the_original():
    """Phi-3's rotates a part of each head where `cos` is shorter."""
    shapes = (1, 6, 7, 16), (1, 2, 7, 16), (1, 7, 8), (1, 7, 8)
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    rotary = fused.fused_rotary(phi3.apply_rotary_pos_emb)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "DEVICES", ("cpu",))
        patch.setattr(fused, "HALF", (torch.float64,))
        torch.testing.assert_close(rotary(*given), phi3.apply_rotary_pos_emb(*given))


# They launch nothing, or make the cache.
NO_KERNELS = {"prim::device", "aten::_unsafe_view", "aten::new_zeros"}


class Operations(TorchDispatchMode):
    """Counts operations that launch a kernel."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view and function.name() not in NO_KERNELS
        return function(*args, **(kwargs or {}))


def count_operations(name: str, num_layers: int) -> int:
    """Count the operations of a decoding forward with pages."""
    model, cache = make_fake(name, num_layers), KVCache(4, PAGE, 1, Pages(4, PAGE, 4, PAGE))
    fuse(model)
    for start in (0, 1):  # the first makes the cache
        packing = pack_rows(cache, np.full(4, start), np.ones(4, np.int64), DEVICE)
        tokens = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        with Operations() as operations:
            forward_hidden(model, tokens, packing, "varlen")
    return operations.count


@pytest.mark.parametrize("name", FILES)
def test_fused_layer_has_few_operations(monkeypatch, restored, name):
    """40 with transformers' norms and rotary embedding, and 56 for Qwen3."""
    with FakeCuda(), torch.no_grad():
        monkeypatch.setattr(fused, "gives", lambda call, *wanted: False)
        plain = count_operations(name, 2) - count_operations(name, 1)
        monkeypatch.setattr(fused, "gives", lambda call, *wanted: True)  # not by fake numbers
        # On CUDA it is one kernel; fake tensors would take it apart.
        one = lambda x, shape, weight, epsilon: x * weight  # noqa: E731
        monkeypatch.setattr(fused, "rms_norm", one)
        few = count_operations(name, 2) - count_operations(name, 1)
    assert plain == (56 if name == "qwen3" else 40) and few <= 24, (plain, few)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", FILES)
def test_fused_model_on_the_gpu(make_model, restored, name):
    """Logits in bfloat16, and one kernel for a norm."""
    plain, model = (make_model(name, torch.bfloat16).cuda() for _ in range(2))
    tokens = torch.arange(1, 30, device="cuda")
    with torch.no_grad():
        wanted = plain(tokens[None]).logits[0]
        prepare_model(model, 64)
        hidden = forward_hidden(model, tokens, pack_sequences([29], tokens.device))
        got = model.get_output_embeddings()(hidden)
        assert ((got - wanted).abs().max() / wanted.abs().max()).item() < 0.05
        norm = next(m for m in model.modules() if isinstance(m, FusedRMSNorm))
        norm(hidden)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            norm(hidden)
            torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1
