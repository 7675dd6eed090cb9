"""What a forward takes: seconds as a function of its load, fitted on measured forwards.

    T = c + f(tokens) + per row, wide row, position, prompt token, draft token, and attended pair
    beyond decoding

f is piecewise linear with knots at powers of two and never falls. So it covers a GPU, whose
forwards take the same time up to saturation and then grow with the tokens, and a CPU, whose
forwards grow from the first token on. Beyond the last knot f goes on with its last slope; knots end
where there is something measured beyond them. All coefficients are 0 or more.

Pairs: a row that feeds n tokens over p positions attends to about n * p of them, where a decoding
row attends to p. A load knows sums over rows alone, so tokens * positions / rows is taken, less the
positions themselves.

Errors count relative to the time of a forward, so that short forwards weigh as much as long ones.
What takes three times its prediction is an interruption and left out. Where forwards do not tell
two causes apart (a decoding row feeds one token, always), the tokens get the cost: a weak ridge
lies on everything else.
"""

import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

from bubblespec.errors import InputError
from bubblespec.telemetry.trace import read_meta, read_table

FORMAT = 1
RATES = ("rows", "wide_rows", "positions", "prompt_tokens", "draft_tokens", "pairs")
RIDGE = (
    1e-5  # on all but the tokens, in squared relative errors of a forward of which they make up all
)
SMOOTHING = 1e-4  # the same on the change of slope at a knot: it decides where nothing was measured
INTERRUPTED = 3.0  # times its prediction
NUM_REFITS = 4
HELD_OUT = 5  # one in so many groups tells the error of a fit that has not seen it
MIN_FORWARDS = 10


