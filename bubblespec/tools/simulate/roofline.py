"""Seconds of forwards on GPUs by their data sheets (Williams, Waterman and Patterson 2009).

Nothing is measured by this project. The rest is fitted to forwards that others have measured on an
A100 (tests/test_roofline.py), or counted, or estimated where a comment says so.
"""

from typing import NamedTuple

from bubblespec.engine.batch import Load
from bubblespec.mechanisms.tp_tail.shards import shard_heads
from bubblespec.tools.simulate.cost import RATES, Attention, ForwardCost


class GPU(NamedTuple):
    """Data sheet, and the time of a block of attention."""

    memory: float
    """Bytes per second."""
    peak: float
    """Dense bfloat16 operations per second."""
    link: float
    """Bytes per second of NVLink in each direction."""
    num_processors: int
    block_s: float
    """Seconds of a block of attention for TILE_KEYS keys and heads of 128. On the A100 what rows
    that verify add with each position (1.47 us); an estimate by clock rates for the others."""


class Model(NamedTuple):
    """Shape of a Qwen2.5."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    dimension: int
    """Numbers of a head."""


GPUS = {
    "h200": GPU(4.8e12, 989e12, 450e9, 132, 1.2e-6),
    "h100": GPU(3.35e12, 989e12, 450e9, 132, 1.2e-6),
    "a100": GPU(2.04e12, 312e12, 300e9, 108, 1.47e-6),
}
MODELS = {
    "32b": Model(32.76e9, 64, 40, 8, 128),
    "7b": Model(7.62e9, 28, 28, 4, 128),
    "1.5b": Model(1.54e9, 28, 12, 2, 128),
    "0.5b": Model(0.49e9, 24, 14, 2, 64),
}
BANDWIDTH_SHARE, COMPUTE_SHARE = 0.8, 0.8  # of the data sheet, that kernels reach
# Linear layers do not go from reading weights to computing at one number of tokens, the knee: from
# this share of it on, a token already costs that share of its operations.
RISE_FROM, RISE = 0.1, 0.5
# Operations of a layer next to its seven products and attention (of a Qwen2, 22 in all), and
# seconds of one in a graph, an estimate: for vLLM's six per layer on an A100, 1.7 us fit best.
SMALL_KERNELS, KERNEL_S = 14, 2e-6
# Host time of a forward in which the GPU waits: 0.12 ms by benchmarks/host_time.py, the rest is an
# estimate of copies and launches; 4 us more for each row that verifies. Seconds in which a token is
# sampled from 152k logits, an estimate.
HOST_S, VERIFY_S, SAMPLE_S = 4e-4, 4e-6, 2e-6
# Seconds of a small all-reduce over NVLink: at all, and for each rank beyond the first. NCCL's ring
# on a DGX A100 was measured at 10 us on 2 GPUs, 16.9 us on 4 and 33.7 us on 8 (NVIDIA/nccl-tests,
# issue 123). Newer links and other algorithms take less.
ALL_REDUCE_S, ALL_REDUCE_RANK_S = 6e-6, 4e-6


def roofline(gpu: str, model: str, num_ranks: int = 1) -> ForwardCost:
    """Return the cost of a forward with its sampling, captured as a graph.

    Linear layers read all weights once, or compute, whichever takes longer; see `Attention` for the
    rest. If several ranks compute a forward together, each does its share, of which the largest
    counts, and there are two all-reduces per layer and one exchange of samples. gpu, model: of GPUS
    and MODELS. Raises TPUnsupported for a model that so many ranks cannot share.
    """
    card, shape = GPUS[gpu], MODELS[model]
    bandwidth, compute = card.memory * BANDWIDTH_SHARE, card.peak * COMPUTE_SHARE
    _, layers, heads, kv_heads, dimension = shape
    own = [shard_heads(heads, kv_heads, rank, num_ranks) for rank in range(num_ranks)]
    own_heads, own_kv_heads = (max(s.stop - s.start for s in of) for of in zip(*own, strict=True))
    weights_s = 2 * shape.parameters / num_ranks / bandwidth  # bfloat16
    token_s = 2 * shape.parameters / num_ranks / compute
    knee = weights_s / token_s  # tokens that compute for as long as the weights are read
    position_s = 2 * 2 * layers * own_kv_heads * dimension / bandwidth
    block_s = card.block_s * dimension / 128
    processors = card.num_processors
    attention = Attention(layers, own_heads, own_kv_heads, processors, block_s, position_s)
    rates = dict.fromkeys(RATES, 0.0)
    rates |= {"rows": SAMPLE_S, "draft_tokens": SAMPLE_S, "wide_rows": VERIFY_S}
    constant_s = weights_s + layers * SMALL_KERNELS * KERNEL_S + HOST_S
    summed_s, where = 0.0, f"one {gpu.upper()}"
    if num_ranks > 1:
        latency_s = ALL_REDUCE_S + ALL_REDUCE_RANK_S * (num_ranks - 1)
        constant_s += (2 * layers + 1) * latency_s
        # A ring sends each sum to and from all ranks but one (bus bandwidth of nccl-tests).
        sent = 2 * (num_ranks - 1) / num_ranks * 2 * heads * dimension
        summed_s = 2 * layers * sent / (card.link * BANDWIDTH_SHARE)
        where = f"{num_ranks} {gpu.upper()}s together"
    source = f"roofline, not measured: Qwen2.5-{model.upper()}, bfloat16, on {where}"
    knots = [1, round(RISE_FROM * knee), round(knee)]
    slopes = [summed_s, RISE * token_s + summed_s, token_s + summed_s]
    return ForwardCost(knots, slopes, constant_s, rates, source, attention)


def decode_seconds(gpu: str, model: str, rows: int, context: int) -> float:
    """Return the seconds of a decode step: `rows` that each attend to `context` positions."""
    return roofline(gpu, model).seconds(Load(rows, rows, 0, rows * context, 0, 0))
