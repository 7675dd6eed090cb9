"""The copy: the policy's decoder with quantised products, int8 on a CPU and int4 on a GPU.

Everything else is shared with the policy: embeddings, norms, keys and values. How large the inputs
of each product's channels get, a forward of the policy shows. An input channel with large values
costs all others their precision, so channels are divided by a factor and the weights multiplied by
it (SmoothQuant, Xiao et al. 2023, arXiv 2211.10438, equation 4, with alpha = 0.5).

Weights are rounded to a grid of their own for each output (int8), or for each group of inputs of
an output (int4). On a CPU the inputs are rounded as well, to 8 bits on a grid of each product's
own, and integers are multiplied (`linear_dynamic` of FBGEMM). On a GPU inputs are not rounded.
Rounding may be as coarse as it likes: a copy only proposes tokens.

After an update the copy is that of older weights, and proposes nearly as well;
`QuantizedDraftModel.renew` quantises a part of it again.

It drafts over the engine's own keys and values. A draft token's are written where the row's next
tokens belong. The policy's forward that verifies the token writes them again, and nothing else
reads them: so there is no second cache and no prefill, and a rejected token leaves nothing behind
(QSpec, Zhao et al. 2024, arXiv 2410.11305, shares the cache in the same way). Tokens are drawn with
the noise that the row itself will use, among the CANDIDATES best, whose logits are computed by the
policy's own head: in 8 bits it would cause a third of all wrong tokens.

Shape legend: N tokens, K features in, M features out; of a draw M rows, C candidates.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.draft.chains import DraftModelRunner
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.decoder import Decoder, stacked
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import LANES, CachePacking, KVCache, pack_rows
from bubblespec.engine.model import OutputHead, output_head
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import widen
from bubblespec.engine.weights import Kind, Linears, Multiply, linear_of

SMOOTHING = 0.5  # alpha of SmoothQuant
# Weights from which int4 is near enough; smaller policies gain little by it on a GPU.
LARGE = 3e9
GROUP = 128  # inputs of an output that share a grid of int4
INNER_TILES = 8  # of torch's int4 layout, each of 16 inputs
OUTPUTS_AT_ONCE = 4096  # that are rounded
HALF = 8  # by which int4 weights, 0 to 15, are moved
NO_PRODUCT = "this device has no product with quantised weights for this type and size of policy"
HAS_VNNI = torch.cpu._is_vnni_supported()
CANDIDATES = 256  # tokens, whose noise is computed: the others hardly ever win


class Product(NamedTuple):
    """A way to multiply by quantised weights."""

    name: str
    bits: int
    pack: Callable[[torch.Tensor, torch.Tensor], Any]
    """Quantise a weight [M, K] times a factor [K]; return an object, or a tuple of tensors."""
    multiply: Callable[[torch.Tensor, Any], torch.Tensor]
    """Multiply x [..., K] by a packed weight; return [..., M] in the type of x."""
    fits: Callable[[int, int], bool]
    """Whether a weight of K inputs and M outputs can be packed."""


class Layers:
    """Linear layers of the policy with one input, as one quantised product."""

    def __init__(self, layers: Linears, product: Product, largest: torch.Tensor):
        """largest: of each input channel, float [K], in magnitude."""
        self.layers, self.product = layers, product
        self.widths = [linear_of(layer).out_features for layer in layers]
        weights = [current_weight(layer) for layer in layers]
        sizes = [torch.linalg.vector_norm(weight, torch.inf, dim=0).float() for weight in weights]
        factor = largest**SMOOTHING
        factor /= torch.stack(sizes).amax(dim=0).clamp_min(1e-5) ** (1 - SMOOTHING)
        self.factor = factor.clamp_min(1e-5)
        self.inverse = (1 / self.factor).to(weights[0].dtype)
        self.packed: Any = None
        self.bias: torch.Tensor | None = None
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Quantise the current weights, in place where a CUDA graph knows their addresses."""
        weight = torch.cat([current_weight(layer) for layer in self.layers])
        packed, bias = self.product.pack(weight, self.factor), self._current_bias()
        if isinstance(self.packed, tuple):
            for old, new in zip(self.packed, packed, strict=True):
                old.copy_(new)
        else:
            self.packed = packed
        if self.bias is None or bias is None:
            self.bias = bias
        else:
            self.bias.copy_(bias)

    def _current_bias(self) -> torch.Tensor | None:
        """Return the biases of all layers, [M], zeros for a layer without; None without any."""
        biases = [linear_of(layer).bias for layer in self.layers]
        if all(bias is None for bias in biases):
            return None
        parts = zip(biases, self.widths, strict=True)
        filled = [self.inverse.new_zeros(n) if bias is None else bias for bias, n in parts]
        return torch.cat([part.detach() for part in filled])

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., M] of all layers for their input [..., K]."""
        out = self.product.multiply(x * self.inverse, self.packed)
        return out if self.bias is None else out + self.bias


class QuantizedDraftModel:
    """A quantised copy of a policy that is like Llama."""

    def __init__(
        self, model: PreTrainedModel, product: Product, largest: dict[Linears, torch.Tensor]
    ):
        """Quantise the policy's products. largest: of `observe_inputs`."""
        self.model = model
        self.parts = {
            layers: Layers(layers, product, sizes)
            for layers, sizes in largest.items()
            if all(product.fits(of.in_features, of.out_features) for of in map(linear_of, layers))
        }
        head = output_head(model)
        self.head = replace(head, linear=self.product_of("out", (head.linear,)))
        # The head only finds candidates, for which that of older weights is good enough; it would
        # take as long as all others together.
        self.renewed = [part for layers, part in self.parts.items() if head.linear not in layers]
        self._oldest = 0  # of these, the one that `renew` begins with
        self._num_old = 0  # parts that are older than the weights

    def product_of(self, kind: Kind, layers: Linears) -> Multiply:
        """Return the quantised product of layers, or the policy's where there is none."""
        part = self.parts.get(layers)
        return stacked(self.model)(kind, layers) if part is None else part.compute

    def renew(self, clock: Callable[[], float], limit_s: float) -> float:
        """Quantise the parts that are oldest again, until time is over; return the seconds."""
        begin_s = clock()
        while self._num_old and clock() - begin_s < limit_s:
            self.renewed[self._oldest].renew()
            self._oldest = (self._oldest + 1) % len(self.renewed)
            self._num_old -= 1
        return clock() - begin_s

    def note_update(self) -> None:
        """Note that the policy's weights have changed."""
        self._num_old = len(self.renewed)


