"""The drafter: one decoder layer of the policy's own class that predicts the policy's next tokens.

At each position the drafter reads the policy's last hidden state there and the embedding of the
token after it, and estimates the policy's next hidden state; the policy's own output head,
restricted to some token ids, turns that into logits. Where no hidden state is known yet the drafter
continues from its own estimate (EAGLE, arXiv 2401.15077; TLT trains such a layer in idle time,
arXiv 2511.16665).

Shape legend: N positions, H hidden size, V token ids that the drafter knows.
"""

import copy
import os
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bubblespec.config import Config
from bubblespec.engine import attention
from bubblespec.engine.arrays import to_device
from bubblespec.engine.model import body_of, of_layers, output_head
from bubblespec.errors import InputError, log, one_line

PLACEHOLDER_VOCABULARY = 8  # of the layer's own embedding, which is not used
DRAFTER_FILE = "drafter.safetensors"
DRAFTER_FOLDER = "drafter"  # of a checkpoint: vLLM's loader takes such files next to the weights
SAMPLE = 1024  # entries of the policy's output head that identify the policy in a file
# RL moves weights by far less; those of another model have nothing in common with them.
MAX_DIFFERENCE = 0.3


class Drafter(torch.nn.Module):
    """One decoder layer, its norms and the projection that fuses its two inputs.

    Embedding and output head are the policy's, as they are at each call."""

    policy: PreTrainedModel

    def __init__(self, policy: PreTrainedModel, ids: np.ndarray, seed: int = 0):
        """ids: int [V], the tokens that can be drafted, ascending.

        Raises ValueError if the policy's class cannot have a single layer."""
        super().__init__()
        self.__dict__["policy"] = policy  # not registered: its parameters are not ours
        self.ids = np.asarray(ids, np.int64)
        self.device_ids = to_device(self.ids, policy.device)
        ends: list[Any] = [policy.get_input_embeddings(), policy.get_output_embeddings()]
        sizes = [module.weight.shape[1] for module in ends]
        options: dict[str, Any] = {"device": policy.device, "dtype": policy.dtype}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = _one_layer(policy).to(**options)
            self.fuse = torch.nn.Linear(sum(sizes), sizes[1], bias=False, **options)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(size, **options) for size in sizes)
        self._head: list[Any] = []  # weight and bias of `ids`
        self._head_version = -1

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, packing, kernel: str = "sdpa"
    ) -> torch.Tensor:
        """Return estimates of the policy's next hidden states, [N, H].

        hidden: [N, H], the policy's; tokens: int64 [N], the ones after these positions."""
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
        """Return the policy's logits of hidden states [N, H] for `ids` alone, [N, V]."""
        head = output_head(self.policy)
        linear: Any = head.linear
        if self._head_version != linear.weight._version:
            # Not an inference tensor, even if first needed while drafting: training uses it too.
            with torch.inference_mode(False), torch.no_grad():
                self._head = [
                    None if t is None else t[self.device_ids] for t in (linear.weight, linear.bias)
                ]
            self._head_version = linear.weight._version
        return head.finish(functional.linear(states, *self._head))


def _one_layer(policy: PreTrainedModel) -> PreTrainedModel:
    """Create a decoder of the policy's class whose layer is the policy's last with full attention.

    What lies outside the layers, as the last norm, is copied too."""
    number = last_full_layer(policy.config)
    try:
        config = _one_layer_config(policy.config, number)
        body = body_of(type(policy)._from_config(config, dtype=policy.dtype))
        body.set_attn_implementation(attention.NAME)
    except Exception as error:  # the model's own code runs here
        reason = " ".join(str(error).split())[:200]
        message = f"{type(policy).__name__} cannot be made with one layer: {reason}"
        raise ValueError(message) from error
    source, target = (
        [name for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
        for model in (body_of(policy), body)
    )
    known, state = body_of(policy).state_dict(), {}
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


def last_full_layer(config: PreTrainedConfig) -> int:
    """Return the last layer with full attention, else the last, among those with keys of its own.

    Gemma 4's last layers may read those of earlier ones."""
    kinds = of_layers(config, "layer_types")
    del kinds[len(kinds) - max(of_layers(config, "num_kv_shared_layers", 0)) :]
    full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    return full[-1] if full else len(kinds) - 1


def _one_layer_config(config: PreTrainedConfig, number: int) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    decoder = config.get_text_config(decoder=True)
    count = decoder.num_hidden_layers
    vars(decoder).update(vars(decoder.per_layer_config[number]))  # the layer's own head size
    decoder.per_layer_config = None
    decoder.num_kv_shared_layers = decoder.hidden_size_per_layer_input = 0
    for key, value in list(vars(decoder).items()):
        if isinstance(value, list | tuple) and len(value) == count:  # one for each layer
            setattr(decoder, key, type(value)([value[number]]))
    decoder.num_hidden_layers = 1
    decoder.vocab_size = PLACEHOLDER_VOCABULARY
    decoder.attn_temperature_tuning = False  # by the place in a packed input
    # Full attention: training (`UnrolledPacking`) knows no window.
    if getattr(decoder, "layer_types", None) is None:
        decoder.sliding_window = None
    elif decoder.layer_types[0] in ("sliding_attention", "chunked_attention"):
        decoder.layer_types = ["full_attention"]
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(decoder, key, None)
    config.tie_word_embeddings = False
    return config


def save_drafter(folder: str, drafter: Drafter, num_updates: int) -> None:
    """Write weights, token ids, updates, and a sample of the policy. Raises OSError."""
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
    """Return the drafter of the checkpoint, else of drafter.path, and its updates, or None.

    warns: where it was trained for another policy of the same shapes. Raises InputError for a
    folder without a drafter for this policy."""
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
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise ValueError("its weights are not numbers")
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
    """Return the drafter's file in a checkpoint, or in a folder of its own."""
    path = os.path.join(folder, DRAFTER_FOLDER, DRAFTER_FILE)
    return path if os.path.isfile(path) else os.path.join(folder, DRAFTER_FILE)


def _sample_of(policy: PreTrainedModel) -> torch.Tensor:
    """Return entries of the output head, float32, at most about SAMPLE."""
    weight = policy.get_output_embeddings().weight.detach().flatten()
    return weight[:: max(len(weight) // SAMPLE, 1)][:SAMPLE].float().cpu().clone()
