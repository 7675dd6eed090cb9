"""Cost and yield of suffix drafts on synthetic text: python benchmarks/suffix.py [--json OUT]

The text is a Markov chain with four successors a token. A group's responses are edited copies of one reference, drafts are
edited copies of the responses, and an edit replaces, inserts or deletes one token. All rows of a group decode in lockstep.
"""

import argparse
import json
import time

import numpy as np

from bubblespec.drafts.suffix import SOURCE_NAMES, GroupIndex

GROUPS, SAMPLES, WINDOW = 8, 8, 16  # 64 rows, up to 16 draft tokens a pass
SIZES = ((300, 300), (300, 50_000), (4000, 300), (4000, 50_000))  # response tokens, alphabet
DRAFT_RATES = ((0.02, 0, 0), (0.02, 0.02, 0.02), (0.1, 0, 0), (0.05, 0.05, 0.05))  # replaced, inserted, deleted
SIBLING_RATES = (0.05, 0.05, 0.05)


def markov_text(rng: np.random.Generator, successors: np.ndarray, length: int) -> np.ndarray:
    """A walk, int64 [length]. successors: int [V, 4]."""
    choice = rng.choice(4, size=length, p=(0.7, 0.2, 0.07, 0.03))
    text = np.empty(length, np.int64)
    token = 0
    for i in range(length):
        token = text[i] = successors[token, choice[i]]
    return text


def edit(rng: np.random.Generator, text: np.ndarray, rates: tuple[float, float, float], alphabet: int) -> np.ndarray:
    """A copy with tokens replaced, inserted and deleted at these rates."""
    replaced, inserted, deleted = rates
    change = rng.random(len(text))
    text = np.where(change < replaced, rng.integers(alphabet, size=len(text)), text)
    keep = change < 1 - deleted
    place = np.flatnonzero(rng.random(keep.sum()) < inserted)
    return np.insert(text[keep], place, rng.integers(alphabet, size=len(place)))


def decode(index: GroupIndex, responses: list[np.ndarray], limit: int = WINDOW) -> dict[str, float]:
    """Play a group's responses through its index: counts of rows' passes, tokens, proposed and accepted tokens, and seconds."""
    count = dict.fromkeys(("passes", "tokens", "proposed", "accepted", "propose_s", "extend_s"), 0.0)
    count |= dict.fromkeys(SOURCE_NAMES, 0.0)
    done = [0] * len(responses)
    while any(done[j] < len(response) for j, response in enumerate(responses)):
        for j, response in enumerate(responses):
            if done[j] == len(response):
                continue
            started = time.perf_counter()
            draft, _, source = index.propose(j, limit)
            proposed_at = time.perf_counter()
            following = response[done[j] : done[j] + len(draft)]
            wrong = np.flatnonzero(draft[: len(following)] != following)
            accepted = int(wrong[0]) if len(wrong) else len(following)
            new = response[done[j] : done[j] + accepted + 1]
            extending_at = time.perf_counter()
            index.extend(j, new)
            count["extend_s"] += time.perf_counter() - extending_at
            count["propose_s"] += proposed_at - started
            done[j] += len(new)
            count["passes"] += 1
            count["tokens"] += len(new)
            count["proposed"] += len(draft)
            count["accepted"] += accepted
            count[SOURCE_NAMES[source]] += accepted
    return count


def measure(length: int, alphabet: int, rates: tuple, drafts: bool = True, history: bool = True, groups: int = GROUPS) -> dict:
    """All groups of one workload, one after the other."""
    rng = np.random.default_rng(0)
    successors = rng.integers(alphabet, size=(alphabet, 4))
    total: dict[str, float] = {}
    for _ in range(groups):
        reference = markov_text(rng, successors, length)
        responses = [edit(rng, reference, SIBLING_RATES, alphabet) for _ in range(SAMPLES)]
        drafted = [edit(rng, response, rates, alphabet) for response in responses]
        old = [(edit(rng, reference, SIBLING_RATES, alphabet), float(i % 2)) for i in range(SAMPLES)]
        started = time.perf_counter()
        index = GroupIndex(old if history else ())
        for j, tokens in enumerate(drafted):
            if drafts:
                index.add_draft(j, tokens)
        count = decode(index, responses) | {"build_s": time.perf_counter() - started}
        count["build_s"] = 0.0
        total = {key: total.get(key, 0.0) + value for key, value in count.items()}
    return {
        "length": length,
        "alphabet": alphabet,
        "rates": list(rates),
        "propose_us": total["propose_s"] / total["passes"] * 1e6,
        "extend_us_per_token": total["extend_s"] / total["tokens"] * 1e6,
        "tokens_per_pass": total["tokens"] / total["passes"],
        "accepted_share": total["accepted"] / max(total["proposed"], 1),
        "sources": {name: total[name] / max(total["accepted"], 1) for name in SOURCE_NAMES},
    }


if __name__ == "__main__":
    for length, alphabet in SIZES:
        for rates in DRAFT_RATES:
            for d, h in ((1, 1), (1, 0), (0, 1), (0, 0)):
                r = measure(length, alphabet, rates, d, h, groups=1 if length > 1000 else 4)
                print(length, alphabet, rates, d, h, {k: round(v, 2) if not isinstance(v, dict) else {a: round(b, 2) for a, b in v.items()} for k, v in r.items() if k not in ("length", "alphabet", "rates")}, flush=True)
