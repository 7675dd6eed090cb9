"""Heads that predict further tokens: kept in checkpoints as they came, where a model's class in
transformers leaves them out."""

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from tests.helpers.models import GQA
from tests.helpers.plain import NO_DRAFTS, REWARD, TINY
from tests.helpers.threads import train_on_threads
from tests.test_architectures import LINEAR

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
