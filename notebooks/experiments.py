"""What exactness.ipynb runs: drafts of any quality for the real engine, and a policy so small that
its law is a formula.

Shape legend: R responses, n draft tokens of each, L longest response, V vocabulary.
"""

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from benchmarks.accept_rules import (
    FRESH,
    further,
    one_step,
    policy_gradient,
    verify_by_rejection,
)
from benchmarks.shared import chain_sums
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import prepare_model
from bubblespec.engine.noise import stream_keys
from bubblespec.engine.ragged import packed
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams, num_gained, sample, verify
from bubblespec.types import Group, Prompt, Row, SampleId

MAX_NEW_TOKENS = 96
SEED = 0

# The trap's policy: one distribution for every token, whatever came before it.
STOP, STOP_CHANCE, NUM_TOKENS = 0, 0.1, 6
LONGEST_DRAFT, LONGEST_RESPONSE = 8, 60


class GivenDrafts:
    """A `Proposer` of the tokens of given responses, each at its own place, `window` at a time.

    drafts: int64 tokens by sample. is_drafted: bool, for each token that a row has gained, whether
    a draft gave it.
    """

    def __init__(self, drafts: dict[SampleId, np.ndarray], window: int = 16):
        self.drafts, self.window = drafts, window
        self.is_drafted: dict[SampleId, list[bool]] = {key: [] for key in drafts}
        self.num_draft = self.num_accepted = 0

    def propose(self, rows, lengths, room, budget):
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
    """After the update."""
    older: PreTrainedModel
    """Before it."""
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    """Prompts that the update was not made with."""
    params: SamplingParams = field(default_factory=SamplingParams)

    def respond(
        self,
        rows: list[Row],
        drafts: GivenDrafts | None = None,
        *,
        slots: int = 64,
        rule="coupled",
        older=False,
    ) -> int:
        """Generate rows to their end, in place, with the real engine. Returns the forwards that it
        took."""
        longest = max(len(row.prompt) + row.max_new_tokens for row in rows)
        model, batch_tokens = self.older if older else self.policy, max(2048, 2 * slots)
        runner = ModelRunner(model, slots, longest, SEED, max_batch_tokens=batch_tokens)
        if rule == "point_mass":
            noise_keys = runner.noise_keys
            runner.noise_keys = lambda *where: further(noise_keys(*where), FRESH)
        engine = Engine(runner)
        engine.run(rows, self.params, drafts)
        return engine.num_forwards


def make_rows(groups: list[Group], num_generations: int, max_new_tokens: int) -> list[Row]:
    """The rows of groups, those of a group adjacent."""
    return [
        Row(group.sample(j), group.prompt.token_ids, max_new_tokens)
        for group in groups
        for j in range(num_generations)
    ]


def tiny_setting(
    folder: str = "configs/tiny_policy", learning_rate: float = 2e-4, num_prompts: int = 8
) -> Setting:
    """The tiny policy before and after one AdamW step on 24 of its own responses, with random
    advantages of +1 and -1."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    prompts = chain_sums(tokenizer, 2 * num_prompts, SEED, max_terms=8)
    prepare_model(policy, max(len(p.token_ids) for p in prompts) + MAX_NEW_TOKENS)
    params = SamplingParams(stop_token_ids=(tokenizer.eos_token_id,))
    setting = Setting(policy, copy.deepcopy(policy), tokenizer, prompts[::2], params)
    trained_on = make_rows([Group(prompt, 0) for prompt in prompts[1::2]], 3, MAX_NEW_TOKENS)
    setting.respond(trained_on)
    one_step(
        policy,
        setting.older,
        policy_gradient(policy, trained_on, params.temperature, SEED),
        learning_rate,
    )
    return setting


def own_softmax(setting: Setting, prompt: tuple[int, ...]) -> np.ndarray:
    """The policy's next-token probabilities, float64 [V], by a forward of transformers itself, not
    by the engine."""
    plain = (
        AutoModelForCausalLM.from_config(
            copy.deepcopy(setting.policy.config), attn_implementation="eager"
        )
        .double()
        .eval()
    )
    plain.load_state_dict(setting.policy.state_dict())
    with torch.inference_mode():
        return (
            (plain(torch.tensor([prompt])).logits[0, -1] / setting.params.temperature)
            .softmax(-1)
            .numpy()
        )


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """Pearson's test: the chance that draws from `law` are as far from it as `counts`. Cells
    expected below 5 are pooled.

    counts, law: [cells], law sums to 1. Returns 0 where something impossible was counted.
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
    """Probability of lengths 1..L under plain sampling, float64 [L]: geometric, cut off at L."""
    law = STOP_CHANCE * (1 - STOP_CHANCE) ** np.arange(LONGEST_RESPONSE)
    law[-1] /= STOP_CHANCE
    return law


