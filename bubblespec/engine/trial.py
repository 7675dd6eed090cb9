"""Kernels tried on this device, in sizes of the run, against the same operations in torch.

A kernel may fail on a machine that it has not run on: no C compiler, which triton needs for its
launches, a card with less shared memory, another version. Then torch computes the operation, the
run goes on, and a line says why. All kernels are launched here, including those that a run reaches
late: merging of splits, acceptance, backward passes.

Whether all of them together compute what training computes is compared in learn/agreement.py.

Shape legend: N tokens, C hidden size, I intermediate size, H query heads, K key/value heads, D head
dimension, V vocabulary.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from bubblespec.engine import ops
from bubblespec.engine.batch import Plan, RowUpdates, SamplingParams
from bubblespec.engine.kv_cache import PAGE, SPLIT, KVCache, LayerCache, pack_rows
from bubblespec.engine.model import Heads, attention_layers, layer_heads, layer_kinds, of_layers
from bubblespec.engine.ops import torch_ops
from bubblespec.engine.ops.softmax import AttentionOptions
from bubblespec.engine.ops.view import AttentionMetadata, Norm
from bubblespec.engine.pages import Pages
from bubblespec.engine.recurrent import StateShape, state_shapes
from bubblespec.engine.sampling import Noise, sample, stream_counters
from bubblespec.engine.states import WINDOWS, StateCache, advance, convolve
from bubblespec.engine.step_graphs import DeviceRows
from bubblespec.errors import fallback, is_lost, one_line
from bubblespec.types import Load

TOKENS, EPS, SEED = 7, 1e-6, 2**40 + 17
# Differences of single operations, in units of rounding of a row's largest number. Kernels and
# torch round to two bytes at the same places: most numbers are equal, others differ by up to four
# units. float32 are sums over a vocabulary, in other orders: 14 units with 20,000 tokens.
MAX_UNITS = {2: 16, 4: 1024}  # by the bytes of a number
KEY = "model.kernels"


class Sizes(NamedTuple):
    """Device, type and sizes of a run's model."""

    device: torch.device
    dtype: torch.dtype
    hidden: int
    units: int  # of the MLP
    vocabulary: int
    attention: tuple[tuple[Heads, AttentionOptions], ...]  # distinct ones of layers, without sinks
    activation: str
    has_teacher: bool = False
    states: tuple[StateShape, ...] = ()  # distinct ones of layers
    has_sinks: bool = False

    def randn(self, *shape: int) -> torch.Tensor:
        """Return random numbers of the model's type, the same ones after the same seed."""
        return torch.randn(shape).to(self.device, self.dtype)


def sizes_of(model: PreTrainedModel, has_teacher: bool = False) -> Sizes:
    """Return what kernels are tried with."""
    config: Any = model.config.get_text_config(decoder=True)
    heads = layer_heads(model.config)
    kinds = layer_kinds(model.config) or ["sliding_attention"] * config.num_hidden_layers
    kinds = [kinds[number] for number in attention_layers(model.config)]
    cap = getattr(config, "attn_logit_softcapping", None)
    options = [
        AttentionOptions(
            of.key_size**-0.5,
            getattr(config, "sliding_window", None) if kind == "sliding_attention" else None,
            cap,
            chunk=config.attention_chunk_size if kind == "chunked_attention" else None,
        )
        for of, kind in zip(heads, kinds, strict=True)
    ]
    units = [size for size in of_layers(model.config, "intermediate_size") if size]
    activation = "gelu_tanh" if "gelu" in str(getattr(config, "hidden_act", "")) else "silu"
    return Sizes(
        device=model.device,
        dtype=model.dtype,
        hidden=config.hidden_size,
        units=units[0] if units else config.hidden_size,
        vocabulary=config.vocab_size,
        attention=tuple(sorted(set(zip(heads, options, strict=True)), key=str)),
        activation=activation,
        has_teacher=has_teacher,
        states=tuple(sorted(set(state_shapes(model)))),
        has_sinks=any(name.endswith(".sinks") for name, _ in model.named_parameters()),
    )


Found = list[torch.Tensor]


