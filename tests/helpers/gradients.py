"""Gradients of packed sequences against those of each sequence alone, in float64."""

import torch

from bubblespec.engine.model import body_of, forward_hidden, pack_sequences
from bubblespec.engine.model_checks import prepare_model
from tests.helpers.models import VOCAB, everything_in_full_precision


def gradients(model, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    (hidden * torch.randn_like(hidden)).sum().backward()
    return {name: of.grad.clone() for name, of in model.named_parameters() if of.grad is not None}


def check_packed_gradients(model, lengths: list[int], max_length: int, monkeypatch) -> dict:
    """Compare hidden states and gradients; return the gradients. The reference is the model's."""
    everything_in_full_precision(monkeypatch, model)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (sum(lengths),))
    alone = [body_of(model)(of[None], use_cache=False)[0][0] for of in ids.split(lengths)]
    wanted = gradients(model, torch.cat(alone))
    prepare_model(model, max_length)
    packed = forward_hidden(model, ids, pack_sequences(lengths, ids.device))
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-10)
    found = gradients(model, packed)
    assert found.keys() == wanted.keys()
    for parameter, grad in found.items():
        size = wanted[parameter].abs().max().clamp(min=1.0)
        torch.testing.assert_close(grad / size, wanted[parameter] / size, rtol=0, atol=1e-10)
    return found
