"""The tiny workload: its problems, its tokenizer, its training and the shipped policy."""

import json
import shutil
from pathlib import Path

import pytest
import reasoning_gym
import torch
from reasoning_gym.utils import extract_answer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bubblespec.data.prompts import reasoning_gym_rows
from bubblespec.engine.model_checks import prepare_model
from bubblespec.mechanisms.drafter.heads import head_of
from bubblespec.types import HEADS
from scripts import tiny_head
from scripts import tiny_policy as tiny
from tests.helpers.runs import read, train_here

SHIPPED = Path(__file__).parent.parent / "configs" / "tiny_policy"
HYBRID = SHIPPED.parent / "tiny_hybrid"


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return reasoning_gym_rows(tiny.MIXTURE, 2000, seed=3)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def scored(row: dict, solution: str) -> float:
    return reasoning_gym.get_score_answer_fn(row["task"])(extract_answer(solution), row["entry"])


def test_tokenizer_round_trips_right_solutions(rows):
    tokenizer = tiny.build_tokenizer()
    assert len(tokenizer) <= 512 and tokenizer("")["input_ids"] == []
    texts = ["Straße 日本 🙂\n\t<answer> x </answer>"]
    for row in rows:
        solution = tiny.worked_solution(row["entry"])
        assert scored(row, solution) == 1.0
        texts += [row["prompt"], solution]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_short_run_learns_and_can_be_loaded(tmp_path, monkeypatch):
    # Small steps and short samples keep the test quick.
    monkeypatch.setattr(tiny, "BATCH_TOKENS", 1000)
    monkeypatch.setattr(tiny, "MAX_RESPONSE_TOKENS", 40)
    options = ["--max-steps", "50", "--seconds", "3600", "--problems", "2"]
    tiny.main(["--output", str(tmp_path), *options])
    quality = json.loads((tmp_path / "quality.json").read_text())
    (stage,) = quality["stages"]
    assert stage["steps"] == 50
    assert stage["last_loss"] < 0.6 * stage["first_loss"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert tokenizer.eos_token == tiny.EOS and tokenizer.pad_token == tiny.PAD
    # The solution's fixed form is predictable by now: the equals sign after the first copied term.
    prompt = "State the final answer to the following arithmetic problem: 4 - 1 - 7 ="
    ids = tokenizer(prompt)["input_ids"] + tokenizer("4 - 1")["input_ids"]
    logits = model(torch.tensor([ids])).logits[0, -1]
    assert logits.argmax().item() == tokenizer(" = ")["input_ids"][0]


def test_shipped_hybrid_learns(tmp_path):
    """256 samples: twice the standard error of a mean is 0.06."""
    options = ["run.max_steps=20", "run.save_steps=20", "eval.num_prompts=64"]
    train_here(tmp_path, *options, config="configs/tiny_hybrid.yaml", short=())
    rewards = [line["eval/reward"] for line in read(tmp_path) if "eval/reward" in line]
    assert len(rewards) == 2 and rewards[0] < 0.55 and rewards[1] > rewards[0] + 0.15


def test_head_is_written_next_to_the_weights(tmp_path):
    folder = shutil.copytree(HYBRID, tmp_path / "policy")
    shipped = load_file(folder / "model.safetensors")
    before = {name: tensor for name, tensor in shipped.items() if not name.startswith("mtp.")}
    save_file(before, folder / "model.safetensors", {"format": "pt"})
    tiny_head.main(["--policy", str(folder), "--prompts", "3"])
    after = load_file(folder / "model.safetensors")
    head = {name: tensor for name, tensor in after.items() if name.startswith("mtp.")}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name: t.shape for name, t in after.items()} == {n: t.shape for n, t in shipped.items()}
    model = AutoModelForCausalLM.from_pretrained(folder)
    prepare_model(model, 64)
    vars(model)[HEADS] = head
    assert head_of(model) is not None


def test_deeper_policy_has_same_logits_and_tokenizer(tmp_path, monkeypatch):
    """Before it is trained: the teacher of configs/tiny_distillation.yaml begins like this."""
    monkeypatch.setattr(tiny, "train", lambda *arguments: [0.0])
    monkeypatch.setattr(tiny, "measure_quality", lambda *arguments: {})
    tiny.main(["--output", str(tmp_path), "--start", str(SHIPPED), "--layers", "5"])
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (SHIPPED, tmp_path)]
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(*(model(tokens).logits for model in models))
    cached = models[1].generate(tokens, max_new_tokens=3, do_sample=False)
    assert torch.equal(cached, models[0].generate(tokens, max_new_tokens=3, do_sample=False))
    assert [model.config.num_hidden_layers for model in models] == [3, 5]
    first, second = (AutoTokenizer.from_pretrained(f).get_vocab() for f in (SHIPPED, tmp_path))
    assert first == second


def test_shipped_policy_is_small_and_half_good():
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 5_000_000
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    assert model.dtype == torch.float32
    assert 0.4e6 <= sum(weight.numel() for weight in model.parameters()) <= 1e6
    assert model.config.eos_token_id == tokenizer.eos_token_id
    quality = json.loads((SHIPPED / "quality.json").read_text())
    assert 0.3 <= quality["accuracy_temperature_1"] <= 0.5
    torch.manual_seed(0)
    rows = reasoning_gym_rows(tiny.MIXTURE[:1], 96, seed=tiny.HELD_OUT_SEED)
    assert 0.25 <= tiny.accuracy(model, tokenizer, rows) <= 0.65