class CopyForward(ModelForward):
    """The forward of a copy."""

    def __init__(self, copy: QuantizedDraftModel, **options):
        self.copy = copy
        super().__init__(copy.model, **options)

    def make_decoder(self) -> Decoder:
        """Return the policy's decoder with the copy's products."""
        return Decoder(self.copy.model, self.copy.product_of)

    def hidden(self, tokens: torch.Tensor, packing: CachePacking) -> torch.Tensor:
        """Return the copy's last hidden states [N, hidden], without taps."""
        assert self.decoder is not None
        return self.decoder.hidden(tokens, packing)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the copy's logits [T, V] of hidden states [T, hidden]."""
        return self.copy.head(hidden)


class CopyRunner(DraftModelRunner):
    """The copy's part of an engine, in the cache of the policy."""

    reads_states = False

    def __init__(self, copy: QuantizedDraftModel, engine: Engine, params: SamplingParams):
        """params: of the engine's rows."""
        runner = cast(ModelRunner, engine.runner)
        policy = runner.forward
        forward = CopyForward(copy, enforce_eager=policy.is_eager, memory=policy.memory)
        super().__init__(engine, params, forward, runner.cache, runner.num_slots)
        self.copy = copy
        self.num_candidates = min(CANDIDATES, copy.head.num_tokens)

    @torch.inference_mode()
    def draw(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        try:
            return super().draw(slots, number, tokens)
        except Exception:  # what was written is masked, but must be finite: see `KVCache`
            start = self.engine.length[slots] - 1 + number
            self.cache.erase(self.pack(slots, start, np.ones_like(start)).place)
            raise

    def candidates(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        start = self.engine.length[slots] - 1 + number
        hidden = self.feed(tokens, slots, start, np.ones_like(start))
        ids = widen(self.forward.logits(hidden)).topk(self.num_candidates).indices
        return exact_logits(output_head(self.runner.model), hidden, ids), ids, len(tokens)


def exact_logits(head: OutputHead, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the policy's own logits [M, C] of the tokens int64 [M, C] for states [M, hidden]."""
    linear = linear_of(head.linear)
    product = torch.bmm(linear.weight[ids], hidden[:, :, None])[:, :, 0]
    return widen(head.finish(product if linear.bias is None else product + linear.bias[ids]))


@torch.no_grad()
def current_weight(layer: torch.nn.Module) -> torch.Tensor:
    """Return the weight [M, K] that a layer multiplies by, its adapters included."""
    weight = linear_of(layer).weight.detach()
    for name in getattr(layer, "active_adapters", ()):
        weight = weight + cast(Any, layer).get_delta_weight(name)
    return weight


def linear_layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the linear layers of a model, one with an adapter as a whole."""
    if isinstance(linear_of(module), torch.nn.Linear):
        yield module
        return
    for child in module.children():
        yield from linear_layers(child)


@torch.inference_mode()
def observe_inputs(model: PreTrainedModel, tokens: torch.Tensor) -> dict[Linears, torch.Tensor]:
    """Run the policy on tokens int64 [N]; return the size of each product's input channels.

    Largest magnitudes, float32 [K], by the layers of the product, the output head included."""
    largest: dict[Linears, torch.Tensor] = {}

    def observed(kind: Kind, layers: Linears) -> Multiply:
        exact = stacked(model)(kind, layers)

        def multiply(x: torch.Tensor) -> torch.Tensor:
            largest[layers] = torch.linalg.vector_norm(x, torch.inf, dim=0).float()
            return exact(x)

        return multiply

    count = np.array([len(tokens)])
    cache = KVCache(1, -(-len(tokens) // LANES) * LANES)  # a GPU reads whole blocks of keys
    packing = pack_rows(cache, 0 * count, count, tokens.device)
    hidden = Decoder(model, observed).hidden(tokens, packing)
    observed("out", (output_head(model).linear,))(hidden)
    return largest


def product_for(model: torch.nn.Module, device: str, bits: int | str) -> Product | None:
    """Return the product of a policy's copy, if a device has one for its type.

    device: cpu or cuda, where the policy will be; bits: auto, 8 or 4."""
    parameters = list(model.parameters())
    if device == "cpu":
        has_engine = "x86" in torch.backends.quantized.supported_engines
        return INT8_CPU if has_engine and bits != 4 else None
    is_large = sum(parameter.numel() for parameter in parameters) >= LARGE
    fits = bits == 4 or (bits == "auto" and is_large)
    return INT4 if fits and parameters[0].dtype == torch.bfloat16 else None


def by_parts(
    rounding: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    weight: torch.Tensor,
    factor: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Round a weight [M, K] times a factor [K] in float32, a few outputs at a time.

    A float32 copy of a large model's output head would take gigabytes."""
    parts = [rounding(part.float() * factor) for part in weight.split(OUTPUTS_AT_ONCE)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def round_to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight [M, K]; return int8 [M, K] and the steps of the outputs' grids, float [M]."""
    step = weight.abs().amax(dim=1).clamp_min(torch.finfo(weight.dtype).tiny) / 127
    return (weight / step[:, None]).round().to(torch.int8), step


def _pack_int8(weight: torch.Tensor, factor: torch.Tensor) -> Any:
    whole, step = by_parts(round_to_int8, weight, factor)
    zeros = torch.zeros(len(step), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to take out this type of tensor
        quantized = torch._make_per_channel_quantized_tensor(whole, step.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(quantized, None)


def _multiply_int8(x: torch.Tensor, packed: Any) -> torch.Tensor:
    size, given = None, x.float()
    if x.numel() > x.shape[-1]:  # the rows share a grid, so they are brought to one size
        size = given.abs().amax(dim=-1, keepdim=True).clamp_min_(1e-9)
        given = given / size
    # Without VNNI, FBGEMM adds up products in 16 bits, where 8-bit inputs would overflow.
    out = torch.ops.quantized.linear_dynamic(given, packed, not HAS_VNNI)
    return (out if size is None else out * size).to(x.dtype)


def round_to_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight [M, K] to 16 levels; return levels uint8 [M, K], and each group's grid.

    A grid is (step, middle), [M, groups] each: level q stands for (q - 8) * step + middle."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    step = ((high - low) / 15).clamp_min(1e-6)
    levels = ((groups - low[..., None]) / step[..., None]).round().clamp(0, 15).to(torch.uint8)
    return levels.flatten(1), step, low + HALF * step


def _pack_int4(weight: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    levels, step, middle = by_parts(round_to_int4, weight, factor)
    pairs = levels[:, ::2] << 4 | levels[:, 1::2]
    packed = torch._convert_weight_to_int4pack(pairs, INNER_TILES)
    grids = torch.stack((step, middle), dim=2).transpose(0, 1).contiguous()
    return packed, grids.to(weight.dtype)  # [groups, M, 2]


def _multiply_int4(x: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    weight, grids = packed
    out = torch._weight_int4pack_mm(x.reshape(-1, x.shape[-1]), weight, GROUP, grids)
    return out.view(*x.shape[:-1], out.shape[-1])


INT8_CPU = Product("int8", 8, _pack_int8, _multiply_int8, lambda k, m: True)


INT4 = Product("int4", 4, _pack_int4, _multiply_int4, lambda k, m: k % GROUP == 0 and m % 8 == 0)
