"""What weights of other steps say: the response up to a first mismatch, then an edited text.

Each token of a response is another one under other weights with a chance of 1 / mean_run. Whether a
token stays is one number per position, compared with that chance: drafts by all older weights get
equally far.

After the mismatch the text continues like the response, with tokens replaced, inserted and omitted,
so that positions shift; suffix matching finds its way in it for a while and loses it again. All of
this is a function of (seed, step, uid, sample), the distance, and the tokens so far.
"""

import math
from dataclasses import dataclass

import numpy as np

VOCABULARY = 1 << 15  # of synthetic tokens: so many that no text has an n-gram twice by chance
STOP = VOCABULARY  # the token that ends a synthetic response
TEXT, MISMATCH, EDITS = range(3)  # uses of random numbers
LATER = 1 << 12  # above all sample numbers: the k-th later version of a sample is named + k * LATER
# Mean acceptance length of `SuffixIndex` on texts of which such a share is edited, with windows of
# 128 tokens (18,000 tokens each).
ACCEPT_LENGTH = (1.0, 1.10, 1.18, 1.29, 1.44, 1.68, 2.01, 2.60, 3.78, 7.24, 14.4)
EDITED = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)

Key = tuple[int, int, int]
"""Step, uid and sample of a response."""


@dataclass(frozen=True)
class DraftModel:
    """How the texts of other weights differ from a response."""

    mean_run: float = 500.0
    """Tokens to the first mismatch with other weights; infinite for none."""
    accept_length: float = 2.0
    """About what a row gains per forward after it, by suffix matches."""
    seed: int = 0

    def text(self, key: Key, true: np.ndarray, limit: int, stop: int, distance: int) -> np.ndarray:
        """All that weights `distance` updates away from the response's say, int64 [L]; older ones
        if it is negative. Two later versions have nothing in common after their first mismatches.

        true: int64 [L], the response, cut at `limit` tokens if its last is not `stop`.
        """
        step, uid, sample = key
        name = (step, uid, sample + max(distance, 0) * LATER)
        chance = -math.expm1(-min(abs(distance), 1) / self.mean_run)
        leaves = keyed_random(self.seed, *name, MISMATCH).random(len(true)) < chance
        at = int(leaves.argmax())
        return self.diverged(name, true, limit, stop, at) if leaves[at] else true

    def continued(
        self, key: Key, text: np.ndarray, limit: int, stop: int, so_far: np.ndarray
    ) -> np.ndarray:
        """What weights that would say `text` say if they continue `so_far`, with it: `text` itself,
        or if `so_far` has left it, a text like it."""
        known = len(so_far)
        if np.array_equal(so_far, text[:known]):
            return text
        if known >= len(text):  # it has outgrown it
            return np.append(so_far, stop)[:limit]
        return np.concatenate((so_far, self.diverged(key, text, limit, stop, known)[known:]))

    def diverged(self, key: Key, true: np.ndarray, limit: int, stop: int, at: int) -> np.ndarray:
        """The text whose first mismatch is token `at`."""
        share = float(np.interp(self.accept_length, ACCEPT_LENGTH, EDITED))
        if self.accept_length > ACCEPT_LENGTH[-1]:
            share *= ACCEPT_LENGTH[-1] / self.accept_length
        random = keyed_random(self.seed, *key, EDITS)
        return edited(true, limit, stop, at, share=share, random=random)


def edited(
    true: np.ndarray, limit: int, stop: int, at: int, *, share: float, random: np.random.Generator
) -> np.ndarray:
    """A text whose first mismatch with `true` is token `at`; after it a share of its tokens is
    replaced, inserted or omitted, all replaced with a share of 1.

    It ends with `stop` if `true` does and there is room for it within `limit` tokens.
    """
    rest = true[at:-1] if true[-1] == stop else true[at:]
    edit = np.where(random.random(len(rest)) < share, random.integers(1, 4, len(rest)), 0)
    keep, replace, insert, omit = range(4)
    if share == 1.0:
        edit[:] = replace
    if len(rest) and edit[0] in (keep, omit):
        edit[0] = replace
    copies = np.array([1, 1, 2, 0])[edit]
    text = np.repeat(rest, copies)
    new = (np.cumsum(copies) - copies)[(edit == replace) | (edit == insert)]
    # Another token than the one in its place.
    text[new] = (text[new] + random.integers(1, VOCABULARY, len(new))) % VOCABULARY
    room = limit - at
    if true[-1] != stop:  # its end is beyond the limit, and so is the draft's
        missing = max(room - len(text), 0)
        text = np.concatenate((text, random.integers(0, VOCABULARY, missing)))
    elif len(text) < room:
        if not len(text):  # the mismatch is the stop token: the text continues for a token
            text = random.integers(0, VOCABULARY, 1)
        text = np.append(text, stop)
    return np.concatenate((true[:at], text[:room])).astype(np.int64)


def keyed_random(seed: int, step: int, uid: int, sample: int, use: int) -> np.random.Generator:
    """Random numbers of one use by one sample."""
    seeds = np.random.SeedSequence((seed, step, uid, sample, use))
    return np.random.Generator(np.random.Philox(seeds))
