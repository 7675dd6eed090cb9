"""Rows with turns: stop tokens pause them, observations come in between."""

import numpy as np

from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.types import Row
from tests.helpers.generation import STOP
from tests.helpers.models import VOCAB

STOPS = (*STOP, *range(20, 36))  # so that turns are short
PARAMS = SamplingParams(stop_token_ids=STOPS)
SEED, LIMIT = 5, 30


def observation(row: Row, turn: int) -> np.ndarray | None:
    """Return the tokens after a row's turn (from 1): empty, too long, or None where it is over."""
    random = np.random.default_rng((*row.id, turn))
    if turn > 2 and row.id.sample:
        return None
    lengths = (0, 1, 3, 12, LIMIT)
    return random.integers(1, VOCAB, lengths[random.integers(len(lengths) - (turn < 2))])


def play(
    engine: Engine, rows: list[Row], random: np.random.Generator, proposer=None, many=4
) -> None:
    """Generate rows to their end; they come late, fewer than `many` at a time, wait for
    observations, leave and come back."""
    queue, turns, waiting, outside = list(rows), dict.fromkeys(rows, 0), [], []
    while queue or waiting or outside or not engine.is_idle:
        coming, queue = queue[: (count := int(random.integers(many)))], queue[count:]
        engine.add(coming)
        limit = None if random.random() < 0.5 else int(random.integers(1, 9))
        is_waiting = engine.is_waiting
        finished, load = engine.step(PARAMS, proposer, limit)
        # Where pages are few, a row that could be fed may be preempted instead.
        assert (load is None) == is_waiting or engine.pages is not None
        waiting += [row for row in finished if row.finish == "stop" and row.has_turns]
        for row in [row for row in waiting if load is None or random.random() < 0.3]:
            waiting.remove(row)
            turns[row] += 1
            if (ids := observation(row, turns[row])) is None:
                engine.drop(row)
            else:
                engine.resume(row, ids)
        for row in [row for row in (*engine.rows, *engine.queue) if row.finish is None]:
            if random.random() < 0.03:
                engine.drop(row)
                outside.append(row)
        for row in [row for row in outside if random.random() < 0.3 or load is None]:
            outside.remove(row)
            engine.add([row])
