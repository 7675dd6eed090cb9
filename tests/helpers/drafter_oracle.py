"""A drafter for tests, its examples, and chains by a forward over the whole row for each token."""

import time

import numpy as np
import torch
import transformers

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.model import forward_hidden, output_head, pack_sequences, tap, with_taps
from bubblespec.engine.model_checks import prepare_model
from bubblespec.learn.microbatch import Microbatch, pack_responses
from bubblespec.mechanisms.drafter.eagle3 import Eagle3
from bubblespec.mechanisms.drafter.layer import Drafter, HeadDrafter
from bubblespec.mechanisms.drafter.mechanism import SHARPNESS, DrafterRunner
from bubblespec.mechanisms.drafter.training import DrafterTraining, Example
from bubblespec.types import SampleId
from tests.helpers.models import VOCAB, config_of, random_model, small_config
from tests.helpers.reference_step import gumbel as reference_gumbel
from tests.helpers.reference_step import noise_key

NAMES = ["llama", "qwen2", "qwen3", "mistral-window", "gpt2", "gpt_neox", "qwen3_moe"]
SEED = 5
STOP = (5, 11)
PARAMS = SamplingParams(temperature=0.8, top_k=20, stop_token_ids=STOP, min_length=3)
MAX_LENGTH = 120
ONE_RANK = Ranks(torch.device("cpu"))


def make_policy(name: str, dtype: torch.dtype = torch.float64) -> transformers.PreTrainedModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    is_mixture = name == "qwen3_moe"
    config = config_of("Qwen3Moe", head_dim=16, **experts) if is_mixture else small_config(name)
    model = random_model(config, dtype)
    prepare_model(model, MAX_LENGTH)
    return model


def make_drafter(policy, ids=None, shape: type[Drafter] = Eagle3) -> Drafter:
    """Create a drafter of some tokens, stop tokens among them, with disturbed weights."""
    drafter = shape(policy, np.sort(np.array([*STOP, *range(20, 70)])) if ids is None else ids)
    if drafter.taps:
        tap(policy, drafter.taps)
    torch.manual_seed(1)
    with torch.no_grad():
        for param in drafter.parameters():
            param.add_(0.05 * torch.randn_like(param))
    return drafter


# The oracle


@torch.no_grad()
def hidden_of(policy, tokens: list[int]) -> torch.Tensor:
    """The policy's hidden states, [L, W], of one sequence, with those of its taps."""
    packing = pack_sequences([len(tokens)], torch.device("cpu"))
    return with_taps(policy, forward_hidden(policy, torch.tensor(tokens), packing))


def body(drafter: Drafter, hidden: list[torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """The drafter's state at the last of these positions, [H]."""
    packing = pack_sequences([len(tokens)], torch.device("cpu"))
    return drafter(torch.stack(hidden), torch.tensor(tokens), packing)[-1]


def head(drafter: Drafter, state: torch.Tensor) -> torch.Tensor:
    if isinstance(drafter, HeadDrafter):
        return output_head(drafter.policy)(state)[drafter.ids]
    return drafter.lm_head(drafter.norm(state))


def teach(drafter: Drafter, hidden: torch.Tensor) -> torch.Tensor:
    """The policy's logits for the drafter's tokens at hidden states [..., W]."""
    return output_head(drafter.policy)(hidden[..., :64])[..., drafter.ids]


def draw(
    drafter: Drafter, logits: torch.Tensor, name: SampleId, position: int, params: SamplingParams
) -> int:
    """Return the sample's token at this position, from logits over the drafter's tokens."""
    logits = (SHARPNESS * logits / params.temperature).tolist()
    if position < params.min_length:
        logits = [
            -np.inf if token in params.stop_token_ids else x
            for token, x in zip(drafter.ids, logits, strict=True)
        ]
    if params.top_k:
        least = sorted(logits)[-params.top_k] if len(logits) > params.top_k else -np.inf
        logits = [x if x >= least else -np.inf for x in logits]
    noise = reference_gumbel(noise_key(SEED, *name, position), VOCAB)[drafter.ids]
    return int(drafter.ids[int((torch.tensor(logits, dtype=torch.float64) + noise).argmax())])


@torch.no_grad()
def chain_of(
    drafter, hidden, tokens, name: SampleId, position: int, length: int, params=PARAMS
) -> list[int]:
    """hidden: [P, H], the policy's in the row's context; tokens: P, each the one after a state;
    position: of the chain in the response."""
    hidden, tokens, chain = list(hidden), list(tokens), []
    for number in range(length):
        hidden.append(body(drafter, hidden, tokens))
        chain.append(draw(drafter, head(drafter, hidden[-1]), name, position + number, params))
        tokens.append(chain[-1])
    return chain


def draft(runner: DrafterRunner, slots: np.ndarray, length: int) -> tuple:
    """Return chains of some slots, int64 [M, n], their slots, and the positions caught up with."""
    slots = slots[runner.can_draft(slots)]
    chains, caught_up = np.zeros((len(slots), length), np.int64), 0
    tokens = runner.engine.tokens[slots, runner.engine.length[slots] - 1]
    for place in range(length) if len(slots) else ():
        tokens, _, fed = runner.draw(slots, place, tokens)
        chains[:, place] = tokens
        caught_up += fed if place == 0 else 0
    return chains, slots, caught_up


# Training


def make_training(drafter: Drafter, clock=time) -> DrafterTraining:
    return DrafterTraining(drafter, PARAMS.temperature, SEED, clock=clock)


def make_texts(sizes: list[tuple[int, int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(4)
    return [tuple(random.integers(12, VOCAB, size) for size in pair) for pair in sizes]


def make_batch(policy, sizes: list[tuple[int, int]]) -> tuple[Microbatch, torch.Tensor]:
    """A micro-batch of these texts, with observations in them, and the policy's hidden states."""
    prompts, tokens = zip(*make_texts(sizes), strict=True)
    logprob = [np.where(np.arange(len(t)) % 5 < 3, 0, np.nan).astype(np.float32) for t in tokens]
    device = torch.device("cpu")
    batch = pack_responses(prompts, tokens, logprob, device)
    packing = pack_sequences(batch.sequence_lengths, device)
    with torch.no_grad():
        return batch, forward_hidden(policy, batch.input_ids, packing)


def make_examples(policy, sizes: list[tuple[int, int]]) -> list[Example]:
    """What a gradient step over texts of these sizes gives to learn from."""
    training = make_training(make_drafter(policy))
    training.merge(ONE_RANK)
    training.take(*make_batch(policy, sizes))
    return list(training.examples)