@dataclass
class ForwardCost:
    """Seconds of forwards on one machine."""

    knots: list[int]
    """Tokens, ascending."""
    slopes: list[float]
    """Seconds a token from each knot on."""
    constant: float
    """Seconds of a forward of `knots[0]` tokens."""
    rates: dict[str, float]
    """Seconds by name (RATES)."""
    propose: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Seconds of looking for proposals at all, and for each row."""
    kind: Literal["measured", "analytic"] = "measured"
    """Analytic where no machine was asked."""
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    model: str = ""
    """Whose forwards they are."""
    error_median: float = 0.0
    """Relative, on loads that the fit has not seen; so is the next."""
    error_p90: float = 0.0

    def __post_init__(self):
        rises = np.diff(self.knots) * np.array(self.slopes[:-1])
        self._at_knots = (self.constant + np.concatenate(([0.0], np.cumsum(rises)))).tolist()
        self._rates = [self.rates.get(name, 0.0) for name in RATES]

    @classmethod
    def fit(
        cls,
        loads: np.ndarray,
        seconds: np.ndarray,
        kind: Literal["measured", "analytic"] = "measured",
        groups: np.ndarray | None = None,
    ) -> "ForwardCost":
        """loads: [N, 6], the fields of `Load`; seconds: [N], above 0; groups: [N], forwards of one
        group are held out together (default: those of equal loads). Raises ValueError if there are
        too few forwards."""
        loads, seconds = np.asarray(loads, np.float64), np.asarray(seconds, np.float64)
        if len(loads) < MIN_FORWARDS:
            raise ValueError(
                f"{len(loads)} forwards are too few to fit their cost; {MIN_FORWARDS} are needed"
            )
        _, group = np.unique(loads if groups is None else groups, axis=0, return_inverse=True)
        is_held_out = (np.random.default_rng(0).permutation(group.max() + 1) % HELD_OUT == 0)[
            group.ravel()
        ]
        knots = _knots(loads[:, 1])
        errors = np.zeros(1)
        if is_held_out.any() and not is_held_out.all():
            seen = _solve(loads[~is_held_out], seconds[~is_held_out], knots)
            errors = np.abs(_features(loads[is_held_out], knots) @ seen / seconds[is_held_out] - 1)
        solution = _solve(loads, seconds, knots).tolist()
        return cls(
            knots.tolist(),
            solution[1 : 1 + len(knots)],
            solution[0],
            dict(zip(RATES, solution[1 + len(knots) :], strict=True)),
            kind=kind,
            error_median=float(np.median(errors)),
            error_p90=float(np.quantile(errors, 0.9)),
        )

    def seconds(self, load: Sequence[int]) -> float:
        """Seconds of a forward; load: the fields of `Load`."""
        rows, tokens, wide_rows, positions, prompt_tokens, draft_tokens = load
        i = max(bisect_right(self.knots, tokens) - 1, 0)
        per_row, per_wide_row, per_position, per_prompt_token, per_draft_token, per_pair = (
            self._rates
        )
        return (
            self._at_knots[i]
            + self.slopes[i] * (tokens - self.knots[i])
            + per_row * rows
            + per_wide_row * wide_rows
            + per_position * positions
            + per_prompt_token * prompt_tokens
            + per_draft_token * draft_tokens
            + per_pair * max(tokens / rows - 1.0, 0.0) * positions
        )

    def propose_seconds(self, num_rows: int) -> float:
        """Seconds of looking for proposals for so many rows, and of taking in what came of them; 0
        for none."""
        return self.propose[0] + self.propose[1] * num_rows if num_rows else 0.0

    def save(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **asdict(self)}, file, indent=1)
            file.write("\n")

    @classmethod
    def load(cls, path: str) -> "ForwardCost":
        """Raises InputError for a file that is not there, or is not what `save` writes."""
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise InputError(f"{path}: not valid JSON: {error}") from error
        if problem := _problem(content):
            raise InputError(f"{path}: not a cost model: {problem}")
        del content["format"]
        return cls(**content)


def cost_from_trace(folder: str) -> ForwardCost:
    """The cost of forwards on the machine that recorded a trace, host work between them included.
    Raises InputError."""
    return cost_from_traces([folder])


def cost_from_traces(folders: list[str]) -> ForwardCost:
    """The same from several traces of one machine, model and number of ranks."""
    meta, tables = read_meta(folders[0]), [read_table(folder, "forwards") for folder in folders]
    columns = {
        name: np.concatenate([table[name].to_numpy() for table in tables])
        for name in tables[0].column_names
    }
    loads = np.stack(
        [
            columns[name]
            for name in (
                "rows",
                "tokens",
                "wide_rows",
                "positions",
                "prompt_tokens",
                "draft_tokens",
            )
        ],
        1,
    )
    has_looked = columns["looked_up_rows"] > 0
    propose_s = np.where(has_looked, columns["propose_s"], 0.0)
    try:
        cost = ForwardCost.fit(loads, columns["end_s"] - columns["begin_s"] - propose_s)
    except ValueError as error:
        raise InputError(f"{folders[0]}: {error}") from error
    if has_looked.any():
        cost.propose = fit_propose(columns["looked_up_rows"][has_looked], propose_s[has_looked])
    cost.hardware, cost.versions = meta["hardware"], meta["versions"]
    cost.model = f"{meta['config']['model.path']}, {meta['config']['model.dtype']}"
    return cost


def fit_propose(rows: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Seconds of looking for proposals at all, and for each row, from forwards that did; rows,
    seconds: [N]."""
    features = np.stack((np.ones(len(rows)), rows), axis=1)
    return _refit(features, seconds, np.zeros((2, 2))).tolist()


def _knots(tokens: np.ndarray) -> np.ndarray:
    """Powers of two, int64 [K]; the last is far enough below the largest that its slope is
    measured."""
    count = max(1, math.ceil(math.log2(max(tokens.max() / 1.5, 1.0))))
    return 2 ** np.arange(count, dtype=np.int64)


