"""Every forward of a rollout on one rank: what it had to do, for whom, and how long it took."""

import time
from typing import NamedTuple

import numpy as np

from bubblespec.records import Load


class Forward(NamedTuple):
    """begin_s, end_s: seconds since the rollout began; a forward begins where the one before, or a wait, has ended, so that the
    host's work between forwards is in it. engine_s: in `Generator.step`, less propose_s, which finding proposals and taking in
    what came of them took. rows ... draft_tokens: see `Load`. own_rows, ahead_rows: rows of this step, and of coming steps, that
    were unfinished before it; looked_up_rows: rows for which proposals were looked for."""

    begin_s: float
    end_s: float
    engine_s: float
    propose_s: float
    rows: int
    tokens: int
    wide_rows: int
    positions: int
    prompt_tokens: int
    draft_tokens: int
    own_rows: int
    ahead_rows: int
    looked_up_rows: int


class ForwardLog:
    """The forwards of one rollout, in order."""

    def __init__(self):
        self.forwards: list[Forward] = []
        self.begin()

    def begin(self) -> None:
        """The rollout begins: its time counts from here."""
        self._zero = self._last = time.perf_counter()

    def add(
        self,
        begin: float,
        end: float,
        load: Load,
        own_rows: int,
        ahead_rows: int = 0,
        propose_s: float = 0.0,
        looked_up_rows: int = 0,
    ) -> None:
        """One forward. begin, end: around `Generator.step`, by time.perf_counter."""
        spent = (self._last - self._zero, end - self._zero, end - begin - propose_s, propose_s)
        self.forwards.append(Forward(*spent, *load, own_rows, ahead_rows, looked_up_rows))
        self._last = end

    def waited(self) -> None:
        """A wait has ended: its time belongs to no forward."""
        self._last = time.perf_counter()

    def numbers(self) -> np.ndarray:
        """All of it, float64 [forwards, fields of Forward]. Counts are exact in it."""
        return np.array(self.forwards, np.float64).reshape(-1, len(Forward._fields))
