"""From hidden states to logits, against transformers' own: constants and caps of families, what is
refused, and ids without a token."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_update import gradient, make_config, make_samples, oracle
from transformers import AutoModelForCausalLM

from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import output_head
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.norms import replace_norms
from bubblespec.engine.runner import ModelRunner
from bubblespec.mechanisms.drafter.layer import HeadDrafter
from bubblespec.mechanisms.drafter.mechanism import DrafterRunner
from bubblespec.types import Row, SampleId
from tests.helpers.clocks import train_in_virtual_time
from tests.helpers.drafter_oracle import make_drafter
from tests.helpers.drafting import chain_always
from tests.helpers.generation import Drafter, as_dict
from tests.helpers.models import GQA, VOCAB, config_of, random_model
from tests.helpers.reference_step import sample_response
from tests.helpers.runs import SHORT, digests, read
from tests.helpers.threads import train_on_threads

LONGEST, SEED, KNOWN = 64, 4, 61
PARAMS = SamplingParams(temperature=0.8, top_k=40, stop_token_ids=(5,))
ROLLOUT = SimpleNamespace(temperature=0.8, top_k=40, top_p=1.0, stop_token_ids=[5])
ROLLOUT.min_completion_length, ROLLOUT.max_completion_length = 0, 12
GEMMA = {**GQA, "head_dim": 16, "tie_word_embeddings": False, "final_logit_softcapping": 5.0}
GEMMA |= {"query_pre_attn_scalar": 16, "attn_logit_softcapping": None}
# Kind and options, factor, cap.
HEADS = {
    "gemma2": (("Gemma2", GEMMA), 1.0, 5.0),
    "gemma3": (("Gemma3Text", GEMMA), 1.0, 5.0),
    "vaultgemma": (("VaultGemma", GEMMA), 1.0, 5.0),
    "cohere": (("Cohere", {**GQA, "logit_scale": 0.3}), 0.3, None),
    "granite": (("Granite", {**GQA, "logits_scaling": 3.0}), 1 / 3, None),
    "hyperclovax": (("HyperCLOVAX", {**GQA, "logits_scaling": 3.0}), 3.0, None),
    "llama": (("Llama", GQA), 1.0, None),
}


def build(kind: str, base: dict, dtype: torch.dtype = torch.float64):
    return random_model(config_of(kind, base), dtype)


def make_rows() -> list[Row]:
    prompts = [tuple(range(7 + n, 12 + 3 * n)) for n in range(3)]
    return [Row(SampleId(50 + n, 3, j), prompts[n], 12) for n in range(3) for j in range(2)]


@pytest.mark.parametrize("name", HEADS)
def test_tokens_and_gradients_follow_own_logits(name):
    """Every token drawn with the row's noise from the model's own logits, with right and wrong
    drafts; the loss and gradient of an update of the same model by its own logits."""
    config, factor, cap = HEADS[name]
    own, model = build(*config), build(*config)
    prepare_model(model, LONGEST)
    head = output_head(model)
    assert head.cap == cap and head.factor == pytest.approx(factor, rel=1e-15)
    rows, wanted = make_rows(), {}
    for row in rows:
        response = sample_response(own, list(row.prompt), (SEED, *row.id), ROLLOUT)
        wanted[row.id.prompt_id, row.id.sample] = response.tokens, None
    engine, drafts = Engine(ModelRunner(model, 4, LONGEST, SEED)), Drafter(wanted, 0.3)
    engine.run(rows, PARAMS, drafts)
    assert {key: (tokens, None) for key, (tokens, _) in as_dict(rows).items()} == wanted
    assert drafts.num_accepted > 10
    if (factor, cap) != (1.0, None):  # the product alone has other samples
        model.to_logits = dataclasses.replace(head, factor=1.0, cap=None)
        others = Engine(ModelRunner(model, 4, LONGEST, SEED)).run(make_rows(), PARAMS)
        assert as_dict(others) != as_dict(rows)
        model.to_logits = head
    samples, settings = make_samples(), make_config()
    wanted_gradient, wanted_loss = oracle(own, samples, settings)
    got, metrics = gradient(model, samples, settings)
    # Norms are computed in float32, and the softmax of the first and the third family.
    largest = wanted_gradient.abs().max()
    assert largest > 0 and (got - wanted_gradient).abs().max() < 1e-5 * largest
    assert abs(metrics["loss"] - wanted_loss) < 1e-7


CAPPED = HEADS["gemma3"][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cap_is_found_where_logits_are_small(dtype):
    """So small that logits with and without it are equal up to rounding."""
    model = build(*CAPPED, dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)
    prepare_model(model, LONGEST)
    assert output_head(model).cap == 5.0


CHANGES = {
    "clamp": lambda logits: logits.clamp(-30, 30),
    "square": lambda logits: logits + 1e-2 * logits.square(),
    "bias": lambda logits: logits + 1e-2 * torch.arange(VOCAB) / VOCAB,
    "barred token": lambda logits: logits.index_fill(-1, torch.tensor([3]), -1e4),
    "position": lambda logits: logits * torch.linspace(1, 1.01, logits.shape[1])[:, None],
    "fewer": lambda logits: logits[..., :-1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_other_change_of_logits_is_refused(change, dtype):
    """Even where logits are so small that the change is hardly seen."""
    model = build("Llama", GQA, dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)

    def changed(module, args, output):
        output.logits = CHANGES[change](output.logits)

    model.register_forward_hook(changed)
    with pytest.raises(ValueError, match="its logits are not its output head's product"):
        prepare_model(model, LONGEST)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_constant_before_the_head_is_refused(dtype):
    """MiniCPM3 divides hidden states; small weights, so that logits are small."""
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    sizes |= {"v_head_dim": 16, "dim_model_base": 16, "num_key_value_heads": 4}
    model = build("MiniCPM3", {**GQA, **sizes, "initializer_range": 0.01}, dtype)
    with pytest.raises(ValueError, match="differ from the model's own"):
        prepare_model(model, LONGEST)


def test_uncalled_head_is_refused(monkeypatch):
    model = build("Llama", GQA)
    weight = model.lm_head.weight

    def forward(self, input_ids, **options):
        hidden = self.model(input_ids=input_ids, **options).last_hidden_state
        return SimpleNamespace(logits=hidden @ weight.T)

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(ValueError, match="does not call its output head exactly once"):
        prepare_model(model, LONGEST)


# Ids without a token


class KnownOnly(torch.nn.Module):
    """A model whose own logits are those of the first tokens, for oracles."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.model(input_ids=input_ids).logits[..., :KNOWN])


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite"])
def test_unknown_ids_are_neither_sampled_nor_learned(name):
    config = HEADS[name][0]
    own, model = KnownOnly(build(*config)), build(*config)
    replace_norms(own)
    prepare_model(model, LONGEST, KNOWN)
    rows = make_rows()
    Engine(ModelRunner(model, 4, LONGEST, SEED)).run(rows, PARAMS)
    of_all = build(*config)
    prepare_model(of_all, LONGEST)
    unbarred = Engine(ModelRunner(of_all, 4, LONGEST, SEED)).run(make_rows(), PARAMS)
    assert max(max(row.tokens) for row in unbarred) >= KNOWN
    for row in rows:
        response = sample_response(own, list(row.prompt), (SEED, *row.id), ROLLOUT)
        assert row.tokens.tolist() == response.tokens
    samples, settings = make_samples(), make_config()
    samples.tokens[:] = [tokens % KNOWN for tokens in samples.tokens]
    wanted, wanted_loss = oracle(own, samples, settings)
    got, metrics = gradient(model, samples, settings)
    assert (got - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert abs(metrics["loss"] - wanted_loss) < 1e-10


def test_drafter_logits_are_capped_and_of_known_tokens():
    model = build(*CAPPED)
    prepare_model(model, LONGEST, KNOWN)
    drafter = make_drafter(model, np.arange(KNOWN), HeadDrafter)
    states = torch.randn(4, 64, dtype=torch.float64)
    torch.testing.assert_close(drafter.logits(states), output_head(model)(states))
    assert drafter.logits(100 * states).abs().max() <= 5.0
    runner = DrafterRunner(drafter, Engine(ModelRunner(model, 4, LONGEST, SEED)), PARAMS)
    assert runner.drafter.ids.max() < KNOWN


DRAFTED = ["speculative.method=bubble+suffix+drafter", "drafter.warm_start=600"]
RUN = [*SHORT, "rollout.max_completion_length=24", "optim.learning_rate=1e-3"]


@pytest.fixture
def padded(tmp_path):
    """The tiny policy with rows of the embedding that no token has, and that would be sampled."""
    folder = tmp_path / "padded"
    shutil.copytree("configs/tiny_policy", folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    with torch.no_grad():
        rows = model.get_output_embeddings().weight
        rows[size:] = 3.0 * rows[:8]
    model.save_pretrained(folder)
    return folder


def test_run_with_unknown_ids_has_the_same_digests(monkeypatch, tmp_path, padded, capfd):
    chain_always(monkeypatch.setattr)
    plain, folder = tmp_path / "plain", tmp_path / "run"
    train_in_virtual_time(*RUN, "speculative.method=none", f"run.output_dir={plain}")
    assert "token ids" not in capfd.readouterr().err
    train_on_threads(2, *RUN, *DRAFTED, f"model.path={padded}", f"run.output_dir={folder}")
    line = "8 of the model's 320 token ids exceed the tokenizer's last token; they are never"
    assert capfd.readouterr().err.count(line) == 1
    assert digests(folder) == digests(plain) and len(set(digests(plain))) == 4
    assert sum(step.get("drafts/drafter/tokens", 0) for step in read(folder)) > 50
    saved = json.loads((folder / "checkpoint-4" / "config.json").read_text())
    assert saved["vocab_size"] == 320
