"""Checks of a model at the start of a run.

`prepare_model` refuses, with the reason, every model that the packed forward cannot compute
exactly: first by its configuration, then by its masks, and by comparing a packed forward with the
model's own on random tokens.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from bubblespec.engine import attention
from bubblespec.engine.comparison import (
    CHECKED,
    cache_for,
    difference,
    find_head,
    over_cache,
    own_forward,
    random_tokens,
)
from bubblespec.engine.decoder import IS_WRITTEN_OUT, Decoder, is_like_llama, stacked
from bubblespec.engine.model import (
    OWN_HIDDEN,
    STATE_LAYERS,
    body_of,
    forward_hidden,
    layer_kinds,
    of_layers,
    output_head,
    pack_sequences,
    state_layers,
)
from bubblespec.engine.norms import replace_norms
from bubblespec.engine.ops import LAYERS, TYPES, has_kernels
from bubblespec.engine.ops.softmax import AttentionOptions
from bubblespec.engine.recurrent import serve_states
from bubblespec.errors import gpu_problem, log, one_line

RECORDER = "bubblespec_recorder"
SLOW_WARNING = "warn_if_padding_and_no_attention_mask"
TRAINED = [160, 5, 3]  # tokens of sequences; of the longest, so many that a kernel splits its keys
# Tokens: beyond the usual windows, up to 8,192, and no more than seconds on a GPU.
MAX_CHECK_LENGTH = 8300
# Kinds in a configuration's `layer_types`; those with a state.
RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
KNOWN = {"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"} | RECURRENT


def prepare_model(
    model: PreTrainedModel, max_length: int, num_tokens: int | None = None
) -> frozenset[tuple[int, int]]:
    """Switch the model to the packed attention and check that it gives the model's own logits.

    Sets evaluation mode for good, and finds the `output_head`. max_length: of prompt plus response,
    in tokens; num_tokens: size of the policy's vocabulary, by default the model's. Returns each
    pair of sizes of key and value heads. Raises ValueError."""
    vars(model)[STATE_LAYERS] = serve_states(model)
    _check_configuration(model, max_length)
    # For good: the probability ratio compares two forwards of the same weights, so nothing in them
    # may be random.
    model.eval()
    if model.dtype == torch.float64:
        # transformers' default, a grouped product, has no float64.
        model.set_experts_implementation("eager")
    for module in model.modules():
        if hasattr(module, SLOW_WARNING):
            # It reads token ids back from the device in every forward.
            setattr(module, SLOW_WARNING, lambda *args, **kwargs: None)
    is_double, in_float32 = model.dtype == torch.float64, has_float32_parts(model)
    if is_double or (model.device.type == "cuda" and model.dtype in TYPES):
        # On a GPU the sums of float32 norms depend on the shape of the batch.
        in_float32 |= not replace_norms(model) and model.device.type == "cuda"
    try:
        with torch.no_grad():
            tokens = random_tokens(model, CHECKED)
            head: Any = find_head(model, tokens, num_tokens)
            model.to_logits = head
            calls = record_calls(model, tokens)
            # Until a comparison shows something else. A cap may be hidden by rounding.
            is_plain = all(of.options.has_only_a_window for of in calls)
            vars(model)[IS_WRITTEN_OUT] = is_plain
            head_sizes = _compare(model, CHECKED, in_float32)
            _check_masks(model, calls, max_length)
            longer = _longer_check(model, max_length)
            if longer:
                _compare(model, longer, in_float32)
    except Exception as error:  # the model's own code runs here
        if gpu_problem(error) is not None:  # which is not the model's
            raise
        what = "" if isinstance(error, ValueError) else "its forward over packed tokens fails: "
        raise ValueError(f"{type(model).__name__}: {what}{' '.join(str(error).split())}") from error
    model.set_attn_implementation(attention.NAME)
    return head_sizes


def has_float32_parts(model: PreTrainedModel) -> bool:
    """Whether a float64 model computes routers, states, or without SDPA its softmax, in float32."""
    has_experts = any("experts" in name for name, _ in model.named_modules())
    return has_experts or bool(state_layers(model)) or not model._supports_sdpa


@torch.inference_mode()
def kernel_difference(model: PreTrainedModel, kernel: str) -> str | None:
    """Return how a kernel's training forward differs from SDPA's beyond rounding."""
    packing = pack_sequences(TRAINED, model.device)
    kernels = kernel, "sdpa"
    got, wanted = (partial(forward_hidden, model, packing=packing, kernel=k) for k in kernels)
    differs = difference(model, sum(TRAINED), got, wanted)
    return differs and f"hidden states differ from sdpa's by {differs}"


def _check_configuration(model: PreTrainedModel, max_length: int) -> None:
    config = model.config
    kinds = set(layer_kinds(config))
    other, recurrent = (
        f" ({', '.join(sorted(some))})" if some else ""
        for some in (kinds - KNOWN, kinds & RECURRENT)
    )
    is_recurrent = getattr(model, "_is_stateful", False) or recurrent
    problems = {
        "an encoder-decoder model; the engine serves decoder-only models": getattr(
            config, "is_encoder_decoder", False
        ),
        f"attention of another kind{other}; the engine computes full, sliding-window and chunked "
        "attention only": other,
        f"a recurrent state{recurrent} of another kind; the engine computes gated delta rules, "
        "scans of Mamba-2 and convolutions only": is_recurrent and not state_layers(model),
        "does not use transformers' attention interface, so the engine cannot serve it "
        # most models with a state do, and say nothing of it
        "unpatched": not getattr(model, "_supports_attention_backend", False)
        and not state_layers(model),
        "has no output head; give a causal language model": model.get_output_embeddings() is None,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"{type(model).__name__}: {problem}")
    _end_tuning(model, max_length)
    limit = min(of_layers(config, "max_position_embeddings", math.inf))
    if max_length > limit:
        raise ValueError(
            f"rollout.max_prompt_length + rollout.max_completion_length = {max_length} exceeds "
            f"the model's {limit} positions"
        )
    check_rotary(model, max_length)


def check_rotary(model: PreTrainedModel, max_length: int) -> None:
    """Raise ValueError where a sequence's states depend on the others that it is fed with."""
    limit = min(of_layers(model.config, "max_position_embeddings", math.inf))
    for parameters in _rotary(model):
        original: Any = parameters.get("original_max_position_embeddings") or limit
        if parameters.get("rope_type") in ("dynamic", "longrope") and max_length > original:
            raise ValueError(
                f"{type(model).__name__}: its {parameters['rope_type']} rotary scaling changes "
                f"with the longest row of a batch beyond {original} tokens, so a row's tokens "
                f"would depend on its neighbours; keep prompt and response within {original}"
            )


