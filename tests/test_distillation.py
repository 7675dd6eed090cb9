"""The divergence from a teacher: the formula, its gradient, chunks, and runs. The loss of whole
updates, with masks and ranks: test_masked_loss.py."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bubblespec.config import Config, DataConfig, ModelConfig, RunConfig
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.model import OutputHead
from bubblespec.learn.losses import compare, divergence
from bubblespec.loading import check_vocabulary, load_model, load_teacher, load_tokenizer
from scripts.tiny_policy import add_layers
from tests.helpers.checks import refusal
from tests.helpers.reference_step import jensen_shannon
from tests.helpers.runs import (
    ALWAYS_DRAFT,
    SHORT,
    digests,
    max_change,
    same_weights,
    steps_of,
    train_here,
    weights,
)
from tests.helpers.threads import train_on_threads

TINY, HYBRID, CPU = "configs/tiny_policy", "configs/tiny_hybrid", torch.device("cpu")

BETAS = (0.0, 1e-3, 0.3, 0.5, 1.0)


def logits(seed: int, scale: float, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = scale * torch.randn(6, 31, generator=generator, dtype=torch.float64)
    return drawn.requires_grad_(requires_grad)


@pytest.mark.parametrize("beta", BETAS)
def test_divergence_equals_definition_and_trl(beta):
    from trl.experimental.gkd import GKDTrainer  # takes a second

    for scale in (1.0, 8.0):
        student, teacher = logits(0, scale, requires_grad=True), logits(1, scale)
        log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
        found, wanted = divergence(log_q, log_p, beta), jensen_shannon(log_p, log_q, beta)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        theirs = GKDTrainer.generalized_jsd_loss(
            student[None], teacher[None], beta=beta, reduction="sum"
        )
        torch.testing.assert_close(found.sum(), theirs, rtol=1e-9, atol=1e-12)
        gradients = [
            torch.autograd.grad(v.sum(), student, retain_graph=True)[0] for v in (found, wanted)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
        assert (found > 0).all()
        assert divergence(log_p, log_p, beta).abs().max() < 1e-14


def test_chunks_and_padding_change_no_divergence():
    """Heads of other widths and numbers of padded rows, with factor and cap; against whole logits
    of the common vocabulary."""
    torch.manual_seed(0)
    own, other = (torch.nn.Linear(n, v, bias=False).double() for n, v in ((16, 97), (24, 104)))
    heads = OutputHead(own, 90, factor=0.7, cap=3.0), OutputHead(other.requires_grad_(False), 90)
    hidden = torch.randn(20, 16, dtype=torch.float64, requires_grad=True)
    theirs, target = torch.randn(20, 24, dtype=torch.float64), torch.randint(90, (20,))
    weight, results = torch.linspace(0.1, 2, 40, dtype=torch.float64).view(2, 20), []
    for max_logits in (1 << 20, 2 * 104 * 3, 1):
        options = {"params": SamplingParams(0.8), "beta": 0.3, "max_logits": max_logits}
        found = compare(hidden, heads[0], theirs, heads[1], target, target, **options)
        results.append((found, *torch.autograd.grad((weight * found).sum(), [hidden, own.weight])))
    policy = (3.0 * torch.tanh(0.7 * own(hidden) / 3.0)[:, :90] / 0.8).log_softmax(-1)
    teacher = (other(theirs)[:, :90] / 0.8).log_softmax(-1)
    logprob = policy.gather(1, target[:, None])[:, 0]
    whole = torch.stack((logprob, jensen_shannon(teacher, policy, 0.3)))
    wanted = (whole, *torch.autograd.grad((weight * whole).sum(), [hidden, own.weight]))
    for found in results:
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Folder of a deeper model than the tiny policy, which gives other tokens."""
    folder, model = tmp_path_factory.mktemp("teacher"), AutoModelForCausalLM.from_pretrained(TINY)
    add_layers(model, 4)
    return save_perturbed(model, TINY, folder)


def save_perturbed(model, tokenizer: str, folder):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def load(path, num_tokens: int | None = None):
    config = Config(
        model=ModelConfig(path=TINY, dtype="float32", teacher_path=str(path), lora_r=2),
        data=DataConfig(path="d"),
        run=RunConfig(output_dir="o"),
    )
    tokenizer, policy = load_tokenizer(config), load_model(config, None, CPU)
    num_tokens = num_tokens or check_vocabulary(config, policy, tokenizer)[0]
    return load_teacher(config, tokenizer, num_tokens, CPU)


def test_teacher_is_frozen_and_has_no_adapter(teacher):
    loaded = load(teacher)
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not hasattr(loaded, "peft_config") and loaded.config.num_hidden_layers == 4


