"""The configurations for GPUs, run on CPU: two steps of each with a shrunken Qwen2 and data of the
same form, and the memory that their headers give."""

import json
import os

import pytest
import transformers
from safetensors.torch import load_file

from bubblespec.config.file import load_config
from bubblespec.rewards import math_equivalence
from bubblespec.tools.memory import planned_model, table
from tests.helpers.environments import make_tokenizer
from tests.helpers.runs import digests, read, same_weights, steps_of, train_here, weights

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SIZES = ("0.5b", "1.5b", "7b")
# The published configurations, as far as memory depends on them.
SIZE_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZE_KEYS += ("num_key_value_heads", "vocab_size")
QWEN = {
    "0.5b": (896, 4864, 24, 14, 2, 151_936),
    "1.5b": (1536, 8960, 28, 12, 2, 151_936),
    "7b": (3584, 18944, 28, 28, 4, 152_064),
}
SOLUTION = "Each has {n}, so 2 * {n} = <<2*{n}={m}>>{m}.\n#### {m}"
PROBLEM = "Find $2 \\cdot {n}$."
# What a row of each data set looks like: the columns that the configuration reads, and some that it
# does not.
ROWS = {
    "0.5b": {"question": "Two boxes have {n} each. How many?", "answer": SOLUTION},
    "1.5b": {"problem": PROBLEM, "answer": "{m}", "solution": "It is $\\boxed{{m}}$."},
    "7b": {"prompt": PROBLEM, "solution": "{m}", "reward_model": {"ground_truth": "{m}"}},
}


def row_of(form: dict, n: int) -> dict:
    return json.loads(json.dumps(form).replace("{n}", str(n)).replace("{m}", str(2 * n)))


def path_of(size: str) -> str:
    return os.path.join(ROOT, "configs", f"qwen2.5_{size}.yaml")


def full_size(size: str) -> transformers.PretrainedConfig:
    shape = dict(zip(SIZE_KEYS, QWEN[size], strict=True))
    tied = size != "7b"
    return transformers.Qwen2Config(
        **shape, tie_word_embeddings=tied, max_position_embeddings=131_072
    )


@pytest.fixture(scope="module")
def make_model(tmp_path_factory):
    """make_model(size) -> the folder of a random model of the same architecture with its own
    tokenizer and a chat template."""
    tokenizer = make_tokenizer()

    def make(size: str) -> str:
        folder, config = tmp_path_factory.mktemp(f"model_{size}"), full_size(size)
        tokenizer.save_pretrained(folder)
        config.vocab_size, config.num_hidden_layers = len(tokenizer), 2
        config.layer_types = ["full_attention"] * 2
        config.hidden_size, config.intermediate_size = 8 * config.num_attention_heads, 128
        config.initializer_range = 0.2  # wide enough that responses end at different lengths
        config.eos_token_id = tokenizer.eos_token_id
        transformers.set_seed(0)
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
        return str(folder)

    return make


def shrunken(size: str, model: str, folder) -> list[str]:
    """Overrides that make a run small and local, and leave the rest of a configuration as it is."""
    data = folder / f"{size}.jsonl"
    data.write_text(
        "".join(json.dumps(row_of(ROWS[size], n)) + "\n" for n in range(40)), encoding="utf-8"
    )
    config = load_config(path_of(size))
    overrides = [f"model.path={model}", f"data.path={data}", *SHRUNKEN]
    if config.rollout.stop_token_ids:
        overrides.append("rollout.stop_token_ids=[0,2]")
    if config.reward.overlong_buffer_length:
        overrides.append("reward.overlong_buffer_length=8")
    return overrides


SHRUNKEN = ["model.device=cpu", "data.name=null", "data.eval_path=null", "data.eval_split=null"]
SHRUNKEN += ["rollout.num_prompts_per_step=4", "rollout.num_generations=4", "eval.num_prompts=4"]
SHRUNKEN += ["rollout.max_prompt_length=256", "rollout.max_completion_length=24"]
SHRUNKEN += ["rollout.max_num_batched_tokens=512", "optim.max_tokens_per_microbatch=1024"]
SHRUNKEN += ["reward.num_workers=0", "run.max_steps=2", "run.eval_steps=2", "run.save_steps=2"]
SHRUNKEN += ["reward.functions=[tests.test_gpu_configs.shrunken_reward]"]


def shrunken_reward(prompts, completions, completion_ids, answer, **columns):
    """The configuration's own reward must know every answer; a random model learns another one."""
    texts = [f"\\boxed{{{reference.split()[-1]}}}" for reference in answer]
    right = [[{"role": "assistant", "content": text}] for text in texts]
    known = math_equivalence(prompts, right, None, answer)
    assert known == [1.0] * len(answer) and all(prompt[0]["role"] == "system" for prompt in prompts)
    assert not any(math_equivalence(prompts, completions, completion_ids, answer))
    return [len(set(ids)) / 24 for ids in completion_ids]


@pytest.mark.parametrize(
    "size, dtype", [("0.5b", "bfloat16"), ("1.5b", "float32"), ("7b", "bfloat16")]
)
def test_two_steps_with_a_shrunken_model(make_model, tmp_path, size, dtype):
    model, out = make_model(size), tmp_path / "out"
    options = [*shrunken(size, model, tmp_path), f"model.dtype={dtype}"]
    train_here(out, *options, config=path_of(size), short=())
    steps = steps_of(out)
    assert len(steps) == 2 and len(set(digests(out))) == 2
    assert sum("eval/reward" in line for line in read(out)) == 2
    limit = 1e-4 if dtype == "float32" else 0.2
    for line in steps:
        assert line["grad_norm"] > 0 and line["reward_std"] > 0
        assert line["sampling/logp_difference/max"] < limit
        assert ("kl" in line) == (size == "0.5b")
    assert load_config(str(out / "config.yaml")).optim.shard_state
    before = load_file(os.path.join(model, "model.safetensors"))
    assert not same_weights(before, {k: v.to(before[k].dtype) for k, v in weights(out, 2).items()})


@pytest.mark.parametrize("size", SIZES)
def test_headers_equal_estimated_memory(size):
    """The comment at the top is what `python -m bubblespec memory` prints."""
    config = load_config(path_of(size))
    model = planned_model(config, config.model.path)
    printed = table(config, model, 8)
    with open(path_of(size), encoding="utf-8") as file:
        header = [line.rstrip("\n") for line in file if line.startswith("#")]
    assert header[-len(printed.splitlines()) :] == [f"#   {line}" for line in printed.splitlines()]
    assert "80 GB: fits" in printed and "141 GB: fits" in printed


@pytest.mark.parametrize("size", SIZES)
def test_shipped_shapes_are_the_published_shapes(size):
    """They are taken for the hub names of the configurations, without the hub."""
    config, wanted = load_config(path_of(size)), full_size(size)
    shipped = planned_model(config, config.model.path).config
    for key in (*SIZE_KEYS, "tie_word_embeddings", "model_type", "head_dim"):
        assert getattr(shipped, key, None) == getattr(wanted, key, None), key
