"""Bad input through the real entry point: one line that names the key, exit code 2, and nothing
left behind or changed.

Most of it runs `train.main` in this process, which takes half a second; what concerns several ranks
is launched for real.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys

import datasets
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import train
from bubblespec import memory
from bubblespec import setup as set_up_module
from bubblespec.config import load_config
from bubblespec.dist.ranks import ranks_from_environment
from bubblespec.draft.drafter import Drafter
from bubblespec.draft.drafter_training import DRAFTER_FILE, WEIGHTS_FILE, save_drafter
from bubblespec.errors import InputError
from tests.helpers.drafter_oracle import make_training
from tests.helpers.warm import ROOT, launch

TINY = os.path.join(ROOT, "configs", "tiny_policy")
SHORT = [
    "rollout.num_prompts_per_step=2",
    "rollout.num_generations=2",
    "rollout.max_completion_length=8",
    "rollout.num_slots=4",
    "speculative.method=none",
    "data.size=10",
    "eval.num_prompts=0",
    "run.max_steps=1",
    "run.eval_steps=0",
]
GOOD = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(4)]
MESSAGE = {"role": "user", "content": "1 + 1 ="}


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """Run from the root as users do, with a cache of our own, no GPU, and nothing of `main` left
    behind in this process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def options(output_dir, *overrides: str) -> list[str]:
    return [
        "--config",
        os.path.join(ROOT, "configs", "tiny_cpu.yaml"),
        *SHORT,
        f"run.output_dir={output_dir}",
        *overrides,
    ]


def run(monkeypatch, output_dir, *overrides: str) -> tuple[int, str]:
    """train.main in this process: exit code and what it said."""
    monkeypatch.setattr(sys, "argv", ["train.py", *options(output_dir, *overrides)])
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = train.main()
    return code, said.getvalue()


def contents(folder) -> dict[str, str]:
    """Every file and folder below, with a digest of what it holds; empty if there is nothing. The
    empty lock is no content."""
    found = {}
    for place, folders, files in os.walk(folder):
        found |= {os.path.join(place, name): "folder" for name in folders}
        for name in files:
            if name == ".lock":
                continue
            with open(os.path.join(place, name), "rb") as file:
                found[os.path.join(place, name)] = hashlib.sha256(file.read()).hexdigest()
    return found


@pytest.fixture
def refusal(monkeypatch, tmp_path):
    """refusal(*overrides, output_dir=...) -> the one line of a run that never starts and changes
    nothing."""

    def check(*overrides: str, output_dir=tmp_path / "out") -> str:
        before, existed = contents(output_dir), os.path.exists(output_dir)
        code, said = run(monkeypatch, output_dir, *overrides)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(errors) == 1 and "Traceback" not in said, said
        assert os.path.exists(output_dir) == existed and contents(output_dir) == before
        return errors[0].removeprefix("error: ")

    return check


@pytest.fixture
def data(tmp_path):
    """data(name, rows or text or bytes) -> overrides that train on that file."""

    def write(name: str, content) -> list[str]:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["data.tasks=[]", f"data.path={path}"]

    return write


@pytest.fixture
def policy(tmp_path):
    """policy(name, **keys of config.json) -> a folder with a copy of the tiny policy."""

    def copy(name: str = "policy", **keys):
        folder = tmp_path / name
        shutil.copytree(TINY, folder)
        edit_json(folder / "config.json", **keys)
        return folder

    return copy


def edit_json(path, **keys) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | keys))


def edit_weights(folder, edit) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(
        edit(weights), folder / "model.safetensors", metadata={"format": "pt"}
    )


# Data


def test_broken_data_names_the_file_and_the_place(refusal, data):
    """test_data.py has all the ways in which a file can be broken."""
    message = refusal(*data("torn.jsonl", '{"prompt": "x"}\n\n{"prompt": "y"\n'))
    assert message.startswith("data.path: ") and "torn.jsonl, line 3 is not JSON" in message


