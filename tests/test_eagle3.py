"""EAGLE-3 drafters: their formula and their files, against transcriptions of what vLLM and SGLang
compute and read."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bubblespec.config import Config
from bubblespec.engine.attention import own_modules
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import TAPS, pack_sequences, tap
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.errors import InputError
from bubblespec.mechanisms import Run
from bubblespec.mechanisms.drafter import mechanism as drafter_mechanism
from bubblespec.mechanisms.drafter.eagle3 import Eagle3, read_eagle3, save_eagle3, tapped_layers
from bubblespec.types import Row, SampleId
from tests.helpers.drafter_oracle import PARAMS, SEED, hidden_of, make_drafter, make_policy
from tests.helpers.models import (
    VOCAB,
    config_of,
    everything_in_full_precision,
    norms_in_full_precision,
    random_model,
)

IDS = np.array([5, 11, *range(20, 70)])
# vLLM's parameters (llama_eagle3.py) before its loader stacks them, with their shapes for hidden
# size H, query heads A and key heads K of size D, MLP width I and V drafted tokens.
LOADED = {
    "fc.weight": "H,3*H",
    "layers.0.hidden_norm.weight": "H",
    "layers.0.input_layernorm.weight": "H",
    "layers.0.mlp.down_proj.weight": "H,I",
    "layers.0.mlp.gate_proj.weight": "I,H",
    "layers.0.mlp.up_proj.weight": "I,H",
    "layers.0.post_attention_layernorm.weight": "H",
    "layers.0.self_attn.k_proj.weight": "K*D,2*H",
    "layers.0.self_attn.o_proj.weight": "H,A*D",
    "layers.0.self_attn.q_proj.weight": "A*D,2*H",
    "layers.0.self_attn.v_proj.weight": "K*D,2*H",
    "lm_head.weight": "V,H",
    "norm.weight": "H",
    "d2t": "V",
    "t2d": "T",
}


@pytest.fixture(scope="module")
def policy():
    return make_policy("llama")


@pytest.fixture
def folder(policy, tmp_path):
    save_eagle3(str(tmp_path / "drafter"), make_drafter(policy, IDS))
    return tmp_path / "drafter"


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def transcription(folder, states, tokens: list[int], embedding: torch.Tensor):
    """vLLM's `llama_eagle3.py` for one sequence: the state that goes on, and logits, of each place.

    states: [P, H], or [P, 3 * H] of the policy's layers."""
    config = json.loads((folder / "config.json").read_text())
    names = {
        n.replace("midlayer.", ""): t for n, t in load_file(folder / "model.safetensors").items()
    }
    eps, heads, size = config["rms_norm_eps"], config["num_attention_heads"], config["head_dim"]
    kv_heads = config["num_key_value_heads"]
    if states.shape[1] != config["hidden_size"]:
        states = states @ names["fc.weight"].T
    embedded = rms(embedding[tokens], names["input_layernorm.weight"], eps)
    x = torch.cat((embedded, rms(states, names["hidden_norm.weight"], eps)), -1)
    places = torch.arange(len(tokens), dtype=torch.float64)
    frequency = 1.0 / config["rope_theta"] ** (torch.arange(0, size, 2) / size)  # in float32
    angle = (places[:, None] * frequency.double()).repeat(1, 2)[:, None]

    def rotated(y: torch.Tensor) -> torch.Tensor:
        half = torch.cat((-y[..., size // 2 :], y[..., : size // 2]), -1)
        return y * angle.cos() + half * angle.sin()

    query, key, value = (
        (x @ names[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, size)) for n in "qkv"
    )
    out = []
    for head in range(heads):
        of = head * kv_heads // heads
        scores = rotated(query)[:, head] @ rotated(key)[:, of].T / math.sqrt(size)
        later = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        out.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ value[:, of])
    states = states + torch.cat(out, -1) @ names["self_attn.o_proj.weight"].T
    h = rms(states, names["post_attention_layernorm.weight"], eps)
    gate, up = (h @ names[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    states = states + (torch.nn.functional.silu(gate) * up) @ names["mlp.down_proj.weight"].T
    logits = torch.full((len(tokens), VOCAB), -torch.inf, dtype=torch.float64)
    targets = torch.arange(len(names["d2t"])) + names["d2t"]
    logits[:, targets] = rms(states, names["norm.weight"], eps) @ names["lm_head.weight"].T
    return states, logits


def test_saved_drafter_computes_what_vllm_does(policy, folder, monkeypatch):
    """Two positions of a chain, the second from the drafter's own state."""
    drafter = read_eagle3(str(folder), policy)
    everything_in_full_precision(monkeypatch, drafter)
    tokens = list(range(30, 41))
    embedding = policy.get_input_embeddings().weight.detach()
    with torch.no_grad():
        hidden = hidden_of(policy, tokens[:-1])
        with own_modules(policy):  # transformers numbers hidden states by what goes into a layer
            ids = torch.tensor(tokens[:-1])[None]
            seen = policy(ids, use_cache=False, output_hidden_states=True).hidden_states
        taken = torch.cat([seen[number][0] for number in drafter.taps], -1)
        assert torch.allclose(hidden[:, 64:], taken, rtol=0, atol=1e-12)
        fed, states, known = tokens[1:], taken, drafter.combine(hidden)
        for further in (25, None):
            wanted, logits = transcription(folder, states, fed, embedding)
            found = drafter(known, torch.tensor(fed), pack_sequences([len(fed)], policy.device))
            assert torch.allclose(found, wanted, rtol=0, atol=1e-9)
            got = drafter.logits(found)
            assert torch.allclose(got, logits[:, drafter.ids], rtol=0, atol=1e-9)
            assert logits.isfinite().any(0).nonzero()[:, 0].tolist() == drafter.ids.tolist()
            combined = taken @ drafter.fc.weight.T
            states = torch.cat((combined, wanted[-1:]))
            known, fed = torch.cat((known, found[-1:])), [*fed, further]


def test_files_have_the_names_and_shapes_that_loaders_expect(policy, folder):
    config = json.loads((folder / "config.json").read_text())
    sizes = {"H": config["hidden_size"], "A": config["num_attention_heads"], "T": VOCAB}
    sizes |= {"K": config["num_key_value_heads"], "D": config["head_dim"]}
    sizes |= {"I": config["intermediate_size"], "V": config["draft_vocab_size"]}
    saved = load_file(folder / "model.safetensors")
    shapes = {n.replace("midlayer.", "layers.0."): tuple(t.shape) for n, t in saved.items()}
    wanted = {n: tuple(eval(size, sizes) for size in form.split(",")) for n, form in LOADED.items()}
    assert shapes == wanted
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["vocab_size"] == VOCAB
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 1
    assert not config["tie_word_embeddings"] and config["rope_theta"] == 10_000.0
    # Of two layers the usual ones, 2, 1 and -1, are not all there.
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 1, 0]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 0, -1]
    drafted = saved["t2d"].nonzero()[:, 0]
    assert torch.equal(drafted, torch.arange(len(saved["d2t"])) + saved["d2t"])


def test_usual_layers_are_left_out_of_the_configuration(tmp_path):
    assert tapped_layers(32) == (2, 16, 29)
    policy = random_model(config_of("Llama", num_hidden_layers=6), torch.float32)
    prepare_model(policy, 32)
    save_eagle3(str(tmp_path), Eagle3(policy, IDS))
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"eagle_config", "eagle_aux_hidden_state_layer_ids"} & config.keys()
    assert read_eagle3(str(tmp_path), policy).taps == (2, 3, 3)


def as_vllm(config: dict, tensors: dict) -> tuple[dict, dict]:
    """Names of a saved model, with an embedding; tokens in another order than the policy's."""
    order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(0))
    ids = (torch.arange(len(order)) + tensors["d2t"])[order]
    tensors = tensors | {"lm_head.weight": tensors["lm_head.weight"][order]}
    tensors |= {"d2t": ids - torch.arange(len(order)), "embed_tokens.weight": torch.ones(VOCAB, 64)}
    head = {"lm_head.weight", "d2t", "t2d"}
    return config, {
        n if n in head else "model." + n.replace("midlayer.", "layers.0."): t
        for n, t in tensors.items()
    }


