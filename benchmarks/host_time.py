"""Time of the host in a forward: python benchmarks/host_time.py [--json OUT] [--rows 16,128,512]

The real engine and proposer, with a runner that computes nothing and has the text of each row:
scheduling, looking for proposals, planning windows and taking in what was accepted. Prompts of 300
tokens in groups of 8 rows, drafts of 4,000 tokens of which 3% are wrong, so that rows leave their
drafts and find back. Processor time of one core, the packing of plans included.

A GPU is a clock: a forward takes --forward-ms, and begins when it has been launched and the one
before it has ended. It waits for the host between two forwards. At depth 0 that is all of the
host's time but what is done meanwhile; at depth 1 what exceeds a forward. Launching two graphs and
two copies takes the host some 0.03 ms more (CUDA's, which is not here).
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
import torch

from benchmarks.shared import write_json
from bubblespec.draft.proposer import Proposer, make_proposer
from bubblespec.draft.store import TextStore
from bubblespec.engine.arrays import ragged
from bubblespec.engine.batch import (
    Batch,
    Plan,
    RowPosition,
    RowUpdates,
    Runner,
    SamplerOutput,
    SamplingParams,
    draft_of,
    num_accepted,
)
from bubblespec.engine.engine import Engine
from bubblespec.engine.step_graphs import packed
from bubblespec.planner.costs import CostModel
from bubblespec.types import Draft, Load, Row, SampleId

PROMPT, DRAFT, GROUP, WRONG = 300, 4000, 8, 0.03
WINDOW = 8  # draft tokens of a row in a forward, on average: there is room for no more
MAX_LENGTH = 6000
VOCABULARY = 32000
NUM_WARM = 5  # forwards before those that count
MAX_Q = 8  # tokens of a sequence in a graph
COST_S = (1.0, 0.0, 1e-7)  # of a forward, a row and a token: drafts always pay


class KnownText(Runner):
    """Row n generates texts[n], int64 [rows, tokens], on a GPU that is a clock."""

    pages, supports_overlap = None, True
    depth = 1

    def __init__(self, rows: list[Row], texts: np.ndarray, max_num_batched_tokens: int):
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_slots, self.max_length = len(texts), MAX_LENGTH
        prompts = np.array([row.prompt for row in rows])
        self.text = np.hstack((prompts, texts))
        self.length = np.full(len(texts), 0)
        self.forward_s = self.own_s = self.waited_s = 0.0
        self.free_s = self.idle_s = 0.0  # when the last forward ends, and time between forwards

    def now_s(self) -> float:
        """Return the host's time: processor time without this class's own, and waits."""
        return time.thread_time() - self.own_s + self.waited_s

    def launch_ahead(
        self, plan: Plan, texts: RowUpdates, params: SamplingParams, batch: Batch | None
    ) -> Callable[[], SamplerOutput]:
        packed(plan, MAX_Q)
        now_s, begin_s = self.now_s(), time.thread_time()
        self.idle_s += max(now_s - self.free_s, 0.0)
        self.free_s = ends_s = max(now_s, self.free_s) + self.forward_s
        self.length[texts.slots] = texts.length
        slots, sampled = plan.slots, plan.num_sampled
        total = np.full(len(slots), MAX_LENGTH)
        of_rows = self.text, slots, self.length[slots], total, np.ones(len(slots), bool)
        num_draft, draft = draft_of(plan, RowPosition(*of_rows))
        row, offset = ragged(sampled)
        token = self.text[slots[row], np.minimum(self.length[slots][row] + offset, MAX_LENGTH - 1)]
        counts = offset <= num_draft[row]
        self.length[slots] += 1 + num_accepted(token[counts], draft, num_draft)
        drawn = SamplerOutput(token, np.zeros(len(token), np.float32))
        self.own_s += time.thread_time() - begin_s

        def wait() -> SamplerOutput:
            self.waited_s += max(ends_s - self.now_s(), 0.0)
            return drawn

        return wait

    def place(self, slot: int, row: Row) -> None:
        pass

    def reset(self) -> None:
        """Nothing is kept."""

    def share(
        self, source: np.ndarray, target: np.ndarray, length: np.ndarray, states: np.ndarray
    ) -> None:
        pass


def make_rows(num_rows: int, rng: np.random.Generator) -> tuple[list[Row], np.ndarray, list[Draft]]:
    """Return rows in groups, their texts, int64 [rows, tokens], and their drafts."""
    texts = rng.integers(2, VOCABULARY, (num_rows, MAX_LENGTH - PROMPT))
    rows, drafts = [], []
    for number, text in enumerate(texts):
        prompt = tuple(np.random.default_rng(number // GROUP).integers(2, VOCABULARY, PROMPT))
        name = SampleId(number // GROUP, 0, number % GROUP)
        rows.append(Row(name, prompt, MAX_LENGTH - PROMPT, number=number))
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
    proposer = make_proposer(["bubble", "suffix"], TextStore(1), cost, has_drafts=True)
    begin_s = time.perf_counter()
    proposer.begin()
    for row, draft in zip(rows, drafts, strict=True):
        row.draft = draft
        proposer.track(row, version=1)
    return proposer, time.perf_counter() - begin_s


def step_seconds(
    num_rows: int, num_forwards: int, has_drafts: bool, depth: int = 0, forward_s: float = 1e-3
) -> tuple[np.ndarray, float]:
    """Return seconds of each forward, and tokens that a row gains in one.

    Of the host without what it does meanwhile, and for which the GPU waits, float64 [num_forwards,
    2]."""
    rows, texts, drafts = make_rows(num_rows, np.random.default_rng(num_rows))
    runner = KnownText(rows, texts, (1 + WINDOW) * num_rows)
    runner.depth, runner.forward_s = depth, forward_s
    engine, params = Engine(runner), SamplingParams(1.0)
    proposer = start(rows, drafts)[0] if has_drafts else None
    engine.add(rows)
    while len(engine.rows) < num_rows or (engine.lengths <= PROMPT).any():
        engine.step(params, proposer)
    seconds, gained, cost = [], int(engine.lengths.sum()), CostModel()
    load, meanwhile_s = Load(num_rows, num_rows, 0, num_rows * PROMPT, 0, 0), [0.0]

    def meanwhile() -> None:
        begin_s = time.thread_time()
        cost.observe(load, 1.0)
        if proposer is not None:
            proposer.catch_up()
        meanwhile_s[0] = time.thread_time() - begin_s

    runner.free_s = runner.now_s()
    for _ in range(NUM_WARM + num_forwards):
        idle_s, began_s = runner.idle_s, runner.now_s() - runner.waited_s
        _, load = engine.step(params, proposer, None, meanwhile)
        host_s = runner.now_s() - runner.waited_s - began_s
        seconds.append([host_s - meanwhile_s[0], runner.idle_s - idle_s])
    gained = (int(engine.lengths.sum()) - gained) / num_rows / len(seconds)
    assert len(engine.rows) == num_rows and engine.lengths.max() < PROMPT + DRAFT
    return np.array(seconds[NUM_WARM:]), gained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("--rows", default="16,128,512")
    parser.add_argument("--forwards", type=int, default=60)
    parser.add_argument("--forward-ms", type=float, default=1.0, help="of the GPU")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    columns = (f"{name:>8}" for name in ("host ms", "90th", "GPU waits", "90th"))
    print(f"{'rows':>5} {'depth':>5} {'':30} {' '.join(columns)} tokens per row and forward")
    cases = itertools.product(map(int, arguments.rows.split(",")), (0, 1), (False, True))
    for num_rows, depth, has_drafts in cases:
        given = has_drafts, depth, arguments.forward_ms / 1e3
        seconds, gained = step_seconds(num_rows, arguments.forwards, *given)
        kind = "own drafts and suffix matches" if has_drafts else "no drafts"
        ms, high = 1e3 * np.quantile(seconds, (0.5, 0.9), axis=0)
        of_rows = f"{ms[0]:8.2f} {high[0]:8.2f} {ms[1]:9.2f} {high[1]:8.2f} {gained:8.1f}"
        print(f"{num_rows:5} {depth:5} {kind:30} {of_rows}", flush=True)
        name = f"{'drafts' if has_drafts else 'none'}_{num_rows}_depth_{depth}"
        result[f"host_ms_{name}"], result[f"gpu_waits_ms_{name}"] = ms.tolist()
    rows, _, drafts = make_rows(256, np.random.default_rng(0))
    result["start_s"] = start(rows, drafts)[1]
    tokens = f"{256 * DRAFT / 1e6:.2f} M draft tokens"
    print(f"start of a rollout with {tokens}: {result['start_s']:.3f} s")
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
