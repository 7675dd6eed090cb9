"""What processes of tests need, imported once in the process that they are forked from: see
warm.py."""

import datasets  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import reasoning_gym  # noqa: F401
import torch._dynamo
import torch.utils.tensorboard
from transformers.models.llama import modeling_llama  # noqa: F401

import train  # noqa: F401
from tests.helpers.quick import start_quickly

torch.set_num_threads(1)
start_quickly()
