"""Time of the host in a forward: python benchmarks/host_time.py [--json OUT] [--rows 16,128,512]

The real engine and proposer, with a runner that computes nothing and has the text of each row:
scheduling, looking for proposals, planning windows and taking in what was accepted. Prompts of 300
tokens in groups of 8 rows, drafts of 4,000 tokens of which 3% are wrong, so that rows leave their
drafts and find back. Processor time of one core. Noise counters and the input of a graph are timed
separately. "Meanwhile" is what a rollout does while a GPU computes; for all else a GPU waits.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
import torch

from benchmarks.shared import write_json
from bubblespec.draft.proposer import Proposer, make_proposer
from bubblespec.draft.store import History
from bubblespec.engine.batch import Batch, Load
from bubblespec.engine.engine import Engine
from bubblespec.engine.graphs import FIELDS, ForwardGraphs, padded
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.noise import stream_counters
from bubblespec.engine.packing import PAGE, CachePacking
from bubblespec.engine.pages import Pages
from bubblespec.engine.ragged import ragged
from bubblespec.engine.sampling import Drawn, SamplingParams
from bubblespec.planner.costs import CostModel
from bubblespec.types import Draft, Row, SampleId

PROMPT, DRAFT, GROUP, WRONG = 300, 4000, 8, 0.03
WINDOW = 8  # draft tokens of a row in a forward, on average: there is room for no more
MAX_LENGTH = 6000
VOCABULARY = 32000
NUM_WARM = 5  # forwards before those that count
FOLD = 6  # query heads of a key/value head
COST_S = (1.0, 0.0, 1e-7)  # of a forward, a row and a token: drafts always pay


class KnownText:
    """A `Runner` that computes nothing: row n generates texts[n]. Takes note of its own time."""

    depth = 0

    def __init__(self, texts: np.ndarray, max_num_batched_tokens: int):
        self.texts, self.max_num_batched_tokens = texts, max_num_batched_tokens
        self.num_slots, self.max_length = len(texts), MAX_LENGTH
        self.own_s, self.pages = 0.0, None

    def launch(self, batch: Batch, params: SamplingParams) -> Callable[[], Drawn]:
        begin_s = time.thread_time()
        row, offset = ragged(batch.num_draft + 1)
        text = self.texts[batch.slots[row], batch.generated[row] + offset]
        drawn = Drawn(text, np.zeros((2, len(text)), np.float32))
        self.own_s += time.thread_time() - begin_s
        return lambda: drawn

    def place(self, slot: int, row: Row) -> None:
        pass

    def reset(self) -> None:
        """Nothing is kept."""

    def share(self, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> None:
        pass


def make_rows(num_rows: int, rng: np.random.Generator) -> tuple[list[Row], np.ndarray, list[Draft]]:
    """Return rows in groups, their texts, int64 [rows, tokens], and their drafts."""
    texts = rng.integers(2, VOCABULARY, (num_rows, MAX_LENGTH - PROMPT))
    rows, drafts = [], []
    for number, text in enumerate(texts):
        prompt = tuple(np.random.default_rng(number // GROUP).integers(2, VOCABULARY, PROMPT))
        name = SampleId(number // GROUP, 0, number % GROUP)
        rows.append(Row(name, prompt, MAX_LENGTH - PROMPT))
        draft = text[:DRAFT].copy()
        wrong = rng.random(DRAFT) < WRONG
        draft[wrong] = rng.integers(2, VOCABULARY, int(wrong.sum()))
        drafts.append(Draft(draft.astype(np.int32), True, 0))
    return rows, texts, drafts


def start(rows: list[Row], drafts: list[Draft | None]) -> tuple[Proposer, float]:
    """Return a proposer that tracks the rows, and the seconds of starting it."""
    parameters = np.zeros_like(CostModel().parameters)
    parameters[:3] = COST_S
    cost = CostModel.from_parameters(parameters)
    proposer = make_proposer(["bubble", "suffix"], History(1), cost, has_drafts=True)
    begin_s = time.perf_counter()
    proposer.begin()
    for row, draft in zip(rows, drafts, strict=True):
        row.draft = draft
        proposer.track(row, version=1)
    return proposer, time.perf_counter() - begin_s


def step_seconds(num_rows: int, num_forwards: int, has_drafts: bool) -> tuple[np.ndarray, float]:
    """Return seconds of the host in each forward, and tokens that a row gains in one.

    Seconds are without the runner's, float64 [num_forwards, 2]: the first column is time for which
    a GPU waits, the second is meanwhile.
    """
    rows, texts, drafts = make_rows(num_rows, np.random.default_rng(num_rows))
    runner = KnownText(texts, (1 + WINDOW) * num_rows)
    engine, params = Engine(runner), SamplingParams(1.0)
    proposer = start(rows, drafts)[0] if has_drafts else None
    engine.add(rows)
    while len(engine.rows) < num_rows or (engine.lengths <= PROMPT).any():
        engine.step(params, proposer)
    seconds, gained, cost = [], int(engine.lengths.sum()), CostModel()
    load = Load(num_rows, num_rows, 0, num_rows * PROMPT, 0, 0)

    def meanwhile() -> None:
        begin_s = time.thread_time()
        cost.observe(load, 1.0)
        if proposer is not None:
            proposer.catch_up(is_free=True)
        seconds.append([0.0, time.thread_time() - begin_s])

    for _ in range(NUM_WARM + num_forwards):
        runner.own_s, begin_s = 0.0, time.thread_time()
        _, load = engine.step(params, proposer, None, meanwhile)
        seconds[-1][0] = time.thread_time() - begin_s - runner.own_s - seconds[-1][1]
    gained = (int(engine.lengths.sum()) - gained) / num_rows / len(seconds)
    assert len(engine.rows) == num_rows and engine.lengths.max() < PROMPT + DRAFT
    return np.array(seconds[NUM_WARM:]), gained


def runner_seconds(num_rows: int, count: int = 50) -> float:
    """Return the median seconds of noise counters and a graph's input, a window for each row."""
    length = -(-MAX_LENGTH // PAGE) * PAGE
    pages = Pages(num_rows, length, num_rows * (length // PAGE), PAGE)
    cache, rng = KVCache(num_rows, length, pages=pages), np.random.default_rng(0)
    starts = rng.integers(PROMPT, DRAFT, num_rows)
    fed, seconds = 1 + WINDOW, []
    forward = SimpleNamespace(min_tokens=1, fold=FOLD, is_invariant=False)
    known, tokens = ForwardGraphs(forward, cache, num_rows * fed), num_rows * fed
    pages.grow(starts + fed)
    slot, offset = ragged(np.full(num_rows, fed))
    index = np.array((slot, starts[slot] + offset))
    for _ in range(count):
        begin_s = time.thread_time()
        packing = CachePacking(cache, starts, np.full(num_rows, fed), index, torch.device("cpu"))
        shape, zeros = known.shape_of(packing), np.zeros(tokens, np.int64)
        padded(slot, packing, shape, np.zeros((FIELDS, shape.tokens + 1), np.int32))
        stream_counters(slot, zeros, zeros, index[1])
        seconds.append(time.thread_time() - begin_s)
    return float(np.median(seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("--rows", default="16,128,512")
    parser.add_argument("--forwards", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    columns = (f"{name:>8}" for name in ("ms", "90th", "m.while", "90th"))
    print(f"{'rows':>5} {'':30} {' '.join(columns)} tokens per row and forward")
    for num_rows in map(int, arguments.rows.split(",")):
        for suffix, has_drafts in (("_none", False), ("", True)):
            seconds, gained = step_seconds(num_rows, arguments.forwards, has_drafts)
            kind = "own drafts and suffix matches" if has_drafts else "no drafts"
            ms, high = 1e3 * np.quantile(seconds, (0.5, 0.9), axis=0)
            of_rows = f"{ms[0]:8.2f} {high[0]:8.2f} {ms[1]:8.2f} {high[1]:8.2f} {gained:8.1f}"
            print(f"{num_rows:5} {kind:30} {of_rows}", flush=True)
            name = f"ms{suffix}_{num_rows}"
            result[name], result[f"{name}_meanwhile"] = 1e3 * np.median(seconds, axis=0)
            result[f"{name}_p90"] = 1e3 * float(np.quantile(seconds[:, 0], 0.9))
        result[f"runner_ms_{num_rows}"] = runner_ms = 1e3 * runner_seconds(num_rows)
        print(f"{num_rows:5} {'noise, input of a graph':30} {runner_ms:8.2f}")
    rows, _, drafts = make_rows(256, np.random.default_rng(0))
    result["start_s"] = start(rows, drafts)[1]
    tokens = f"{256 * DRAFT / 1e6:.2f} M draft tokens"
    print(f"start of a rollout with {tokens}: {result['start_s']:.3f} s")
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
