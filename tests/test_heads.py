"""Heads that predict further tokens: kept in checkpoints, where a model's class in transformers
leaves them out, as they came or as trained; and as drafters, against transformers' own."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)
from transformers.modeling_layers import MtpModel

from bubblespec.checkpoint import copied
from bubblespec.engine.model import forward_hidden, pack_sequences
from bubblespec.engine.model_checks import prepare_model
from bubblespec.mechanisms.drafter import mechanism
from bubblespec.mechanisms.drafter.heads import FAMILIES as OURS
from bubblespec.mechanisms.drafter.heads import head_of, places, read_head, save_head
from bubblespec.mechanisms.drafter.layer import HeadDrafter
from bubblespec.mechanisms.drafter.mechanism import DrafterMechanism, possible_speedup
from bubblespec.planner.costs import KNOTS, CostModel
from bubblespec.types import HEADS
from tests.helpers.clocks import train_in_virtual_time
from tests.helpers.drafting import chain_always, train_always
from tests.helpers.models import GQA, VOCAB, everything_in_full_precision
from tests.helpers.plain import NO_DRAFTS, REWARD, STEPS, TINY, plain_run
from tests.helpers.runs import digests, read, train_here, weights
from tests.helpers.threads import train_on_threads
from tests.test_architectures import LINEAR, SERVED, build

TOKENIZER = "configs/tiny_policy"
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}


def test_text_of_an_image_text_checkpoint_is_trained_and_its_head_kept(tmp_path):
    """Under the names of the source, which transformers and vLLM read; also after a resumption."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    ends = {"eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    text = Qwen3_5TextConfig(**{**GQA, **LINEAR, **ends})
    vision = VISION | {"out_hidden_size": text.hidden_size}
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    source, run = tmp_path / "source", tmp_path / "run"
    whole.save_pretrained(source)
    tokenizer.save_pretrained(source)
    given = load_file(source / "model.safetensors")
    torch.manual_seed(0)
    head = {"mtp.fc.weight": torch.randn(64, 128), "mtp.norm.weight": torch.randn(64).bfloat16()}
    save_file(given | head, source / "model.safetensors", {"format": "pt"})
    options = [*TINY, *NO_DRAFTS, REWARD, f"model.path={source}", f"run.output_dir={run}"]
    train_on_threads(1, *options, ends_in=2)
    train_on_threads(1, *options)
    for step in (2, 3):
        saved = load_file(run / f"checkpoint-{step}" / "model.safetensors")
        text_of_source = {name for name in given if not name.startswith("model.visual.")}
        assert saved.keys() == text_of_source | head.keys()
        for name, tensor in head.items():
            assert saved[name].dtype == tensor.dtype and torch.equal(saved[name], tensor)
    changed = "model.language_model.layers.0.linear_attn.A_log"
    assert not torch.equal(saved[changed].float(), given[changed])
    model, info = AutoModelForCausalLM.from_pretrained(
        run / "checkpoint-3", dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(model.model.layers[0].linear_attn.A_log, saved[changed])


# Of each family: layers of transformers' head to names in a file, those of vLLM's loaders.
QWEN = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}
QWEN |= {"eh_proj": "mtp.fc", "mtp_block": "mtp.layers.0", "post_norm": "mtp.norm"}
DEEPSEEK = {name: f"model.layers.2.{name}" for name in ("enorm", "hnorm", "eh_proj")}
DEEPSEEK |= {"mtp_block": "model.layers.2", "post_norm": "model.layers.2.shared_head.norm"}
FAMILIES = {"qwen3_5": QWEN, "qwen3_5_moe": QWEN, "qwen3_next": QWEN}
FAMILIES |= {"deepseek_v3": DEEPSEEK, "glm4_moe": DEEPSEEK}


def with_head(name: str, monkeypatch):
    """A prepared policy that came with a head of random weights, and transformers' own head."""
    policy = build(*SERVED[name])
    everything_in_full_precision(monkeypatch, policy)
    policy.config.num_mtp_layers = 1
    if getattr(policy.config, "layer_types", None):
        policy.config.mtp_layer_types = ["full_attention"]
    if getattr(policy.config, "mlp_layer_types", None):
        policy.config.mtp_mlp_layer_types = ["sparse"]
    if name == "deepseek_v3":  # its class repeats the keys of latent attention, too
        policy.config.num_key_value_heads = policy.config.num_attention_heads
    policy.set_attn_implementation("eager")
    torch.manual_seed(3)
    reference = MtpModel(policy, 1).double().eval()
    reference.config._experts_implementation = "eager"
    everything_in_full_precision(monkeypatch, reference)
    with torch.no_grad():
        for tensor in reference.layers.state_dict().values():
            tensor.copy_(0.2 * torch.randn_like(tensor))
    kept = {}
    for whole, tensor in reference.layers[0].state_dict().items():
        part, _, rest = whole.partition(".")
        where = f"{FAMILIES[name][part]}.{rest}"
        experts, _, kind = where.rpartition(".")
        if kind == "gate_up_proj":
            for number, (gate, up) in enumerate(tensor.unflatten(1, (2, -1)).unbind(0)):
                kept[f"{experts}.{number}.gate_proj.weight"] = gate.clone()
                kept[f"{experts}.{number}.up_proj.weight"] = up.clone()
        elif kind == "down_proj":
            for number, down in enumerate(tensor):
                kept[f"{experts}.{number}.down_proj.weight"] = down.clone()
        else:
            kept[where] = tensor.clone()
    if FAMILIES[name] is DEEPSEEK:
        for end in ("embed_tokens.weight", "shared_head.head.weight"):
            kept[f"model.layers.2.{end}"] = torch.zeros(VOCAB, 64)
    prepare_model(policy, 64)
    vars(policy)[HEADS] = kept
    return policy, reference


