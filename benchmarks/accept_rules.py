"""The accept rules side by side, on real drafts: python benchmarks/accept_rules.py [--model FOLDER]
[--json OUT]

Under the same weights, responses to train on and drafts for the next step are generated, to
different prompts. One AdamW step on a policy gradient with random advantages of +1 and -1 moves the
weights, and the drafts are verified by each rule, with the noise they were made with. (Responses
that were trained on would not do: the step moves just their probabilities.) Learning rate 0 shows
what rounding alone does, since generation and verification are forwards of different shapes.

acceptance: mean over all draft positions of the rule's chance to accept the draft token there,
which is 0 or 1 for coupled, min(1, p(x) / q(x)) for rejection and p(x) for point_mass. run: mean
number of tokens accepted before the first mismatch. whole: share of drafts without a mismatch.
"""

import argparse
import copy
import os
import sys

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.shared import chain_sums, load_policy, write_json
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import forward_hidden, output_head, prepare_model
from bubblespec.engine.noise import gumbel, random_bits, stream_keys
from bubblespec.engine.packing import pack_sequences
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams, verify
from bubblespec.learn.losses import token_logprobs
from bubblespec.types import Prompt, Row, SampleId

SEED, NUM_PROMPTS, NUM_RESPONSES, MAX_NEW_TOKENS = 0, 16, 24, 96
MAX_LOGITS = 1 << 26
# coupled is the engine's. point_mass is the same with noise that no draft has seen: a draft token x
# is accepted with chance p(x).
RULES = ("coupled", "rejection", "point_mass")
# Sampling and drafts read a stream at the token ids, from 0. From FRESH on, beyond any vocabulary,
# is noise that no draft has used, and from ACCEPT on the uniforms of the rejection rule.
FRESH, ACCEPT = 1 << 29, 1 << 30


def further(keys: torch.Tensor, offset: int) -> torch.Tensor:
    """Keys int32 [..., 4] of the same streams read from `offset` on: a stream's token ids are added
    to its key's first word."""
    keys = keys.clone()
    keys[..., 0] += offset
    return keys