def test_teacher_with_other_tokens_is_refused(teacher, tmp_path):
    path = teacher / "tokenizer.json"
    text = json.loads(path.read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    other = tmp_path / "other"
    load(teacher).save_pretrained(other)
    name = "tokenizer_config.json"
    (other / name).write_bytes((teacher / name).read_bytes())
    (other / "tokenizer.json").write_text(json.dumps(text))
    message = refusal(load, other)
    assert message.startswith(f"model.teacher_path: the tokenizer of {other} is not that of ")
    assert "2 tokens differ, 'A' for example" in message
    assert "embeddings for 100000 tokens" in refusal(load, teacher, 100_000)
    assert refusal(load, tmp_path / "none").startswith("model.teacher_path: there is no folder")


RUN = [*SHORT, "loss.loss_type=distillation", "loss.distillation_beta=0.7", "run.max_steps=3"]
RUN += ["run.save_steps=1", "run.save_total_limit=9", "rollout.num_prompts_per_step=4"]
RUN += ["data.size=8"]
RUN += ["optim.learning_rate=4e-3", "optim.warmup_steps=0", "reward.functions=[]"]


@pytest.fixture(scope="module")
def alone(teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train_here(folder, f"model.teacher_path={teacher}", "speculative.method=none", short=RUN)
    lines = steps_of(folder)
    assert lines[2]["divergence"] < 0.9 * lines[0]["divergence"]
    assert not any(key.startswith(("reward/left", "rewards/", "critic/")) for key in lines[0])
    assert "reward" not in lines[0]
    return folder


def test_distilled_runs_equal_with_ranks_drafts_and_kills(teacher, alone, tmp_path):
    options = (f"model.teacher_path={teacher}", "speculative.method=bubble+suffix", ALWAYS_DRAFT)
    options = (*RUN, *options, f"run.output_dir={tmp_path}")
    train_on_threads(2, *options, ends_in=2, is_killed=True)
    train_on_threads(2, *options)
    assert digests(tmp_path) == digests(alone)
    assert max_change(weights(tmp_path, 3), weights(alone, 3)) < 1e-8
    drafted = sum(line["rollout/spec_accepted_tokens"] for line in steps_of(tmp_path))
    assert drafted > 0


def test_distilled_hybrid_equals_with_ranks_and_drafts(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(HYBRID)
    teacher = save_perturbed(model, HYBRID, tmp_path / "teacher")
    options = [*RUN, f"model.path={HYBRID}", f"model.teacher_path={teacher}"]
    train_here(tmp_path / "alone", "speculative.method=none", short=options)
    drafts = ("speculative.method=bubble+suffix", ALWAYS_DRAFT)
    train_on_threads(2, *options, *drafts, f"run.output_dir={tmp_path / 'two'}")
    assert digests(tmp_path / "two") == digests(tmp_path / "alone")
    assert max_change(weights(tmp_path / "two", 3), weights(tmp_path / "alone", 3)) < 1e-8
    lines = steps_of(tmp_path / "two")
    assert lines[2]["divergence"] < lines[0]["divergence"]
    assert sum(line["rollout/spec_accepted_tokens"] for line in lines) > 0


def test_mechanisms_take_teachers(teacher, tmp_path):
    """Streamed gradients: alone, a rank never waits, so their sums are in test_streaming.py."""
    options = ["model.lora_r=4", "optim.learning_rate=1e-2"]
    options += ["tail_batching.enabled=true", "optim.stream_gradients=true"]
    train_here(tmp_path, f"model.teacher_path={teacher}", *options, short=RUN)
    lines = steps_of(tmp_path)
    assert lines[2]["divergence"] < 0.9 * lines[0]["divergence"]


def test_added_divergence_has_rewards_and_the_same_first_tokens(teacher, alone, tmp_path):
    """Tokens depend on the weights alone; the weights are not those of either loss."""
    rewards = [o for o in RUN if not o.startswith(("loss.loss_type", "reward.functions"))]
    added = [f"model.teacher_path={teacher}", "loss.distillation_coef=0.5"]
    train_here(tmp_path / "added", *added, short=rewards)
    train_here(tmp_path / "rewards", short=[o for o in rewards if "distillation" not in o])
    first = steps_of(tmp_path / "added")[0]
    assert first["divergence"] == pytest.approx(steps_of(alone)[0]["divergence"], rel=1e-9)
    assert digests(tmp_path / "added")[0] == digests(alone)[0] == digests(tmp_path / "rewards")[0]
    assert first["reward"] == steps_of(tmp_path / "rewards")[0]["reward"]
    for other in (alone, tmp_path / "rewards"):
        assert not same_weights(weights(tmp_path / "added", 1), weights(other, 1))
