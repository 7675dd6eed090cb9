"""The drafter: one decoder layer of the policy's own class that predicts the policy's next tokens;
how it drafts chains of them for the rows of an engine, and its file on disk.

At each position it reads the policy's last hidden state there and the embedding of the token after
it, and estimates the policy's next hidden state; the policy's own output head, restricted to some
token ids, turns that into logits. Where a hidden state is not known yet it continues from its own
estimate (EAGLE, arXiv 2401.15077; TLT trains such a layer in idle time, arXiv 2511.16665). Tokens
are drawn with the noise that the row itself will use.

`DrafterRunner` keeps the hidden states of each slot's latest positions, which the policy's forwards
compute anyway. Before a chain the drafter catches up: all positions that the policy has verified
since the last chain go through it in one forward, over its own small cache of keys and values. From
there it continues token by token; what this leaves in the cache is overwritten by the next
catching up. What is kept follows a row that moves to another slot, and rows share what is kept of a
common prompt; a row whose states are no longer kept starts again from its last CONTEXT positions.

Shape legend: N positions, H hidden size, V token ids that the drafter knows, R active rows, M rows
that get a chain, n tokens of a chain.
"""

import copy
import os
from dataclasses import replace

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bubblespec.config import Config
from bubblespec.engine import attention
from bubblespec.engine.batch import Batch
from bubblespec.engine.engine import Engine
from bubblespec.engine.graphs import ForwardGraphs
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.noise import add_gumbel
from bubblespec.engine.output_head import output_head
from bubblespec.engine.packing import PAGE, pack_rows, to_device
from bubblespec.engine.ragged import ragged
from bubblespec.engine.sampling import SamplingParams, scale_and_restrict, widened
from bubblespec.errors import InputError, log, one_line

PLACEHOLDER_VOCABULARY = 8  # of the layer's own embedding, which is not used
NUM_KEPT = 128  # latest positions of a slot whose hidden states are kept
CONTEXT = 64  # positions a row starts with; below NUM_KEPT by more than a verification feeds
MAX_CHAIN_LENGTH = 5  # tokens
# By which logits are multiplied before noise is added. The drafter's probabilities are means over
# what the policy may say at a place: unlikely tokens mostly have less, and would win too often.
SHARPNESS = 1.2
MAX_GRAPH_TOKENS = 512  # of a CUDA graph: a few for each row
MAX_ROWS = 128  # with more active rows no hidden states are kept and nothing is drafted
DRAFTER_FILE = "drafter.safetensors"
DRAFTER_FOLDER = "drafter"  # of a checkpoint: vLLM's loader takes such files next to the weights
SAMPLE = 1024  # entries of the policy's output head that identify it in a file
# RL moves weights by far less; those of another model have nothing in common with them.
MAX_DIFFERENCE = 0.3