def test_data_that_is_not_there(refusal, tmp_path, monkeypatch):
    """Also not by a relative path, which is not looked for on the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "notes").write_text("x")
    for path in (tmp_path / "none.jsonl", tmp_path / "rows", "rows/*", "rows/notes"):
        message = refusal("data.tasks=[]", f"data.path={path}", f"model.path={TINY}")
        assert message == f"data.path: no JSON, JSONL, CSV or Parquet file at {path}"


def test_data_that_is_neither_here_nor_on_the_hub(refusal):
    message = refusal("data.tasks=[]", "data.path=nobody/nothing")
    assert message.startswith(
        "data.path: cannot load nobody/nothing (no such file or folder, so taken for a hub dataset)"
    )


def test_held_out_data_is_named_as_such(refusal, data, tmp_path):
    overrides = [*data("good.jsonl", GOOD), "eval.num_prompts=2"]
    assert refusal(*overrides, "data.eval_path=/none.jsonl").startswith("data.eval_path: no JSON")
    assert refusal(*overrides, "data.eval_split=test").startswith("data.eval_split: cannot load")
    assert "data.eval_path, data.eval_split: all training" in refusal(
        *overrides, "eval.num_prompts=4", "data.eval_split=train"
    )
    (tmp_path / "bad.jsonl").write_text('{"prompt": 3}\n')
    message = refusal(*overrides, f"data.eval_path={tmp_path / 'bad.jsonl'}")
    assert message.startswith("data.eval_path: the prompt of row 0 is 3")


@pytest.mark.parametrize(
    "override, key", [("data.split=test", "data.path"), ("data.name=main", "data.name")]
)
def test_files_have_no_splits_and_subsets_that_would_be_ignored(refusal, data, override, key):
    assert refusal(*data("good.jsonl", GOOD), override).startswith(f"{key}: ")


def test_long_prompts_are_dropped_with_a_count_and_not_all_of_them(
    refusal, data, monkeypatch, tmp_path
):
    rows = [*GOOD, {"prompt": "1 + " * 200, "answer": ""}]
    code, said = run(monkeypatch, tmp_path / "some", *data("some.jsonl", rows))
    assert code == 0 and "data: 1 prompts over rollout.max_prompt_length = 160 dropped" in said
    message = refusal(*data("all.jsonl", rows[4:] * 3))
    assert message.startswith(
        "rollout.num_prompts_per_step: 2, but the data has 0 usable prompts; 3 more are over rollout.max_pr"
    )


def test_chat_prompts_need_a_template_that_takes_them(refusal, data, policy):
    chat = data("chat.jsonl", [{"prompt": [MESSAGE], "answer": "2"}] * 4)
    assert (
        refusal(*chat)
        == "model.path: its tokenizer has no chat template, but data has chat prompts"
    )
    assert refusal("data.as_chat=true").startswith("model.path: its tokenizer has no chat template")
    folder = policy()
    for template, says in [
        (
            "{{ raise_exception('no system role') }}",
            "refuses the prompt of row 0: TemplateError: no system role",
        ),
        ("{{ messages", "refuses the prompt of row 0: TemplateSyntaxError"),
        ("{{ messages[0].content + 3 }}", "refuses the prompt of row 0: TypeError"),
        ("{# nothing #}", "the prompt of row 0 has no tokens"),
    ]:
        (folder / "chat_template.jinja").write_text(template)
        message = refusal(*chat, f"model.path={folder}")
        assert message.startswith("data.path: ") and says in message


# Rewards

REWARDS = """
number = 3
class Scorer:
    pass
def positional(completions, prompts):
    return [0.0 for _ in completions]
def wants_level(prompts, completions, completion_ids, answer, level, **columns):
    return [0.0 for _ in completions]
