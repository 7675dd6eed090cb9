"""The step's own Python work grows no faster than its tokens. Operations are counted, not
seconds."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.setup import build
from bubblespec.telemetry.report import speculation_metrics
from bubblespec.types import Draft
from tests.helpers.rows import make_rows

TINY_POLICY = Path("configs/tiny_policy")
WRONG_EVERY = 32  # tokens of a draft


def save_model(folder: Path, max_length: int) -> None:
    """Random weights of one small layer, with positions enough, and the tiny policy's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY_POLICY / name, folder)
    config = AutoConfig.from_pretrained(TINY_POLICY)
    config.max_position_embeddings, config.num_hidden_layers = max_length, 1
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def spoiled(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    draft = tokens.astype(np.int32)
    draft[WRONG_EVERY - 1 :: WRONG_EVERY] = (draft[WRONG_EVERY - 1 :: WRONG_EVERY] + 1) % vocab_size
    return draft


def calls_of_a_step(folder: Path, num_rows: int, length: int) -> int:
    """Rows of `length` tokens are generated without speculation. Then the calls of a step are
    counted, which generates them with a draft for each and trains on them."""
    num_generations = 4
    # Windows of a fixed size, no drafting ahead and torch's own products: what is planned by
    # measured times would make the count one of times.
    overrides = [f"rollout.max_completion_length={length}"]
    overrides += [f"rollout.min_completion_length={length}"]
    overrides += [f"rollout.num_prompts_per_step={num_rows // num_generations}"]
    overrides += [f"rollout.num_generations={num_generations}"]
    overrides += [f"rollout.max_num_seqs={2 * num_rows}", "data.size=100"]
    overrides += ["speculative.planning=always", "run.max_steps=1"]
    overrides += [f"optim.max_tokens_per_microbatch={max(4096, 160 + length)}"]
    overrides += ["eval.num_prompts=0", "run.eval_steps=0", "model.cpu_linear=torch"]
    overrides += [f"model.path={folder}", f"run.output_dir={folder}/run"]
    save_model(folder, 160 + length)
    trainer = build(load_config("configs/tiny_cpu.yaml", overrides), Ranks(torch.device("cpu")))
    sampler = trainer.sampler
    rows = make_rows(sampler.schedule.launch(0).groups, num_generations, length)
    sampler.engine.run(rows, sampler.params)
    for row in rows:
        draft = Draft(spoiled(row.tokens, trainer.learner.model.config.vocab_size), True, 0)
        sampler.store.put(row.id, draft)

    def step() -> None:
        record = trainer.sample(0)
        trainer.update(record, np.random.default_rng(0).choice((-1.0, 1.0), num_rows))
        metrics = speculation_metrics(trainer.ranks, record, has_store=True)
        gained, fed = metrics["rollout/spec_accept_length"]
        for row, tokens in zip(rows, record.samples.tokens, strict=True):
            assert np.array_equal(row.tokens, tokens) and len(tokens) == length
        assert gained > 3 * fed, "drafts must have been verified"

    count = count_calls(step)
    trainer.lock.close()
    return count


def count_calls(function) -> int:
    """Calls that the package's own functions make, of each other and of libraries."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        if event in ("call", "c_call"):
            caller = frame.f_back if event == "call" else frame
            count += caller is not None and "/bubblespec/" in caller.f_code.co_filename

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("over", ["rows", "length"])
def test_calls_grow_at_most_linearly(tmp_path, over):
    sizes = [(4, 24), (16, 24), (64, 24)] if over == "rows" else [(4, 16), (4, 64), (4, 256)]
    counts = []
    for num_rows, length in sizes:
        folder = tmp_path / f"{num_rows}_{length}"
        folder.mkdir()
        counts.append(calls_of_a_step(folder, num_rows, length))
    # Four times the work twice: linear growth makes the second difference four times the first,
    # quadratic sixteen times.
    first, second = np.diff(counts)
    assert 0 < second <= 4.4 * first