def _features(loads: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """What the coefficients are multiplied with, float64 [N, 1 + K + rates]."""
    rows, tokens, wide_rows, positions, prompt_tokens, draft_tokens = loads.T
    widths = np.append(np.diff(knots), np.inf)
    ramps = np.clip(tokens[:, None] - knots, 0, widths)
    pairs = np.maximum(tokens / rows - 1, 0) * positions
    rates = (rows, wide_rows, positions, prompt_tokens, draft_tokens, pairs)
    return np.column_stack((np.ones(len(loads)), ramps, *rates))


def _solve(loads: np.ndarray, seconds: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """Coefficients of `_features`, float64 [1 + K + rates]."""
    features = _features(loads, knots)
    penalty = np.zeros((features.shape[1],) * 2)
    typical = np.sqrt(np.mean((features / seconds[:, None]) ** 2, axis=0))
    free = 1 + len(knots)
    penalty[range(free, len(typical)), range(free, len(typical))] = RIDGE * typical[free:] ** 2
    for i in range(len(knots) - 1):
        change = np.zeros(len(typical))
        change[1 + i], change[2 + i] = 1.0, -1.0
        penalty += SMOOTHING * (knots[i + 1] / np.median(seconds)) ** 2 * np.outer(change, change)
    return _refit(features, seconds, len(seconds) * penalty)


def _refit(features: np.ndarray, seconds: np.ndarray, penalty: np.ndarray) -> np.ndarray:
    """Least squares of relative errors, without interruptions. The first fit counts errors relative
    to what was measured, which interruptions hardly move; the further ones relative to the fit
    before, as the mean time is wanted."""
    scale, is_kept = seconds, np.ones(len(seconds), bool)
    for _ in range(1 + NUM_REFITS):
        weighted = features[is_kept] / scale[is_kept, None]
        solution = nonnegative(
            weighted.T @ weighted + penalty, weighted.T @ (seconds[is_kept] / scale[is_kept])
        )
        scale = np.maximum(features @ solution, 1e-9)
        is_kept = seconds < INTERRUPTED * scale
        if not is_kept.any():
            break
    return solution


def nonnegative(gram: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 with the least x' gram x / 2 - target' x, by active sets (Lawson and Hanson 1974,
    Solving Least Squares Problems, algorithm NNLS). gram: [K, K], positive semi-definite; target:
    [K]."""
    size = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    gram, target = gram / np.outer(size, size), target / size
    gram = gram + 1e-12 * np.eye(len(gram))
    x, is_free = np.zeros(len(target)), np.zeros(len(target), bool)
    for _ in range(
        10 * len(target)
    ):  # each round frees one; it ends by itself unless rounding makes it turn in circles
        slope = np.where(is_free, -np.inf, target - gram @ x)
        if slope.max() <= 1e-10 * np.abs(target).max():
            break
        is_free[slope.argmax()] = True
        while is_free.any():
            wanted = np.zeros(len(x))
            wanted[is_free] = np.linalg.solve(gram[np.ix_(is_free, is_free)], target[is_free])
            below = is_free & (wanted <= 0)
            if not below.any():
                break
            way = (x[below] / np.maximum(x[below] - wanted[below], 1e-300)).min()
            x = x + way * (wanted - x)
            is_free &= x > 1e-15
        x = np.where(is_free, wanted, 0.0)
    return x / size


def _problem(content: Any) -> str | None:
    """Why a JSON value is not a cost model, or None."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return f'it has no "format": {FORMAT}'
    names = {"format", *(f.name for f in fields(ForwardCost))}
    if content.keys() != names:
        return f"{', '.join(sorted(map(str, content.keys() ^ names)))} missing or unknown"
    if not all(isinstance(content[name], list) for name in ("knots", "slopes", "propose")):
        return "knots, slopes and propose must be lists"
    if not all(isinstance(content[name], dict) for name in ("rates", "hardware", "versions")):
        return "rates, hardware and versions must be objects"
    if set(content["rates"]) != set(RATES):
        return f"rates must be those of {', '.join(RATES)}"
    if not isinstance(content["model"], str):
        return "model must be a text"
    if content["kind"] not in ("measured", "analytic"):
        return "kind must be measured or analytic"
    numbers = [
        *content["knots"],
        *content["slopes"],
        *content["propose"],
        *content["rates"].values(),
    ]
    for number in (*numbers, content["constant"], content["error_median"], content["error_p90"]):
        if (
            isinstance(number, bool)
            or not isinstance(number, (int, float))
            or not math.isfinite(number)
            or number < 0
        ):
            return f"{number!r} must be a number, finite and at least 0"
    knots = content["knots"]
    if (
        not knots
        or len(knots) != len(content["slopes"])
        or any(a >= b for a, b in itertools.pairwise(knots))
    ):
        return "knots must ascend, with one slope each"
    return None if len(content["propose"]) == 2 else "propose must be two numbers"
