"""Cost and yield of suffix drafts on synthetic text: python benchmarks/suffix.py [--json OUT]

The text is a Markov chain with four successors a token. A group's responses are edited copies of one reference, drafts are
edited copies of the responses, and an edit replaces, inserts or deletes one token. All rows of a group decode in lockstep.
"""

import argparse
import json
import time

import numpy as np

from bubblespec.speculate.suffix import SOURCE_NAMES, GroupIndex

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


def play(index: GroupIndex, responses: list[np.ndarray], limit: int) -> dict[str, float]:
    """Decode a group's known responses in lockstep. Counts over its rows' passes; nanoseconds of propose and of extend."""
    names = ("passes", "tokens", "proposed", "accepted", "propose_ns", "extend_ns", *SOURCE_NAMES)
    count = dict.fromkeys(names, 0)
    done = [0] * len(responses)
    active = list(range(len(responses)))
    while active:
        started = time.perf_counter_ns()
        proposals = [index.propose(j, limit) for j in active]
        count["propose_ns"] += time.perf_counter_ns() - started
        accepted_tokens = []
        for j, (draft, _, source) in zip(active, proposals, strict=True):
            rest = responses[j][done[j] : done[j] + limit + 1]
            n = min(len(draft), len(rest))
            accepted = int(np.argmin(np.append(draft[:n] == rest[:n], False)))
            accepted_tokens.append(rest[: accepted + 1])
            done[j] += len(accepted_tokens[-1])
            count["tokens"] += len(accepted_tokens[-1])
            count["proposed"] += len(draft)
            count["accepted"] += accepted
            count[SOURCE_NAMES[source]] += accepted
        started = time.perf_counter_ns()
        for j, tokens in zip(active, accepted_tokens, strict=True):
            index.extend(j, tokens)
        count["extend_ns"] += time.perf_counter_ns() - started
        count["passes"] += len(active)
        active = [j for j in active if done[j] < len(responses[j])]
    return count


def measure(length: int, alphabet: int, rates: tuple[float, float, float], drafts: bool = True) -> dict:
    """One workload. Costs are those of the cheapest group, since other processes only ever add to them."""
    rng = np.random.default_rng(0)
    successors = rng.integers(alphabet, size=(alphabet, 4))
    counts = []
    for _ in range(GROUPS):
        reference = markov_text(rng, successors, length)
        responses = [edit(rng, reference, SIBLING_RATES, alphabet) for _ in range(SAMPLES)]
        history = [(edit(rng, reference, SIBLING_RATES, alphabet), float(i % 2)) for i in range(SAMPLES)]
        drafted = [edit(rng, response, rates, alphabet) for response in responses]
        index = GroupIndex(history)
        started = time.perf_counter_ns()
        index.propose(-1, 1)  # of a row that does not exist: indexes the history
        history_ns = time.perf_counter_ns() - started
        started = time.perf_counter_ns()
        for j, tokens in enumerate(drafted if drafts else ()):
            index.add_draft(j, tokens)
        draft_ns = time.perf_counter_ns() - started
        count = play(index, responses, WINDOW)
        count["draft_us"] = draft_ns / sum(map(len, drafted)) / 1000
        count["history_us"] = history_ns / sum(len(tokens) for tokens, _ in history) / 1000
        counts.append(count)
    total = {key: sum(count[key] for count in counts) for key in counts[0]}
    return {
        "length": length,
        "alphabet": alphabet,
        "rates": list(rates) if drafts else None,
        "propose_us": min(c["propose_ns"] / c["passes"] for c in counts) / 1000,
        "extend_us": min(c["extend_ns"] / c["tokens"] for c in counts) / 1000,
        "draft_us": min(c["draft_us"] for c in counts),
        "history_us": min(c["history_us"] for c in counts),
        "tokens_per_pass": total["tokens"] / total["passes"],
        "accepted_share": total["accepted"] / total["proposed"],
        "sources": {name: total[name] / total["accepted"] for name in SOURCE_NAMES},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    print(
        f"{GROUPS * SAMPLES} rows in groups of {SAMPLES}, up to {WINDOW} proposed tokens; microseconds a proposal, and a token of"
    )
    print("live rows, drafts and history; accepted: of the proposed tokens; by source: of the accepted tokens, in percent")
    print(
        f"{'length':>6} {'alphabet':>8} {'repl/ins/del %':>15} {'propose':>8} {'extend':>7} {'draft':>6} {'history':>7} "
        f"{'tokens/pass':>11} {'accepted':>8}  {'/'.join(SOURCE_NAMES)}"
    )
    rows = []
    for length, alphabet in SIZES:
        for rates in (*DRAFT_RATES, None):
            r = measure(length, alphabet, rates or SIBLING_RATES, drafts=rates is not None)
            label = "/".join(f"{100 * rate:g}" for rate in rates) if rates else "no drafts"
            shares = "/".join(f"{100 * share:.0f}" for share in r["sources"].values())
            print(
                f"{length:6} {alphabet:8} {label:>15} {r['propose_us']:8.2f} {r['extend_us']:7.2f} {r['draft_us']:6.2f} "
                f"{r['history_us']:7.2f} {r['tokens_per_pass']:11.2f} {r['accepted_share']:8.2f}  {shares}",
                flush=True,
            )
            rows.append(r)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
