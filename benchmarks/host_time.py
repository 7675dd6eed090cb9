"""Time of the host in a forward: python benchmarks/host_time.py [--json OUT] [--rows 16,128,512]

The real engine and proposer, with a runner that computes nothing and knows what each row is going
to say: what is measured is scheduling, looking for proposals, planning their windows and taking in
what was accepted. Prompts of 300 tokens in groups of 8 rows, drafts of 4,000 tokens of which 3% are
wrong, so that rows leave their drafts and find back. Processor time of one core. What a
`ModelRunner` does on the host apart from calling the model (noise keys and packing) is timed
separately.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
import torch

from benchmarks.shared import write_json
from bubblespec.draft.proposer import Proposer, make_proposer
from bubblespec.draft.store import History
from bubblespec.engine.batch import Batch
from bubblespec.engine.engine import Engine
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.noise import stream_keys
from bubblespec.engine.packing import pack_rows
from bubblespec.engine.ragged import ragged
from bubblespec.engine.sampling import SamplingParams, Verified
from bubblespec.planner.costs import CostModel
from bubblespec.types import Draft, Row, SampleId

PROMPT, DRAFT, GROUP, WRONG = 300, 4000, 8, 0.03
WINDOW = 8  # draft tokens of a row in a forward, on average: there is room for no more
MAX_LENGTH = 6000
VOCABULARY = 32000
NUM_WARM = 5  # forwards before those that count
COST_S = (1.0, 0.0, 1e-7)  # of a forward, a row and a token: drafts always pay


class KnownText:
    """A `Runner` that computes nothing: row n says texts[n]. Takes note of its own time."""

    def __init__(self, texts: np.ndarray, max_num_batched_tokens: int):
        self.texts, self.max_num_batched_tokens = texts, max_num_batched_tokens
        self.num_slots, self.max_length = len(texts), MAX_LENGTH
        self.own_s, self.pages = 0.0, None

    def forward(self, batch: Batch, params: SamplingParams) -> Verified:
        begin_s = time.thread_time()
        row, offset = ragged(batch.num_draft + 1)
        said = self.texts[batch.slots[row], batch.generated[row] + offset]
        drafted, place = ragged(batch.num_draft)
        first = np.cumsum(batch.num_draft + 1) - (batch.num_draft + 1)
        accepted = batch.num_draft.copy()
        wrong = (batch.draft != said[first[drafted] + place]).nonzero()[0]
        np.minimum.at(accepted, drafted[wrong], place[wrong])
        verified = Verified(accepted, said, np.zeros((2, len(said)), np.float32))
        self.own_s += time.thread_time() - begin_s
        return verified

    def place(self, slot: int, row: Row) -> None:
        pass

    def share(self, source: int, target: int, length: int) -> None:
        pass


def make_rows(num_rows: int, rng: np.random.Generator) -> tuple[list[Row], np.ndarray, list[Draft]]:
    """Rows in groups, what they are going to say, int64 [rows, tokens], and their drafts."""
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
    """A proposer that knows the rows, and the seconds that took."""
    parameters = np.zeros_like(CostModel().parameters)
    parameters[:3] = COST_S
    cost = CostModel.from_parameters(parameters)
    proposer = make_proposer("bubble+suffix", History(1), cost, has_drafts=True)
    begin_s = time.perf_counter()
    proposer.begin()
    for row, draft in zip(rows, drafts, strict=True):
        proposer.track(row, draft, version=1)
    return proposer, time.perf_counter() - begin_s


def step_seconds(num_rows: int, num_forwards: int, has_drafts: bool) -> np.ndarray:
    """Seconds of the host in each forward, the runner's left out, float64 [num_forwards]."""
    rows, texts, drafts = make_rows(num_rows, np.random.default_rng(num_rows))
    runner = KnownText(texts, (1 + WINDOW) * num_rows)
    engine, params = Engine(runner), SamplingParams(1.0)
    proposer = start(rows, drafts)[0] if has_drafts else None
    engine.add(rows)
    while len(engine.rows) < num_rows or (engine.lengths <= PROMPT).any():
        engine.step(params, proposer)
    seconds, gained = [], int(engine.lengths.sum())
    for _ in range(NUM_WARM + num_forwards):
        runner.own_s, begin_s = 0.0, time.thread_time()
        engine.step(params, proposer)
        seconds.append(time.thread_time() - begin_s - runner.own_s)
    gained = (int(engine.lengths.sum()) - gained) / num_rows / len(seconds)
    assert len(engine.rows) == num_rows and engine.lengths.max() < PROMPT + DRAFT
    kind = "own drafts and suffix matches" if has_drafts else "no drafts"
    ms = 1e3 * np.quantile(seconds[NUM_WARM:], (0.5, 0.9))
    print(f"{num_rows:5} {kind:30} {ms[0]:8.2f} {ms[1]:8.2f} {gained:8.1f}", flush=True)
    return np.array(seconds[NUM_WARM:])


def runner_seconds(num_rows: int, count: int = 50) -> float:
    """Median seconds of noise keys and packing for rows that each feed 8 tokens."""
    cache, rng = KVCache(num_rows, MAX_LENGTH), np.random.default_rng(0)
    starts = rng.integers(PROMPT, DRAFT, num_rows)
    names = [np.arange(num_rows)] * 3
    seconds = []
    for _ in range(count):
        begin_s = time.perf_counter()
        packing = pack_rows(cache, starts, np.full(num_rows, 8), torch.device("cpu"))
        assert packing.varlen.max_q == 8
        # Keys of 64 positions ahead are made at once: an eighth of the forwards makes them.
        stream_keys(0, *names, starts)
        seconds.append(time.perf_counter() - begin_s)
    return float(np.median(seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("--rows", default="16,128,512")
    parser.add_argument("--forwards", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    print(f"{'rows':>5} {'':30} {'ms':>8} {'90th':>8} {'tokens per row and forward':>8}")
    for num_rows in map(int, arguments.rows.split(",")):
        for suffix, has_drafts in (("_none", False), ("", True)):
            seconds = step_seconds(num_rows, arguments.forwards, has_drafts)
            result[f"ms{suffix}_{num_rows}"] = 1e3 * float(np.median(seconds))
            result[f"ms{suffix}_{num_rows}_p90"] = 1e3 * float(np.quantile(seconds, 0.9))
        result[f"runner_ms_{num_rows}"] = 1e3 * runner_seconds(num_rows)
        print(f"{num_rows:5} {'noise keys and packing':30} {result[f'runner_ms_{num_rows}']:8.2f}")
    rows, _, drafts = make_rows(256, np.random.default_rng(0))
    result["start_s"] = start(rows, drafts)[1]
    print(
        f"start of a rollout with {256 * DRAFT / 1e6:.2f} M draft tokens: {result['start_s']:.3f} s"
    )
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
