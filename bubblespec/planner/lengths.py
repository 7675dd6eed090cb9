"""Lengths of responses, predicted from all that were generated. The same on every rank.

The best evidence is a finished draft, then the prompt's responses in earlier epochs (RhymeRL, arXiv
2508.18588), then finished drafts of siblings, and otherwise a straight line fitted to the prompt
and response lengths of recent responses.
"""

import numpy as np

from bubblespec.planner.rows import Rows, mean_length_beyond
from bubblespec.records import Samples
from bubblespec.types import Draft, Group

NUM_RECENT = 4096  # responses that the line is fitted to
MAX_PROMPTS = 1 << 18  # prompts whose lengths are kept; the oldest go first
MIN_SPREAD = 1.0  # tokens; lower bound of an unknown length's spread
SIBLING_SPREAD = 0.7  # share of the line's spread; lower bound where siblings are known


class LengthModel:
    """Mean and spread of the lengths of responses."""

    def __init__(self):
        self._recent = np.empty((0, 2), np.int64)  # tokens of prompt and response, latest last
        self._of_prompt: dict[int, tuple[float, float]] = {}  # mean and spread, by uid
        self._line = 1.0, 0.0, 1.0  # offset, slope and spread

    def observe(self, samples: Samples) -> None:
        """Learn from the responses of a step."""
        lengths = samples.lengths.reshape(len(samples.groups), -1)
        for group, of_group in zip(samples.groups, lengths, strict=True):
            self._of_prompt.pop(group.prompt.uid, None)
            self._of_prompt[group.prompt.uid] = (float(of_group.mean()), float(of_group.std()))
        while len(self._of_prompt) > MAX_PROMPTS:
            del self._of_prompt[next(iter(self._of_prompt))]
        prompts = np.repeat([len(g.prompt.token_ids) for g in samples.groups], lengths.shape[1])
        pairs = np.stack((prompts, lengths.ravel()), axis=1)
        self._recent = np.concatenate((self._recent, pairs))[-NUM_RECENT:]
        self._fit_line()

    @property
    def knows_lengths(self) -> bool:
        """Whether any response has been seen."""
        return len(self._recent) > 0

    def predict(
        self, groups: list[Group], num_generations: int, drafts: list[Draft | None]
    ) -> Rows:
        """Return the rows of these groups before they begin, by group and number.

        drafts: by row, None for no draft."""
        prompt_tokens = np.array([len(group.prompt.token_ids) for group in groups], np.int64)
        offset, slope, line_spread = self._line
        means = np.maximum(offset + slope * prompt_tokens, 1.0)
        spreads = np.full(len(groups), line_spread)
        for number, group in enumerate(groups):
            of_group = drafts[number * num_generations : (number + 1) * num_generations]
            siblings = [len(d.tokens) for d in of_group if d is not None and d.is_finished]
            if group.prompt.uid in self._of_prompt:
                means[number], spreads[number] = self._of_prompt[group.prompt.uid]
            elif siblings:
                means[number] = np.mean(siblings)
                spreads[number] = max(np.std(siblings), SIBLING_SPREAD * line_spread)
        expected = np.repeat(means, num_generations)
        spread = np.repeat(np.maximum(spreads, MIN_SPREAD), num_generations)
        drafted = np.array([0 if d is None else len(d.tokens) for d in drafts], np.float64)
        is_whole = np.array([d is not None and d.is_finished for d in drafts], bool)
        is_begun = (drafted > 0) & ~is_whole
        if is_begun.any():
            known = (expected[is_begun], spread[is_begun])
            expected[is_begun] = mean_length_beyond(*known, drafted[is_begun])
        return Rows(
            prompt_tokens=np.repeat(prompt_tokens, num_generations),
            group=np.repeat(np.arange(len(groups)), num_generations),
            expected=np.where(is_whole, drafted, expected),
            spread=np.where(is_whole, 0.0, spread),
            drafted=drafted,
            generated=np.zeros(len(drafts), np.int64),
        )

    def _fit_line(self) -> None:
        """Fit offset and slope by least squares, and the spread around the line."""
        x, y = self._recent.T.astype(np.float64)
        slope = ((x - x.mean()) * (y - y.mean())).mean() / max(x.var(), 1e-9)
        offset = float(y.mean() - slope * x.mean())
        self._line = offset, float(slope), float((y - offset - slope * x).std())

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return recent lengths, int64 [N, 2]; uids, int64 [P], with lengths, float64 [P, 2]."""
        of_prompt = np.array(list(self._of_prompt.values()), np.float64).reshape(-1, 2)
        uids = np.array(list(self._of_prompt), np.int64)
        return {"recent": self._recent, "uids": uids, "of_prompt": of_prompt}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state."""
        self._recent = state["recent"]
        if self.knows_lengths:
            self._fit_line()
        pairs = map(tuple, state["of_prompt"].tolist())
        self._of_prompt = dict(zip(state["uids"].tolist(), pairs, strict=True))
