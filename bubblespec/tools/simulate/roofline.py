"""Seconds of forwards on GPUs: a roofline (Williams, Waterman and Patterson 2009) with a soft knee.

`FITTED` is fitted by benchmarks/fit_roofline.py to forwards of Qwen2.5-7B that others have measured
in vLLM on an A100, and compared with other models and several GPUs. `OWN` replaces what this engine
does in another way, by the figures of its kernels' prototype on an H200. Other GPUs follow by data
sheet, see `GPU`. docs/lab/simulator.md names the sources.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from bubblespec.mechanisms.quantized.copy import GROUP, LARGE
from bubblespec.mechanisms.tp_tail.shards import TPUnsupported, shard_heads
from bubblespec.types import Load

# A block of attention computes this many queries, whether they are real or not, against so many
# keys at a time. Two blocks on a multiprocessor take 1.5 times as long as one.
TILE_QUERIES, TILE_KEYS, OVERLAP = 64, 64, 4 / 3


class GPU(NamedTuple):
    """Data sheet: shares of bandwidth and peak, and seconds per layer, are those of the A100."""

    memory: float  # bytes per second
    peak: float  # dense bfloat16 operations per second
    link: float  # bytes per second of NVLink, or PCIe, in each direction
    num_processors: int
    block_time: float
    """Time of a block of attention over that on an A100. FlashAttention-2 reaches 73% of the peak
    of an A100 (Dao 2023) and 35% of that of an H100 (Shah et al. 2024), here by multiprocessor. Ada
    has the A100's instructions, so it is given the same share."""


class States(NamedTuple):
    """Shape of a model's gated delta layers."""

    layers: int
    heads: int  # of values
    key_heads: int
    size: int  # numbers of a key or value

    @property
    def row_bytes(self) -> float:
        """Bytes of a row's states that a forward reads and writes, in float32."""
        return 2 * 4 * self.layers * self.heads * self.size**2


class Model(NamedTuple):
    """Shape of a Llama or Qwen2, or with `states` of a Qwen3.5, whose attention has gates."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dimension: int  # numbers of a head
    vocabulary: int
    states: States | None = None

    @property
    def attention_layers(self) -> int:
        return self.layers - (self.states.layers if self.states else 0)

    @property
    def layer_weights(self) -> float:
        """Weights of the products of all layers."""
        projections = (3 if self.states else 2) * self.heads + 2 * self.kv_heads
        outputs = self.attention_layers * projections * self.dimension
        if of := self.states:
            outputs += of.layers * ((2 * of.key_heads + 3 * of.heads) * of.size + 2 * of.heads)
        return self.hidden * (outputs + 3 * self.layers * self.intermediate)

    @property
    def parameters(self) -> float:
        """Weights of all products, the head's included."""
        return self.layer_weights + self.hidden * self.vocabulary


class Fit(NamedTuple):
    """Constants of an engine's forward."""

    memory_share: float  # share of the bandwidth at which weights are read
    keys_share: float  # the same for keys and values
    peak_share: float  # share of the peak that products reach with many tokens
    knee: float  # sharpness of the bend between two limits, see `both`
    layer_s: float
    """Seconds of a layer beyond its products and attention: small kernels, and each kernel's begin
    and end."""
    block_s: float  # seconds of a block of attention for TILE_KEYS keys and heads of 128 numbers
    copy_memory_share: float  # `memory_share` of int4 weights
    copy_peak_share: float  # `peak_share` of products with int4 weights
    shared_speed: float  # of reading keys that rows have in common, from the L2 cache; vLLM only
    cascade_s: float  # seconds per layer of vLLM's cascade attention beyond those of common keys


