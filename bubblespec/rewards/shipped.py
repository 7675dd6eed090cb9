"""The shipped reward functions; `math_equivalence` compares answers by the math-verify library."""

import re

from bubblespec.config.imports import import_quietly
from bubblespec.rewards.functions import per_sample

MATH_LIMIT_S = 5  # for one comparison by math-verify, which would evaluate 9^{9^9} forever
MAX_ANSWER = 2000  # characters: the library takes quadratic time, and prints what takes too long
_NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?")
_BOX = re.compile(r"\\boxed\s*{")
_BRACE = re.compile(r"(?<!\\)[{}]")
_BETWEEN_BOXES = re.compile(r"[\s$]*(,[\s$]*((and|or)[\s$]*)?|(and|or)[\s$]*)")
# Words after a number, such as "dollars per hour", which LaTeX takes for products of letters; not
# words that change the number.
_UNIT = re.compile(r"(?<=[\d)}\]])\s+[A-Za-z]{3,}(\s+[A-Za-z]{2,})*\.?$")
_CHANGES_NUMBER = re.compile(
    r"\b(hundred|thousand|\w+illion|dozen|half|percent|and|plus|minus|times|over|squared|cubed|mod)s?\b"
)
_EQUATION = re.compile(r"[-+*/^().,\d\s]+(=[-+*/^().,\d\s]+)+")


@per_sample
def exact_match(prompts, completions, completion_ids, answer, **columns) -> list[float | None]:
    """Return 1 where the final answer equals the column `answer` as text, else 0.

    Without `<answer>` tags the whole completion is the answer."""
    texts = [text_of(c) for c in completions]
    given = [text.strip() if final_answer(text) is None else final_answer(text) for text in texts]
    return [float(g == str(a).strip()) for g, a in zip(given, answer, strict=True)]


@per_sample
def reasoning_gym_score(
    prompts, completions, completion_ids, task, entry, **columns
) -> list[float | None]:
    """Return the score from 0 to 1 of the final answer by reasoning-gym's scorer of the task."""
    reasoning_gym = import_quietly("reasoning_gym")
    return [
        reasoning_gym.get_score_answer_fn(name)(answer=final_answer(text_of(c)), entry=item)
        for c, name, item in zip(completions, task, entry, strict=True)
    ]


@per_sample
def answer_format(prompts, completions, completion_ids, **columns) -> list[float | None]:
    """Return 1 where the completion ends with exactly one `<answer>...</answer>`, else 0."""
    pattern = re.compile(r"(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)
    return [float(pattern.fullmatch(text_of(c)) is not None) for c in completions]


def text_of(completion: str | list[dict]) -> str:
    """Return the text of a completion, which is a string or chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_answer(text: str) -> str | None:
    """Return the text in the last `<answer>` tags, or None without any."""
    for part in reversed(text.split("</answer>")[:-1]):
        _, tag, answer = part.partition("<answer>")
        if tag:
            return answer.strip()
    return None


@per_sample
def math_equivalence(prompts, completions, completion_ids, answer, **columns) -> list[float | None]:
    """Return 1 where the answer equals the column `answer` by the math-verify library, else 0.

    The answer is in the last `<answer>` tags or `\\boxed{}`, else what the library finds at the end
    of the text; an equation of numbers must be true. None where the reference cannot be parsed. A
    reference may be a whole solution with the answer behind the last ####, as in GSM8K."""
    from math_verify import parse, verify

    scores: list[float | None] = []
    for completion, reference in zip(completions, answer, strict=True):
        gold = _parse_reference(reference)
        if not gold:
            scores.append(None)
            continue
        text = text_of(completion)
        given = _answer_in(text)
        if given is None:
            parsed = parse(text[-MAX_ANSWER:], parsing_timeout=MATH_LIMIT_S)
        else:
            parsed = _parse(given) if len(given) <= MAX_ANSWER else []
        parsed = [expression for expression in parsed if not _is_false(expression)]
        scores.append(float(verify(gold, parsed, timeout_seconds=MATH_LIMIT_S)))
    return scores


def _has_reference(columns: dict) -> bool:
    answer = columns.get("answer")
    # most are numbers, whose parsing would take minutes for a large data set
    return _NUMBER.fullmatch(_reference_text(answer)) is not None or bool(_parse_reference(answer))


math_equivalence.can_score = _has_reference  # type: ignore[attr-defined]  # as `per_sample`


def _reference_text(reference) -> str:
    return "" if reference is None else str(reference).rpartition("####")[2].strip()


def _parse_reference(reference) -> list:
    text = _reference_text(reference)
    return _parse(text) if text else []


def _answer_in(text: str) -> str | None:
    """Return the marked answer of a completion, as LaTeX, or None without one."""
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


def _parse(latex: str) -> list:
    """Parse LaTeX, and the same without a unit in words."""
    from math_verify import parse

    unit = _UNIT.search(latex)
    texts = [latex]
    if unit is not None and not _CHANGES_NUMBER.search(unit[0]):
        texts.append(latex[: unit.start()])
    return [e for text in texts for e in parse(f"${text}$", parsing_timeout=MATH_LIMIT_S)]


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
        and not verify(left, right, float_rounding=2, timeout_seconds=MATH_LIMIT_S)
        for left, right in sides
    )
