"""Verification of drafts: the law of the output, token identity, acceptance rates, selection.

The policy is a Markov chain, a table of logits [V, V] by previous token, whose law is known
exactly. `decode` generates from it speculatively and asks `verify` for every token.
"""

import numpy as np
import pytest
import torch
from scipy import stats
from test_sampling import law as warped

from bubblespec.engine.batch import SamplingParams, num_accepted, num_gained
from bubblespec.engine.sampling import read, sample, stream_keys

V, STOP, START = 6, 0, 1
LIMIT, LONGEST_DRAFT = 6, 8  # drafts may run past the limit, and go on after a stop token
ROWS = 12_000
PARAMS = {
    "plain": SamplingParams(stop_token_ids=(STOP,)),
    "cold": SamplingParams(temperature=0.6, stop_token_ids=(STOP,)),
    "truncated": SamplingParams(temperature=1.2, top_p=0.85, top_k=4, stop_token_ids=(STOP,)),
    "long": SamplingParams(top_p=0.9, stop_token_ids=(STOP,), min_length=2),
    "greedy": SamplingParams(temperature=0.0, stop_token_ids=(STOP,)),
}


def random_table(seed: int, size: int = V) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, size, generator=generator, dtype=torch.float64)


POLICY = random_table(9)
OLDER = POLICY + 0.7 * random_table(10)


def keys_of(rows: int, positions: int, seed: int = 0) -> torch.Tensor:
    prompt_id, position = (a.ravel() for a in np.indices((rows, positions)))
    zero = np.zeros_like(prompt_id)
    return torch.from_numpy(stream_keys(seed, prompt_id, zero, zero, position)).view(
        rows, positions, 4
    )


KEYS = keys_of(ROWS, LIMIT + LONGEST_DRAFT)


# Drafters: (previous token, keys, response tokens so far, params), [rows, ...], to tokens [rows].


def sampled_from(table):
    def drafter(previous, keys, num_generated, params):
        return sample(table[previous], keys, num_generated, params)[0]

    return drafter


def least_likely(previous, keys, num_generated, params):
    return POLICY[previous].argmin(-1)


def uniform(previous, keys, num_generated, params):
    logits = torch.zeros(len(previous), V, dtype=torch.float64)
    return sample(logits, keys, num_generated, SamplingParams())[0]


DRAFTERS = {"same weights": sampled_from(POLICY), "older weights": sampled_from(OLDER)}
DRAFTERS |= {"least likely": least_likely, "random": uniform}


def by_clock(draft, num_passes):
    generator = np.random.Generator(np.random.Philox(key=num_passes))
    return generator.integers(0, LONGEST_DRAFT + 1, len(draft))


def decode(params, drafter, cut=by_clock, limit=LIMIT, keys=KEYS, draft_keys=None):
    """Generate from POLICY speculatively. keys: [rows, at least limit + LONGEST_DRAFT, 4].

    Returns tokens int64 [rows, limit], -1 after the end, and as many logprob, and the share of
    drafts accepted."""
    draft_keys = keys if draft_keys is None else draft_keys
    tokens = np.full((len(keys), limit), -1)
    logprobs = np.zeros((len(keys), limit))
    length = np.zeros(len(keys), np.int64)
    rows, num_passes, num_right, num_drafted = np.arange(len(keys)), 0, 0, 0
    while len(rows):
        last = tokens[rows, length[rows] - 1]
        chain = [torch.from_numpy(np.where(length[rows] == 0, START, last))]
        position = torch.from_numpy(length[rows])[:, None] + torch.arange(LONGEST_DRAFT + 1)
        for i in range(LONGEST_DRAFT):
            own_keys = draft_keys[torch.from_numpy(rows), position[:, i]]
            chain.append(drafter(chain[-1], own_keys, position[:, i], params))
        chain = torch.stack(chain, 1)
        counts = cut(chain[:, 1:].numpy(), num_passes)
        is_fed = torch.arange(LONGEST_DRAFT + 1) <= torch.from_numpy(counts)[:, None]
        draft = chain[:, 1:][is_fed[:, 1:]].numpy()
        own_keys = keys[torch.from_numpy(rows)[:, None], position][is_fed]
        sampled = sample(POLICY[chain[is_fed]], own_keys, position[is_fed], params)
        token, logprob = read(sampled)
        accepted = num_accepted(token, draft, counts)
        stops, left = params.stop_token_ids, limit - length[rows]
        gained = num_gained(token, accepted, counts, stops, limit=left)
        first = np.cumsum(counts + 1) - (counts + 1)
        offset = np.arange(gained.sum()) - np.repeat(np.cumsum(gained) - gained, gained)
        source = np.repeat(first, gained) + offset
        target = np.repeat(rows, gained), np.repeat(length[rows], gained) + offset
        tokens[target] = token[source]
        logprobs[target] = logprob[source]
        length[rows] += gained
        num_passes += 1
        num_right += accepted.sum()
        num_drafted += counts.sum()
        rows = rows[(tokens[rows, length[rows] - 1] != STOP) & (length[rows] < limit)]
    return tokens, logprobs, num_right / max(num_drafted, 1)


