"""How a run's model is loaded."""

import os

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bubblespec.config import Config, DataConfig, ModelConfig, RunConfig
from bubblespec.loading import load_model

TINY = "configs/tiny_policy"


def load(device: str):
    config = Config(
        model=ModelConfig(path=TINY), data=DataConfig(path="d"), run=RunConfig(output_dir="o")
    )
    return load_model(config, None, torch.device(device))


def test_weights_go_straight_to_the_device(monkeypatch):
    """They are on it as soon as transformers has loaded them: no copy of the whole model has been
    in the machine's memory."""
    original, places = AutoModelForCausalLM.from_pretrained, []

    def noted(*args, **kwargs):
        loaded = original(*args, **kwargs)
        places.extend(tensor.device.type for tensor in loaded[0].parameters())
        return loaded

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    load("meta")
    assert len(places) > 10 and set(places) == {"meta"}


def test_weights_are_those_of_the_file():
    model, saved = load("cpu"), load_file(os.path.join(TINY, "model.safetensors"))
    state = model.state_dict()
    assert saved.keys() <= state.keys() and all(
        torch.equal(state[name], tensor) for name, tensor in saved.items()
    )
    assert not hasattr(model, "_hf_hook"), "no hook runs in its forward"
