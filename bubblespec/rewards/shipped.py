"""The shipped reward functions; `math_equivalence` compares answers by the math-verify library."""

import contextlib
import math
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple
from unicodedata import normalize

from bubblespec.config.imports import import_quietly
from bubblespec.rewards.functions import per_sample

MATH_LIMIT_S = 5  # of CPU time for a call of math-verify, which would evaluate 9^{9^9} forever
MAX_ANSWER = 2000  # characters: the library takes quadratic time, and prints what takes too long
_NEVER_S = 1 << 20  # the library's own limit counts wall time, also while all processes are paused
_BOX = re.compile(r"\\boxed\s*{")
_BRACE = re.compile(r"(?<!\\)[{}]")
_BETWEEN_BOXES = re.compile(r"[\s$]*(,[\s$]*((and|or)[\s$]*)?|(and|or)[\s$]*)")
_EQUATION = re.compile(r"[-+*/^().,\d\s]+(=[-+*/^().,\d\s]+)+")
_DELIMITERS = (("\\[", "\\]"), ("\\(", "\\)"), ("$$", "$$"), ("$", "$"), ("**", "**"))
_SYMBOLS = {"·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∞": r"\infty ", "∪": r"\cup "}
_SYMBOLS |= {"⁄": "/", "{,}": ",", "\\!": "", "\u00a0": " ", "\u2009": " ", "\u202f": " "}
_FORMS = {"([¼-¾⅐-⅞])": r" \frac{%s}", "([⁰¹²³⁴-⁹⁻]+)": "^{%s}"}
_FORMS |= {
    r"√\s*\(([^()]*)\)": r"\sqrt{%s}",
    r"√\s*(\d+(?:\.\d+)?|[A-Za-z])": r"\sqrt{%s}",
    r"√\s*()": r"\sqrt%s",
}
# A number as programs and people write it: 1.5e16, 5,000, 1 1/2; and LaTeX for the same.
_NUMBER = re.compile(
    r"([-+]?)\s*(?:((?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:\.\d*)?|\.\d+)(e[-+]?\d{1,3})?"
    r"|(?:(\d{1,300})\s+)?(\d{1,300})\s*/\s*(0*[1-9]\d{0,300}))",
    re.IGNORECASE,
)
_POWER = re.compile(r"\s*(?:\\times|\\cdot|[×*])\s*10\s*\^\s*{?\s*([-+]?\d+)\s*}?$")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:{\s*(\d+)\s*}\s*{\s*(\d+)\s*}|(\d)(\d))$")
# What may follow a number: words, letters, \text{...} with a power, or the base in which it is.
_UNIT = re.compile(
    r"(?<=[\d)}\]])(?:\s*\\(?:text|mathrm|mbox|textrm)\s*{\s*(?P<text>[^{}]*)}(?P<power>\^{?\d}?)?"
    r"|(?P<words>\s*[A-Za-z]+(?:\s+[A-Za-z]+)*)|(?P<base>_{?\d+}?))$"
)
# Words after a number, such as "dollars per hour", which LaTeX takes for products of letters ...
_WORDS = re.compile(r"\s+[A-Za-z]{3,}(\s+[A-Za-z]{2,})*")
# ... but not words that change the number: parts, multiples, arithmetic, comparisons, denials.
_CHANGES_NUMBER = re.compile(
    r"\b(?:half|halve|third|quarter|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf)th"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen(?:th)?|(?:twen|thir|for|fif|six|seven|eigh|nine)t"
    r"(?:y|ieth)|(?:hundred|thousand|\w+illion)(?:th)?|zero|one|two|three|four|five|six|seven"
    r"|eight|nine|ten|eleven|twelve|dozen|lakh|crore|percent\w*|pct|and|or|plus|minus|time|over"
    r"|divided|multiplied|squared|cubed|factorial|mod|modulo|choose|twice|to|through|more|less"
    r"|fewer|least|most|than|at|up|above|below|under|not|no|never|except|without|if|when|unless"
    r"|is|are|was|isn|aren|wrong|incorrect|false)s?\b",
    re.IGNORECASE,
)


def references_of(answer, write: Callable[[Any], str] = str) -> list[str]:
    """Return the accepted answers as texts: one, or those of a list; none that is empty."""
    accepted = answer if isinstance(answer, list | tuple) else [answer]
    texts = ["" if a is None else write(a).strip() for a in accepted]
    return [text for text in texts if text]


def _written(answer) -> str:
    """Return an answer as text, a number of JSON without an exponent."""
    is_number = isinstance(answer, float) and math.isfinite(answer)
    return f"{Decimal(repr(answer)):f}" if is_number and "e" in repr(answer) else str(answer)


def _has_answer(columns: dict) -> bool:
    return bool(references_of(columns.get("answer")))


@per_sample
def exact_match(prompts, completions, completion_ids, answer, **columns) -> list[float | None]:
    """Return 1 where the final answer equals the column `answer`, or a text of that list, else 0.

    None without a reference. Without `<answer>` tags the whole completion is the answer."""
    texts = [text_of(c) for c in completions]
    given = [text.strip() if final_answer(text) is None else final_answer(text) for text in texts]
    accepted = [references_of(a) for a in answer]
    return [float(g in texts) if texts else None for g, texts in zip(given, accepted, strict=True)]


