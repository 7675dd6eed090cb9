"""How a run's model, prompts and drafter are loaded, and what does not fit together is refused."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from bubblespec import loading
from bubblespec.checkpoint import load_optimizer
from bubblespec.config import Config, DataConfig, ModelConfig, RunConfig
from bubblespec.config.imports import import_quietly
from bubblespec.data.prompts import check_equal, data_state
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine import graphs
from bubblespec.learn.optimizer import Optimizer
from bubblespec.loading import (
    check_vocabulary,
    load_model,
    load_prompts,
    load_tokenizer,
    stop_tokens,
    with_dtype,
)
from bubblespec.types import Prompt
from tests.helpers.checks import refusal

TINY = "configs/tiny_policy"
CPU = torch.device("cpu")
UP = "model.layers.1.mlp.up_proj.weight"


def make_config(path=TINY) -> Config:
    return Config(
        model=ModelConfig(path=str(path), dtype="float32"),
        data=DataConfig(path="d"),
        run=RunConfig(output_dir="o"),
    )


def load_all(config: Config) -> None:
    model, tokenizer = load_model(config, None, CPU), load_tokenizer(config)
    check_vocabulary(config, model, tokenizer)
    stop_tokens(config, model, tokenizer)


@pytest.fixture
def policy(tmp_path):
    return shutil.copytree(TINY, tmp_path / "policy")


def edit_json(path, **keys) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def edit_weights(folder, edit) -> None:
    path = folder / "model.safetensors"
    safetensors.torch.save_file(edit(load_file(path)), path, metadata={"format": "pt"})


def test_weights_are_loaded_onto_device(monkeypatch):
    """They are on it as soon as transformers has loaded them: no copy of the whole model has been
    in the machine's memory."""
    original, devices = AutoModelForCausalLM.from_pretrained, []

    def noted(*args, **kwargs):
        loaded = original(*args, **kwargs)
        devices.extend(tensor.device.type for tensor in loaded[0].parameters())
        return loaded

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    load_model(make_config(), None, torch.device("meta"))
    assert len(devices) > 10 and set(devices) == {"meta"}


def test_default_precision_is_bfloat16_on_gpus():
    config = make_config()
    assert with_dtype(config, "cuda").model.dtype == "float32"
    config.model.dtype = "auto"
    wanted = {"cuda": "bfloat16", "cpu": "float32"}
    assert {device: with_dtype(config, device).model.dtype for device in wanted} == wanted
    assert config.model.dtype == "auto"


def test_weights_equal_file():
    model, saved = load_model(make_config(), None, CPU), load_file(f"{TINY}/model.safetensors")
    state = model.state_dict()
    assert saved.keys() <= state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
    assert not hasattr(model, "_hf_hook"), "no hook runs in its forward"


