"""Whether what a run generates and trains with computes what transformers' modules compute.

The engine as the run has it generates a few texts. A forward of the model's own modules over each
text, without cache, packing, graphs or kernels of ours, gives the log-probability that each token
should have, and with the noise of its position the token that should be there. Gradients are
compared in the same way.

Types of two bytes round by a percent, so a fixed tolerance is blind for some models and wrong for
others. Here rounding is measured: a second forward in which the output of every module is moved by
one unit in its last places, up or down at random, and so are gradients. What is compared may
differ by some multiples of the difference that this makes. Kernels round at other places than
modules do, but not at more: on random models of six families their median difference is below the
measured one (tests/test_agreement.py). float32 and float64 are summed in other orders, of which a
unit in the last place says less; a fault is orders of magnitude larger than 100 units.

Shape legend: L tokens of a row, T positions sampled in it, V vocabulary."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.arrays import packed, to_device
from bubblespec.engine.attention import own_modules
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine, Proposer
from bubblespec.engine.model import (
    OutputHead,
    body_of,
    forward_hidden,
    output_head,
    pack_sequences,
)
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import add_gumbel, kept_tokens, restrict, stream_keys, widen
from bubblespec.learn import losses
from bubblespec.types import Row, SampleId

NEW_TOKENS = 24  # of each row
PREFILL = 200  # prompt tokens of a forward: few enough for keys to be split
DRAFT, WRONG = 5, 7  # tokens of a draft; of a text every how many are replaced in drafts
MAX_LOGITS = 1 << 24  # positions x vocabulary that exist at once
# Tokens of the sequences of a gradient; on a GPU so many that a kernel splits its keys.
TRAINED = {"cuda": (160, 40, 3), "cpu": (40, 10, 3)}
# Multiples of rounding: shares of a row's tokens that may differ by more, for two bytes and others.
BOUNDS = {2: ((0.5, 1.5), (0.125, 4.0), (0.0, 15.0)), 4: ((0.0, 100.0),), 8: ((0.0, 100.0),)}
GRADIENT_BOUND = {2: 3.0, 4: 100.0, 8: 100.0}
MIN_TOKENS = 16  # of a row of which a share is taken
PRIOR = 8.0  # tokens with the rounding of all rows that are added to those of a row


def generation_problem(runner: ModelRunner, params: SamplingParams) -> str | None:
    """Return how texts that a runner generates now differ from the model's own forward, or None.

    The texts are over a border of pages and of splits where rows may be as long. They are generated
    twice, without drafts, and with drafts that are partly wrong. No slot may have a row."""
    engine, plain, drafted = Engine(runner), _make_rows(runner), _make_rows(runner)
    try:
        _generate(engine, plain, params)
        _generate(engine, drafted, params, _Drafts(plain))
    finally:
        engine.reset()
    return rows_problem(runner.model, plain + drafted, params, runner.seed)


def _generate(
    engine: Engine, rows: list[Row], params: SamplingParams, drafts: Proposer | None = None
) -> None:
    engine.reset()
    engine.add(rows)
    while not engine.is_idle:
        engine.step(params, drafts, PREFILL)


def _make_rows(runner: ModelRunner) -> list[Row]:
    """Return random prompts, the same at every call."""
    new = min(NEW_TOKENS, runner.max_length // 2)
    ends = [40, 40, 13, new + 1]
    if runner.pages is not None:
        page, split = runner.pages.page_size, runner.cache.split_of(1, runner.max_length)
        ends += [page + new // 2, split + new // 2, split + new // 2]
    vocab, random = output_head(runner.model).num_tokens, np.random.default_rng(0)
    rows: list[Row] = []
    for number, end in enumerate(sorted(ends)):
        length = max(min(end, runner.max_length) - new, 1)
        prompt = tuple(random.integers(vocab, size=length).tolist())
        if rows and len(rows[-1].prompt) == length:
            prompt = rows[-1].prompt  # whose prefill is shared
        rows.append(Row(SampleId(number, 0, number), prompt, new))
    return rows


class _Drafts(Proposer):
    """Proposes the texts of other rows with the same ids, some tokens replaced."""

    def __init__(self, rows: list[Row]):
        self.texts = {}
        for row in rows:
            text = self.texts[row.id] = row.tokens.copy()
            text[WRONG - 1 :: WRONG] = row.prompt[0]

    def propose(self, rows, lengths, room, budget, in_flight) -> tuple[np.ndarray, np.ndarray]:
        """See `Proposer`."""
        ends = lengths + in_flight + DRAFT
        of = zip(rows, lengths.tolist(), ends.tolist(), strict=True)
        return packed([self.texts[row.id][begin:end] for row, begin, end in of])

    def observe(self, rows, tokens, num_gained, num_draft, num_accepted) -> None:
        """See `Proposer`."""


@torch.no_grad()
def rows_problem(
    model: PreTrainedModel, rows: Sequence[Row], params: SamplingParams, seed: int
) -> str | None:
    """Return how generated rows differ from the model's own forward beyond rounding, or None.

    seed: of the noise. Rows have not been continued by an environment."""
    rows = [row for row in rows if len(row.tokens)]
    if not rows:
        return None
    with own_modules(model):
        wanted = [_expected(model, row, params, seed) for row in rows]
        with _rounded(model):
            moved = [_expected(model, row, params, seed)[0] for row in rows]
    rounding = [other - own for other, (own, _) in zip(moved, wanted, strict=True)]
    overall = float(np.mean(np.concatenate([each**2 for each in rounding])))
    bounds = BOUNDS[model.dtype.itemsize]
    for number, (row, each, (logprob, lost)) in enumerate(zip(rows, rounding, wanted, strict=True)):
        variance = (float((each**2).sum()) + PRIOR * overall) / (len(each) + PRIOR)
        # Log-probabilities are float32.
        unit = float(np.finfo(np.float32).eps) * max(1.0, float(np.abs(logprob).max()))
        scale = max(variance**0.5, unit)
        differs = np.zeros_like(logprob)
        if params.temperature > 0.0:
            differs = np.abs(row.logprob - logprob)
        error = np.maximum(np.where(np.isfinite(differs), differs, np.inf), lost)
        for share, multiple in bounds:
            is_over = ~(error <= multiple * scale)  # also what is no number
            if is_over.sum() > share * len(error) and (share == 0.0 or len(error) >= MIN_TOKENS):
                problem = _difference(number, error, lost, scale)
                count = f"{is_over.sum()} of {len(error)}"
                more = f"; {count} tokens by more than {multiple * scale:.2g}"
                return problem + more * (share > 0.0)
    return None


def _difference(number: int, error: np.ndarray, lost: np.ndarray, scale: float) -> str:
    worst = int(error.argmax())
    size = f"{error[worst]:.2g}"
    what = f"log-probability of token {worst} of row {number} by {size}"
    if lost[worst] == error[worst]:
        what = f"token {worst} of row {number} loses by {size} against another"
    return (
        f"rollouts differ from a forward of transformers' modules: {what}, rounding explains "
        f"{scale:.2g}"
    )


def _expected(
    model: PreTrainedModel, row: Row, params: SamplingParams, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return of a row's tokens the log-probabilities by the model's modules, float64 [T].

    Also by how much each loses, with its noise, against the best token that is surely kept."""
    text = np.concatenate((np.array(row.prompt, np.int64), row.tokens))
    count, device = len(row.tokens), model.device
    hidden = _own_hidden(model, to_device(text[:-1], device))[-count:]
    position = np.arange(count)
    keys = stream_keys(seed, *(np.full(count, part) for part in row.id), position)
    tensors = hidden, *(to_device(part, device) for part in (row.tokens, position, keys))
    head = output_head(model)
    compute = partial(_values, head=head, params=params)
    found = losses.in_chunks(compute, max(MAX_LOGITS // head.num_tokens, 1), *tensors)
    logprob, lost = found.double().cpu().numpy()
    return logprob, lost


def _values(
    hidden: torch.Tensor,
    target: torch.Tensor,
    num_generated: torch.Tensor,
    keys: torch.Tensor,
    *,
    head: OutputHead,
    params: SamplingParams,
) -> torch.Tensor:
    """Compute what `_expected` returns, [2, T]."""
    logits = losses.logits_of(hidden, head, params.temperature or 1.0)
    kept = kept_tokens(logits, target, num_generated, params)
    logprob = _logprob(logits, target, kept)
    noisy = logits if params.temperature == 0.0 else add_gumbel(logits, keys, logits.shape[1])
    best, index = noisy.masked_fill(~kept, float("-inf")).max(-1)
    lost = best - noisy.gather(-1, target[:, None])[:, 0]
    if params.truncates:
        lost = torch.minimum(lost, _distance_to_bars(logits, index, num_generated, params))
    return torch.stack((logprob, lost))


def _distance_to_bars(
    logits: torch.Tensor, index: torch.Tensor, num_generated: torch.Tensor, params: SamplingParams
) -> torch.Tensor:
    """Return by how much logits [T, V] would have to change for tokens to be barred, [T].

    index: int64 [T], tokens that are kept."""
    logits = restrict(logits, num_generated, replace(params, top_k=0, top_p=1.0))
    chosen = logits.gather(-1, index[:, None])
    distance = torch.full_like(chosen[:, 0], torch.inf)
    if 0 < params.top_k < logits.shape[1]:
        distance = chosen[:, 0] - logits.topk(params.top_k + 1).values[:, -1]
    if params.top_p < 1.0:
        kept = restrict(logits, num_generated, replace(params, top_p=1.0))
        chance = kept.softmax(-1)
        before = (chance * (kept >= chosen)).sum(-1) - chance.gather(-1, index[:, None])[:, 0]
        odds = torch.logit(torch.full_like(before, params.top_p)) - torch.logit(before)
        distance = torch.minimum(distance, odds)
    return distance


def _logprob(logits: torch.Tensor, target: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    logprobs = logits.masked_fill(~kept, losses.BARRED).log_softmax(-1)
    return logprobs.gather(-1, target[:, None])[:, 0]


def gradient_problem(
    model: PreTrainedModel, kernel: str, params: SamplingParams, max_length: int, max_logits: int
) -> str | None:
    """Return how a gradient of training differs from that of the model's own modules, or None.

    kernel: of attention; max_length: of a sequence in tokens; max_logits: see `token_logprobs`.
    Takes the memory of two gradients in the model's type. Must come before an `Optimizer`."""
    random, vocab = np.random.default_rng(1), output_head(model).num_tokens
    counts = [min(length, max_length) + 1 for length in TRAINED[model.device.type]]
    texts = [to_device(random.integers(vocab, size=n), model.device) for n in counts]
    of = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def gradient(mean: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        given = list(of.values())
        return list(torch.autograd.grad(mean(), given, materialize_grads=True, allow_unused=True))

    own = partial(_mean_of_training, model, texts, kernel, params, max_logits)
    modules = partial(_mean_of_modules, model, texts, params, max_logits)
    found = gradient(own)
    with own_modules(model):
        wanted = gradient(modules)
        differs = _distances(of, found, wanted)
        del found
        with _rounded(model):
            rounding = _distances(of, gradient(modules), wanted)
    bound, unit = GRADIENT_BOUND[model.dtype.itemsize], _unit(model.dtype)
    sizes = _distances(of, wanted, [each.new_zeros(()) for each in wanted])
    for name, size in differs.items():
        explained = max(rounding[name], unit * sizes[name])
        if not size <= bound * explained:  # or no number
            whole = max(sizes[name], torch.finfo(torch.float32).tiny)
            return (
                f"gradients differ from those of transformers' modules: {name} by "
                f"{size / whole:.2g} of its size, rounding explains {explained / whole:.2g}"
            )
    return None


def _distances(names, some: list[torch.Tensor], others: list[torch.Tensor]) -> dict[str, float]:
    """Return the norms of differences by module: a bias may have no gradient but rounding."""
    squares: dict[str, torch.Tensor | float] = {}
    for name, one, other in zip(names, some, others, strict=True):
        owner = name.rpartition(".")[0]
        distance = torch.linalg.vector_norm(widen(one) - widen(other)).double()
        squares[owner] = squares.get(owner, 0.0) + distance.square()
    return {owner: float(square) ** 0.5 for owner, square in squares.items()}


def _mean_of_training(model, texts, kernel, params, max_logits) -> torch.Tensor:
    packing = pack_sequences([len(text) - 1 for text in texts], model.device)
    hidden = forward_hidden(model, torch.cat([text[:-1] for text in texts]), packing, kernel)
    target = torch.cat([text[1:] for text in texts])
    given = target, packing.position, params, max_logits
    return losses.token_logprobs(hidden, output_head(model), *given).mean()


def _mean_of_modules(model, texts, params, max_logits) -> torch.Tensor:
    """Compute the same by the model's modules, text by text."""
    head = output_head(model)

    def logprob(hidden, target, num_generated) -> torch.Tensor:
        logits = losses.logits_of(hidden, head, params.temperature)
        with torch.no_grad():
            kept = kept_tokens(logits, target, num_generated, params)
        return _logprob(logits, target, kept)

    parts = []
    for text in texts:
        hidden, position = _own_hidden(model, text[:-1]), torch.arange(len(text) - 1)
        tensors = hidden, text[1:], position.to(model.device)
        parts.append(losses.in_chunks(logprob, max(max_logits // head.num_tokens, 1), *tensors))
    return torch.cat(parts).mean()


def _own_hidden(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return body_of(model)(input_ids=tokens[None], use_cache=False).last_hidden_state[0]


def _unit(dtype: torch.dtype) -> float:
    """Return half a unit in the last place of 1; models in float64 compute parts in float32.

    Added to x, it moves all but powers of two by one unit in the last place."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) / 2


@contextlib.contextmanager
def _rounded(model: PreTrainedModel) -> Iterator[None]:
    """Context in which outputs of modules, and their gradients, are moved by one unit.

    The signs are random, the same at every call."""
    generator = torch.Generator(model.device).manual_seed(2)

    def move(of: torch.Tensor) -> torch.Tensor:
        sign = torch.randint(2, of.shape, generator=generator, device=of.device, dtype=torch.int8)
        return of + of.detach() * ((2 * sign - 1) * _unit(of.dtype)).to(of.dtype)

    def on_output(module: Any, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        moved = move(output)
        if moved.requires_grad:
            moved.register_hook(move)
        return moved

    handles = [module.register_forward_hook(on_output) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
