"""Which attention kernel a run uses: one with the results of SDPA, the reference.

Shape legend: N packed tokens, V vocabulary.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.attention import VARLEN_KERNELS, reads_pages
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden
from bubblespec.engine.model_checks import is_rounding, random_tokens, relative_difference
from bubblespec.engine.output_head import output_head
from bubblespec.engine.packing import PAGE, pack_rows, pack_sequences
from bubblespec.engine.pages import Pages
from bubblespec.errors import fallback, first_problem, one_line

HALF = (torch.bfloat16, torch.float16)  # types of the CUDA kernels
MAX_HEAD_SIZE = 256  # in the CUDA kernels
PROMPTS, MORE, ONE = [8, 5, 3], [1, 4, 2], [1, 1, 1]  # tokens fed to rows of `packed_logits`
CHECKED = 12  # tokens fed by `random_hidden`
LONG = 160  # tokens of a prompt whose keys are so many that a kernel splits them if it can


def choose_kernel(
    requested: str,
    model: PreTrainedModel,
    head_sizes: frozenset[tuple[int, int]],
    gather_text: Callable[[str], list[str]] = lambda text: [text],
) -> tuple[str, str | None]:
    """Choose the kernel, together with all ranks; with a line if `auto` falls back.

    Raises ValueError if a requested kernel cannot be used. head_sizes: see `prepare_model`."""
    is_auto, problems = requested == "auto", []
    for kernel in kernels_for(model.device) if is_auto else [requested]:
        problem = None
        if kernel != "sdpa":
            own = problem_of(kernel, model.device, model.dtype, head_sizes)
            problem = first_problem(own or difference_of(kernel, model), gather_text)
        if problem is None:
            break
        problems.append(f"{kernel} {problem}")
    if not is_auto and problems:
        raise ValueError(f"model.attention: {problems[0]}")
    if not problems:
        return kernel, None
    line = fallback(f"attention is {kernel}", "; ".join(problems), f"model.attention={kernel}")
    return kernel, line


def problem_of(
    kernel: str, device: torch.device, dtype: torch.dtype, head_sizes: frozenset[tuple[int, int]]
) -> str | None:
    """Return why a CUDA kernel cannot be used, after its name; None where it can."""
    unfit = sorted((key, value) for key, value in head_sizes if key != value or key > MAX_HEAD_SIZE)
    if device.type != "cuda":
        return f"runs on CUDA only; set sdpa on {device.type}"
    if dtype not in HALF:
        return f"computes in bfloat16 only; set sdpa for {str(dtype).partition('.')[2]}"
    if unfit:
        return (
            f"takes heads of one size up to {MAX_HEAD_SIZE}; this model's query and key heads have "
            f"{unfit[0][0]} and its value heads {unfit[0][1]}; set sdpa"
        )
    if kernel == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "is not installed (see requirements-flash.txt); set varlen or sdpa"
    return None


def kernels_for(device: torch.device) -> list[str]:
    """Return the kernels that `auto` tries, the best first."""
    if device.type != "cuda":
        return ["sdpa"]
    has_package = importlib.util.find_spec("flash_attn") is not None
    return [k for k in (*VARLEN_KERNELS, "sdpa") if k != "flash_attn" or has_package]


def difference_of(kernel: str, model: PreTrainedModel) -> str | None:
    """Return how a kernel fails or differs from SDPA; None if only by rounding."""
    try:
        prompts = [LONG, *PROMPTS[1:]]
        got = packed_logits(model, cache_for(kernel), kernel, prompts=prompts)
        wanted = packed_logits(model, cache_for("sdpa"), "sdpa", prompts=prompts)
        difference = relative_difference(got, wanted)
    except Exception as error:  # a package built for another torch, a driver, the kernel itself
        return f"fails: {one_line(error)}"
    if is_rounding(difference, model.dtype):
        return None
    return f"logits differ from sdpa's by {difference:.1e} of their size"


def cache_for(kernel: str, num_spare: int = 0) -> KVCache:
    """Create a cache of a few rows of PAGE positions, in pages where a run has them."""
    rows = len(PROMPTS)
    pages = Pages(rows, PAGE, rows, PAGE) if reads_pages(kernel) else None
    return KVCache(rows, PAGE, num_spare, pages)


@torch.inference_mode()
def random_hidden(forward: ModelForward) -> torch.Tensor:
    """Compute the hidden states [N, hidden] of random tokens, one prompt over an empty cache."""
    model, count = cast(PreTrainedModel, forward.model), np.array([CHECKED])
    tokens = random_tokens(model, CHECKED)
    packing = pack_rows(cache_for(forward.kernel), 0 * count, count, tokens.device)
    return forward.hidden(tokens, packing)


@torch.inference_mode()
def packed_logits(
    model: PreTrainedModel,
    cache: KVCache,
    kernel: str,
    forward: Callable | None = None,
    prompts: Sequence[int] = PROMPTS,
) -> torch.Tensor:
    """Compute logits [N, V] of prompts, some tokens after them, one more, and training sequences.

    forward: of `ForwardGraphs` over this cache, except for training; prompts: their lengths."""
    device, hidden, start = model.device, [], np.zeros(len(prompts), np.int64)
    for count in map(np.array, (prompts, MORE, ONE)):
        packing, tokens = pack_rows(cache, start, count, device), random_tokens(model, count.sum())
        start = start + count
        if forward is None:
            hidden.append(forward_hidden(model, tokens, packing, kernel))
        else:
            hidden.append(forward(tokens, packing)[: len(tokens)].clone())
    tokens = random_tokens(model, sum(prompts))
    hidden.append(forward_hidden(model, tokens, pack_sequences(prompts, device), kernel))
    return output_head(model)(torch.cat(hidden))