FITTED = Fit(0.8, 0.8, 0.747, 1.61, 52.7e-6, 1.41e-6, 0.576, 0.386, 1.9, 33.7e-6)
GPUS = {
    "h200": GPU(4.8e12, 989e12, 450e9, 132, 0.8),
    "h100": GPU(3.35e12, 989e12, 450e9, 132, 0.8),
    "a100": GPU(2.04e12, 312e12, 300e9, 108, 1.0),
    # Dense, with sums in float32. PCIe 4.0: nothing is known of several of them together.
    "rtx4090": GPU(1.008e12, 165e12, 32e9, 128, 2.24),
    "l4": GPU(0.3e12, 121e12, 32e9, 58, 1.38),
}
# Sizes without a name are Qwen2.5's.
MODELS = {
    "32b": Model(64, 5120, 27648, 40, 8, 128, 152064),
    "14b": Model(48, 5120, 13824, 40, 8, 128, 152064),
    "7b": Model(28, 3584, 18944, 28, 4, 128, 152064),
    "1.5b": Model(28, 1536, 8960, 12, 2, 128, 151936),
    "0.5b": Model(24, 896, 4864, 14, 2, 64, 151936),
    "llama-3.1-8b": Model(32, 4096, 14336, 32, 8, 128, 128256),
    "llama-2-7b": Model(32, 4096, 11008, 32, 32, 128, 32000),
    "qwen3.5-0.8b": Model(24, 1024, 3584, 8, 2, 256, 248320, States(18, 16, 16, 128)),
    "qwen3.5-2b": Model(24, 2048, 6144, 8, 2, 256, 248320, States(18, 16, 16, 128)),
    "qwen3.5-9b": Model(32, 4096, 12288, 16, 4, 256, 248320, States(24, 32, 16, 128)),
}
# This engine by the prototype of its kernels (docs/lab/data/h200_prototype.csv): 10 launches of
# 3.2 us a layer and 12 around the layers, and seconds in which a token is sampled from 152k logits.
OWN, AROUND, SAMPLE_S = FITTED._replace(keys_share=0.95, knee=2.0, layer_s=32e-6), 1.2, 8e-7
# Host time of a forward: planning and packing 0.3 ms, the graph's launch 0.15 ms
# (docs/lab/h200.md). A forward that verifies nothing is launched ahead of results, so a GPU
# waits for what exceeds the forward. Behind one that verifies the host waits for results: that
# costs all of it, and 0.35 ms and 0.8 us for each row that verifies (benchmarks/host_time.py, on a
# CPU; engine/batch.py does better where the host takes long).
HOST_S, VERIFY_S, VERIFY_ROW_S = 4.5e-4, 3.5e-4, 8e-7
# Seconds of a small all-reduce over NVLink: at all, and for each rank beyond the first. These are
# what gpt-fast's tokens per second on 2, 4 and 8 A100s leave for its all-reduces (6.8, 7.3 and
# 9.2 us) with `memory_share` and the layers of its run on one. NCCL's ring was measured at 10, 17
# and 34 us (NVIDIA/nccl-tests, issue 123).
ALL_REDUCE_S, ALL_REDUCE_RANK_S = 6.4e-6, 0.41e-6
# Share of the bandwidth at which int8 weights are read, by gpt-fast's 155.6 tokens per second.
INT8_MEMORY_SHARE = 0.68


def both(read_s: float, computed_s: float, knee: float) -> float:
    """Return the seconds in which reading and computing overlap: flat at first, then rising."""
    return (read_s**knee + computed_s**knee) ** (1 / knee)