exact_match.can_score = _has_answer  # type: ignore[attr-defined]  # as `per_sample`


@per_sample
def reasoning_gym_score(
    prompts, completions, completion_ids, task, entry, **columns
) -> list[float | None]:
    """Return the score of the final answer by reasoning-gym, 0 to 1; None without task or entry."""
    reasoning_gym = import_quietly("reasoning_gym")
    return [
        reasoning_gym.get_score_answer_fn(name)(answer=final_answer(text_of(c)), entry=item)
        if name and item
        else None
        for c, name, item in zip(completions, task, entry, strict=True)
    ]


def _has_entry(columns: dict) -> bool:
    return bool(columns.get("task") and columns.get("entry"))


reasoning_gym_score.can_score = _has_entry  # type: ignore[attr-defined]


@per_sample
def answer_format(prompts, completions, completion_ids, **columns) -> list[float | None]:
    """Return 1 where the completion ends with exactly one `<answer>...</answer>`, else 0."""
    pattern = re.compile(r"(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)
    return [float(pattern.fullmatch(text_of(c)) is not None) for c in completions]


def text_of(completion: str | list[dict]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_answer(text: str) -> str | None:
    for part in reversed(text.split("</answer>")[:-1]):
        _, tag, answer = part.partition("<answer>")
        if tag:
            return answer.strip()
    return None


@per_sample
def math_equivalence(prompts, completions, completion_ids, answer, **columns) -> list[float | None]:
    """Return 1 where the answer equals the column `answer` by the math-verify library, else 0.

    The answer is in the last `<answer>` tags or `\\boxed{}`, else what the library finds at the
    end; an equation of numbers must be true. None where the reference cannot be parsed, which may
    be a solution with the answer behind the last ####, as in GSM8K, or a list of accepted ones."""
    scores: list[float | None] = []
    for completion, reference in zip(completions, answer, strict=True):
        with _cpu_limit():
            golds = _parse_references(reference)
            scores.append(float(_is_one_of(text_of(completion), golds)) if golds else None)
    return scores


def _has_reference(columns: dict) -> bool:
    answer = columns.get("answer")
    # most are numbers, whose parsing would take minutes for a large data set
    if any(_NUMBER.fullmatch(_behind_marks(text)) for text in references_of(answer, _written)):
        return True
    with _cpu_limit():
        return bool(_parse_references(answer))


math_equivalence.can_score = _has_reference  # type: ignore[attr-defined]


@contextlib.contextmanager
def _cpu_limit() -> Iterator[None]:
    """End calls of the library after MATH_LIMIT_S of CPU time each, however busy the machine is."""
    from math_verify.errors import TimeoutException

    def stop(*_) -> None:
        raise TimeoutException

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MATH_LIMIT_S, MATH_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


class _Parsed(NamedTuple):
    """What a marked answer or a reference holds."""

    expressions: list
    """What the library reads in the text, then without its unit."""
    unit: str = ""
    """What they leave out."""


def _behind_marks(reference: str) -> str:
    return reference.rpartition("####")[2].strip()


def _parse_references(answer) -> list[_Parsed]:
    parsed = [_parse(text) for text in map(_behind_marks, references_of(answer, _written)) if text]
    return [gold for gold in parsed if gold.expressions]


def _is_one_of(text: str, golds: list[_Parsed]) -> bool:
    from math_verify import parse

    given = _answer_in(text)
    if given is None:
        parsed = _Parsed(parse(text[-MAX_ANSWER:], parsing_timeout=_NEVER_S))
    else:
        parsed = _parse(given) if len(given) <= MAX_ANSWER else _Parsed([])
    right = [expression for expression in parsed.expressions if not _is_false(expression)]
    return any(
        _are_alike(gold.unit, parsed.unit) and _is_equal(gold.expressions, right) for gold in golds
    )


def _is_equal(gold: list, given: list) -> bool:
    """Whether the library finds two expressions equal, small numbers to six digits."""
    from math_verify import verify
    from sympy import Number

    numbers = [
        e for e in gold + given if isinstance(e, Number) and e.is_finite and 0 < abs(e) < 1e-3
    ]
    smallest = min(filter(None, (abs(float(e)) for e in numbers)), default=1.0)
    digits = 5 - math.floor(math.log10(smallest)) if numbers else 6
    return verify(gold, given, float_rounding=digits, timeout_seconds=_NEVER_S)


def _answer_in(text: str) -> str | None:
    tagged = final_answer(text)
    boxed = _last_boxed(text if tagged is None else tagged)
    if tagged is not None or boxed is not None:
        return tagged if boxed is None else boxed
    last = text.strip().rpartition("\n")[2].rstrip(". ")  # the library would see its last number
    return last if _EQUATION.fullmatch(last) else None


def _last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{}, or None without one.

    Boxes right before it that a comma, "and" or "or" joins to it belong to it."""
    open_braces: list[int] = []
    ends: dict[int, int] = {}  # of what is between two braces, by its beginning
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_braces.append(brace.end())
        elif open_braces:
            ends[open_braces.pop()] = brace.start()
    held: list[str] = []  # the last one first
    following = len(text)  # where the box after this one begins
    for box in reversed(list(_BOX.finditer(text))):
        end = ends.get(box.end(), following)
        if end >= following:  # cut off, or around another one
            continue
        if held and not _BETWEEN_BOXES.fullmatch(text, end + 1, following):
            break
        held.append(text[box.end() : end])
        following = box.start()
    return ", ".join(reversed(held)) if held else None


def _parse(text: str) -> _Parsed:
    """Parse an answer: a number exactly, else by the library, also without its unit."""
    latex = _tidy(text)
    number = _number_in(latex)
    if number is not None:
        # 2e-1 may be 2e - 1; 3e8, 1e-05 and 1.5e-7 are numbers
        is_unclear = re.fullmatch(r"-?(?!1e)\d+e[-+]\d", latex)
        return _Parsed(_parsed(number) + (_parsed(latex) if is_unclear else []))
    unit = _UNIT.search(latex)
    if unit is None:
        is_sentence = " " in latex and text.endswith(".")  # then the library takes its last number
        return _Parsed(_parsed(latex) + (_parsed(latex + ".") if is_sentence else []))
    name = (unit["text"] or unit["words"] or unit["base"] or "").strip() + (unit["power"] or "")
    if _CHANGES_NUMBER.search(name) and not re.search("percent|pct", name):
        return _Parsed(_parsed(latex, drops_units=False))
    bare = latex[: unit.start()]
    whole, number = _parsed(latex), _parsed(_number_in(bare) or bare)
    if whole[:1] == _parsed(bare)[:1]:  # the library drops it
        return _Parsed(number, name)
    if unit["words"] and _WORDS.fullmatch(unit["words"]):
        return _Parsed(whole + number, name)
    return _Parsed(whole)


def _parsed(latex: str, drops_units: bool = True) -> list:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    of_latex = LatexExtractionConfig()
    if not drops_units:
        normal = replace(of_latex.normalization_config, units=False)
        of_latex = replace(of_latex, normalization_config=normal)
    return parse(f"${latex}$", [of_latex, ExprExtractionConfig()], parsing_timeout=_NEVER_S)


def _tidy(text: str) -> str:
    """Return the text without delimiters and final stop, with LaTeX for signs of Unicode."""
    text = " ".join(text.split())
    for left, right in _DELIMITERS:
        inner = text[len(left) : -len(right)]
        if text == left + inner + right and left not in inner:
            text = inner.strip()
    text = re.sub(r"(?<!\.)\.(?=}*$)", "", text)
    for sign, latex in _SYMBOLS.items():
        text = text.replace(sign, latex)
    text = re.sub(r"(?<!\\)\\[,;: ]|~(?!=)", " ", text)
    for signs, form in _FORMS.items():
        text = re.sub(
            signs, lambda m, form=form: form % normalize("NFKC", m[1]).replace("⁄", "}{"), text
        )
    # not between two numbers, where a dash makes a range
    text = re.sub(r"(^|[(\[{,=A-Za-z)}]\s*)[‐-—](?=\s*[\w.\\(√])", r"\1-", text)
    return text.replace("−", "-").strip()


def _number_in(latex: str) -> str | None:
    """Return a number without exponents, groups and a whole part, or None for other text."""
    text = _FRACTION.sub(r" \1\3/\2\4", _POWER.sub(r"e\1", latex))
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    sign, digits, power, whole, top, under = found.groups(default="")
    if digits:
        return f"{sign}{Decimal(re.sub('[, ]', '', digits) + power):f}"
    value = int(whole or 0) + Fraction(int(top), int(under))
    return rf"{sign}\frac{{{value.numerator}}}{{{value.denominator}}}"


def _are_alike(unit: str, other: str) -> bool:
    """Whether two units may be the same (km, kilometers; feet, square feet are not)."""
    if not unit or not other:
        return True
    texts = [re.sub(r"\bsq(uare)?\b", "2", u.lower()) for u in (unit, other)]
    if re.findall(r"\d", texts[0]) != re.findall(r"\d", texts[1]):
        return False
    few, many = sorted((re.findall("[a-z]+", text) for text in texts), key=len)
    return all(any(_abbreviates(*sorted((word, own), key=len)) for own in many) for word in few)


def _abbreviates(short: str, long: str) -> bool:
    letters = iter(long)
    is_short = len(short) <= 3 <= len(long) and short[0] == long[0]
    is_plural = short.rstrip("s") == long.rstrip("s") or long == short + "es"
    return is_plural or (is_short and all(letter in letters for letter in short))


def _is_false(expression) -> bool:
    """Whether an expression has a false equation of numbers, up to rounding of decimals.

    The library would compare the right side alone."""
    from math_verify import verify
    from sympy import Basic, Eq

    if not isinstance(expression, Basic):
        return False
    sides = [equation.args for equation in expression.atoms(Eq)]
    return any(
        left.is_number
        and right.is_number
        and not verify(left, right, float_rounding=2, timeout_seconds=_NEVER_S)
        for left, right in sides
    )