def put(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def edit_config(**keys):
    return lambda folder: edit_json(folder / "config.json", **keys)


def drop_a_weight(folder) -> None:
    edit_weights(folder, lambda weights: {k: v for k, v in weights.items() if k != UP})


def add_weights(*names: str):
    more = {name: torch.ones(1, 1) for name in names}
    return lambda folder: edit_weights(folder, lambda weights: weights | more)


def shrink_embedding(folder) -> None:
    def shrink(weights):
        return {k: v[:200].clone() if len(v) == 312 else v for k, v in weights.items()}

    edit_weights(folder, shrink)
    edit_json(folder / "config.json", vocab_size=200)


def other_architecture(folder) -> None:
    os.remove(folder / "model.safetensors")
    sizes = {"vocab_size": 312, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(folder)


def drop_stops(folder) -> None:
    os.remove(folder / "generation_config.json")
    edit_json(folder / "config.json", eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)


@pytest.mark.parametrize(
    "damage, says",
    [
        (put("tokenizer.json", b"{"), "model.path: cannot load AutoTokenizer"),
        (put("model.safetensors", b""), "SafetensorError: Error while deserializing header"),
        (drop_a_weight, f"model.path: the weights of POLICY lack {UP}"),
        (shrink_embedding, "model.path: the tokenizer of POLICY has token 311, but the model has"),
        (other_architecture, "model.path: POLICY is an encoder-decoder model"),
        (put("adapter_config.json", b"{}"), "model.path: POLICY is a LoRA adapter; merge it"),
        (drop_stops, "rollout.stop_token_ids: neither model nor tokenizer has an end"),
        (edit_config(hidden_size=128), "but its config.json expects [312, 128]"),
        (edit_config(num_hidden_layers=5), "lack model.layers.3.input_layernorm.weight and 17"),
        (edit_config(num_hidden_layers=2), "have model.layers.2.input_layernorm.weight and 8"),
        (add_weights(f"{UP}_scale_inv"), f"have {UP}_scale_inv, which the model of its config"),
        (add_weights("model.layers.0.self_attn.q_proj.bias"), "have model.layers.0.self_attn.q_"),
    ],
)
def test_damaged_model_folder(policy, damage, says):
    damage(policy)
    message = refusal(load_all, make_config(policy))
    assert message.startswith(("model.path: ", "rollout.stop_token_ids: "))
    assert says.replace("POLICY", str(policy)) in message


def test_heads_for_further_tokens_are_left_out(policy):
    edit_json(policy / "config.json", num_nextn_predict_layers=1)
    add_weights("mtp.fc.weight", "model.mtp.layers.0.fc.weight", "model.layers.3.eh_proj.weight")(
        policy
    )
    plain = load_model(make_config(), None, CPU).state_dict()
    model = load_model(make_config(policy), None, CPU).state_dict()
    assert model.keys() == plain.keys()
    assert all(torch.equal(model[name], plain[name]) for name in plain)
    edit_json(policy / "config.json", num_nextn_predict_layers=0)
    assert "have model.layers.3.eh_proj.weight" in refusal(load_all, make_config(policy))


def test_checkpoint_of_another_model(policy):
    edit_json(policy / "config.json", intermediate_size=64)
    message = refusal(load_model, make_config(), str(policy), CPU)
    assert message.startswith("run.resume_from_checkpoint: ") and "config.json expects" in message


def without_last_row(value):
    """Every tensor of two dimensions, however deep, without its last row."""
    if isinstance(value, torch.Tensor):
        return value[:-1].clone() if value.ndim == 2 else value
    if isinstance(value, dict):
        return {key: without_last_row(item) for key, item in value.items()}
    return [without_last_row(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "edit, says",
    [
        (lambda state: [1, 2], "does not fit this run"),
        (without_last_row, "for other parameter shapes"),
        (None, "does not fit this run"),
    ],
)
def test_optimizer_of_another_model(tmp_path, edit, says):
    config = make_config()
    optimizer = Optimizer(load_model(config, None, CPU), config.optim, 10, Ranks(CPU))
    optimizer.flat_grad.fill_(1.0)
    optimizer.step(0)
    if edit is None:
        (tmp_path / "optimizer.pt").write_bytes(b"hello")
    else:
        torch.save(edit(optimizer.state_dict()), tmp_path / "optimizer.pt")
    message = refusal(load_optimizer, str(tmp_path), optimizer)
    assert message.startswith("run.resume_from_checkpoint: ") and says in message


@pytest.mark.parametrize(
    "template, says",
    [
        (
            "{{ raise_exception('no system role') }}",
            "model.path: its chat template fails on .*: TemplateError",
        ),
        ("{# nothing #}", "data.path: the prompt of row 0 has no tokens"),
    ],
)
def test_template_rejecting_prompts_is_refused(policy, tmp_path, template, says):
    (policy / "chat_template.jinja").write_text(template)
    config = make_config(policy)
    config.data.path = str(tmp_path / "chat.jsonl")
    prompt = [{"role": "user", "content": "1 + 1 ="}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    assert re.match(says, refusal(load_prompts, config, load_tokenizer(config)))


GAMES = [{"prompt": "Play the game.", "start": start} for start in "0123456789ABCDEF"]


def config_of_rows(tmp_path, rows: list[dict], count: int, held_out: list[dict] = ()) -> Config:
    config = make_config()
    config.eval.num_prompts = count
    for key, content in (("path", rows), ("eval_path", held_out)):
        if content:
            path = tmp_path / f"{key}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
            setattr(config.data, key, str(path))
    return config


def starts(prompts) -> list[str]:
    return [prompt.columns["start"] for prompt in prompts]


def test_rows_of_equal_text_are_held_out_by_columns(tmp_path):
    config = config_of_rows(tmp_path, GAMES, 4)
    train, held_out = load_prompts(config, load_tokenizer(config))
    assert len(held_out) == 4 and len(train) == 12
    assert sorted(starts(train.prompts) + starts(held_out)) == [row["start"] for row in GAMES]
    more = [{**row, "level": 1} for row in GAMES[:2]]
    config = config_of_rows(tmp_path, GAMES, 2, more)
    train, held_out = load_prompts(config, load_tokenizer(config))
    assert starts(held_out) == ["0", "1"] and starts(train.prompts) == [*"23456789ABCDEF"]


def test_equal_problems_are_held_out_together(tmp_path):
    """A text that each of both files has once is the same problem, and so are equal rows."""
    rows = [{"prompt": f"{n} + 1 =", "start": n} for n in range(4)]
    config = config_of_rows(tmp_path, [*rows, rows[3]], 2, [{**rows[0], "start": 17}, rows[3]])
    train, _ = load_prompts(config, load_tokenizer(config))
    assert starts(train.prompts) == [1, 2]
    assert train.num_duplicates == 3
    config = config_of_rows(tmp_path, [*rows, rows[3], rows[3]], 2)
    train, held_out = load_prompts(config, load_tokenizer(config))
    assert train.num_duplicates == 6 - len(train) - len(held_out)
    assert (train.num_duplicates > 0) == (3 in starts(held_out)), "a held-out row is no duplicate"


def test_different_rows_on_ranks_are_refused():
    """As tasks make them whose problems depend on the seed of Python's hashes."""
    prompts = [Prompt(n, "p", (n,), {"answer": n}) for n in range(2)]
    state = data_state("template", prompts, [])
    sent = []

    def gather(own: np.ndarray) -> np.ndarray:
        """One rank after the other: all that have come so far."""
        sent.append(own)
        return np.stack(sent)

    ranks = SimpleNamespace(all_gather=gather)
    check_equal(state, ranks.all_gather)
    check_equal(data_state("template", prompts[:], []), ranks.all_gather)
    for theirs in [("template", prompts[::-1], []), ("other", prompts, []), ("template", [], [])]:
        assert "PYTHONHASHSEED" in refusal(check_equal, data_state(*theirs), ranks.all_gather)
        sent.pop()


VALUES = [{"b": 1, "a": {"x", "y", "z"}}, {(1, 2): object}, object(), b"a", [None, 2.5, "\ud800"]]
PRINT = "from bubblespec.data.prompts import fingerprint; from tests.test_set_up import VALUES"
PRINT += "; print([fingerprint(value) for value in VALUES])"


def test_fingerprints_are_the_same_in_every_process():
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in "12"]
    command = [sys.executable, "-c", PRINT]
    printed = [subprocess.check_output(command, env=environment) for environment in environments]
    assert printed[0] == printed[1] and len(set(json.loads(printed[0]))) == len(VALUES)


def test_a_hub_out_of_reach_is_asked_once_and_named(monkeypatch):
    """By one connection to a port where nobody answers; the cache is looked into all the same."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(loading.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(loading, "getproxies", dict)
    loading.is_hub_reachable.cache_clear()
    config = make_config()
    try:
        for path in ("org/no-such-model", "no-such-model"):
            config.model.path = path
            message = refusal(load_tokenizer, config)
            assert message.startswith(f"model.path: there is no folder {path}, and no such model")
            assert message.endswith(f"({endpoint} cannot be reached)")
        config.model.path = "./models/no-such-model"
        assert (
            refusal(load_tokenizer, config) == f"model.path: there is no folder {config.model.path}"
        )
    finally:
        loading.is_hub_reachable.cache_clear()


def test_libraries_warn_of_nothing_on_the_screen(monkeypatch, tmp_path):
    """Noise of a package's first compilation, of BPE's clean-up, of CUDA's debug mode."""
    (tmp_path / "clumsy.py").write_text("is_one = 1 is 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    policy = shutil.copytree(TINY, tmp_path / "policy")
    settings = json.loads((policy / "tokenizer_config.json").read_text())
    settings["clean_up_tokenization_spaces"] = True
    (policy / "tokenizer_config.json").write_text(json.dumps(settings))
    modes = []

    def set_mode(mode):
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert import_quietly("clumsy").is_one
        tokenizer = load_tokenizer(Config(model=ModelConfig(path=str(policy))))
        graphs.rehearse(lambda: None)
    assert [str(warning.message) for warning in shown] == []
    assert not tokenizer.clean_up_tokenization_spaces and modes == ["error", 0]


# Stop tokens of the model, and files that git has left out


@pytest.mark.parametrize(
    "found, says",
    [
        ([0, 99999], "99999, an eos_token_id of model.path, is beyond the model's 312 tokens"),
        (312, "312, an eos_token_id of model.path, is beyond"),
        (-1, "-1, an eos_token_id of model.path, is no token id"),
        ([0, "1"], "'1', an eos_token_id of model.path, is no token id"),
        ("</s>", "'</s>', an eos_token_id of model.path, is no token id"),
        ([[0]], "[0], an eos_token_id of model.path, is no token id"),
        ([True], "True, an eos_token_id of model.path, is no token id"),
    ],
)
def test_stop_tokens_that_no_model_has_are_refused(policy, found, says):
    edit_json(policy / "generation_config.json", eos_token_id=found)
    config = make_config(policy)
    assert refusal(load_all, config).startswith(f"rollout.stop_token_ids: {says}")
    config.rollout.stop_token_ids = [311, 0]
    load_all(config)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "chat"])
def test_pointer_in_model_folder_is_named(policy, name):
    name = "chat_template.jinja" if name == "chat" else name
    content = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
    (policy / "pytorch_model.bin").write_bytes(content)  # next to what is loaded
    load_all(make_config(policy))
    os.remove(policy / "pytorch_model.bin")
    (policy / name).write_bytes(content)
    message = refusal(load_all, make_config(policy))
    assert message.startswith("model.path: ")
    assert message.endswith("is a pointer of git-lfs, not the file: run `git lfs pull`")
    assert name in message or name == "chat_template.jinja"