@dataclass
class Attention:
    """Seconds of this engine's attention, which reads keys once.

    A tile's 16, 32 or 64 queries are tokens of a row times the query heads of a key/value head."""

    layers: int
    heads: int
    kv_heads: int
    num_processors: int  # multiprocessors, each of which computes a block or more
    block_s: float  # seconds of a block for TILE_KEYS keys in one layer
    position_s: float  # seconds in which keys and values of one position are read, all layers
    knee: float

    def seconds(self, rows: float, tokens: float, positions: float) -> float:
        """Return the seconds of all layers, as if all rows were alike.

        positions: attended to, summed over rows."""
        fed, group = max(tokens / rows, 1.0), self.heads / self.kv_heads
        tiles = rows * self.kv_heads * math.ceil(fed / max(TILE_QUERIES // group, 1.0))
        height = 2 ** math.ceil(math.log2(min(max(fed * group, 16.0), TILE_QUERIES)))
        waves = tiles * height / TILE_QUERIES / self.num_processors / OVERLAP
        computed_s = self.computed_s(waves, positions / rows, fed)
        return both(positions * self.position_s, computed_s, self.knee)

    def computed_s(self, waves: float, positions: float, fed: float) -> float:
        """Return the seconds of whole blocks, `waves` of them on each multiprocessor."""
        keys = max(positions - (fed - 1) / 2, 0.0)  # causal
        return self.layers * waves * keys / TILE_KEYS * self.block_s


@dataclass
class Products:
    """Seconds of matrix products of some tokens with the same weights."""

    read_s: float  # seconds in which the weights are read
    token_s: float  # seconds in which a token is computed
    knee: float

    def seconds(self, tokens: float) -> float:
        return both(self.read_s, tokens * self.token_s, self.knee)


@dataclass
class GPUCost:
    """Seconds of forwards on one GPU, or on several that compute each forward together."""

    layers: Products
    head: Products  # of the tokens that are sampled
    attention: Attention
    constant_s: float  # seconds of a forward beyond `layers`, `head` and `attention`
    token_s: float  # seconds of a token in all-reduces
    sample_s: float
    host_s: float  # of the host, in which the GPU computes the forward before if no row verifies
    verify_s: tuple[float, float]  # more of the host if any row verifies, and for each that does
    row_s: float  # seconds in which a row's states are read and written
    source: str  # where the figures are from

    def seconds(self, load: Load) -> float:
        """Return the seconds of a forward."""
        rows, tokens, wide_rows, positions, _, draft_tokens = load
        sampled = rows + draft_tokens
        total_s = self.constant_s + self.token_s * tokens + self.sample_s * sampled
        total_s += self.row_s * rows
        total_s += self.layers.seconds(tokens) + self.attention.seconds(rows, tokens, positions)
        total_s += self.head.seconds(sampled)
        if not wide_rows:
            return max(total_s, self.host_s)
        return total_s + self.host_s + self.verify_s[0] + self.verify_s[1] * wide_rows


def roofline(
    gpu: str, model: str | Model, num_ranks: int = 1, *, bits: int = 16, fit: Fit = OWN
) -> GPUCost:
    """Return the cost of a forward, captured as a graph.

    If several ranks compute a forward together, each does its share, of which the largest counts,
    and there are two all-reduces per layer and one exchange of samples. gpu, model: of GPUS and
    MODELS, or a shape; bits: of a weight, 8 or 4 for a quantised copy, with a grid for each GROUP
    inputs. Raises TPUnsupported for a model that so many ranks cannot share."""
    card, shape = GPUS[gpu], MODELS[model] if isinstance(model, str) else model
    layers, hidden, _, heads, kv_heads, dimension, vocabulary, states = shape
    if states is not None and num_ranks > 1:
        raise TPUnsupported("layers with a state")
    title = "a model"
    if isinstance(model, str):
        title = f"Qwen2.5-{model.upper()}" if model[0].isdigit() else model.title()
    own = [shard_heads(heads, kv_heads, rank, num_ranks) for rank in range(num_ranks)]
    own_heads, own_kv_heads = (max(s.stop - s.start for s in of) for of in zip(*own, strict=True))
    shares = {
        16: (fit.memory_share, fit.peak_share),
        8: (INT8_MEMORY_SHARE, fit.peak_share),
        4: (fit.copy_memory_share, fit.copy_peak_share),
    }
    memory_share, peak_share = shares[bits]
    weight_bytes = bits / 8 + (4 / GROUP if bits == 4 else 0)  # step and middle, 2 bytes each

    def products(weights: float) -> Products:
        read_s = weight_bytes * weights / num_ranks / (memory_share * card.memory)
        return Products(read_s, 2 * weights / num_ranks / (peak_share * card.peak), fit.knee)

    block_s = fit.block_s * card.block_time * dimension / 128
    with_keys = shape.attention_layers
    position_s = 2 * 2 * with_keys * own_kv_heads * dimension / (fit.keys_share * card.memory)
    constant_s = (layers + AROUND) * fit.layer_s
    summed_s, where = 0.0, f"one {gpu.upper()}"
    if num_ranks > 1:
        latency_s = ALL_REDUCE_S + ALL_REDUCE_RANK_S * (num_ranks - 1)
        constant_s += (2 * layers + 1) * latency_s
        # A ring sends each sum to and from all ranks but one (bus bandwidth of nccl-tests).
        sent = 2 * (num_ranks - 1) / num_ranks * 2 * hidden
        summed_s = 2 * layers * sent / (card.link * fit.memory_share)
        where = f"{num_ranks} {gpu.upper()}s together"
    return GPUCost(
        layers=products(shape.layer_weights),
        head=products(hidden * vocabulary),
        attention=Attention(
            with_keys, own_heads, own_kv_heads, card.num_processors, block_s, position_s, fit.knee
        ),
        constant_s=constant_s,
        token_s=summed_s,
        sample_s=SAMPLE_S,
        host_s=HOST_S,
        verify_s=(VERIFY_S, VERIFY_ROW_S),
        row_s=states.row_bytes / (fit.keys_share * card.memory) if states else 0.0,
        source=f"roofline, not measured: {title}, bfloat16, on {where}",
    )


def copy_roofline(gpu: str, model: str) -> GPUCost:
    """Return the cost of a forward of the policy's quantised copy, see `Product`."""
    return roofline(gpu, model, bits=4 if MODELS[model].parameters >= LARGE else 8)


def update_tokens_per_s(gpu: str, model: str) -> float:
    """Return the tokens per second of an update: forward and backward of all products."""
    return OWN.peak_share * GPUS[gpu].peak / (6 * MODELS[model].parameters)