def trap_lengths(
    rule: str, keeps: str, num_rows: int, *, distance: float = 0.3, seed: int = 1
) -> np.ndarray:
    """Lengths int64 [R] of responses that come of one draft each, by `rule`, and plain sampling
    after it.

    Drafts are made by an older policy, whose logits are `distance` away, with the noise of the
    responses under the coupled rule and with other noise under the others. keeps: "by clock" cuts
    them at lengths that have nothing to do with their content; "finished" keeps those that reach
    the stop token within n tokens, up to it, and no other.
    """
    rest = (1 - STOP_CHANCE) / (NUM_TOKENS - 1)
    log_p = torch.tensor([STOP_CHANCE] + [rest] * (NUM_TOKENS - 1), dtype=torch.float64).log()
    shift = torch.randn(
        NUM_TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    log_q = (log_p + distance * shift).log_softmax(-1)
    params = SamplingParams(stop_token_ids=(STOP,))
    keys, other_keys = (_keys(num_rows, LONGEST_RESPONSE, s) for s in (seed, seed + 1))
    if rule == "point_mass":
        keys = further(keys, FRESH)
    positions = torch.arange(LONGEST_RESPONSE).expand(num_rows, -1)

    draft_keys = (keys if rule == "coupled" else other_keys)[:, :LONGEST_DRAFT].reshape(-1, 4)
    flat = positions[:, :LONGEST_DRAFT].flatten()
    draft = sample(log_q.expand(len(flat), -1), draft_keys, flat, params)[0].view(
        num_rows, LONGEST_DRAFT
    )
    is_stop = (draft == STOP).numpy()
    if keeps == "finished":
        counts = np.where(is_stop.any(1), is_stop.argmax(1) + 1, 0)
    else:
        counts = np.random.default_rng(seed).integers(0, LONGEST_DRAFT + 1, num_rows)

    is_fed = torch.arange(LONGEST_DRAFT + 1) <= torch.from_numpy(counts)[:, None]
    fed_drafts = draft[is_fed[:, 1:]]
    fed = positions[:, : LONGEST_DRAFT + 1][is_fed]
    fed_keys, log_ps = keys[:, : LONGEST_DRAFT + 1][is_fed], log_p.expand(len(fed), -1)
    if rule == "rejection":
        result = verify_by_rejection(
            log_ps, log_q.expand(len(fed_drafts), -1), fed_drafts, counts, keys=fed_keys
        )
        accepted, token = (t.numpy() for t in result)
    else:
        options = {"num_generated": fed, "params": params}
        accepted, token, _ = verify(log_ps, fed_drafts.numpy(), counts, fed_keys, **options)
    room = np.full(num_rows, LONGEST_RESPONSE)
    gained = num_gained(token, accepted, counts, params.stop_token_ids, limit=room)
    last = token[np.cumsum(counts + 1) - (counts + 1) + gained - 1]

    # Tokens do not depend on those before them, so what plain sampling puts at every place is known
    # at once.
    every = positions.flatten()
    plain = sample(log_p.expand(len(every), -1), keys.reshape(-1, 4), every, params)[0].numpy()
    stops_later = (plain.reshape(num_rows, -1) == STOP) & (positions.numpy() >= gained[:, None])
    later = np.where(stops_later.any(1), stops_later.argmax(1) + 1, LONGEST_RESPONSE)
    return np.where(last == STOP, gained, later)


def _keys(num_rows: int, length: int, seed: int) -> torch.Tensor:
    """Noise keys int32 [rows, length, 4]."""
    uid, position = (a.ravel() for a in np.indices((num_rows, length)))
    zero = np.zeros_like(uid)
    return torch.from_numpy(stream_keys(seed, uid, zero, zero, position)).view(num_rows, length, 4)
