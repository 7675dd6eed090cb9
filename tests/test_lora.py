"""LoRA: what an adapted model computes, what of it is trained, and whole runs with it. Skipped
without peft."""

import copy
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from test_update import gradient, make_config, make_samples, oracle
from transformers import AutoModelForCausalLM

from bubblespec.config import ModelConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.model import enable_gradient_checkpointing
from bubblespec.engine.model_checks import prepare_model
from bubblespec.learn.lora import adapter_disabled, add_adapter
from bubblespec.learn.optimizer import Optimizer
from tests.helpers.checks import refusal
from tests.helpers.runs import EPOCHS, train_here

peft = pytest.importorskip("peft", reason="pip install -r requirements-lora.txt")

RANK, ALPHA = 4, 12
LORA = ("model.lora_r=4", "model.lora_alpha=8", "optim.learning_rate=1e-2")
OPTIONS = [*EPOCHS, *LORA, "rollout.max_completion_length=24", "loss.kl_coef=0.02"]
TOKENS = torch.arange(1, 13)[None]


def lora_config() -> ModelConfig:
    return ModelConfig(path="", lora_r=RANK, lora_alpha=ALPHA)


def adapt(model):
    """With an adapter that does something: a new one has B = 0."""
    add_adapter(model, lora_config(), seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def adapter_of(model) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


def merged(base, adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adapted weights by the formula W + alpha / r B A (arXiv 2106.09685, section 4.1)."""
    weights = dict(base.named_parameters())
    for name, a in adapter.items():
        if "lora_A" in name:
            layer = name.partition(".lora_A")[0]
            change = ALPHA / RANK * adapter[name.replace("lora_A", "lora_B")] @ a
            if "Conv1D" in type(base.get_submodule(layer)).__name__:  # GPT-2 stores [in, out]
                change = change.T
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + change
    return weights


class Merged(torch.nn.Module):
    """A plain model with the weights of the formula; its parameters are the adapter's, in the order
    that they are given in."""

    def __init__(self, base, adapter: dict[str, torch.Tensor]):
        super().__init__()
        self.names = list(adapter)
        self.values = torch.nn.ParameterList(
            parameter.detach().clone() for parameter in adapter.values()
        )
        self.base = (base,)  # in a tuple: not a part of this module

    def forward(self, input_ids):
        adapter = dict(zip(self.names, self.values, strict=True))
        return torch.func.functional_call(
            self.base[0], merged(self.base[0], adapter), (input_ids,), {"use_cache": False}
        )


# One model


def test_new_adapter_keeps_logits_and_is_reproducible(make_model):
    """To the bit, whatever random numbers were drawn before; and it draws none itself."""
    plain, first, second = make_model(), make_model(), make_model()
    before = torch.get_rng_state()
    add_adapter(first, lora_config(), seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    add_adapter(second, lora_config(), seed=3)
    with torch.no_grad():
        assert torch.equal(first(TOKENS).logits, plain(TOKENS).logits)
    a, b = adapter_of(first), adapter_of(second)
    assert all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())
    add_adapter(other := make_model(), lora_config(), seed=4)
    others = adapter_of(other).items()
    assert not any(torch.equal(a[name], value) for name, value in others if "lora_A" in name)


def test_only_adapter_is_trained_in_model_dtype(make_model):
    model = adapt(make_model(dtype=torch.bfloat16))
    optimizer = Optimizer(model, make_config().optim, 10, Ranks(torch.device("cpu")))
    adapter = adapter_of(model)
    assert {id(p) for p in optimizer.params} == {id(p) for p in adapter.values()}
    assert len(adapter) == 2 * 2 * 7  # A and B, layers, linear layers of each
    assert {p.dtype for p in optimizer.params} == {torch.bfloat16}
    assert {m.dtype for m in optimizer.updated.values()} == {torch.float32}


@pytest.mark.parametrize(
    "name, kl_coef, checkpointing",
    [("llama", 0.3, True), ("qwen2", 0.0, False), ("gpt2", 0.3, False)],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_loss_and_gradient_equal_merged_weights(
    make_model, exact_norms, name, kl_coef, checkpointing
):
    """The reference of the KL is the base."""
    base, model = make_model(name), adapt(make_model(name))
    prepare_model(model, 64)
    samples, config = make_samples(), make_config(kl_coef=kl_coef)
    plain = Merged(base, adapter_of(model))
    wanted, wanted_loss = oracle(plain, samples, config, base if kl_coef else None)
    if checkpointing:
        enable_gradient_checkpointing(model)
        config.model.gradient_checkpointing = True
    parameters = dict(model.named_parameters())
    frozen = {n: p.detach().clone() for n, p in parameters.items() if not p.requires_grad}
    got, metrics = gradient(model, samples, config, reference=model if kl_coef else None)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)
    assert abs(metrics["loss"] - wanted_loss) < 1e-10
    assert got.abs().max() > 1e-3
    for key, value in frozen.items():
        assert torch.equal(parameters[key], value) and parameters[key].grad is None
    assert not all(map(torch.equal, adapter_of(model).values(), plain.values))


def test_adapter_is_off_only_within_context(make_model):
    model, base = adapt(make_model()), make_model()
    adapted = model(TOKENS).logits
    with pytest.raises(RuntimeError, match="in between"), adapter_disabled(model):
        assert torch.equal(model(TOKENS).logits, base(TOKENS).logits)
        raise RuntimeError("in between")
    assert torch.equal(model(TOKENS).logits, adapted)
    assert not torch.equal(adapted, base(TOKENS).logits)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == adapter_of(model).keys()
    with adapter_disabled(base):  # has none
        assert all(p.requires_grad for p in base.parameters())


def test_impossible_adapter_is_refused(make_model, monkeypatch):
    message = refusal(add_adapter, make_model(), ModelConfig(path="", lora_r=65), 0)
    assert message.startswith("model.lora_r: 65 must be at most 64, the model's hidden size")
    policy = SimpleNamespace(config=transformers.Gemma3Config(text_config={"hidden_size": 64}))
    assert refusal(add_adapter, policy, ModelConfig(path="", lora_r=65), 0) == message
    monkeypatch.setitem(sys.modules, "peft", None)
    message = refusal(add_adapter, make_model(), lora_config(), 0)
    assert message.startswith("model.lora_r: LoRA needs peft ")
    assert message.endswith("; pip install -r requirements-lora.txt")


# A whole run; others are in test_exact_runs.py


def test_checkpoint_loads_in_peft_and_transformers(tmp_path, exact_norms):
    trainer = train_here(tmp_path, "run.max_steps=2", short=OPTIONS)
    assert trainer.learner.reference is trainer.learner.model, "no second copy of the weights"
    checkpoint = os.path.join(tmp_path, "checkpoint-2")
    base = AutoModelForCausalLM.from_pretrained("configs/tiny_policy", dtype=torch.float64)
    with torch.no_grad():
        before = base(TOKENS).logits
        loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        by_transformers = loaded(TOKENS).logits
        by_peft = peft.PeftModel.from_pretrained(base, checkpoint)
        trained = copy.deepcopy(trainer.learner.model)
        trained.set_attn_implementation("sdpa")
        wanted = trained(TOKENS).logits
        assert torch.equal(by_peft(TOKENS).logits, wanted) and torch.equal(by_transformers, wanted)
        by_merging = by_peft.merge_and_unload()(TOKENS).logits
        torch.testing.assert_close(by_merging, wanted, rtol=1e-9, atol=1e-9)
    assert (wanted - before).abs().max() > 1e-2
    assert not os.path.exists(os.path.join(checkpoint, "model.safetensors"))
