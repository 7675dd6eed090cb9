"""Drafts of any quality for the real engine, and a policy whose law is a formula: for
exactness.ipynb.

Shape legend: R responses, n draft tokens of each, L longest response, V vocabulary.
"""

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.shared import chain_sums
from bubblespec.engine.arrays import packed
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.types import Group, Prompt, Row, SampleId

MAX_NEW_TOKENS = 96
SEED = 0

# The trap's policy: one distribution for every token, whatever came before it.
STOP, STOP_CHANCE, NUM_TOKENS = 0, 0.1, 6
LONGEST_DRAFT, LONGEST_RESPONSE = 8, 60


class GivenDrafts:
    """Proposes tokens of given responses, int64 by sample, `window` at a time.

    is_drafted: by sample, whether a draft gave each token that the row has gained.
    """

    def __init__(self, drafts: dict[SampleId, np.ndarray], window: int = 16):
        self.drafts, self.window = drafts, window
        self.is_drafted: dict[SampleId, list[bool]] = {key: [] for key in drafts}
        self.num_draft = self.num_accepted = 0

    def propose(self, rows, lengths, room, budget, ahead):
        places = zip(rows, lengths, strict=True)
        return packed([self.drafts[row.id][n : n + self.window] for row, n in places])

    def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
        self.num_draft += int(num_draft.sum())
        self.num_accepted += int(num_accepted.sum())
        for row, gained, accepted in zip(rows, num_gained, num_accepted, strict=True):
            self.is_drafted[row.id] += [i < accepted for i in range(gained)]

    @property
    def accepted_share(self) -> float:
        return self.num_accepted / self.num_draft


@dataclass
class Setting:
    """A policy before and after an update, in float64."""

    policy: PreTrainedModel
    """Policy after the update."""
    older: PreTrainedModel
    """Policy before the update."""
    tokenizer: Tokenizer
    prompts: list[Prompt]
    """Prompts without a part in the update."""
    params: SamplingParams = field(default_factory=SamplingParams)

    def respond(
        self,
        rows: list[Row],
        drafts: GivenDrafts | None = None,
        *,
        slots: int = 64,
        is_older: bool = False,
    ) -> int:
        """Generate rows to their end, in place, with the real engine; return its forwards."""
        longest = max(len(row.prompt) + row.max_new_tokens for row in rows)
        model, num_tokens = self.older if is_older else self.policy, max(2048, 2 * slots)
        runner = ModelRunner(model, slots, longest, SEED, max_num_batched_tokens=num_tokens)
        engine = Engine(runner)
        engine.run(rows, self.params, drafts)
        return engine.num_forwards


def make_rows(groups: list[Group], num_generations: int, max_new_tokens: int) -> list[Row]:
    """Return the rows of groups, group by group."""
    return [
        Row(group.sample(j), group.prompt.token_ids, max_new_tokens)
        for group in groups
        for j in range(num_generations)
    ]


def tiny_setting(
    folder: str = "configs/tiny_policy", distance: float = 2e-2, num_prompts: int = 8
) -> Setting:
    """Load the tiny policy. Its older weights have normal noise, a share `distance` of each."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    prompts = chain_sums(tokenizer, num_prompts, SEED, max_terms=8)
    prepare_model(policy, max(len(p.token_ids) for p in prompts) + MAX_NEW_TOKENS)
    older, random = copy.deepcopy(policy), torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in older.parameters():
            noise = torch.randn(weight.shape, generator=random, dtype=weight.dtype)
            weight.mul_(1 + distance * noise)
    params = SamplingParams(stop_token_ids=(tokenizer.eos_token_id,))
    return Setting(policy, older, tokenizer, prompts, params)


def own_softmax(setting: Setting, prompt: tuple[int, ...]) -> np.ndarray:
    """Return next-token probabilities by a forward of transformers itself, float64 [V]."""
    config = copy.deepcopy(setting.policy.config)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    plain.load_state_dict(setting.policy.state_dict())
    with torch.inference_mode():
        logits = plain(torch.tensor([prompt])).logits[0, -1]
    return (logits / setting.params.temperature).softmax(-1).numpy()


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """Return the p-value of Pearson's test; 0 where something impossible was counted.

    counts, law: [cells], law sums to 1. Cells expected below 5 are pooled.
    """
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    is_rare = expected < 5
    counts, expected = (np.append(a[~is_rare], a[is_rare].sum()) for a in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)).item()


# The selection trap


def trap_law() -> np.ndarray:
    """Return the law of lengths 1..L under plain sampling, float64 [L]: geometric, cut at L."""
    law = STOP_CHANCE * (1 - STOP_CHANCE) ** np.arange(LONGEST_RESPONSE)
    law[-1] /= STOP_CHANCE
    return law


def trap_lengths(
    rule: str, keeps: str, num_rows: int, *, distance: float = 0.3, seed: int = 1
) -> np.ndarray:
    """Return lengths int64 [R] of responses made of one draft each, by `rule`, and plain sampling.

    rule: "coupled" accepts a draft token if plain sampling gives it; "rejection" with chance
    min(1, p / q), else it samples norm(max(p - q, 0)) (Leviathan et al. 2023, "Fast inference from
    transformers via speculative decoding", Algorithm 1). An older policy makes drafts, with logits
    `distance` away, and with the noise of the responses under the coupled rule alone. keeps: "by
    clock" cuts drafts at lengths independent of their content; "finished" keeps those that reach
    the stop token within n tokens.
    """
    random = np.random.default_rng(seed)
    p = np.array([STOP_CHANCE] + [(1 - STOP_CHANCE) / (NUM_TOKENS - 1)] * (NUM_TOKENS - 1))
    q = p * np.exp(distance * random.standard_normal(NUM_TOKENS))
    q /= q.sum()
    noise = random.gumbel(size=(num_rows, LONGEST_RESPONSE, NUM_TOKENS))
    other, fresh = random.gumbel(size=(2, num_rows, LONGEST_DRAFT, NUM_TOKENS))
    # Tokens do not depend on earlier ones, so plain sampling is known at every place at once.
    tokens = (np.log(p) + noise).argmax(-1)
    draft_noise = noise[:, :LONGEST_DRAFT] if rule == "coupled" else other
    draft = (np.log(q) + draft_noise).argmax(-1)
    verified = tokens[:, :LONGEST_DRAFT]
    if rule == "rejection":
        residual = np.maximum(p - q, 0)
        residual = residual if residual.any() else p
        with np.errstate(divide="ignore"):
            resampled = (np.log(residual) + fresh).argmax(-1)
        verified = np.where(random.random(draft.shape) < (p / q)[draft], draft, resampled)

    is_stop = draft == STOP
    if keeps == "finished":
        counts = np.where(is_stop.any(1), is_stop.argmax(1) + 1, 0)
    else:
        counts = random.integers(0, LONGEST_DRAFT + 1, num_rows)
    place = np.arange(LONGEST_DRAFT)
    is_drafted = place < counts[:, None]
    num_accepted = ((draft == verified) & is_drafted).cumprod(axis=1).sum(axis=1)
    is_from_draft = is_drafted & (place <= num_accepted[:, None])  # with the first mismatch
    tokens[:, :LONGEST_DRAFT][is_from_draft] = verified[is_from_draft]
    stops = tokens == STOP
    return np.where(stops.any(1), stops.argmax(1) + 1, LONGEST_RESPONSE)
