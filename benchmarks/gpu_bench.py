"""Device, models of published shapes with random weights, and expected times of the GPU suite."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from bubblespec.distributed.ranks import set_cuda_defaults
from bubblespec.engine.arrays import median_s
from bubblespec.engine.attention import KERNELS, problem_of
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import PAGE
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.ops import has_kernels
from bubblespec.engine.runner import ModelRunner
from bubblespec.tools.simulate.roofline import GPUS, MODELS, GPUCost, roofline
from bubblespec.types import Row, SampleId

SHAPE_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
SHAPE_KEYS += ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
SHAPES = {  # SHAPE_KEYS
    "0.5B": (896, 4864, 24, 151_936, 14, 2, True),
    "1.5B": (1536, 8960, 28, 151_936, 12, 2, True),
    "7B": (3584, 18_944, 28, 152_064, 28, 4, False),
    "SmolLM2-135M": (576, 1536, 30, 49_152, 9, 3, True),
    "tiny": (48, 64, 2, 320, 4, 2, True),
}
LEFT_OUT = "left out: "  # begin of the note of such a row
MAX_LENGTH = 16_384  # positions of a model


class Figure(NamedTuple):
    """A row of the table."""

    case: str
    value: float | None  # value, or None if `note` says why there is none
    unit: str = ""
    note: str = ""
    expected: float | None = None  # value by the roofline of this GPU, where there is one


def left_out(case: str, reason: str) -> Figure:
    """Return a row of what was not measured; the suite lists these at its end."""
    return Figure(case, None, note=f"{LEFT_OUT}{reason}")


@dataclass
class Bench:
    """Device and sizes of all measurements."""

    device: torch.device
    dtype: torch.dtype
    kernel: str  # attention kernel of training
    is_small: bool  # whether sizes are tiny, for a CPU
    gpu: str | None = None  # name in `GPUS`
    memory: float = math.inf  # bytes of the card
    overrides: tuple[str, ...] = ()  # `section.key=value` of programs
    end_s: float = math.inf  # `time.perf_counter` at which the running part has to end

    @property
    def policy(self) -> str:
        return "tiny" if self.is_small else "1.5B" if self.has_room else "0.5B"

    @property
    def has_room(self) -> bool:
        """Whether a full update of the 1.5B fits, which it does not on cards of 24 to 48 GB."""
        return self.memory > 60e9

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_graphs(self) -> bool:
        """Whether the engine's forwards are CUDA graphs."""
        return has_kernels(self.device, self.dtype)

    @property
    def left_s(self) -> float:
        """Seconds that are left to the part that is running."""
        return self.end_s - time.perf_counter()

    def sizes(self, small: tuple, large: tuple) -> tuple:
        return small if self.is_small else large

    def decoding_fits(self, name: str, rows: int, context: int) -> bool:
        """Whether weights in half precision, keys and values fit on the card."""
        hidden, intermediate, layers, vocabulary, heads, kv_heads, _ = SHAPES[name]
        kv = kv_heads * hidden // heads
        weights = layers * hidden * (2 * hidden + 2 * kv + 3 * intermediate)
        weights += 2 * hidden * vocabulary  # embedding and head
        keys_values = rows * (context + PAGE) * 2 * layers * kv
        return 2 * (weights + keys_values) < 0.85 * self.memory

    def raw_model(self, name: str) -> PreTrainedModel:
        """Make a model with random weights."""
        config = dict(zip(SHAPE_KEYS, SHAPES[name], strict=True))
        torch.manual_seed(0)
        with torch.device(self.device):
            config = Qwen2Config(max_position_embeddings=MAX_LENGTH, **config)
            return AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()

    def model(self, name: str) -> PreTrainedModel:
        """Make a `raw_model` that the engine can compute, without gradients."""
        model = self.raw_model(name).requires_grad_(False)
        prepare_model(model, MAX_LENGTH)
        return model

    def engine(self, forward: ModelForward, rows: int, length: int, tokens: int = 2048) -> Engine:
        """Make an engine with a slot for each of `rows`. tokens: of the largest forward."""
        model, sizes = forward.model, {"max_num_batched_tokens": tokens}
        return Engine(ModelRunner(model, rows, length, 0, forward=forward, **sizes))

    def decoding_engine(
        self, forward: ModelForward, rows: int, context: int, window: int = 0
    ) -> Engine:
        """Return an engine whose rows all decode, over keys and values of zero.

        They decode long enough to be timed with drafts of `window` tokens."""
        new, most = 100 + window, rows * (window + 1)
        engine = self.engine(forward, rows, context + new, most)
        engine.insert(make_rows(forward.model, rows, context, new), np.full(rows, context - 1))
        return engine

    def seconds(self, action: Callable[[], object]) -> float:
        """Return the median wall seconds of a call, until the device is done."""
        return median_s(action, self.device)

    def cost(self, name: str) -> GPUCost | None:
        """Return the cost of a model's forwards by the roofline, if it has this GPU and model."""
        is_known = self.gpu is not None and name.lower() in MODELS
        return roofline(self.gpu, name.lower()) if is_known else None

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def make_bench(on_cpu: bool) -> Bench:
    """Return the measurements' device and sizes, tiny ones on a CPU."""
    if on_cpu:
        return Bench(torch.device("cpu"), torch.float32, "sdpa", True)
    set_cuda_defaults()
    device, dtype = torch.device("cuda"), torch.bfloat16
    kernel = next(name for name in KERNELS if problem_of(name, device, dtype, frozenset()) is None)
    card, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    return Bench(device, dtype, kernel, False, gpu_of(card), memory)


def gpu_of(card: str) -> str | None:
    """Return the name in GPUS of a card, by whole words: an L40 is no L4."""
    words = re.split(r"\W+", card.lower().replace("rtx ", "rtx"))
    return next((name for name in GPUS if name in words), None)


def make_rows(model: PreTrainedModel, count: int, prompt: int, new: int) -> list[Row]:
    """Make rows of up to `new` tokens after random prompts, so that no prefill is shared."""
    prompts = np.random.default_rng(7).integers(1, model.config.vocab_size, (count, prompt))
    return [Row(SampleId(100 + i, 0, 0), tuple(p), new) for i, p in enumerate(prompts.tolist())]
