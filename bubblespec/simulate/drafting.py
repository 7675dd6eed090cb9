"""What a draft says that older weights made: the true response up to a first mismatch, and a text
that has left it after that.

While a draft follows the true response, each of its tokens is another one with a chance of 1 /
mean_run (times the age of the weights, where they drift). Whether a token stays is one number a
place, compared with that chance: a draft by older weights never gets further than one by newer
ones, and a draft that is continued under newer weights goes on from what it has.

After the mismatch the text goes on as the true one does, with tokens replaced, inserted and left
out, so that positions shift; suffix matching finds its way in it for a while and loses it again.
With tokens_a_pass = 1 it has nothing more in common. Each of these is a function of (seed, step,
uid, sample) and the weights' age alone.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

VOCABULARY = 1 << 15  # of made-up tokens: so many that a text has no n-gram twice by chance
STOP = VOCABULARY  # the token that ends a made-up response
TEXT, MISMATCH, EDITS = range(3)  # uses of random numbers
LATER = (
    1 << 12
)  # sample numbers are below it: what is added to one stands for its text under later weights
# Tokens a pass that `GroupIndex` gains on texts of which such a share is edited, with windows of
# 128 tokens (18,000 tokens each).
GAINED = (1.0, 1.10, 1.18, 1.29, 1.44, 1.68, 2.01, 2.60, 3.78, 7.24, 14.4)
EDITED = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)


@dataclass(frozen=True)
class DraftModel:
    """How drafts differ from the responses that they are drafts of."""

    mean_run: float = 500.0
    """Tokens to the first mismatch, of drafts one update old; infinite for none."""
    tokens_a_pass: float = 2.0
    """About what a row gains in a forward after it, by suffix matches in its own draft, where
    windows are not cut short."""
    drifts: bool = False
    """With the age in updates the mean run shrinks as mean_run / age."""
    seed: int = 0
    """Of all random numbers."""

    def text(
        self,
        key: tuple[int, int, int],
        true: np.ndarray,
        limit: int,
        stop: int,
        age: int,
        so_far: np.ndarray,
    ) -> np.ndarray:
        """The whole draft of (step, uid, sample) as weights `age` updates before its step's
        continue it after `so_far`.

        true: int [L], the response that it is a draft of, cut at `limit` tokens if its last is not
        `stop`.
        """
        known = min(len(so_far), len(true))
        wrong = np.flatnonzero(so_far[:known] != true[:known])
        if len(wrong):
            return self.diverged(key, true, limit, stop, at=int(wrong[0]))
        if len(so_far) > len(true):
            raise ValueError(f"a draft of {key} goes on after the end of its response")
        chance = -math.expm1(-(age if self.drifts else min(age, 1)) / self.mean_run)
        if chance == 0.0:
            return true
        leaves = np.flatnonzero(self._random(key, MISMATCH).random(len(true))[known:] < chance)
        return (
            self.diverged(key, true, limit, stop, at=known + int(leaves[0]))
            if len(leaves)
            else true
        )

    def later(
        self, key: tuple[int, int, int], true: np.ndarray, limit: int, stop: int, age: int
    ) -> np.ndarray:
        """The whole response of (step, uid, sample) under weights `age` updates after its step's, 1
        or more.

        Any two of these have their first mismatch after mean_run tokens, as each has one with
        `true`; where weights drift, after mean_run / the updates between them. None has anything to
        do with drafts that older weights made.
        """
        step, uid, sample = key
        text, model, changes = true, self, range(1, age + 1)  # one by each update
        if (
            not self.drifts
        ):  # half of the mismatches and edits are those of all later weights, and half their own
            share = 1 - math.sqrt(1 - edit_share(self.tokens_a_pass))
            model = replace(self, mean_run=2 * self.mean_run, tokens_a_pass=tokens_a_pass_of(share))
            changes = (1, 1 + age)
        for change in changes:
            text = model.text((step, uid, sample + change * LATER), text, limit, stop, 1, true[:0])
        return text

    def continued(
        self, key: tuple[int, int, int], text: np.ndarray, limit: int, stop: int, so_far: np.ndarray
    ) -> np.ndarray:
        """What comes after `so_far` under weights that would say `text`: that, or if `so_far` has
        left it, a text like it."""
        known = len(so_far)
        if np.array_equal(so_far, text[:known]):
            return text
        if known >= len(text):  # it has outgrown it
            return np.append(so_far, stop)[:limit]
        return np.concatenate((so_far, self.diverged(key, text, limit, stop, at=known)[known:]))

    def diverged(
        self, key: tuple[int, int, int], true: np.ndarray, limit: int, stop: int, *, at: int
    ) -> np.ndarray:
        """The draft whose first mismatch is token `at`."""
        share = 1.0 if self.tokens_a_pass == 1.0 else edit_share(self.tokens_a_pass)
        return edited(true, limit, stop, at, share=share, random=self._random(key, EDITS))

    def _random(self, key: tuple[int, int, int], use: int) -> np.random.Generator:
        return keyed_random(self.seed, *key, use)


def edited(
    true: np.ndarray, limit: int, stop: int, at: int, *, share: float, random: np.random.Generator
) -> np.ndarray:
    """A text whose first mismatch with `true` is token `at`; after it a share of its tokens is
    replaced, inserted or left out.

    A share of 1 replaces all. It ends with `stop` if `true` does and there is room for it within
    `limit` tokens.
    """
    rest = true[at:-1] if true[-1] == stop else true[at:]
    is_edited = random.random(len(rest)) < share
    edit = np.where(
        is_edited, random.integers(1, 4, len(rest)), 0
    )  # as it is, replaced, one inserted before it, left out
    if share == 1.0:
        edit[:] = 1
    if len(rest) and edit[0] in (0, 3):
        edit[0] = 1
    copies = np.array([1, 1, 2, 0])[edit]
    text = np.repeat(rest, copies)
    new = (
        np.concatenate(([0], np.cumsum(copies)[:-1]))[(edit == 1) | (edit == 2)]
        if len(rest)
        else []
    )
    text[new] = other_tokens(text[new], random)
    if true[-1] != stop:  # its end is beyond the limit, and so is the draft's
        missing = max(limit - at - len(text), 0)
        text = np.concatenate((text, random.integers(0, VOCABULARY, missing)))[: limit - at]
    elif at + len(text) < limit:
        if not len(text):  # the mismatch is the stop token: the draft goes on for a token
            text = random.integers(0, VOCABULARY, 1)
        if at + len(text) < limit:
            text = np.append(text, stop)
    return np.concatenate((true[:at], text[: limit - at])).astype(np.int64)


def keyed_random(seed: int, step: int, uid: int, sample: int, use: int) -> np.random.Generator:
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence((seed, step, uid, sample, use)))
    )


def other_tokens(tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Random tokens, none of which is the one in its place."""
    return (tokens + random.integers(1, VOCABULARY, len(tokens))) % VOCABULARY


def edit_share(tokens_a_pass: float) -> float:
    """Share of tokens to edit, so that suffix matching gains about so many tokens a pass."""
    if tokens_a_pass > GAINED[-1]:
        return EDITED[-1] * GAINED[-1] / tokens_a_pass
    return float(np.interp(tokens_a_pass, GAINED, EDITED))


def tokens_a_pass_of(share: float) -> float:
    """The other way round."""
    if share < EDITED[-1]:
        return EDITED[-1] * GAINED[-1] / share
    return float(np.interp(share, EDITED[::-1], GAINED[::-1]))