def _rows_in_pages(sizes: Sizes, heads: Heads) -> tuple[Any, LayerCache]:
    """Feed rows over the border of a page and of a split, and one that begins; keys are random."""
    start, count = np.array([SPLIT - 2, PAGE - 5, 0]), np.array([5, 9, 1])
    pages = Pages.for_rows(len(start), SPLIT + PAGE, PAGE)
    cache = KVCache(len(start), pages.slot_length, 1, pages)
    packing = pack_rows(cache, start, count, sizes.device)
    like = [sizes.randn(1, heads.num_keys, size) for size in (heads.key_size, heads.value_size)]
    layer = cache.layer(0, *like)
    for part in (layer.keys, layer.values):
        part.copy_(sizes.randn(*part.shape))
    return packing, layer


def attention(own: Any, sizes: Sizes) -> Found:
    """Attend with the splits of a row added up, and with one split."""
    found = []
    for heads, options in sizes.attention:
        if sizes.has_sinks:
            options = options._replace(sinks=sizes.randn(heads.num_queries))
        packing, layer = _rows_in_pages(sizes, heads)
        query = sizes.randn(len(packing.place), heads.num_queries, heads.key_size)
        found.append(own.attend(query, packing, layer, options))
        view = packing.view
        vars(packing)["view"] = view._replace(split=-(-view.max_keys // SPLIT) * SPLIT)
        found.append(own.attend(query, packing, layer, options))
    return found


def norms(own: Any, sizes: Sizes) -> Found:
    """Normalise, and add before that."""
    norm, residual = _norm(sizes, sizes.hidden), sizes.randn(TOKENS, sizes.hidden)
    alone = own.add_norm(None, residual, norm)
    return [alone, own.add_norm(sizes.randn(TOKENS, sizes.hidden), residual, norm), residual]


def _norm(sizes: Sizes, width: int) -> Norm:
    return Norm(1 + sizes.randn(width) / 4, EPS, torch.full((), EPS, device=sizes.device))


def rotation(own: Any, sizes: Sizes) -> Found:
    """Rotate, with norms of heads and without, and store keys and values."""
    found: Found = []
    for heads in sorted({heads for heads, _ in sizes.attention}):
        if heads.key_size != heads.value_size:  # of modules that rotate by themselves
            continue
        for has_norms in (False, True):
            packing, layer = _rows_in_pages(sizes, heads)
            size = heads.key_size
            qkv = sizes.randn(len(packing.place), heads.num_queries + 2 * heads.num_keys, size)
            angle = torch.outer(torch.arange(SPLIT + PAGE), 0.9 ** torch.arange(size // 2))
            tables = tuple(t.to(sizes.device, sizes.dtype) for t in (angle.cos(), angle.sin()))
            of_heads = (_norm(sizes, size), _norm(sizes, size)) if has_norms else None
            turned = own.rotation(tables, packing)
            query = own.rope_store(qkv, packing, layer, turned, of_heads)
            found += [query.clone(), layer.keys, layer.values]
    return found


def gated_units(own: Any, sizes: Sizes) -> Found:
    """Compute the gated units of an MLP."""
    return [own.gated(sizes.randn(TOKENS, 2 * sizes.units), sizes.activation)]


def sampling(own: Any, sizes: Sizes) -> Found:
    """Draw tokens at two temperatures, and what several ranks reduce."""
    found: Found = []
    logits = 3 * sizes.randn(TOKENS, sizes.vocabulary)
    number = np.arange(TOKENS)
    words = torch.from_numpy(stream_counters(number, number, number, number).view(np.int32))
    noise = Noise(words.to(sizes.device), SEED)
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature)
        if own is torch_ops:
            reduce = lambda *of: own.best_and_sum(*of, seed=SEED)  # noqa: E731
            token, logprob = sample(logits, noise.words, noise.words[:, 0], params, reduce)
        else:
            token, logprob = own.draw(logits, noise, params)
        # Without noise several logits may be the largest.
        found += [logprob, logits.gather(1, token[:, None]) if temperature == 0.0 else token]
    return [*found, *own.best_and_sum(logits, noise.words, 5, False, SEED)]


def device_rows(own: Any, sizes: Sizes) -> Found:
    """Plan, feed, sample and accept for a row in flight with a draft, and for a prompt.

    torch has no such operations: the other side is what the rule gives, by hand."""
    pages = Pages.for_rows(2, 24, 8)
    cache = KVCache(2, pages.slot_length, 1, pages)
    pages.grow(np.array([12, 10]))
    places = cache.places(np.array([0, 0, 0, 1, 1, 1, 1]), np.array([5, 6, 7, 0, 1, 2, 3]))
    if own is torch_ops:
        wanted = [[15, 30, 31, 20, 21, 22, 23], places.tolist(), [5, 6, 7, 0, 1, 2, 3]]
        wanted += [[0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 6], [3, 4, 5, 0]]
        wanted += [[8, 5], [0, 1], [10, 11, 12, 13, 14, 15, 30, 9], [20, 21, 22, 23, 7]]
        return [torch.tensor(of) for of in wanted]
    from bubblespec.engine.ops import triton_rows

    rows = DeviceRows(cache, 24, 16, sizes.device)
    # Row 0 is known to have 5 tokens and has gained another one, which its proposal begins with.
    text = np.array([10, 11, 12, 13, 14, 15, 20, 21, 22, 23])
    slots, length, prompt, total = np.array([[0, 1], [6, 4], [3, 4], [12, 10]])
    rows.write(RowUpdates(slots, length, prompt, total, text), np.array([[5, 0, 0], [6, 0, 0]]))
    start, count, known, num_proposed = np.array([[4, 0], [3, 4], [5, 4], [3, 0]])
    proposals = np.array([15, 30, 31])
    rows.send(Plan(start, count, known, slots, num_proposed, proposals, Load(2, 7)), 4)
    ids, place, position, first, slot = torch.zeros(5, 9, dtype=torch.int32, device=sizes.device)
    table = cache.block_table(sizes.device)
    view = AttentionMetadata(place, position, first, slot[:-1], table, 4, pages.slot_length, SPLIT)
    rows.fill(ids, view)
    state = rows.state
    triton_rows.sampled(state, 4)
    drawn = torch.tensor([30, 9, 8, 7], device=sizes.device)  # the last one is a stop token
    triton_rows.accept(state, drawn, torch.tensor([7], dtype=torch.int32, device=sizes.device))
    of_tokens = np.arange(2).repeat([3, 4])  # a sequence each
    found = [ids[:7], view.place[:7], view.position[:7], view.slot[of_tokens]]
    found += [state.behind[:4], state.generated[:4], state.state[0, :2], state.state[3, :2]]
    return [of.cpu().long() for of in (*found, state.tokens[0, :8], state.tokens[1, :5])]


def layers_with_states(own: Any, sizes: Sizes) -> Found:
    """Feed a row and its wrong token again, and one that begins; then normalise, with a gate."""
    found: Found = []
    for shape in sizes.states:
        pages = Pages.for_rows(2, 24, 8)
        states = StateCache(2, [0], WINDOWS["cuda"], own is not torch_ops)
        cache = KVCache(2, pages.slot_length, 1, pages, states=states)
        weight = sizes.randn(shape.channels, shape.taps)
        for start, count in (([0, 0], [4, 1]), ([3, 1], [4, 3])):
            packing = pack_rows(cache, np.array(start), np.array(count), sizes.device)
            windows, tokens = packing.windows, sum(count)
            x = sizes.randn(tokens, shape.channels)
            found.append(windows.packed(convolve(packing, 0, x, weight, None, has_silu=True)))
            if not shape.heads:
                continue
            qk = sizes.randn(tokens, 2, shape.key_heads, shape.key)
            v, gate = sizes.randn(2, tokens, shape.heads, shape.value)
            given = *sizes.randn(2, tokens, shape.heads), *sizes.randn(2, shape.heads)
            rates = own.rates(*given, 2.0)
            decay, beta = windows.padded(rates).unbind(1)
            how = {"scale": shape.key**-0.5, "is_unit": True} if shape.has_beta else {}
            fed = windows.padded(qk), windows.padded(v), decay
            out = advance(packing, 0, *fed, beta if shape.has_beta else None, **how)
            out = windows.packed(out).to(sizes.dtype)
            found += [rates, out, own.gated_norm(out, gate, _norm(sizes, shape.value))]
    return found


def layers_of_training(own: Any, sizes: Sizes) -> Found:
    """Compute norms, rotations and gated units with their gradients."""
    hidden, width = sizes.hidden, sizes.attention[0][0].key_size
    x, residual = sizes.randn(40, hidden), sizes.randn(40, hidden)
    norm = _norm(sizes, hidden)
    gate_up, heads = sizes.randn(40, 2 * sizes.units), sizes.randn(40, 3, width)
    given = [of.requires_grad_() for of in (x, residual, norm.weight, gate_up, heads)]
    position = torch.arange(40, device=sizes.device)
    angle = torch.outer(torch.arange(40), 0.9 ** torch.arange(width // 2))
    cos, sin = (t.to(sizes.device, sizes.dtype) for t in (angle.cos(), angle.sin()))
    weights = [sizes.randn(40, size) for size in (hidden, hidden, sizes.units, 3 * width)]
    with torch.enable_grad():
        if own is torch_ops:
            total = residual + x
            out = rms_norm(total.float(), (hidden,), None, EPS).to(x.dtype) * norm.weight
            gate, up = gate_up.chunk(2, -1)
            product = torch_ops.ACTIVATIONS[sizes.activation](gate) * up
            low, high = heads[:, :2].chunk(2, -1)
            c, s = cos[:, None], sin[:, None]
            parts = torch.cat((low * c - high * s, high * c + low * s), -1), heads[:, 2:]
        else:
            from bubblespec.engine.ops.triton_training import AddNorm, Gated, Rotated

            total, out = AddNorm.apply(x, residual, norm.weight, norm)
            product = Gated.apply(gate_up, sizes.activation)
            parts = Rotated.apply(heads.clone(), (1, 1, 1), position, (cos, sin))
        turned = torch.cat(parts, 1).flatten(1)
        outputs = [total, out, product, turned]
        grads = torch.autograd.grad(outputs, given, weights)
    return [of.detach() for of in (*outputs, *grads)]


def head_of_training(own: Any, sizes: Sizes) -> Found:
    """Compute log-probabilities, with a teacher divergences, and their gradients."""
    logits = sizes.randn(TOKENS, sizes.vocabulary).requires_grad_()
    teacher = sizes.randn(TOKENS, sizes.vocabulary)
    target = torch.arange(TOKENS, device=sizes.device) % sizes.vocabulary
    found: Found = []
    for beta in (None, *((0.0, 0.5, 1.0) if sizes.has_teacher else ())):
        given = None if beta is None else teacher
        with torch.enable_grad():
            if own is torch_ops:
                values = _head_values(logits, target, given, beta)
            else:
                from bubblespec.engine.ops.triton_training import HeadValues

                copied = logits.clone()  # whose memory the gradient takes
                how = sizes.vocabulary, 1 / 0.7, beta or 0.0
                values = HeadValues.apply(copied, target, given, *how)
            (grad,) = torch.autograd.grad(values.sum(), logits)
        found += [values.detach(), grad]
    return found


def _head_values(logits, target, teacher, beta) -> torch.Tensor:
    """Return log-probabilities and the divergences of `HeadValues`, float32 [1 or 2, N]."""
    log_q = (logits.float() / 0.7).log_softmax(-1)
    values = [log_q.gather(-1, target[:, None])[:, 0]]
    if teacher is not None:
        log_p = (teacher.float() / 0.7).log_softmax(-1)
        kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
        if 0 < beta < 1:
            log_m = torch.logaddexp(log_p + np.log(beta), log_q + np.log(1 - beta))
            values.append(beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m))
        else:
            values.append(kl(log_q, log_p) if beta else kl(log_p, log_q))
    return torch.stack(values)


def moved_gradients(own: Any, sizes: Sizes) -> Found:
    """Add gradients in float32, and round weights."""
    total, part = sizes.randn(999).float(), sizes.randn(999)
    rounded = torch.empty_like(part)
    if own is torch_ops:
        total.add_(part)
        rounded.copy_(total)
    else:
        from bubblespec.engine.ops import triton_training

        triton_training.add_to(total, part)
        triton_training.round_into(rounded, total)
    return [total, rounded]


TRIALS: dict[str, Callable[[Any, Sizes], Found]] = {
    ops.ATTEND: attention,
    ops.ADD_NORM: norms,
    ops.STORE: rotation,
    ops.GATED: gated_units,
    ops.SAMPLE: sampling,
    ops.ROWS: device_rows,
    ops.STATES: layers_with_states,
    ops.LAYERS: layers_of_training,
    ops.HEAD: head_of_training,
    ops.MOVE: moved_gradients,
}


@torch.no_grad()
def problem_of(operation: str, sizes: Sizes) -> str | None:
    """Return why kernels cannot compute an operation on this device; None if they do.

    Raises ValueError where the device computes nothing any more."""
    trial, state = TRIALS[operation], torch.get_rng_state()
    try:
        from bubblespec.engine.ops import triton_ops

        torch.manual_seed(0)
        found = trial(triton_ops, sizes)
        if sizes.device.type == "cuda":
            torch.cuda.synchronize(sizes.device)
        torch.manual_seed(0)
        wanted = trial(torch_ops, sizes)
        return _difference(found, wanted)
    except Exception as error:  # of a compiler, a driver, or a kernel
        if is_lost(error):
            line = f"{KEY}: the kernel of {operation} fails: {one_line(error)}; set torch"
            raise ValueError(line) from error
        return cause_of(error)
    finally:
        torch.set_rng_state(state)


def _difference(found: Found, wanted: Found) -> str | None:
    """Return by how much results differ beyond rounding; None if they do not."""
    for got, right in zip(found, wanted, strict=True):
        if not right.is_floating_point():
            if not torch.equal(got, right):
                share = (got != right).double().mean().item()
                return f"{share:.0%} of its results differ from torch's"
            continue
        bound = MAX_UNITS[right.itemsize] * torch.finfo(right.dtype).eps
        got, right = got.double(), right.double()
        size = (got - right).abs()
        # By rows: what adds up many keys is smaller than what adds up few.
        is_far = ~(size <= bound * right.abs().amax(-1, keepdim=True))  # or no number
        if is_far.any():
            share, worst = is_far.double().mean().item(), size[is_far].max().item()
            return f"{share:.0%} of its results differ from torch's, by up to {worst:.1e}"
    return None


def cause_of(error: BaseException) -> str:
    """Return one line on why a kernel fails, with what to install where that is known."""
    text = one_line(error)
    if "C compiler" in text:
        return "no C compiler: apt install gcc python3-dev"
    if "Python.h" in text or ("gcc" in text and "non-zero exit status" in text):
        return "no Python.h that the C compiler finds: apt install python3-dev"
    return text


def choose_operations(
    kernels: str,
    model: PreTrainedModel,
    has_teacher: bool,
    gather_text: Callable[[str], list[str]],
) -> list[str]:
    """Choose what computes the operations of a run, together with all ranks; return lines.

    kernels: `model.kernels`. Raises ValueError if it is `triton` and a kernel cannot be used."""
    ops.replaced.clear()
    if kernels == "torch":
        ops.replaced |= dict.fromkeys(ops.OPERATIONS, f"{KEY}=torch")
        return []
    if not ops.has_kernels(model.device, model.dtype):
        if kernels == "triton":
            raise ValueError(
                f"{KEY}: triton needs a GPU, bfloat16 and the package triton; set auto"
            )
        return []
    sizes = sizes_of(model, has_teacher)
    own, lost = {}, ""
    try:
        for operation in ops.OPERATIONS:
            own[operation] = problem_of(operation, sizes) or ""
    except ValueError as error:  # the others have to hear of it
        lost = str(error)
    of_ranks = [json.loads(text) for text in gather_text(json.dumps([lost, own]))]
    if lost := next((of for of, _ in of_ranks if of), ""):
        raise ValueError(lost)
    for operation in ops.OPERATIONS:
        problem = next((of[operation] for _, of in of_ranks if of[operation]), None)
        if problem is not None:
            ops.replaced[operation] = problem
    if kernels == "triton" and ops.replaced:
        operation, problem = next(iter(ops.replaced.items()))
        raise ValueError(f"{KEY}: triton, but the kernel of {operation} fails: {problem}; set auto")
    return replaced_lines()


def replace(operations: tuple[str, ...], why: str) -> list[str]:
    """Let torch compute operations from now on; return lines."""
    ops.replaced |= dict.fromkeys(operations, why)
    return replaced_lines(operations)


def replaced_lines(operations: tuple[str, ...] = ops.OPERATIONS) -> list[str]:
    """Return lines on what torch computes in place of kernels, one for each reason."""
    replaced = {name: ops.replaced[name] for name in operations if name in ops.replaced}
    if ops.ATTEND in replaced:  # without that one all others are torch's too
        replaced = {"all operations": replaced[ops.ATTEND]}
    for name in (ops.ADD_NORM, ops.GATED):  # training launches the same kernels
        if name in replaced:
            ops.replaced.setdefault(ops.LAYERS, replaced[name])
    names: dict[str, list[str]] = {}
    for name, why in replaced.items():
        names.setdefault(why, []).append(name)
    form = "torch computes {} in place of kernels"
    return [
        f"warning: {fallback(form.format(', '.join(of)), why, f'{KEY}=torch')}"
        for why, of in names.items()
    ]