class Drafter(torch.nn.Module):
    """One decoder layer, its norms, and the projection that fuses its two inputs. Embedding and
    output head are the policy's, as they are at each call."""

    def __init__(self, policy: PreTrainedModel, ids: np.ndarray, seed: int = 0):
        """ids: int [V], the tokens that it can draft, ascending. The layer starts as a copy of the
        policy's last one. Raises ValueError if the policy's class cannot have a single layer."""
        super().__init__()
        self.__dict__["policy"] = policy  # not registered: its parameters are not ours
        self.ids = np.asarray(ids, np.int64)
        self.device_ids = to_device(self.ids, policy.device)
        ends = policy.get_input_embeddings(), policy.get_output_embeddings()
        sizes = [module.weight.shape[1] for module in ends]
        options = {"device": policy.device, "dtype": policy.dtype}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = _one_layer(policy).to(**options)
            self.fuse = torch.nn.Linear(sum(sizes), sizes[1], bias=False, **options)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(size, **options) for size in sizes)
        self._head: list[torch.Tensor | None] = []
        self._head_version = -1

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, packing, kernel: str = "sdpa"
    ) -> torch.Tensor:
        """Estimates of the policy's next hidden states, [N, H]. hidden: [N, H], the policy's at
        these positions; tokens: int64 [N], the ones after them; packing: as of a policy's
        forward."""
        with torch.no_grad():
            embedded = self.policy.get_input_embeddings()(tokens)
        token_norm, hidden_norm = self.norms
        fused = self.fuse(torch.cat((token_norm(embedded), hidden_norm(hidden)), dim=-1))
        out = self.body(
            inputs_embeds=fused[None],
            position_ids=packing.position[None],
            use_cache=False,
            packing=packing,
            kernel=kernel,
        )
        return out.last_hidden_state[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The policy's logits of hidden states [N, H], for `ids` alone: [N, V]."""
        head = output_head(self.policy)
        linear = head.linear
        if self._head_version != linear.weight._version:
            # Not an inference tensor, even if first needed while drafting: training uses it too.
            with torch.inference_mode(False), torch.no_grad():
                self._head = [
                    None if t is None else t[self.device_ids] for t in (linear.weight, linear.bias)
                ]
            self._head_version = linear.weight._version
        return head.finish(functional.linear(states, *self._head))


def _one_layer(policy: PreTrainedModel) -> PreTrainedModel:
    """A decoder of the policy's class with one layer, a copy of the policy's last one with full
    attention. What lies outside the layers, as the last norm, is copied too."""
    config = policy.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or []
    full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    number = full[-1] if full else config.num_hidden_layers - 1
    try:
        config = _one_layer_config(policy.config, number)
        body = type(policy)._from_config(config, dtype=policy.dtype).base_model
        body.set_attn_implementation(attention.NAME)
    except Exception as error:  # the model's own code runs here
        reason = " ".join(str(error).split())[:200]
        message = f"{type(policy).__name__} cannot be made with one layer: {reason}"
        raise ValueError(message) from error
    source, target = (
        [name for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
        for model in (policy.base_model, body)
    )
    known, state = policy.base_model.state_dict(), {}
    for name, tensor in body.state_dict().items():
        name_there = name
        if target and name.startswith(f"{target[0]}."):
            name_there = source[number] + name.removeprefix(target[0])
        adapted = name_there.replace(".weight", ".base_layer.weight")  # with a LoRA adapter
        found = known.get(name_there, known.get(adapted))
        if found is not None and found.shape == tensor.shape:
            state[name] = found.detach().clone()
    body.load_state_dict(state, strict=False)
    return body.eval()


def _one_layer_config(config: PreTrainedConfig, number: int) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    decoder = config.get_text_config(decoder=True)
    count = decoder.num_hidden_layers
    for key, value in list(vars(decoder).items()):
        if isinstance(value, list | tuple) and len(value) == count:  # one for each layer
            setattr(decoder, key, type(value)([value[number]]))
    decoder.num_hidden_layers = 1
    decoder.vocab_size = PLACEHOLDER_VOCABULARY
    # Full attention: training (`UnrolledPacking`) knows no window.
    if getattr(decoder, "layer_types", None) == ["sliding_attention"]:
        decoder.layer_types = ["full_attention"]
    decoder.sliding_window = None
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(decoder, key, None)
    config.tie_word_embeddings = False
    return config


class DrafterRunner:
    """The drafter's part of an engine. While it is enabled it follows the slots of the engine's
    runner (see `ModelRunner.follower`)."""

    def __init__(self, drafter: Drafter, engine: Engine, params: SamplingParams):
        """params: of the rows."""
        self.drafter, self.engine, runner = drafter, engine, engine.runner
        stops = np.flatnonzero(np.isin(drafter.ids, params.stop_token_ids))
        self.params = replace(params, stop_token_ids=tuple(stops.tolist()))  # by index in its ids
        # Rows are in the first slots; in the others nothing is kept.
        self.num_slots = min(runner.num_slots, MAX_ROWS)
        length = runner.max_length + MAX_CHAIN_LENGTH
        if runner.kernel == "flash_attn":
            length = -(-length // PAGE) * PAGE
        self.cache = KVCache(self.num_slots, length, int(runner.graphs is not None))
        self.graphs: ForwardGraphs | None = None
        if runner.graphs is not None:
            options = {"state_size": drafter.fuse.out_features, "beside": runner.graphs}
            parts = (drafter, self.cache, runner.kernel, MAX_GRAPH_TOKENS)
            self.graphs = ForwardGraphs(*parts, **options)
        self._hidden: torch.Tensor | None = None  # [slots, NUM_KEPT, H], by position % NUM_KEPT
        # Per slot: hidden states have been kept without a gap for positions in [_first, _end); the
        # drafter's cache begins at position _base (-1: it is empty) and holds _num_cached.
        self._context = np.zeros((4, runner.num_slots), np.int64)
        self._first, self._end, self._base, self._num_cached = self._context
        self.forget()

    def enable(self, is_on: bool) -> None:
        """Follow the engine's rows from now on, which must be before they are in slots; or stop,
        and give the memory back."""
        runner = self.engine.runner
        if not is_on and runner.follower is not None:
            self.release()
        runner.follower = self if is_on else None

    def forget(self, slots: int | slice | np.ndarray = slice(None)) -> None:
        """Other rows are in these slots, or the weights have changed."""
        self._context[:, slots] = 0
        self._base[slots] = -1

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """The row in slot `source` continues in slot `target`."""
        self.forget(target)
        if self._hidden is not None and max(source, target) < self.num_slots:
            self._context[:, target] = self._context[:, source]
            self._hidden[target] = self._hidden[source]
            self.cache.copy(source, target, int(self._num_cached[source]))

    @torch.inference_mode()
    def share(self, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> None:
        """See `Runner`: what is still kept of the positions of slots `source` serves both."""
        self.forget(target)
        end = self._end[source]
        first = np.maximum(self._first[source], end - NUM_KEPT)
        is_kept = (np.maximum(source, target) < self.num_slots) & (first < length) & (length <= end)
        if self._hidden is None or not is_kept.any():
            return
        source, target = source[is_kept], target[is_kept]
        self._first[target], self._end[target] = first[is_kept], length[is_kept]
        source, target = to_device(np.array((source, target)), self._hidden.device)
        self._hidden[target] = self._hidden[source]

    def release(self) -> None:
        """Give all memory back."""
        self.cache.clear()
        if self.graphs is not None:
            self.graphs.clear()
        self._hidden = None
        self.forget()

    def note(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Keep the hidden states of what a forward has fed, [N or more, H]. Those of rejected draft
        tokens are overwritten when their positions are fed again."""
        if len(batch.count) > MAX_ROWS:
            self.forget()
            return
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self.num_slots, NUM_KEPT, hidden.shape[1])
        fed = np.flatnonzero(batch.count)
        start, end = batch.start[fed], batch.start[fed] + batch.count[fed]
        has_gap = start > self._end[fed]
        self._first[fed] = np.where(has_gap, start, self._first[fed])
        self._end[fed] = np.where(has_gap, end, np.maximum(self._end[fed], end))
        # Of a row that was rewound, the drafter's cache holds what was thrown away.
        valid = np.maximum(start - self._base[fed], 0)
        self._num_cached[fed] = np.minimum(self._num_cached[fed], valid)
        slot, position = batch.index
        latest = np.flatnonzero(position >= (batch.start + batch.count - NUM_KEPT)[slot])
        states = hidden[: len(slot)]
        if len(latest) < len(slot):
            states = hidden[to_device(latest, hidden.device)]
        index = to_device(np.array((slot[latest], position[latest] % NUM_KEPT)), hidden.device)
        self._hidden[index[0], index[1]] = states

    @torch.inference_mode()
    def draft(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Chains for decoding rows, int64 [M, n], which of `slots` they are for, int64 [M], and how
        many positions the drafter had to catch up with. slots: int64, ascending; length: n, at most
        MAX_CHAIN_LENGTH. The host waits for the device once."""
        engine, runner = self.engine, self.engine.runner
        count = self._to_catch_up(slots)
        slots, count = slots[count > 0], count[count > 0]
        if len(slots) == 0:
            return np.empty((0, length), np.int64), slots, 0
        row, offset = ragged(count)
        cached = self._num_cached[slots]
        position = (self._base[slots] + cached)[row] + offset
        index = to_device(np.array((slots[row], position % NUM_KEPT)), runner.device)
        tokens = to_device(engine.tokens[slots[row], position + 1], runner.device)
        states = self._forward(self._hidden[index[0], index[1]], tokens, slots, cached, count)
        state = states[to_device(np.cumsum(count) - 1, runner.device)]
        self._num_cached[slots] += count
        generated = (engine.length - engine.prompt_length)[slots]
        # A chain may be longer than its row can get; the excess is cut off later.
        position = np.minimum(generated[:, None] + np.arange(length), runner.max_length - 1)
        keys = runner.noise_keys(np.repeat(slots, length), position.ravel())
        keys = keys.view(len(slots), length, 4)
        position = to_device(position, runner.device)
        chain, one = [], np.ones(len(slots), np.int64)
        for number in range(length):
            if number:
                begin = self._num_cached[slots] + number - 1
                state = self._forward(state, chain[-1], slots, begin, one)
            chain.append(self._draw(state, keys[:, number], position[:, number]))
        return torch.stack(chain, dim=1).cpu().numpy(), slots, int(count.sum())

    @torch.inference_mode()
    def run_once(self, num_rows: int) -> None:
        """One forward of the drafter for one more token of `num_rows` empty rows, to be timed."""
        slots, zeros = np.arange(num_rows), np.zeros(num_rows, np.int64)
        weight = self.drafter.fuse.weight
        hidden, tokens = weight.new_ones(num_rows, len(weight)), to_device(zeros, weight.device)
        state = self._forward(hidden, tokens, slots, zeros, zeros + 1)
        self._draw(state, self.engine.runner.noise_keys(slots, zeros), tokens).cpu()

    def _to_catch_up(self, slots: np.ndarray) -> np.ndarray:
        """Positions that each row's cache lacks, int64; 0 where hidden states are missing. Rows
        whose cache cannot be continued start again."""
        verified = self.engine.cached[slots]
        kept_from = np.maximum(self._first[slots], self._end[slots] - NUM_KEPT)
        base, cached = self._base[slots], self._num_cached[slots]
        # Rows that go on after what was thrown away have too much in it.
        restarts = (base < 0) | (base + cached < kept_from) | (base + cached > verified)
        self._base[slots] = np.where(restarts, np.maximum(kept_from, verified - CONTEXT), base)
        self._num_cached[slots] = np.where(restarts, 0, cached)
        lacking = verified - self._base[slots] - self._num_cached[slots]
        return np.where(self._end[slots] >= verified, lacking, 0)

    def _draw(
        self, states: torch.Tensor, keys: torch.Tensor, num_generated: torch.Tensor
    ) -> torch.Tensor:
        """The tokens that rows would sample from the drafter's logits, int64 [M]. states: [M, H];
        keys: int32 [M, 4], of their noise; num_generated: int64 [M], tokens before them."""
        logits, ids = SHARPNESS * widened(self.drafter.logits(states)), self.drafter.device_ids
        _, allowed = scale_and_restrict(logits, num_generated, self.params)
        if self.params.temperature > 0.0:
            allowed = add_gumbel(allowed, keys, ids.int())
        return ids[allowed.argmax(-1)]

    def _forward(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        slots: np.ndarray,
        start: np.ndarray,
        count: np.ndarray,
    ) -> torch.Tensor:
        """The drafter's states of new positions, `count` of each slot, from `start` on in its own
        cache: [N, H]."""
        starts, counts = np.zeros((2, slots[-1] + 1), np.int64)
        starts[slots], counts[slots] = start, count
        runner = self.engine.runner
        packing = pack_rows(self.cache, starts, counts, runner.device)
        states = self.graphs.forward(tokens, packing, hidden) if self.graphs is not None else None
        if states is None:
            return self.drafter(hidden, tokens, packing, runner.kernel)
        return states[: len(tokens)]


# On disk


def save_drafter(folder: str, drafter: Drafter, num_updates: int) -> None:
    """Write weights, token ids, updates, and what identifies the policy. Raises OSError."""
    state = drafter.state_dict()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    tensors["ids"] = torch.from_numpy(drafter.ids)
    tensors["num_updates"] = torch.tensor(num_updates)
    tensors["policy"] = _sample_of(drafter.policy)
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, DRAFTER_FILE))


def read_drafter(
    config: Config, model: PreTrainedModel, checkpoint: str | None, warns: bool = False
) -> tuple[Drafter, int] | None:
    """The checkpoint's drafter, else that of drafter.path, and its number of updates; None if there
    is neither. Raises InputError for a folder without one for this policy. warns: say so where it
    was trained for another one of the same shapes."""
    folder, key = config.drafter.path, "drafter.path"
    if checkpoint and os.path.isfile(_file_in(checkpoint)):
        folder, key = checkpoint, "run.resume_from_checkpoint"
    if not folder:
        return None
    try:
        tensors = load_file(_file_in(folder))
        ids, num_updates = tensors.pop("ids").numpy(), int(tensors.pop("num_updates"))
        trained_for = tensors.pop("policy")
        if ids.ndim != 1 or not len(ids) or (np.diff(ids, prepend=-1) <= 0).any():
            raise ValueError("ids must be token ids, ascending")
        if ids[-1] >= len(model.get_output_embeddings().weight):
            raise ValueError(f"ids: the policy has no token {ids[-1]}")
        drafter = Drafter(model, ids, config.run.seed)
        drafter.load_state_dict(tensors)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        problem = f"no drafter of this policy can be read from {folder}: {one_line(error)}"
        raise InputError(f"{key}: {problem}") from error
    here = _sample_of(model)
    if warns and (here - trained_for).norm() > MAX_DIFFERENCE * trained_for.norm():
        log(
            f"warning: {key}: the drafter in {folder} was trained for another model; few of "
            "its drafts will be accepted until it has adapted (tokens are not affected)"
        )
    return drafter, num_updates


def _file_in(folder: str) -> str:
    """The drafter's file in a checkpoint, or in a folder of its own or an older checkpoint."""
    path = os.path.join(folder, DRAFTER_FOLDER, DRAFTER_FILE)
    return path if os.path.isfile(path) else os.path.join(folder, DRAFTER_FILE)


def _sample_of(policy: PreTrainedModel) -> torch.Tensor:
    """Entries of the output head, float32 [SAMPLE] or fewer."""
    weight = policy.get_output_embeddings().weight.detach().flatten()
    return weight[:: max(len(weight) // SAMPLE, 1)][:SAMPLE].float().cpu().clone()