def crashes(:
"""


@pytest.mark.parametrize(
    "path, says",
    [
        ("exact_match", "'exact_match' is not a dotted path"),
        ("no_such_module.reward", "cannot import 'no_such_module.reward': ModuleNotFoundError"),
        ("math.nothing", "cannot import 'math.nothing': AttributeError"),
        ("user_rewards.number", "'user_rewards.number' is not a function"),
        ("user_rewards.Scorer", "'user_rewards.Scorer' is not a function"),
        ("user_rewards.positional", "user_rewards.positional cannot be called with"),
        ("user_rewards.wants_level", "missing a required argument: 'level'"),
        ("broken_rewards.crashes", "cannot import 'broken_rewards.crashes': SyntaxError"),
    ],
)
def test_reward_that_cannot_be_called(refusal, tmp_path, monkeypatch, path, says):
    (tmp_path / "user_rewards.py").write_text(REWARDS.replace("def crashes(:", ""))
    (tmp_path / "broken_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rewards", raising=False)
    message = refusal(f"reward.functions=[{path}]")
    assert message.startswith("reward.functions: ") and says in message


def test_reward_whose_column_the_data_lacks(refusal, data, tmp_path):
    message = refusal(*data("rows.jsonl", [{"prompt": "1 + 1 =", "level": 1}] * 4))
    assert message.startswith("reward.functions: bubblespec.rewards.exact_match cannot be called")
    assert "the columns ['level'] of the data" in message and message.endswith(
        "missing a required argument: 'answer'"
    )
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "2 + 2 ="}\n')
    message = refusal(
        *data("good.jsonl", GOOD),
        "eval.num_prompts=1",
        f"data.eval_path={tmp_path / 'held_out.jsonl'}",
    )
    assert "no further columns of the held-out data" in message and "'answer'" in message


# Models


def remove(*names: str):
    return lambda folder: [os.remove(folder / name) for name in names]


def put(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def cut_weights(folder) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50_000])


def drop_a_weight(folder) -> None:
    edit_weights(
        folder,
        lambda weights: {
            k: v for k, v in weights.items() if k != "model.layers.1.mlp.up_proj.weight"
        },
    )


def break_a_weight(folder) -> None:
    edit_weights(
        folder,
        lambda weights: {
            k: v.fill_(torch.nan) if "layers.1.mlp" in k else v for k, v in weights.items()
        },
    )


def shrink_embedding(folder) -> None:
    edit_weights(
        folder,
        lambda weights: {k: v[:200].clone() if len(v) == 312 else v for k, v in weights.items()},
    )
    edit_json(folder / "config.json", vocab_size=200)


@pytest.mark.parametrize(
    "damage, says",
    [
        (remove("tokenizer.json", "tokenizer_config.json"), "cannot load AutoTokenizer"),
        (put("tokenizer.json", b"{"), "cannot load AutoTokenizer"),
        (put("tokenizer.json", b"{}"), "cannot load AutoTokenizer"),
        (remove("model.safetensors"), "no file named model.safetensors"),
        (cut_weights, "SafetensorError: Error while deserializing header"),
        (put("model.safetensors", b""), "SafetensorError: Error while deserializing header"),
        (drop_a_weight, "lack model.layers.1.mlp.up_proj.weight"),
        (break_a_weight, "logits are not finite"),
        (shrink_embedding, "the tokenizer of"),
        (remove("config.json"), "Should have a `model_type` key"),
        (put("config.json", b"{"), "not a valid JSON file"),
        (put("config.json", b"[]"), "must be a mapping, not list"),
    ],
)
def test_damaged_model_folder(refusal, policy, damage, says):
    folder = policy()
    damage(folder)
    message = refusal(f"model.path={folder}")
    assert (
        message.startswith("model.path: ")
        and says in message
        and str(folder) in message.replace("LlamaForCausalLM", str(folder))
    )


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"vocab_size": 400}, "model.embed_tokens.weight in the weights of"),
        ({"hidden_size": 128}, "but its config.json asks for [312, 128]"),
        ({"num_hidden_layers": 5}, "lack model.layers.3.input_layernorm.weight and 17 more"),
        ({"num_attention_heads": 7}, "not a multiple of the number of attention heads (7)"),
        ({"vocab_size": "many"}, "expected int, got str"),
        ({"model_type": "nonsense"}, "model type `nonsense`"),
        ({"hidden_act": "nothing"}, "KeyError: 'nothing'"),
    ],
)
def test_configuration_and_weights_of_different_models(refusal, policy, keys, says):
    message = refusal(f"model.path={policy(**keys)}")
    assert message.startswith("model.path: ") and says in message


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
LIKE_TINY = {
    "vocab_size": 312,
    "max_position_embeddings": 1024,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 0,
}


@pytest.mark.parametrize(
    "auto_class, config, says",
    [
        (
            "CausalLM",
            transformers.MambaConfig(
                vocab_size=312, hidden_size=32, num_hidden_layers=1, state_size=4
            ),
            "recurrent state",
        ),
        (
            "Seq2SeqLM",
            transformers.T5Config(vocab_size=312, d_model=32, d_ff=32, num_layers=1, num_heads=2),
            "encoder-decoder",
        ),
        ("CausalLM", transformers.Gemma2Config(**SIZES, **LIKE_TINY, head_dim=16), "softcap"),
        (
            "CausalLM",
            transformers.BloomConfig(vocab_size=312, hidden_size=32, n_layer=1, n_head=2),
            "attention interface",
        ),
    ],
)
def test_model_that_the_engine_cannot_serve(refusal, policy, auto_class, config, says):
    folder = policy()
    os.remove(folder / "model.safetensors")
    getattr(transformers, f"AutoModelFor{auto_class}").from_config(config).save_pretrained(folder)
    message = refusal(f"model.path={folder}")
    assert message.startswith("model.path: ") and says in message


def test_model_that_is_not_there(refusal, tmp_path):
    for path in (tmp_path / "none", tmp_path, "nobody/nothing"):
        assert refusal(f"model.path={path}").startswith(
            f"model.path: cannot load AutoTokenizer from {path}: "
        )


def test_stop_tokens_that_do_not_exist(refusal, policy):
    assert (
        refusal("rollout.stop_token_ids=[312]")
        == "rollout.stop_token_ids: 312 is beyond the model's 312 tokens"
    )
    folder = policy(eos_token_id=None)
    os.remove(folder / "generation_config.json")
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    assert refusal(f"model.path={folder}").startswith(
        "rollout.stop_token_ids: neither model nor tokenizer has an end"
    )


# Foreign code


class Mark:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_marks_are_left_by_whoever_unpickles(tmp_path):
    pickle.loads(pickle.dumps(Mark(tmp_path / "mark"))).close()
    assert (tmp_path / "mark").exists()


def test_pickled_weights_run_no_code(refusal, policy, tmp_path):
    folder = policy()
    os.remove(folder / "model.safetensors")
    torch.save({"model.embed_tokens.weight": Mark(tmp_path / "mark")}, folder / "pytorch_model.bin")
    assert "UnpicklingError: Weights only load failed" in refusal(f"model.path={folder}")
    assert not (tmp_path / "mark").exists()


CODE = """
open({mark!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "our_own"
class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_model_code_runs_only_if_trusted(refusal, policy, monkeypatch, tmp_path):
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = policy(
        model_type="our_own",
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    )
    (folder / "code.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    message = refusal(f"model.path={folder}")
    assert (
        message.startswith(f"model.path: {folder} brings code of its own")
        and "model.trust_remote_code=true" in message
    )
    assert not (tmp_path / "mark").exists()
    code, said = run(
        monkeypatch, tmp_path / "trusted", f"model.path={folder}", "model.trust_remote_code=true"
    )
    assert code == 0 and (tmp_path / "mark").exists(), said


def test_dataset_scripts_are_never_run(refusal, monkeypatch, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
    assert "no JSON, JSONL, CSV or Parquet file" in refusal(
        "data.tasks=[]", f"data.path={folder}", "model.trust_remote_code=true"
    )
    refusal("data.tasks=[]", f"data.path={folder / 'rows.py'}", "model.trust_remote_code=true")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    assert run(monkeypatch, tmp_path / "out", "data.tasks=[]", f"data.path={folder}")[0] == 0
    assert not (tmp_path / "mark").exists()


# Device and memory


def test_device_that_is_not_there(refusal):
    assert (
        refusal("model.device=cuda") == "model.device: cuda, but torch sees no GPU; use cpu or auto"
    )
    for kernel in ("varlen", "flash_attn"):
        assert (
            refusal(f"model.attention={kernel}")
            == f"model.attention: {kernel} runs on CUDA only; on cpu use sdpa"
        )


def test_more_ranks_than_gpus_is_said_by_every_rank_alike(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for rank in ("0", "7"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with (
            pytest.raises(InputError, match="--nproc_per_node: 8 ranks, but only 4 GPUs"),
            ranks_from_environment("auto", 1.0),
        ):
            pass


def test_bfloat16_runs_on_cpu(monkeypatch, tmp_path):
    assert run(monkeypatch, tmp_path / "out", "model.dtype=bfloat16")[0] == 0


def test_slots_beyond_the_memory_are_refused_before_they_are_made(refusal, monkeypatch):
    """3 layers of keys and values of 96 float32 numbers for each of 50 x 168 positions."""
    needed = 50 * 168 * 3 * 2 * 96 * 4
    slots = ["rollout.num_slots=50", "rollout.num_generations=25"]
    monkeypatch.setattr(memory, "free_host_bytes", lambda: needed - 1)
    message = refusal(*slots)
    assert message.startswith(
        f"rollout.num_slots: 50, but slots of 168 tokens need {needed / 1e9:.3g} GB for keys and "
    )
    monkeypatch.setattr(memory, "free_host_bytes", lambda: needed)
    config = load_config("configs/tiny_cpu.yaml", [*SHORT, *slots, "run.output_dir=unused"])
    monkeypatch.setattr(set_up_module, "claim_output_dir", lambda config, ranks: None)
    with ranks_from_environment("cpu", 1.0) as ranks:
        set_up_module.build(config, ranks)


def test_free_memory_is_that_of_this_machine():
    assert 0 < memory.free_host_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_absurd_slots_of_a_long_context_are_refused_on_any_machine(refusal, policy):
    folder = policy(max_position_embeddings=1 << 20)
    sizes = [
        "rollout.max_completion_length=1000000",
        "rollout.num_slots=1000000",
        "rollout.max_batch_tokens=1000000",
    ]
    more = [
        "optim.max_tokens_per_microbatch=2000000",
        "rollout.num_generations=4096",
        "rollout.num_prompts_per_step=10",
    ]
    message = refusal(f"model.path={folder}", *sizes, *more)
    assert message.startswith(
        "rollout.num_slots: 1000000, but slots of 1000160 tokens need 9.44e+04 GB"
    )


# The folder of the run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one step, whose folder other runs must leave as it is."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert run(patch, folder)[0] == 0
    return folder


def test_folder_that_cannot_be_made_or_written(refusal, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken" / "config.yaml").mkdir(parents=True)
    places = [
        tmp_path / "file",
        tmp_path / "file" / "below",
        "/proc/none/below",
        "/dev/null",
        tmp_path / ("x" * 300),
    ]
    for place in [*places, tmp_path / "taken"]:
        before = contents(tmp_path)
        message = refusal(output_dir=place)
        assert message.startswith("run.output_dir: ") and str(place) in message
        assert contents(tmp_path) == before
    assert refusal("run.output_dir=''") == "run.output_dir: is empty"


def test_folder_of_another_run_stays_as_it_is(refusal, finished):
    message = refusal("optim.learning_rate=0.5", output_dir=finished)
    assert (
        message.startswith("optim.learning_rate: 0.5 here, but 0.0002 in")
        and "another run.output_dir" in message
    )
    assert refusal("run.resume_from_checkpoint=none", output_dir=finished).startswith(
        "run.output_dir: "
    )


def test_folder_in_use_stays_as_it_is(refusal, tmp_path):
    """Another process holds the lock, of either kind that Linux has."""
    (tmp_path / "out").mkdir()
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); fcntl.lockf(f, 2); print('held', flush=True); input()"
    holder = [sys.executable, "-c", code, str(tmp_path / "out" / ".lock")]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        assert refusal() == f"run.output_dir: {tmp_path / 'out'} is in use by another run"
        process.communicate(b"\n")


# Checkpoints


def test_checkpoint_that_is_none(refusal, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "none", tmp_path / "file", tmp_path / "folder", TINY):
        message = refusal(f"run.resume_from_checkpoint={place}")
        assert message.startswith(f"run.resume_from_checkpoint: {place} is not a checkpoint")


@pytest.fixture
def checkpoint(finished, tmp_path):
    """A copy of a checkpoint to spoil, of a run that has been told to go on for a second step."""
    return shutil.copytree(finished / "checkpoint-1", tmp_path / "checkpoint-1")


def reseal(folder) -> None:
    """Checksums of the spoiled files, if checkpoints have any: what a whole checkpoint of another
    model would have."""
    path = folder / "SHA256SUMS"
    if path.exists():
        names = [line.split("  ", 1)[1] for line in path.read_text().splitlines()]
        sums = [
            f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
            for name in names
        ]
        path.write_text("".join(sums))


def other_vocabulary(folder) -> None:
    edit_weights(
        folder,
        lambda weights: {
            k: torch.cat((v, v[:8])) if len(v) == 312 else v for k, v in weights.items()
        },
    )
    edit_json(folder / "config.json", vocab_size=320)


def other_layers(folder) -> None:
    edit_json(folder / "config.json", num_hidden_layers=2)


def other_shapes(folder) -> None:
    edit_json(folder / "config.json", intermediate_size=64)


def edit_moments(edit):
    def spoil(folder) -> None:
        state = torch.load(folder / "optimizer.pt", weights_only=True)
        torch.save(edit(state), folder / "optimizer.pt")

    return spoil


def shrink(value):
    """Every tensor of two dimensions, however deep, without its last row."""
    if isinstance(value, torch.Tensor):
        return value[:-1].clone() if value.ndim == 2 else value
    if isinstance(value, dict):
        return {key: shrink(item) for key, item in value.items()}
    return [shrink(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """The folder of a drafter of the tiny policy."""
    folder = tmp_path_factory.mktemp("drafter")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY)
    save_drafter(folder, make_training(Drafter(model, np.arange(5))))
    return folder


SPOILT_DRAFTERS = {
    "another policy": ({"hidden_size": 7}, "hidden_size is 7"),
    "another class": ({"policy": "GPT2LMHeadModel"}, "policy is GPT2LMHeadModel"),
    "no ids": ({"ids": []}, "ids"),
    "ids beyond the vocabulary": ({"ids": [1, 10**9]}, "ids"),
    "ids in no order": ({"ids": [3, 1]}, "ids"),
    "ids that are none": ({"ids": {"a": 1}}, ""),
    "updates": ({"num_updates": -1}, "num_updates"),
    "a list": ([1, 2], ""),
    "a number": (3, ""),
    "no JSON": ("{", ""),
    "other weights": (None, ""),
    "no weights": ("weights", ""),
    "nothing": ("empty", ""),
}


@pytest.mark.parametrize("spoilt", SPOILT_DRAFTERS)
def test_drafter_that_is_none(refusal, drafter, tmp_path, spoilt):
    content, says = SPOILT_DRAFTERS[spoilt]
    folder = tmp_path / "drafter"
    if content == "empty":
        folder.mkdir()
    else:
        shutil.copytree(drafter, folder)
    file, weights = folder / DRAFTER_FILE, folder / WEIGHTS_FILE
    if isinstance(content, dict):
        file.write_text(json.dumps(json.loads(file.read_text()) | content))
    elif content == "weights":
        weights.write_bytes(b"no tensors")
    elif content is None:
        safetensors.torch.save_file({"body.norm.weight": torch.ones(3)}, weights)
    elif content != "empty":
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    message = refusal("speculative.method=drafter", f"drafter.path={folder}")
    assert message.startswith("drafter.path: ") and str(folder) in message and says in message


def test_drafter_that_is_not_there(refusal):
    assert refusal("speculative.method=drafter", "drafter.path=/nowhere").startswith(
        "drafter.path: "
    )


@pytest.mark.parametrize(
    "spoil, says",
    [
        (other_vocabulary, "holds another model: vocab_size is 320, in model.path 312"),
        (other_layers, "holds another model: num_hidden_layers is 2, in model.path 3"),
        (other_shapes, "config.json asks for"),
        (drop_a_weight, "lack model.layers.1.mlp.up_proj.weight"),
        (edit_moments(lambda state: {}), "does not fit this run"),
        (edit_moments(lambda state: [1, 2]), "does not fit this run"),
        (edit_moments(shrink), "of a model of other shapes"),
        (put("optimizer.pt", b"hello"), "does not fit this run"),
    ],
)
def test_checkpoint_of_another_model(refusal, checkpoint, spoil, says):
    spoil(checkpoint)
    reseal(checkpoint)
    message = refusal("run.max_steps=2", f"run.resume_from_checkpoint={checkpoint}")
    assert message.startswith("run.resume_from_checkpoint: ") and says in message


def test_checkpoint_with_a_key_that_is_no_more(refusal, checkpoint):
    state = checkpoint / "trainer_state.json"
    edit_json(state, config=json.loads(state.read_text())["config"] | {"bubble.order": "global"})
    reseal(checkpoint)
    message = refusal("run.max_steps=2", f"run.resume_from_checkpoint={checkpoint}")
    assert (
        message == f"bubble.order: unknown key in {checkpoint}, which another version has written"
    )


def test_pickled_optimizer_runs_no_code(refusal, checkpoint, tmp_path):
    torch.save({"adamw": Mark(tmp_path / "mark")}, checkpoint / "optimizer.pt")
    reseal(checkpoint)
    message = refusal("run.max_steps=2", f"run.resume_from_checkpoint={checkpoint}")
    assert (
        message.startswith("run.resume_from_checkpoint: ") and "Weights only load failed" in message
    )
    assert not (tmp_path / "mark").exists()


# Several ranks


NO_REWARD = """
def nothing(prompts, completions, completion_ids, **columns):
    return [None for _ in completions]
"""


@pytest.mark.parametrize(
    "overrides, says, is_started",
    [
        (["rollout.num_generations=0"], "rollout.num_generations: 0 must be at least 1", False),
        (
            ["rollout.num_prompts_per_step=1"],
            "rollout.num_prompts_per_step: 1 prompts for 2 ranks",
            False,
        ),
        (["run.output_dir=/proc/none"], "run.output_dir: cannot write to", False),
        (
            ["reward.functions=[user_rewards_of_ranks.nothing]"],
            "reward.functions: all of them returned None",
            True,
        ),
    ],
)
def test_ranks_say_it_once_and_all_end(tmp_path, overrides, says, is_started):
    """Whether the line comes before the ranks have met, from all of them, from rank 0 alone, or in
    the middle of the run."""
    (tmp_path / "user_rewards_of_ranks.py").write_text(NO_REWARD)
    paths = os.pathsep.join((ROOT, str(tmp_path)))
    command = ["train.py", *options(tmp_path / "out", *overrides)]
    if is_started:
        launcher = [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
        ]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": paths,
        }
        done = subprocess.run(
            [sys.executable, *launcher, *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        # The launcher's own exit code, and the ranks'.
        assert done.returncode == 1 and "exitcode  : 2 " in done.stderr, done.stderr[-3000:]
    else:
        done = launch(2, command)
        assert done.returncode == 2, done.stderr[-3000:]
    errors = re.findall(
        r"error: .*" + re.escape(says), done.stderr
    )  # behind the progress bar, if there is one already
    assert len(errors) == 1 and done.stderr.count("error: ") == 1, done.stderr[-3000:]
    assert (tmp_path / "out").exists() == is_started