@torch.no_grad()
def chain_of_reference(policy, reference, hidden, tokens) -> list[torch.Tensor]:
    """States at the last position of a sequence and at the two after it, each [H]."""
    found = []
    for further in (7, 9, None):
        length = len(tokens)
        ids, position = torch.tensor(tokens)[None], torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        states = reference.layers[0](
            reference.embed_tokens(ids),
            hidden[None],
            position_embeddings=reference.rotary_emb(hidden[None], position),
            attention_mask=mask,
            position_ids=position,
            past_key_values=None,
        )[0]
        found.append(states[-1])
        hidden, tokens = torch.cat((hidden, states[-1:])), [*tokens, further]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_chain_of_a_models_head_equals_transformers(name, monkeypatch, tmp_path):
    policy, reference = with_head(name, monkeypatch)
    kept = dict(vars(policy)[HEADS])
    drafter = head_of(policy)
    tokens = torch.randint(12, VOCAB, (10,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        packing = pack_sequences([9], policy.device)
        hidden = forward_hidden(policy, torch.tensor(tokens[:-1]), packing)
        wanted = chain_of_reference(policy, reference, hidden, tokens[1:])
        states, fed = drafter.combine(hidden), tokens[1:]
        for number, state in enumerate(wanted):
            packing = pack_sequences([len(fed)], policy.device)
            out = drafter(states, torch.tensor(fed), packing)[-1:]
            assert torch.allclose(out[0], state, rtol=0, atol=1e-8), number
            logits = policy.lm_head(state)
            assert torch.allclose(drafter.logits(out)[0], logits, rtol=0, atol=1e-8)
            states, fed = torch.cat((states, out)), [*fed, (7, 9, 0)[number]]
    # What checkpoints keep is the drafter's own from now on, and of the policy where it is shared.
    now = vars(policy)[HEADS]
    assert now.keys() == kept.keys()
    own = {name for name in kept if "embed_tokens" not in name and "shared_head.head" not in name}
    assert all(torch.equal(now[name], kept[name]) for name in own)
    with torch.no_grad():
        for tensor in drafter.state_dict().values():
            tensor.add_(1.0)
    assert all(torch.equal(now[name], kept[name] + 1.0) for name in own)
    for name in now.keys() - own:
        assert torch.equal(
            now[name],
            policy.get_parameter(
                "lm_head.weight" if "shared_head" in name else "model.embed_tokens.weight"
            ),
        )
    # Files hold tensors that share memory in the policy, such as experts.
    policy.save_pretrained(tmp_path, state_dict=copied(now) | policy.state_dict())
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in now.items())
    save_head(str(tmp_path / "drafter"), policy)
    vars(policy)[HEADS] = kept
    read_head(str(tmp_path / "drafter"), policy)
    assert all(torch.equal(vars(policy)[HEADS][name], tensor) for name, tensor in now.items())
    drafter.discard()
    assert vars(policy)[HEADS] is not now and vars(policy)[HEADS].keys() == kept.keys()


def test_head_of_another_form_is_refused_in_one_line(monkeypatch):
    policy, _ = with_head("qwen3_5", monkeypatch)
    kept = dict(vars(policy)[HEADS])
    spoilt = [
        ({}, "mtp.further.weight", torch.ones(3), "None"),
        ({"mtp.norm.weight"}, "mtp.norm.bias", torch.ones(3), "mtp.norm"),
        (
            set(),
            "mtp.fc.weight",
            torch.ones(64, 64),
            r"\[64, 64\], in a layer of the model \[64, 128\]",
        ),
    ]
    for without, name, tensor, says in spoilt:
        vars(policy)[HEADS] = {n: t for n, t in kept.items() if n not in without} | {name: tensor}
        with pytest.raises(ValueError, match=says):
            head_of(policy)
    vars(policy)[HEADS] = {"mtp.unheard.weight": torch.ones(3)}
    with pytest.raises(ValueError, match="no known kind"):
        head_of(policy)
    vars(policy)[HEADS] = {}
    assert head_of(policy) is None


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small hybrid that comes with a head."""
    folder, tokenizer = tmp_path_factory.mktemp("source"), AutoTokenizer.from_pretrained(TOKENIZER)
    ends = {"eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**{**GQA, **LINEAR, **ends}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prepare_model(model, 32)
    own = places(HeadDrafter(model, np.arange(len(tokenizer))), OURS[0])
    head = {f"mtp.{name}": tensor.detach().clone() for name, tensor in own}
    given = load_file(folder / "model.safetensors")
    save_file(given | head, folder / "model.safetensors", {"format": "pt"})
    return folder, head


@pytest.mark.parametrize("adapter", [[], ["model.lora_r=2"]])
def test_run_drafts_with_the_models_head_and_saves_it_as_trained(
    monkeypatch, tmp_path, tmp_path_factory, source, adapter, capfd
):
    """By default, with chains in every forward, also after a resumption. From the second step on
    some tokens of the vocabulary are drafted alone."""
    folder, head = source
    options = [*TINY, REWARD, f"model.path={folder}", *adapter]
    plain = plain_run(tmp_path_factory, *options)
    patch = partial(monkeypatch.setattr, raising=False)
    patch(mechanism, "VOCAB_SIZE", 64)
    chain_always(patch)
    train_always(patch)
    run = [*options, f"run.output_dir={tmp_path}"]
    train_in_virtual_time(*run, "run.max_steps=2")
    train_in_virtual_time(*run)
    assert digests(tmp_path)[-STEPS:] == digests(plain)
    ours, wanted = weights(tmp_path, STEPS), weights(plain, STEPS)
    for name in wanted.keys() - head.keys():
        assert (ours[name] - wanted[name]).abs().max() <= 1e-6, name
    assert "drafter: trained with" not in capfd.readouterr().err, "a head needs no warm start"
    assert sum(line.get("drafts/drafter/tokens", 0.0) for line in read(tmp_path)) > 100
    files = []
    for step in (2, STEPS):
        saved = tmp_path / f"checkpoint-{step}" / ("drafter" if adapter else "")
        files.append(load_file(saved / "model.safetensors"))
        assert head.keys() <= files[-1].keys()
    trained, resumed = files  # which had nothing to learn from in its first rollout
    assert not all(torch.equal(trained[name].double(), head[name].double()) for name in head)
    assert all(torch.equal(trained[name], resumed[name]) for name in head)
    if not adapter:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
        assert model.config.model_type == "qwen3_5_text"


def test_head_drafts_the_most_frequent_tokens_alone(monkeypatch):
    """Their logits are those of the whole vocabulary; stop tokens are among them in any case."""
    monkeypatch.setattr(mechanism, "VOCAB_SIZE", 4)
    policy, _ = with_head("qwen3_5", monkeypatch)
    drafter = HeadDrafter(policy, np.arange(VOCAB))
    states = torch.randn(3, drafter.hidden_size, dtype=policy.dtype)
    whole, params = drafter.logits(states), SimpleNamespace(stop_token_ids=(7,))
    made = DrafterMechanism(
        SimpleNamespace(config=None, ranks=None, params=params), policy, None, id
    )
    made.training = SimpleNamespace(drafter=drafter)
    texts = [np.array([5, 5, 5, 9, 3, 3]), np.array([9, 9, 1, 1, 1, 1])]
    made._narrow(SimpleNamespace(tokens=texts))
    assert drafter.ids.tolist() == [1, 5, 7, 9]
    made._narrow(SimpleNamespace(tokens=[np.full(9, 3), np.array([5])]))
    assert drafter.ids.tolist() == [1, 3, 5, 7]
    torch.testing.assert_close(drafter.logits(states), whole[:, drafter.ids], rtol=0, atol=1e-12)
    assert drafter.device_ids.tolist() == drafter.ids.tolist()


@pytest.mark.parametrize("own_s, wanted", [(0.0, 4.1524), (0.05, 3.3219), (0.5, 1.2863)])
def test_possible_speedup_takes_the_best_length(own_s, wanted):
    """Forwards of a second; the sums of 0.85 to the powers up to 5, 5 and 2."""
    cost = CostModel.from_parameters([1.0, *np.zeros(CostModel.NUM_TERMS + len(KNOTS) - 1)])
    assert possible_speedup(cost, own_s) == pytest.approx(wanted, abs=1e-4)


def test_run_leaves_out_a_head_that_cannot_pay(monkeypatch, tmp_path, source, capfd):
    """The head is saved as it came."""
    folder, head = source
    monkeypatch.setattr(mechanism, "possible_speedup", lambda cost, own_s: 1.29)
    train_here(tmp_path, f"model.path={folder}", "run.max_steps=1")
    line = "no drafter drafts: a good one would make this policy 1.29 times as fast, too little"
    assert line in capfd.readouterr().err
    assert not any("drafter" in key for line in read(tmp_path) for key in line)
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(torch.equal(saved[name].double(), head[name].double()) for name in head)
