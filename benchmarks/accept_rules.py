"""The accept rules side by side, on real drafts: python benchmarks/accept_rules.py [--model FOLDER]
[--json OUT]

Under the same weights, responses to train on and drafts for the next step are generated, to
different prompts. One AdamW step on a policy gradient with random advantages of +1 and -1 moves the
weights, and the drafts are verified by each rule, with the noise they were made with. (Responses
that were trained on would not do: the step moves just their probabilities.) Learning rate 0 shows
what rounding alone does, since generation and verification are forwards of different shapes.

acceptance   mean over all draft positions of the rule's chance to accept the draft token there: for
             coupled whether the keyed sample is the draft token (0 or 1), for rejection min(1, p(x)
             / q(x)), for point_mass p(x)
run          mean number of tokens accepted before the first mismatch; a draft without one counts
with its length
whole        share of drafts without a mismatch
"""

import argparse
import copy
import json

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bubblespec.data.prompts import build_prompt_set, make_tokenize, reasoning_gym_rows
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import forward_hidden, output_head, prepare_model
from bubblespec.engine.noise import gumbel, random_bits, stream_keys
from bubblespec.engine.packing import pack_sequences
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import FRESH, SamplingParams, further, verify
from bubblespec.learn.losses import token_logprobs
from bubblespec.types import Prompt, Row, SampleId

TASKS = [
    {
        "name": "chain_sum",
        "weight": 1.0,
        "config": {"min_terms": 2, "max_terms": 8, "min_digits": 1, "max_digits": 1},
    }
]
MAX_LOGITS = 1 << 26
RULES = ("coupled", "rejection", "point_mass")
ACCEPT = (
    1 << 30
    # where in its stream the rejection rule reads the uniform of a token: beyond token ids and FRESH
    # noise
)


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
    token = (
        gumbel(keys, size, dtype).add_(log_p).argmax(-1)
    )  # after a whole draft plain sampling goes on
    drafted = torch.from_numpy(np.delete(np.arange(len(log_p)), np.cumsum(counts + 1) - 1)).to(
        log_p.device
    )
    u = (
        random_bits(further(keys[drafted], ACCEPT), 1)[:, 0].double() + 0.5
    ) * 2.0**-31  # double: in float32 it could be 1
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


def load_prompts(tokenizer, path: str | None, count: int, seed: int) -> list[Prompt]:
    """The first `count` lines of a text file, or as many chain sums; as chat messages where the
    tokenizer has a template."""
    if path is None:
        rows = reasoning_gym_rows(TASKS, count, seed)
    else:
        with open(path, encoding="utf-8") as file:
            rows = [{"prompt": line.strip()} for line in file if line.strip()][:count]
    return build_prompt_set(
        rows, make_tokenize(tokenizer), 1 << 16, as_chat=tokenizer.chat_template is not None
    ).prompts


def generate(
    model: PreTrainedModel, prompts: list[Prompt], visit: int, arguments, *, params: SamplingParams
) -> list[Row]:
    """`arguments.sequences` responses, shared out over the prompts."""
    rows = [
        Row(SampleId(p.uid, visit, j), p.token_ids, arguments.max_new_tokens)
        for i, p in enumerate(prompts)
        for j in range(len(range(i, arguments.sequences, len(prompts))))
    ]
    longest = max(len(row.prompt) for row in rows) + arguments.max_new_tokens
    return Engine(ModelRunner(model, min(16, len(rows)), longest, arguments.seed)).run(rows, params)


def hidden_states(model: PreTrainedModel, row: Row) -> torch.Tensor:
    """Last hidden states [n + 1, hidden] that predict the n tokens of a response and the one after
    them."""
    fed = torch.tensor([*row.prompt, *row.tokens.tolist()], device=model.device)
    return forward_hidden(model, fed, pack_sequences([len(fed)], model.device))[
        len(row.prompt) - 1 :
    ]


def policy_gradient(
    model: PreTrainedModel, rows: list[Row], temperature: float, seed: int
) -> list[torch.Tensor]:
    """Gradient of the mean token loss -A log p with A = +1 or -1 for each response, clipped to norm
    1."""
    advantages = np.random.default_rng(seed).choice((-1.0, 1.0), len(rows))
    total = sum(len(row.tokens) for row in rows)
    for row, advantage in zip(rows, advantages, strict=True):
        target = torch.from_numpy(row.tokens).to(model.device)
        options = {"temperature": temperature or 1.0, "max_logits": MAX_LOGITS}
        logprob, _ = token_logprobs(
            hidden_states(model, row)[:-1], output_head(model), target, **options
        )
        (-advantage * logprob.sum() / total).backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    gradient = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
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