def _end_tuning(model: PreTrainedModel, max_length: int) -> None:
    """Switch off factors of queries that are 1 up to max_length; raise ValueError for others.

    Llama 4 takes them from a token's place in the input, which is not its position in a packed
    one."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False):
            first: Any = getattr(module, "floor_scale", 0)
            if max_length >= first:
                raise ValueError(
                    f"{type(model).__name__}: scales attention by a token's place in the input "
                    f"(attn_temperature_tuning), which is not its position in a packed one; keep "
                    f"prompt and response together below {first} tokens"
                )
            module.attn_temperature_tuning = False  # type: ignore[assignment]


def _rotary(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return the parameters of rotary embeddings, of all kinds of layers."""
    found = of_layers(model.config, "rope_parameters", {})
    return found + [kind for rope in found for kind in rope.values() if isinstance(kind, dict)]


def _windows(model: PreTrainedModel) -> list[int | None]:
    """Return the sliding window of each layer, read as transformers' own cache reads it."""
    layers: list[Any] = DynamicCache(config=model.config).layers
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _longer_check(model: PreTrainedModel, max_length: int) -> int | None:
    """Return the length of a second check, beyond windows and limits of rotary scaling, or None."""
    lengths = [window for window in _windows(model) if window is not None]
    for rope in _rotary(model):
        if rope.get("llama_4_scaling_beta"):
            lengths.append(rope["original_max_position_embeddings"])
    limit = min(max_length, MAX_CHECK_LENGTH - CHECKED + 1)
    reached = [n for n in lengths if n < limit]
    length = min(max(reached, default=0) + CHECKED, max_length)
    return length if length > CHECKED else None


class Call(NamedTuple):
    """An attention call of a model's own forward."""

    layer: int
    options: AttentionOptions
    shows: Callable | None
    """transformers' mask: a function of row, head, query and key position. None if the mask is
    causal, or made by the model itself."""


def _check_masks(model: PreTrainedModel, calls: list[Call], max_length: int) -> None:
    """Check that masks follow from windows and chunks up to max_length, as attention assumes."""
    device, windows = model.device, _windows(model)
    position = torch.arange(max_length, device=device)
    some = torch.linspace(0, max_length - 1, 16, device=device).long()[:, None]
    row = head = torch.zeros((), dtype=torch.int64, device=device)
    for layer, options, shows in calls:
        window = options.window
        handed = f"a sliding window of {window} tokens" if window else "no sliding window"
        wanted = windows[layer] if layer < len(windows) else None
        if wanted not in (None, window, options.chunk) and wanted < max_length:
            raise ValueError(
                f"layer {layer} has a sliding window of {wanted} tokens, but passes {handed} to "
                f"its attention function, so the engine cannot apply it; keep prompt and response "
                f"within {wanted} tokens together"
            )
        if shows is None:
            continue
        for query, key in ((some, position), (position[:, None], position[:1])):
            seen = (key <= query) & (key >= options.first_key(query))
            try:
                shown = shows(row, head, query, key).expand_as(seen)
            except IndexError:  # it looks these positions up in the input, which was shorter
                raise ValueError(
                    f"layer {layer} has an attention mask that depends on the input, not on "
                    f"positions alone"
                ) from None
            if not (shown == seen).all():
                raise ValueError(
                    f"layer {layer} passes {handed} to its attention function, and the engine "
                    f"derives the mask from that and its chunks alone; over {max_length} tokens "
                    f"the model's own mask differs"
                )


