"""Heads that come with models: their names in files, and the drafters that they are.

Such a head is trained with the model to predict further tokens (multi-token prediction,
DeepSeek-V3, arXiv 2412.19437, section 2.2): norms of its two inputs, a projection of both side by
side, a layer of the model, and a norm in front of the model's output head. For each further token
of a chain the head reads its own normed output, as in SGLang and transformers; for DeepSeek and GLM
vLLM passes the output on without the norm. Names of tensors follow vLLM's `qwen3_5_mtp.py`,
`deepseek_mtp.py` and `glm4_moe_mtp.py`.

A model's class in transformers has no such head, so `loading.keep_heads` keeps its tensors for
checkpoints. The drafter's tensors replace them, so a checkpoint has the head as trained.
"""

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from bubblespec.checkpoint import copied
from bubblespec.engine.model import output_head
from bubblespec.mechanisms.drafter.layer import HeadDrafter
from bubblespec.types import HEADS


class Names(NamedTuple):
    """How the names of a head's tensors begin in a file: all of them, and those of its parts."""

    all: str  # a pattern
    embedding_norm: str
    hidden_norm: str
    projection: str
    layer: str
    norm: str


FAMILIES = (
    # Qwen3-Next, Qwen3.5
    Names(r"(.*\.)?mtp\.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0", "norm"),
    # DeepSeek-V3, GLM-4.5
    Names(r"(.*\.)?layers\.\d+\.", "enorm", "hnorm", "eh_proj", "", "shared_head.norm"),
)
HEAD_FILE = "model.safetensors"
EMBEDDING, HEAD = "embed_tokens.weight", "shared_head.head.weight"  # copies of the model's own


def head_of(policy: PreTrainedModel) -> HeadDrafter | None:
    """Return the head that came with a prepared policy as a drafter, or None.

    From then on checkpoints save the drafter's tensors. Raises ValueError for an unknown form."""
    kept: dict[str, torch.Tensor] = vars(policy).get(HEADS) or {}
    names = next((names for names in FAMILIES if _prefix(names, kept)), None)
    if names is None:
        if kept:
            raise ValueError(f"{min(kept)} is of no known kind of head")
        return None
    prefix = _prefix(names, kept)
    drafter = HeadDrafter(policy, np.arange(output_head(policy).num_tokens))
    own = dict(places(drafter, names))
    given = {n.removeprefix(prefix): t for n, t in kept.items() if n.startswith(prefix)}
    ends = {EMBEDDING: policy.get_input_embeddings(), HEAD: policy.get_output_embeddings()}
    for name in {*given, *own} - ends.keys():
        there, here = given.get(name), own.get(name)
        if there is None or here is None or there.shape != here.shape:
            shapes = [None if t is None else list(t.shape) for t in (there, here)]
            raise ValueError(f"{prefix}{name} is {shapes[0]}, in a layer of the model {shapes[1]}")
        with torch.no_grad():
            here.copy_(there)
    shared = {name: module.weight.detach() for name, module in ends.items() if name in given}
    vars(policy)[HEADS] = kept | {prefix + name: t for name, t in (own | shared).items()}
    drafter.came_as = kept
    return drafter


def save_head(folder: str, policy: PreTrainedModel) -> None:
    """Write the head into a folder of its own, by the names that it came with. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    tensors = copied(vars(policy)[HEADS])
    save_file(tensors, os.path.join(folder, HEAD_FILE), {"format": "pt"})


def read_head(folder: str, policy: PreTrainedModel) -> None:
    """Keep a head that `save_head` has written, in place of the one that came with the policy."""
    if os.path.isfile(path := os.path.join(folder, HEAD_FILE)):
        vars(policy)[HEADS] = vars(policy)[HEADS] | load_file(path)


def _prefix(names: Names, kept: dict[str, torch.Tensor]) -> str:
    """Return how all names of a head begin, or nothing. Of several heads the first is used."""
    behind = re.compile(rf"({names.all}){re.escape(names.projection)}\.weight$")
    found = filter(None, map(behind.match, kept))
    return min((match[1] for match in found), default="")


def places(drafter: HeadDrafter, names: Names) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the drafter's tensors by their names in a file; experts are views of a stack."""
    embedding_norm, hidden_norm = drafter.norms
    parts: list[tuple[str, Any]] = [(names.embedding_norm, embedding_norm)]
    parts += [(names.hidden_norm, hidden_norm), (names.projection, drafter.fuse)]
    parts += [(names.norm, drafter.body.norm), (names.layer, drafter.body.layers[0])]
    for beginning, module in parts:
        for name, tensor in module.state_dict().items():
            whole = f"{beginning}.{name}".lstrip(".")
            stack, _, kind = whole.rpartition(".")
            if kind == "gate_up_proj":
                for number, expert in enumerate(tensor):
                    gate, up = expert.chunk(2)
                    yield f"{stack}.{number}.gate_proj.weight", gate
                    yield f"{stack}.{number}.up_proj.weight", up
            elif kind == "down_proj":
                for number, expert in enumerate(tensor):
                    yield f"{stack}.{number}.down_proj.weight", expert
            else:
                yield whole, tensor