def log_probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits.float() / temperature).log_softmax(-1)


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    start: PreTrainedModel,
    rows: list[Row],
    arguments,
    *,
    params: SamplingParams,
) -> dict:
    """Every draft of `start` verified under the weights of `model`, one row at a time."""
    positions: dict[str, list[torch.Tensor]] = {name: [] for name in ("tv", "entropy", *RULES)}
    runs: dict[str, list[int]] = {rule: [] for rule in RULES}
    for row in rows:
        n = len(row.tokens)
        old, new = (output_head(m)(hidden_states(m, row)).float() for m in (start, model))
        log_q, log_p = (log_probabilities(logits, params.temperature)[:n] for logits in (old, new))
        draft = torch.from_numpy(row.tokens).to(model.device)
        names = np.broadcast_arrays(*row.id, np.arange(n + 1))
        keys = torch.from_numpy(stream_keys(arguments.seed, *names)).to(model.device)
        num_generated = torch.arange(n + 1, device=model.device)
        counts = np.array([n])
        results = {
            rule: verify(
                new, row.tokens, counts, keys, num_generated=num_generated, params=params, rule=rule
            )[:2]
            for rule in ("coupled", "point_mass")
        }
        results["rejection"] = verify_by_rejection(
            log_probabilities(new, params.temperature), log_q, draft, counts, keys=keys
        )
        for rule, (accepted, _) in results.items():
            runs[rule].append(accepted.item())
        positions["coupled"].append(
            torch.from_numpy(results["coupled"][1][:n] == row.tokens).float()
        )
        p, q = (log.gather(1, draft[:, None])[:, 0] for log in (log_p, log_q))
        positions["rejection"].append((p - q).exp().clamp(max=1.0))
        positions["point_mass"].append(p.exp())
        positions["tv"].append((log_p.exp() - log_q.exp()).abs().sum(-1) / 2)
        positions["entropy"].append(-(log_q.exp() * log_q).sum(-1))
    means = {name: torch.cat(values).double().mean().item() for name, values in positions.items()}
    lengths = np.array([len(row.tokens) for row in rows])
    return {
        "tv": means["tv"],
        "entropy": means["entropy"],
        "rules": {
            rule: {
                "acceptance": means[rule],
                "run": float(np.mean(runs[rule])),
                "whole": float(np.mean(np.array(runs[rule]) == lengths)),
            }
            for rule in RULES
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="configs/tiny_policy",
        help="Hugging Face folder of a causal language model",
    )
    parser.add_argument("--prompts", help="text file, one prompt a line (default: chain sums)")
    parser.add_argument(
        "--num-prompts", type=int, default=16, help="half of them to train on, half to draft for"
    )
    parser.add_argument(
        "--sequences", type=int, default=24, help="responses to train on, and as many drafts"
    )
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[0.0, 1e-6, 1e-5])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    if not arguments.temperature > 0:
        parser.error("--temperature must be above 0: the rules differ in how they sample")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = (
        AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device).eval()
    )
    prompts = load_prompts(tokenizer, arguments.prompts, arguments.num_prompts, arguments.seed)
    if len(prompts) < 2:
        parser.error("at least 2 prompts are needed, to train on and to draft for")
    prepare_model(model, max(len(p.token_ids) for p in prompts) + arguments.max_new_tokens)
    eos = model.generation_config.eos_token_id
    stop = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    params = SamplingParams(temperature=arguments.temperature, stop_token_ids=tuple(sorted(stop)))
    start = copy.deepcopy(model)
    trained_on = generate(start, prompts[::2], 0, arguments, params=params)
    rows = generate(start, prompts[1::2], 1, arguments, params=params)
    gradient = policy_gradient(model, trained_on, arguments.temperature, arguments.seed)

    lengths = [len(row.tokens) for row in rows]
    print(
        f"{arguments.model}, {device}, torch {torch.__version__}, temperature {arguments.temperature}"
    )
    print(f"{len(rows)} drafts of {np.mean(lengths):.1f} tokens on average, {sum(lengths)} in all")
    print(
        f"{'lr':>8} {'mean TV':>9} {'entropy':>8} {'rule':>11} {'acceptance':>11} {'run':>7} {'whole':>7}"
    )
    results = []
    for learning_rate in arguments.learning_rate:
        one_step(model, start, gradient, learning_rate)
        result = compare(model, start, rows, arguments, params=params)
        results.append({"learning_rate": learning_rate, **result})
        for rule, figures in result["rules"].items():
            print(
                f"{learning_rate:8.0e} {result['tv']:9.5f} {result['entropy']:8.3f} {rule:>11} {figures['acceptance']:11.5f} "
                f"{figures['run']:7.1f} {figures['whole']:7.3f}"
            )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    **vars(arguments),
                    "device": str(device),
                    "torch": torch.__version__,
                    "draft_tokens": lengths,
                    "steps": results,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