def transition(params: SamplingParams, step: int) -> np.ndarray:
    """Oracle: probabilities [V, V] of token `step` by previous token, by transformers' warpers."""
    logits = POLICY.clone()
    if step < params.min_length:
        logits[:, STOP] = float("-inf")
    if params.temperature == 0.0:
        return np.eye(V)[logits.argmax(-1)]
    return warped(logits, params).numpy()


def length_law(params: SamplingParams, limit: int) -> np.ndarray:
    alive, law = np.eye(V)[START], np.zeros(limit)
    for step in range(limit):
        alive = alive @ transition(params, step)
        law[step], alive[STOP] = alive[STOP], 0.0
    law[-1] += alive.sum()
    return law


def three_token_law(params: SamplingParams) -> np.ndarray:
    """Joint probability [V + 1] * 3 of the first three tokens, V standing for none."""
    first, second, third = (transition(params, step) for step in range(3))
    law = np.zeros((V + 1,) * 3)
    law[:V, :V, :V] = first[START, :, None, None] * second[:, :, None] * third
    law[:, STOP] = law[STOP] = 0.0
    law[:V, STOP, V] = first[START] * second[:, STOP]
    law[STOP] = 0.0
    law[STOP, V, V] = first[START, STOP]
    return law


def assert_law(counts: np.ndarray, law: np.ndarray) -> None:
    """Chi-square, with rare cells pooled; impossible cells must be empty."""
    counts, law = counts.ravel(), law.ravel()
    assert not counts[law == 0].any()
    expected = law * counts.sum()
    is_rare = expected < 5
    counts, expected = (np.append(a[~is_rare], a[is_rare].sum()) for a in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(counts) > 1:
        assert stats.chisquare(counts, expected).pvalue > 1e-4


@pytest.mark.parametrize(
    "setting, drafter",
    [*(("plain", d) for d in DRAFTERS), *((s, "older weights") for s in PARAMS if s != "plain")],
)
def test_output_law_equals_enumeration(setting, drafter):
    params = PARAMS[setting]
    tokens, logprob, _ = decode(params, DRAFTERS[drafter])
    joint = np.zeros((V + 1,) * 3)
    np.add.at(joint, tuple(np.where(tokens[:, :3] < 0, V, tokens[:, :3]).T), 1)
    assert_law(joint, three_token_law(params))
    length = (tokens >= 0).sum(1)
    assert_law(np.bincount(length, minlength=LIMIT + 1)[1:], length_law(params, LIMIT))
    # What is recorded is the distribution each token was drawn from.
    previous = np.concatenate((np.full((len(tokens), 1), START), tokens[:, :-1]), axis=1)
    for step in range(LIMIT):
        rows = np.flatnonzero(tokens[:, step] >= 0)
        pair = previous[rows, step], tokens[rows, step]
        np.testing.assert_allclose(
            logprob[rows, step], np.log(transition(params, step)[pair]), atol=1e-10
        )


@pytest.mark.parametrize("setting", PARAMS)
def test_coupled_tokens_equal_plain_sampling(setting):
    """One by one, whatever the drafts; drafts by the same weights and noise are all accepted."""
    params = PARAMS[setting]
    rows = 3000
    keys, wanted = KEYS[:rows], np.full((rows, LIMIT), -1)
    previous, is_alive = torch.full((rows,), START), np.ones(rows, bool)
    for step in range(LIMIT):
        previous = sample(POLICY[previous], keys[:, step], torch.full((rows,), step), params)[0]
        wanted[is_alive, step] = previous.numpy()[is_alive]
        is_alive &= previous.numpy() != STOP
    for name, drafter in DRAFTERS.items():
        tokens, _, share = decode(params, drafter, keys=keys)
        assert np.array_equal(tokens, wanted), name
        assert share == 1.0 if name == "same weights" else share < 1.0


def test_num_gained_ends_at_stop_and_limit():
    rows = [  # tokens at the n + 1 positions, accepted, limit, tokens gained
        ([4, 5, 6, 7], 3, 10, 4),
        ([4, 9, 6, 7], 3, 10, 2),  # a stop token in the middle of the accepted draft
        ([4, 5, 9, 7], 1, 10, 2),  # after the rejected token
        ([4, 5, 9, 7], 2, 10, 3),  # in its place
        ([4, 5, 6, 7], 3, 2, 2),  # the limit
        ([4, 8, 6, 7], 3, 1, 1),
        ([4, 8, 9, 7], 3, 3, 2),
        ([9], 0, 5, 1),  # no draft
        ([3], 0, 1, 1),
        ([8, 8, 8], 2, 1, 1),
    ]
    token = np.concatenate([r[0] for r in rows])
    counts = np.array([len(r[0]) - 1 for r in rows])
    accepted, limit, wanted = (np.array([r[i] for r in rows]) for i in (1, 2, 3))
    assert num_gained(token, accepted, counts, (8, 9), limit=limit).tolist() == wanted.tolist()
    free = num_gained(token, accepted, counts, (), limit=limit)
    assert free.tolist() == np.minimum(accepted + 1, limit).tolist()
    none = np.zeros(0, np.int64)
    assert num_gained(none, none, none, (9,), limit=none).tolist() == []


def finished_only(draft, num_passes):
    """Select the first drafts that reach a stop token, up to it; later none."""
    is_stop = draft == STOP
    return np.where(is_stop.any(1) & (num_passes == 0), is_stop.argmax(1) + 1, 0)


def test_selected_drafts_keep_the_law_of_lengths():
    limit, rows, params, drafter = 30, 4000, PARAMS["plain"], DRAFTERS["same weights"]
    keys, other_keys = (keys_of(rows, limit + LONGEST_DRAFT, seed) for seed in (1, 2))
    law = length_law(params, limit)
    for draft_keys in (keys, other_keys):
        tokens = decode(params, drafter, finished_only, limit, keys, draft_keys)[0]
        assert_law(np.bincount((tokens >= 0).sum(1), minlength=limit + 1)[1:], law)


@pytest.mark.parametrize("distance", [0.05, 0.5, 2.0])
def test_acceptance_rate_equals_exact_value(distance):
    """Gumbel-max picks token i for p and q at once with chance 1 / sum_j max(p_j / p_i, q_j / q_i),
    as i wins the races of exponential clocks of rates p and of rates q."""
    count = 10_000
    keys = keys_of(count, 2, seed=3)
    for seed in range(3):
        log_p = (random_table(seed + 10, 10)[0] * 1.5).log_softmax(-1)
        log_q = (log_p + distance * random_table(seed + 20, 10)[0]).log_softmax(-1)
        p, q = log_p.exp().numpy(), log_q.exp().numpy()
        distance_tv = np.abs(p - q).sum() / 2
        together = 1 / np.maximum(p / p[:, None], q / q[:, None]).sum(1)
        exact = together.sum()
        assert exact >= (1 - distance_tv) / (1 + distance_tv)
        zero = torch.zeros(count, dtype=torch.int64)
        draft = sample(log_q.expand(count, 10), keys[:, 0], zero, SamplingParams())[0]
        expanded, ones = log_p.expand(2 * count, 10), np.ones(count, np.int64)
        generated = torch.arange(2).repeat(count)
        sampled = sample(expanded, keys.view(-1, 4), generated, SamplingParams())
        got = read(sampled)
        accepted = int(num_accepted(got.token, draft.numpy(), ones).sum())
        assert stats.binomtest(accepted, count, exact).pvalue > 1e-4
        # Accepted or refused, the token has p's law, and so has the one after it.
        for token in got.token.reshape(-1, 2).T:
            assert_law(np.bincount(token, minlength=10), p)
