"""The backward pass of `model.batch_invariant` alone has torch's deterministic algorithms, and
nothing without one on a GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bubblespec.engine.model import enable_gradient_checkpointing
from tests.test_update import ADVANTAGES, gradient, make_config, make_learner, make_samples

# What torch documents to raise on CUDA, of what a language model could contain
# (`torch.use_deterministic_algorithms`); sums that run, and bins, where they are of floats.
REFUSED = {"aten::put", "aten::put_", "aten::bincount", "aten::median", "aten::nanmedian"}
REFUSED |= {"aten::kthvalue", "aten::nll_loss_forward", "aten::nll_loss_backward", "aten::resize_"}
REFUSED_OF_FLOATS = {"aten::cumsum", "aten::cumsum_", "aten::histc", "aten::_histc"}
REFUSED_PARTS = ("grid_sampl", "max_pool", "avg_pool", "ctc_loss", "embedding_bag", "upsample")


class Refusing(TorchDispatchMode):
    """Raises in a deterministic backward pass where CUDA would; `names`: what was in one."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if torch.are_deterministic_algorithms_enabled():
            name = function.name().partition(".")[0]
            self.names.add(name)
            floats = [a for a in args[:1] if isinstance(a, torch.Tensor) and a.is_floating_point()]
            assert name not in (REFUSED | REFUSED_OF_FLOATS if floats else REFUSED), name
            assert not any(part in name for part in REFUSED_PARTS), name
        return function(*args, **(kwargs or {}))


def invariant_config(**loss):
    config = make_config(**loss)
    config.model.batch_invariant = True
    return config


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3", "gpt2"])
@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_backward_pass_has_only_operations_allowed_on_cuda(make_model, name, has_checkpoints):
    model = make_model(name, max_length=100)
    if has_checkpoints:
        enable_gradient_checkpointing(model)
    config = invariant_config(importance_sampling_level="sequence")
    with Refusing() as seen:
        make_learner(model, config).update(make_samples(), ADVANTAGES, 0)
    assert {"aten::mm", "aten::index_add", "aten::embedding_dense_backward"} <= seen.names
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in seen.names) == has_checkpoints
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_flag_changes_no_gradient_on_cpu(make_model):
    grads = []
    for config in (make_config(), invariant_config()):
        model = make_model("llama", torch.float32, 100)
        grads.append(gradient(model, make_samples(), config)[0])
    assert torch.equal(*grads) and grads[0].any()


@pytest.mark.parametrize("was", [False, True])
def test_user_setting_is_restored_after_error(make_model, monkeypatch, was):
    """Here of an operation without a deterministic form, in the user's own loss."""

    class Put(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.clone().put_(torch.tensor([0]), grad[:1])

    learner = make_learner(make_model(max_length=100), invariant_config())
    learner.own_loss = lambda logprob, ratio, advantage: Put.apply(logprob) * advantage
    torch.use_deterministic_algorithms(was, warn_only=was)
    try:
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic"):
            learner.update(make_samples(), ADVANTAGES, 0)
        assert torch.are_deterministic_algorithms_enabled() == was
        assert torch.is_deterministic_algorithms_warn_only_enabled() == was
    finally:
        torch.use_deterministic_algorithms(False)