def use_packed_attention(model: PreTrainedModel, max_length: int) -> None:
    """Switch any model to the packed attention, which its masks must allow up to max_length.

    Unlike `prepare_model` this compares nothing. Raises ValueError, and what the model raises."""
    _end_tuning(model, max_length)
    _check_masks(model, record_calls(model, random_tokens(model, CHECKED)), max_length)
    model.set_attn_implementation(attention.NAME)


def longest_window(model: PreTrainedModel, max_length: int) -> int:
    """Return the tokens of a sequence that reaches beyond windows, as far as they are checked."""
    return _longer_check(model, max_length) or min(CHECKED, max_length)


def record_calls(model: PreTrainedModel, tokens: torch.Tensor) -> list[Call]:
    """Return the attention calls of the model's own forward. It keeps the recording attention."""
    made, calls = [], list[Call]()

    def make_mask(*args, mask_function, **kwargs) -> Any:
        kwargs |= {"allow_is_causal_skip": False, "mask_function": mask_function}
        made.append((sdpa_mask(*args, **kwargs), mask_function))
        return made[-1][0]

    def attend(module, query, key, value, attention_mask, **given) -> tuple:
        shows = next((function for mask, function in made if mask is attention_mask), None)
        calls.append(Call(module.layer_idx, attention.options_of(module, **given), shows))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None  # not used

    AttentionInterface.register(RECORDER, attend)
    AttentionMaskInterface.register(RECORDER, make_mask)
    model.set_attn_implementation(RECORDER)
    body_of(model)(input_ids=tokens[None], use_cache=False)
    return calls


def _reference_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's own logits at the last positions, [CHECKED, num_tokens]."""
    if len(tokens) == CHECKED:
        logits = own_forward(model, model, tokens).logits[0, :, : output_head(model).num_tokens]
    else:  # without the logits of all positions, which may be many gigabytes
        hidden = own_forward(model, body_of(model), tokens).last_hidden_state[0]
        logits = output_head(model)(hidden[-CHECKED:])
    if not logits.isfinite().all():
        raise ValueError(
            "its logits are not finite: the weights are damaged, or overflow their dtype"
        )
    return logits


def _use_own_layers(model: PreTrainedModel, problem: Callable[[], str | None]) -> str | None:
    """Let trained.py compute whole sequences, unless there is a problem; return that."""
    try:
        from bubblespec.engine import trained

        vars(model)[OWN_HIDDEN] = trained.hidden
        differs = problem()
    except Exception as error:  # of the compiler, or a driver
        differs = one_line(error)
    if differs is not None:
        vars(model).pop(OWN_HIDDEN, None)
    return differs


def _compare(model: PreTrainedModel, length: int, in_float32: bool) -> frozenset[tuple[int, int]]:
    """Compare the model's own logits with those of packed training and of generation.

    Returns sizes of key/value heads."""
    reference = _reference_logits(model, random_tokens(model, length))
    head, packing = output_head(model), pack_sequences([length] * 2, model.device)

    def packed(ids: torch.Tensor) -> torch.Tensor:
        states = forward_hidden(model, ids.repeat(2), packing)
        width, size = getattr(head.linear, "in_features", None), states.shape[-1]
        if width not in (None, size):
            raise ValueError(
                f"its output head takes vectors of {width} and its hidden states have {size}: "
                "the model computes something in between that the engine would skip"
            )
        return states.view(2, length, size)

    def problem(what: str, compute: Callable) -> str | None:
        last_logits = lambda ids: head(compute(ids)[:, -CHECKED:])  # noqa: E731
        differs = difference(model, length, last_logits, lambda ids: reference, in_float32)
        return differs and (
            f"logits through {what} differ from the model's own by {differs}; it computes "
            "something (across tokens, or on the logits) that the engine would skip"
        )

    vars(model).pop(OWN_HIDDEN, None)
    found, cache = problem("packed sequences", packed), cache_for(model, length)
    if vars(model)[IS_WRITTEN_OUT]:
        try:
            decoded = partial(over_cache, Decoder(model, stacked(model)).hidden, cache)
            differs = problem("own layers", decoded)
        except Exception as error:  # it has other modules
            differs = one_line(error)
        vars(model)[IS_WRITTEN_OUT] = differs is None
        if differs is not None and has_kernels(model.device, model.dtype):  # or a kernel fails
            log(f"warning: generation computes transformers' modules: {differs}")
    if is_like_llama(model) and has_kernels(model.device, model.dtype, LAYERS):
        differs = _use_own_layers(model, partial(problem, "layers of training", packed))
        if differs is not None:
            log(f"warning: training computes transformers' modules: {differs}")
    if not vars(model)[IS_WRITTEN_OUT]:
        cache = cache_for(model, length)
        modules = partial(over_cache, partial(forward_hidden, model), cache)
        found = found or problem("the K/V cache", modules)
    if found is not None:
        raise ValueError(found)
    return frozenset((own.keys.shape[-1], own.values.shape[-1]) for own in cache.layers.values())