def as_speculators(config: dict, tensors: dict) -> tuple[dict, dict]:
    top = {"draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual"}
    layer = {name: value for name, value in config.items() if name not in top | {"eagle_config"}}
    whole = {name: config[name] for name in top} | {"transformer_layer_config": layer}
    whole |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    return whole, {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}


def as_sglang(config: dict, tensors: dict) -> tuple[dict, dict]:
    del config["eagle_aux_hidden_state_layer_ids"]
    return config, tensors


@pytest.mark.parametrize("layout", [as_vllm, as_speculators, as_sglang])
@pytest.mark.parametrize("is_old", [False, True])
def test_drafters_of_all_layouts_are_read(policy, folder, layout, is_old):
    wanted = read_eagle3(str(folder), policy)
    config = json.loads((folder / "config.json").read_text())
    config, tensors = layout(config, load_file(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    if is_old:
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    found = read_eagle3(str(folder), policy)
    assert found.taps == wanted.taps and found.ids.tolist() == wanted.ids.tolist()
    state = found.state_dict()
    assert all(torch.equal(state[name], t) for name, t in wanted.state_dict().items())


def test_norm_before_residual_is_obeyed(policy, folder, monkeypatch):
    norms_in_full_precision(monkeypatch)
    config = json.loads((folder / "config.json").read_text())
    plain = read_eagle3(str(folder), policy)
    (folder / "config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    other = read_eagle3(str(folder), policy)
    hidden = torch.randn(3, 64, dtype=torch.float64)
    packing = pack_sequences([3], policy.device)
    with torch.no_grad():
        plain_out, other_out = (
            d(hidden, torch.tensor([30, 31, 32]), packing) for d in (plain, other)
        )
        attended = plain_out - hidden
        normed = rms(hidden, plain.midlayer.hidden_norm.weight, plain.config.rms_norm_eps)
        assert not torch.allclose(other_out - normed, attended)
        for drafter in (plain, other):
            drafter.midlayer.mlp.down_proj.weight.zero_()
        plain_out, other_out = (
            d(hidden, torch.tensor([30, 31, 32]), packing) for d in (plain, other)
        )
    assert torch.allclose(other_out - normed, plain_out - hidden, rtol=0, atol=1e-12)


SPOILT = {
    "another policy": ({"fc.weight": torch.ones(64, 65)}, {}, "fc.weight is [64, 65]"),
    "other layers": ({"midlayer.self_attn.g_proj.weight": torch.ones(3)}, {}, "g_proj"),
    "no EAGLE-3": ({"fc.weight": None}, {}, "no fc.weight"),
    "tokens beyond": ({"d2t": torch.full((52,), VOCAB)}, {}, "no token"),
    "no numbers": ({"fc.weight": torch.full((64, 192), torch.nan)}, {}, "not numbers"),
    "another width": ({}, {"hidden_size": 96}, "hidden_size is 96, but the policy's 64"),
    "more layers": ({}, {"num_hidden_layers": 2}, "2 layers"),
    "layers beyond": ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "no layers (1, 2, 9)"),
    "no tensors": (None, {}, ""),
    "no folder": (None, None, ""),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_drafter_that_does_not_fit_ends_the_run_in_one_line(policy, folder, spoilt):
    tensors, config, says = SPOILT[spoilt]
    if config is None:
        shutil.rmtree(folder)
    elif tensors is None:
        (folder / "model.safetensors").write_bytes(b"{")
    else:
        whole = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(whole))
        all_tensors = load_file(folder / "model.safetensors") | tensors
        kept = {name: tensor for name, tensor in all_tensors.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")
    run = Run(Config(), None, policy)
    run.config.drafter.path = str(folder)
    with pytest.raises(InputError) as refusal:
        drafter_mechanism.prepare(run)
    message = str(refusal.value)
    assert message.startswith("drafter.path: no drafter of this policy") and "\n" not in message
    assert str(folder) in message and says in message


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_taps_are_the_same_in_training_and_generation(name):
    """Whether the layers are written out or the model's own."""
    policy = make_policy(name)
    tap(policy, (1, 1, 0))
    wanted = {}
    engine, row = Engine(ModelRunner(policy, 2, 64, SEED)), Row(SampleId(3, 0, 0), (20, 30, 40), 9)

    class Noted:
        reads_states = True

        def note(self, batch, hidden):
            position = batch.index[1]
            for place, state in zip(position.tolist(), hidden, strict=False):
                wanted[place] = state.clone()

        def __getattr__(self, name):
            return lambda *arguments: None

    engine.runner.followers.append(Noted())
    (done,) = engine.run([row], PARAMS)
    tokens = [*done.prompt, *done.tokens.tolist()][:-1]
    found = hidden_of(policy, tokens)
    assert found.shape == (len(tokens), 4 * 64)
    assert torch.equal(found[:, 64:128], found[:, 128:192])
    for place, state in wanted.items():
        assert torch.allclose(found[place], state, rtol=0, atol=1e-9)
    assert len(wanted) == len(tokens)
    del vars(policy)[TAPS]
