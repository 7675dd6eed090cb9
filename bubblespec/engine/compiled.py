"""What sampling reads of whole rows of logits, compiled: three passes over them instead of 28.

A compiler may order the steps of a formula differently, and then a near tie would have another
winner. So before its first use the compiled function is compared with the eager one: it is used
only if all winners and their values are bit-identical. Logarithms of sums do not affect the choice
and are compared up to rounding, as a kernel has its own order of summation.

Shape legend: T positions, V vocabulary.
"""

import functools
import importlib.util
from collections.abc import Callable

import numpy as np
import torch

from bubblespec.engine.noise import gumbel, random_bits, stream_keys
from bubblespec.engine.sampling import best_and_sum
from bubblespec.errors import fallback, log, one_line

# The compiler's own functions and its flushing of small numbers differ from those of single
# operations in the last bit. Older versions of torch do not have all of these.
OPTIONS: dict[str, str | int | bool | Callable] = {
    "eager_numerics.use_pytorch_libdevice": True,
    "eager_numerics.disable_ftz": True,
}
# By default every rank starts up to 32 processes that import torch, for a single kernel.
OPTIONS["compile_threads"] = 1
MAX_COMPARED = 1 << 24  # logits at once
MAX_POSITIONS = 1 << 11
SUM_TOLERANCE = 1e-5  # of float32 sums of positive numbers, in any order


def reduction_for(device: torch.device, enforce_eager: bool) -> Callable:
    """Return `best_and_sum`, or the compiled one where a compiler is to be used."""
    is_compiled = device.type == "cuda" and not enforce_eager
    return compiled_best_and_sum if is_compiled else best_and_sum


def compiled_best_and_sum(
    logits: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `best_and_sum`, compiled if possible; the first call of a kind takes seconds."""
    logits = logits.contiguous()  # as those that were compared; a part of wider ones is not
    return compile_reduction(logits.shape[1], logits.dtype, logits.device)[0](logits, keys, ids)


@functools.cache
def compile_reduction(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable, str | None]:
    """Compile `best_and_sum` for logits [T, vocab_size] of any T, which takes seconds.

    Where that fails, return the eager function and a line with the reason, which is printed."""
    try:
        if device.type == "cuda" and importlib.util.find_spec("triton") is None:
            raise ImportError("the package triton is not installed")
        compiled = compile_for_any_length(best_and_sum)
        problem = first_difference(compiled, vocab_size, dtype, device)
    except Exception as error:  # a compiler, a driver, or what one of them needs of the system
        problem = one_line(error)
    if problem is None:
        return compiled, None
    line = fallback("sampling is eager", problem, "rollout.enforce_eager=true")
    log(f"warning: {line}")
    return best_and_sum, line


def compile_for_any_length(function: Callable) -> Callable:
    """Compile `function` of (logits, keys, ids) whole, for one and for any other number T."""
    known = torch._inductor.list_options()
    options = {name: value for name, value in OPTIONS.items() if name in known}
    compiled = torch.compile(function, fullgraph=True, options=options)

    def call(logits: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor):
        for tensor in (logits, keys):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(logits, keys, ids)

    return call


@torch.inference_mode()
def first_difference(
    reduce: Callable, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return how `reduce` differs from `best_and_sum` at one and many positions, or None."""
    for count in (min(MAX_COMPARED // vocab_size + 2, MAX_POSITIONS), 1):
        given = compared(count, vocab_size, dtype, device)
        (best, index, total), wanted = reduce(*given), best_and_sum(*given)
        num_different = int(((best != wanted[0]) | (index != wanted[1])).sum())
        if num_different:
            return f"{num_different} of {count} compiled winners differ from eager ones"
        if not torch.allclose(total, wanted[2], rtol=SUM_TOLERANCE, atol=SUM_TOLERANCE):
            return "compiled sums differ from eager ones by more than rounding"
    return None


def compared(
    count: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return arguments of `best_and_sum` for T = count positions.

    Position t allows about 2**-(t % 20) of the tokens: not only the largest noise is compared."""
    position = np.arange(count)
    nothing = np.zeros_like(position)
    seeds = (stream_keys(seed, position, nothing, nothing, nothing) for seed in range(3))
    keys, of_logits, of_bars = (torch.from_numpy(keys).to(device) for keys in seeds)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    limit = torch.from_numpy(2 ** (31 - position % 20) - 1).to(device)[:, None]
    is_barred = random_bits(of_bars, ids) >= limit
    is_barred.scatter_(1, torch.from_numpy(position % vocab_size).to(device)[:, None], False)
    logits = gumbel(of_logits, ids).masked_fill_(is_barred, float("-inf"))
    return logits.to(dtype), keys, ids
