"""Shared by all tests: one thread, small random models, rows to generate and samples by hand."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama as llama
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from bubblespec.errors import InputError
from bubblespec.records import RolloutRecord
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.standing import Standing
from bubblespec.types import Group, Launch, Row, Samples

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()

SHOWN_FAILURES, SHOWN_LINES = (
    3,
    10,
)  # at the very end: whoever reads the last lines of a log sees what has failed


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    failed = (
        []
        if reporter is None
        else [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]
    )
    for report in failed[:SHOWN_FAILURES]:
        reporter.write_line(f"\n{report.nodeid} ({report.when})", red=True)
        *lines, place = report.longreprtext.splitlines() or [""]
        shown = [line for line in lines if line.startswith((">", "E"))]
        reporter.write_line("\n".join([*shown[:SHOWN_LINES], place]))
    return result


VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # wide enough that greedy continuations are not constant
}
GQA = {**SMALL, "num_key_value_heads": 2}


def small_config(name: str) -> transformers.PretrainedConfig:
    configs = {
        "llama": lambda: transformers.LlamaConfig(**GQA),
        "qwen2": lambda: transformers.Qwen2Config(**GQA),
        "qwen3": lambda: transformers.Qwen3Config(**GQA, head_dim=16),
        "mistral": lambda: transformers.MistralConfig(**GQA, sliding_window=None),
        "mistral-window": lambda: transformers.MistralConfig(**GQA, sliding_window=7),
        "phi3": lambda: transformers.Phi3Config(**GQA),
        "olmo2": lambda: transformers.Olmo2Config(**GQA),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=512,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            initializer_range=0.2,
        ),
    }
    return configs[name]()


def launch_of(groups: list[Group], num_generations: int) -> Launch:
    """A rollout of these groups that trains on all it generates."""
    return Launch(groups, len(groups), num_generations, num_generations)


def make_rows(groups: list[Group], num_generations: int, max_new_tokens: int) -> list[Row]:
    """The rows of groups, those of a group adjacent."""
    launch = launch_of(groups, num_generations)
    return list(
        Standing(launch, np.zeros(len(launch.ids), np.int64), 0).make_rows(max_new_tokens).values()
    )


MOST_ROWS = 64  # of a rank


def run_loop(loop: RolloutLoop, rows: list[Row]) -> RolloutRecord:
    """Generate rows of whatever groups, with none to choose from: all of them are trained on. Each
    rank may have others, as nobody asks how long they are."""
    owners = np.full(MOST_ROWS, -1)
    owners[: len(rows)] = loop.ranks.rank
    return loop.run(dict(enumerate(rows)), Standing(launch_of([], 0), owners, loop.ranks.rank))


def samples_of(groups: list[Group], tokens: list[np.ndarray], **fields) -> Samples:
    """Responses with these tokens, as many of each group. fields: where they are not 0."""
    num_generations, unknown = (
        len(tokens) // len(groups),
        [np.zeros(len(of_sample), np.float32) for of_sample in tokens],
    )
    fields = {
        "numbers": np.tile(np.arange(num_generations), len(groups)),
        "is_truncated": np.zeros(len(tokens), bool),
    } | fields
    fields = {
        "logprob": unknown,
        "full_logprob": unknown,
        "rewards": np.zeros((len(tokens), 1)),
    } | fields
    return Samples(groups, num_generations, tokens=tokens, **fields)


def refusal(function, *arguments) -> str:
    """The message of the InputError, one line, that function(*arguments) raises."""
    with pytest.raises(InputError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def exact_norms(monkeypatch):
    """RMSNorms in the precision of the model. transformers' compute in float32 whatever that is,
    forward and backward, where the last bit of a float64 may decide a float32's: two ways to sum
    the same gradient may then differ by 1e-7 of it."""

    def forward(norm, hidden):
        return norm.weight * (
            hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        )

    mixtures = (qwen2_moe.Qwen2MoeRMSNorm, qwen3_moe.Qwen3MoeRMSNorm, mixtral.MixtralRMSNorm)
    for norm in (llama.LlamaRMSNorm, qwen2.Qwen2RMSNorm, *mixtures):
        monkeypatch.setattr(norm, "forward", forward)


@pytest.fixture
def make_model():
    """make_model(name, dtype) -> a small random causal LM, the same at every call."""

    def make(
        name: str = "llama", dtype: torch.dtype = torch.float64
    ) -> transformers.PreTrainedModel:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(small_config(name)).to(dtype).eval()

    return make