def verify_by_rejection(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    draft: torch.Tensor,
    counts: np.ndarray,
    *,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a draft token x with chance min(1, p(x) / q(x)), else sample norm(max(p - q, 0))
    (Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", Algorithm
    1; Chen et al. 2023, "Accelerating large language model decoding with speculative sampling",
    Algorithm 2). Accepted with chance 1 - TV, but needs all of q, and that x is a draw from q, by
    any noise but the fresh. It is none if the draft was chosen by what it contains: with finished
    drafts only, x is a draw from q given an early stop, and responses come out too short. Cutting
    drafts by the clock is no such choice.

    log_p: [T, V]; log_q: [S, V]; draft: int64 [S]; counts and keys as in `verify`. Returns its
    accepted and token.
    """
    size, dtype = log_p.shape[1], log_p.dtype
    # After a whole draft plain sampling goes on.
    token = gumbel(keys, size, dtype).add_(log_p).argmax(-1)
    drafted = np.delete(np.arange(len(log_p)), np.cumsum(counts + 1) - 1)
    drafted = torch.from_numpy(drafted).to(log_p.device)
    # Double: in float32 it could be 1.
    u = (random_bits(further(keys[drafted], ACCEPT), 1)[:, 0].double() + 0.5) * 2.0**-31
    log_ratio = (log_p[drafted] - log_q).gather(1, draft[:, None])[:, 0]
    is_right = torch.zeros(len(log_p), dtype=torch.bool, device=log_p.device)
    is_right[drafted] = u < log_ratio.double().exp()
    p = log_p[drafted].exp()
    residual = (p - log_q.exp()).clamp_(min=0.0)
    # p = q but for rounding leaves nothing to sample from; the test then fails with a chance of
    # that rounding alone.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    resampled = gumbel(further(keys[drafted], FRESH), size, dtype).add_(residual.log_()).argmax(-1)
    token[drafted] = torch.where(is_right[drafted], draft, resampled)
    accepted = [row.long().cumprod(0).sum() for row in is_right.split((counts + 1).tolist())]
    return torch.stack(accepted), token


def generate(
    model: PreTrainedModel, prompts: list[Prompt], visit: int, params: SamplingParams
) -> list[Row]:
    """NUM_RESPONSES responses, shared out over the prompts."""
    rows = [
        Row(SampleId(prompt.uid, visit, j), prompt.token_ids, MAX_NEW_TOKENS)
        for i, prompt in enumerate(prompts)
        for j in range(len(range(i, NUM_RESPONSES, len(prompts))))
    ]
    longest = max(len(row.prompt) for row in rows) + MAX_NEW_TOKENS
    return Engine(ModelRunner(model, 16, longest, SEED)).run(rows, params)


def hidden_states(model: PreTrainedModel, row: Row) -> torch.Tensor:
    """Last hidden states [n + 1, hidden] that predict the n tokens of a response and the one after
    them."""
    fed = torch.tensor([*row.prompt, *row.tokens.tolist()])
    packing = pack_sequences([len(fed)], model.device)
    return forward_hidden(model, fed, packing)[len(row.prompt) - 1 :]


def policy_gradient(
    model: PreTrainedModel, rows: list[Row], temperature: float, seed: int
) -> list[torch.Tensor]:
    """Gradient of the mean token loss -A log p with A = +1 or -1 for each response, clipped to norm
    1."""
    advantages = np.random.default_rng(seed).choice((-1.0, 1.0), len(rows))
    total = sum(len(row.tokens) for row in rows)
    options = {"temperature": temperature, "max_logits": MAX_LOGITS}
    for row, advantage in zip(rows, advantages, strict=True):
        hidden, target = hidden_states(model, row)[:-1], torch.from_numpy(row.tokens)
        logprob = token_logprobs(hidden, output_head(model), target, **options)
        (-advantage * logprob.sum() / total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    gradient = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return gradient


def one_step(
    model: PreTrainedModel, start: PreTrainedModel, gradient: list, learning_rate: float
) -> None:
    """Set `model` to the weights of `start` after one AdamW step along `gradient`."""
    with torch.no_grad():
        for p, p0, g in zip(model.parameters(), start.parameters(), gradient, strict=True):
            p.copy_(p0)
            p.grad = None if g is None else g.clone()
    torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0).step()
    model.zero_grad()


@torch.no_grad()
def compare(
    model: PreTrainedModel, start: PreTrainedModel, rows: list[Row], params: SamplingParams
) -> dict[str, dict]:
    """Every draft of `start` verified under the weights of `model`, one row at a time."""
    chances: dict[str, list[torch.Tensor]] = {rule: [] for rule in RULES}
    runs: dict[str, list[int]] = {rule: [] for rule in RULES}
    for row in rows:
        n, draft = len(row.tokens), torch.from_numpy(row.tokens)
        old, new = (output_head(m)(hidden_states(m, row)).float() for m in (start, model))
        log_q, log_p = ((logits / params.temperature).log_softmax(-1) for logits in (old, new))
        names = np.broadcast_arrays(*row.id, np.arange(n + 1))
        keys, counts = torch.from_numpy(stream_keys(SEED, *names)), np.array([n])
        options = {"num_generated": torch.arange(n + 1), "params": params}
        coupled, fresh = (
            verify(new, row.tokens, counts, noise, **options)[:2]
            for noise in (keys, further(keys, FRESH))
        )
        rejection = verify_by_rejection(log_p, log_q[:n], draft, counts, keys=keys)
        for rule, (accepted, _) in zip(RULES, (coupled, rejection, fresh), strict=True):
            runs[rule].append(accepted.item())
        p, q = (log[:n].gather(1, draft[:, None])[:, 0] for log in (log_p, log_q))
        chances["coupled"].append(torch.from_numpy(coupled[1][:n] == row.tokens).float())
        chances["rejection"].append((p - q).exp().clamp(max=1.0))
        chances["point_mass"].append(p.exp())
    lengths = np.array([len(row.tokens) for row in rows])
    return {
        rule: {
            "acceptance": torch.cat(chances[rule]).double().mean().item(),
            "run": float(np.mean(runs[rule])),
            "whole": float(np.mean(np.array(runs[rule]) == lengths)),
        }
        for rule in RULES
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="configs/tiny_policy", help="Hugging Face folder")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[0.0, 1e-6, 1e-5])
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    if not arguments.temperature > 0:
        parser.error("--temperature must be above 0: the rules differ in how they sample")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    tokenizer, model, ends = load_policy(arguments.model)
    prompts = chain_sums(tokenizer, NUM_PROMPTS, SEED, max_terms=8)
    prepare_model(model, max(len(p.token_ids) for p in prompts) + MAX_NEW_TOKENS)
    params = SamplingParams(temperature=arguments.temperature, stop_token_ids=ends)
    start = copy.deepcopy(model)
    trained_on = generate(start, prompts[::2], 0, params)
    rows = generate(start, prompts[1::2], 1, params)
    gradient = policy_gradient(model, trained_on, arguments.temperature, SEED)
    print(f"{arguments.model}, {len(rows)} drafts of {sum(len(row.tokens) for row in rows)} tokens")
    print("| learning rate | rule | acceptance | run | whole |\n|---|---|---|---|---|")
    results = {}
    for learning_rate in arguments.learning_rate:
        one_step(model, start, gradient, learning_rate)
        results[learning_rate] = compare(model, start, rows, params)
        for rule, f in results[learning_rate].items():
            figures = f"{f['acceptance']:.5f} | {f['run']:.1f} | {f['whole']:.3f}"
            print(f"| {learning_rate:.0e} | {rule} | {figures} |")
    write_json(arguments.json, {**vars(arguments), "rates": results})


if __name__ == "__main__":
    main()
