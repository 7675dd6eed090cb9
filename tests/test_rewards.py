"""Shipped reward functions on hand-worked examples, and calls of functions that misbehave."""

import asyncio
import os
import random
import re
import signal
import time

import math_verify.parser
import numpy as np
import pytest
import reasoning_gym
import torch

from bubblespec.data.prompts import reasoning_gym_rows
from bubblespec.errors import MAX_SHOWN, Interrupt, one_line
from bubblespec.records import combine, overlong_penalty
from bubblespec.rewards import shipped as module
from bubblespec.rewards.code import program_in
from bubblespec.rewards.functions import (
    RewardFailure,
    Sample,
    answers_of,
    load_reward,
    per_sample,
    score,
)
from bubblespec.rewards.shipped import (
    answer_format,
    exact_match,
    final_answer,
    math_equivalence,
    reasoning_gym_score,
)
from tests.helpers.checks import refusal

SAMPLES = [Sample("p", "a", [1], {}), Sample("q", "b", [2], {}), Sample("r", "c", [3], {})]


def as_chat(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def call(function, texts: list[str], chat: bool, **columns) -> list:
    return function(
        prompts=["p"] * len(texts),
        completions=[as_chat(t) for t in texts] if chat else texts,
        completion_ids=[[1]] * len(texts),
        **columns,
    )


both = pytest.mark.parametrize("chat", [False, True], ids=["string", "chat"])


@both
@pytest.mark.parametrize(
    "text, matches, has_format",
    [
        ("4", 1.0, 0.0),
        ("so <answer>4</answer>", 1.0, 1.0),
        ("so 4", 0.0, 0.0),
        ("<answer>04</answer>", 0.0, 1.0),
        ("4 <answer>5</answer>", 0.0, 1.0),
        ("thoughts\nand more <answer>4\n5</answer>\n", 0.0, 1.0),
        ("<answer>4</answer> and more", 1.0, 0.0),
        ("<answer>3</answer><answer>4</answer>", 1.0, 0.0),
        ("<answer>3<answer>4</answer>", 0.0, 0.0),
        ("<answer>4", 0.0, 0.0),
    ],
)
def test_exact_match_and_answer_format(text, matches, has_format, chat):
    assert call(exact_match, [text], chat, answer=["4"], other=["column"]) == [matches]
    assert call(answer_format, [text], chat) == [has_format]


LONG = [part * 200_000 for part in ("<answer", "<answer>", "</answer>", "\\boxed{", "```\n", "1 ")]
LONG += ["<answer>" + "x" * 1_000_000, "\\boxed{1}" + "$ " * 500_000 + "\\boxed{2}"]
LONG += ["<answer>" + "(" * 1_000_000 + "</answer>.", "\\boxed{1}, " * 200_000]


def test_text_functions_take_linear_time():
    """What is quadratic takes many minutes."""
    for function in (exact_match, answer_format, math_equivalence):
        assert call(function, LONG, False, answer=["5"] * len(LONG)) == [0.0] * len(LONG)
    assert all(program_in(text) in text for text in LONG)


def test_final_answer_equals_the_regular_expression():
    """On random texts of tags: non-overlapping matches from the left."""
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices(["<answer>", "</answer>", "a", " ", "\n"], k=rng.randrange(9)))
        found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        assert final_answer(text) == (found[-1].strip() if found else None), text


@pytest.mark.parametrize(
    "reference, text, wanted",
    [
        ("1/2", "<answer>\\frac{1}{2}</answer>", 1.0),
        ("\\frac{1}{2}", "<answer>2/4</answer>", 1.0),
        ("0.5", "so it is $\\frac12$.", 1.0),
        ("It is 6 * 7 = 42, and not 41.\n#### 42", "\\boxed{42}", 1.0),  # as in GSM8K
        ("#### 1,000", "\\boxed{1000}", 1.0),
        ("1/3", "<answer>0.33</answer>", 0.0),
        ("x^2-1", "<answer>(x-1)(x+1)</answer>", 1.0),
        ("\\{1,2\\}", "<answer>\\{2,1\\}</answer>", 1.0),
        ("(1,2)", "<answer>(2,1)</answer>", 0.0),
        ("5", "4, no: 5; so <answer>4</answer>", 0.0),
        ("5", "no idea", 0.0),
        (None, "<answer>None</answer>", None),
        ("", "<answer></answer>", None),
        ("5", "So \\boxed{4}. Wait, \\boxed{5}.", 1.0),
        ("4", "So \\boxed{4}. Wait, \\boxed{5}.", 0.0),
        ("5", "\\boxed{5}, and then \\boxed{4", 1.0),
        ("5", "<answer>\\boxed{4}</answer>", 0.0),
        ("\\frac{1}{2}", "\\boxed{1}, so \\boxed{\\frac{1}{2}}", 1.0),
        ("\\{4,5\\}", "\\boxed{4} and \\boxed{5}", 1.0),
        ("\\{4,5\\}", "$\\boxed{4}$, and $\\boxed{5}$", 1.0),
        ("5", "\\boxed{4}\n\\boxed{5}", 1.0),
        ("4", "\\boxed{4}\n\\boxed{5}", 0.0),
        ("5", "$$\\boxed{4}$$\n$$\\boxed{5}$$", 1.0),
        ("5", "\\boxed{\\boxed{5}", 1.0),
        ("\\{5\\}", "\\boxed{\\{5\\}}", 1.0),
        ("1,080", "<answer>1080 dollars</answer>", 1.0),
        ("1,080", "\\boxed{1,080 dollars per hour.}", 1.0),
        ("1080 dollars", "<answer>1080</answer>", 1.0),
        ("\\frac{1}{2}", "<answer>\\frac{1}{2} gallons</answer>", 1.0),
        ("5", "<answer>5 million</answer>", 0.0),
        ("xyz", "<answer>xyz</answer>", 1.0),
        ("5", "<answer>4 = 5</answer>", 0.0),
        ("5", "\\boxed{4 = 5}", 0.0),
        ("5", "4 = 5", 0.0),
        ("5", "Thus $4 = 5$.", 0.0),
        ("5", "<answer>x = 4 = 5</answer>", 0.0),
        ("5", "<answer>2 + 3 = 5</answer>", 1.0),
        ("5", "2 + 3 = 5", 1.0),
        ("5", "<answer>x = 5</answer>", 1.0),
        ("3.14", "<answer>\\frac{22}{7} = 3.14</answer>", 1.0),
    ],
)
def test_math_equivalence(reference, text, wanted):
    is_chat = len(text) % 2 == 0  # by turns
    assert call(math_equivalence, [text], is_chat, answer=[reference]) == [wanted]


# reference | right answers in a box | wrong ones
NOTATIONS = [
    # numbers with an exponent, as JSON and text
    (
        1e-05,
        ["0.00001", "1e-5", r"10^{-5}", r"1 \times 10^{-5}", r"\frac{1}{100000}"],
        ["e-5", "0"],
    ),
    (2e-07, ["0.0000002", r"2\cdot 10^{-7}"], ["0.0000001", "0", "3e-7"]),
    (1.5e16, [r"1.5\times10^{16}", "15000000000000000"], ["1.5e15", "15000000000000001"]),
    (0.30000000000000004, ["0.3"], ["0.4"]),
    ("3e8", ["300000000", "3E8", "3·10⁸", r"3 \times 10^8", "3e8 m"], ["30000000", "3e9", "24e"]),
    ("2e-1", ["0.2", "2e - 1"], ["2e-2"]),
    ("0", ["0.0"], ["1e-7"]),
    ("1/3", ["0.333333"], ["0.33"]),
    # lists of accepted answers
    (["5", "five"], ["5", "five"], ["6", "5, 6"]),
    ([4, 5.0, None, ""], ["4", "5"], ["6", "[4, 5]"]),
    # delimiters and the final stop
    (r"\[12\]", ["12", "12.", r"\(12\)", "**12**", r"\frac{24}{2}"], ["13"]),
    ("$4$ and $5$", ["4, 5", r"\(5\) and \(4\)"], ["4"]),
    ("A", ["A.", r"\text{A.}", "(A)"], ["B", "B."]),
    ("5", ["5.", "It is 5."], ["4."]),
    # words behind a number
    ("3", ["3 roots", "3 pairs", r"3\text{ clips}"], ["3 quarters", "3 fifths", "3 dozen"]),
    ("5", ["5 square feet", "5 km", "5€"], ["5 halves", "5 factorial", "5 squared", "5 more"]),
    ("4", ["4 months"], ["4 or more", "4 or more.", r"4\text{ or more}", "4 to six", "4 or less"]),
    ("7", ["7 points"], ["7 tenths", "7 thousandths", r"7 \text{ twentieths}", "7 is wrong"]),
    ("3 quarters", ["3 quarters"], ["3", "3 halves"]),
    ("50%", ["50 percent", "0.5"], ["0.05"]),
    # units and bases
    ("5 m", ["5", "5 meters", r"5\text{ m}"], ["5 km", r"5\,\text{mm}", "5 minutes and more"]),
    (r"5\text{ cm}^2", ["5", "5 square cm"], [r"5\text{ cm}", "5 kg"]),
    ("12 apples", ["12 red apples"], ["12 oranges"]),
    ("101_2", ["101_{2}", "101"], ["101_3"]),
    ("2xy", ["2yx"], ["2x"]),
    # mixed numbers, groups, signs of Unicode
    ("1.5", ["1 1/2", r"1\frac12", "1½", "3/2"], ["1", "11/2", "1 1/3"]),
    ("-1.5", ["-1 1/2", "–1½", r"-\frac{3}{2}"], ["-0.5", "1½"]),
    ("5000", [r"5\,000", "5{,}000", "5 000", r"5,\!000", "5\u202f000"], ["5", r"50\,00", "0"]),
    ("1/2", ["½", "0.5", "2⁄4"], ["2", "1/0"]),
    ("-5", ["–5", "−5", "—5", "- 5"], ["5", "–6"]),
    ("-2", ["–2"], ["3–5"]),
    (r"\sqrt{12}", ["√12", "2√3", "√(12)", r"2\sqrt3"], ["√3", "12"]),
    (r"x^2 - 1", ["x² – 1", "(x-1)(x+1)"], ["x² – 2"]),
    (r"\infty", ["∞"], ["0"]),
]


@pytest.mark.parametrize("reference, right, wrong", NOTATIONS)
def test_math_equivalence_of_notations(reference, right, wrong):
    texts = [f"So \\boxed{{{answer}}}." for answer in right + wrong]
    scores = call(math_equivalence, texts, False, answer=[reference] * len(texts))
    assert dict(zip(right + wrong, scores, strict=True)) == dict.fromkeys(
        right, 1.0
    ) | dict.fromkeys(wrong, 0.0)


@both
@pytest.mark.parametrize("missing", [None, "", "  ", [], [None, ""]])
def test_missing_reference_gives_no_reward(missing, chat):
    texts = ["", "None", "[]"]
    for function in (exact_match, math_equivalence):
        assert call(function, texts, chat, answer=[missing] * 3) == [None] * 3
        assert not function.can_score({"answer": missing}) and not function.can_score({})
    assert call(exact_match, ["a", "b", "c"], chat, answer=[["a", "b"]] * 3) == [1.0, 1.0, 0.0]
    assert call(reasoning_gym_score, ["5"], chat, task=[None], entry=[{}]) == [None]
    assert not reasoning_gym_score.can_score({"task": "chain_sum", "entry": None})


def test_math_limit_counts_no_wall_time(monkeypatch):
    """As while all processes are paused."""
    extract, waits = math_verify.parser.extract_target_from_pred, [3]

    def wait(*arguments, **options):
        time.sleep(waits.pop() if waits else 0)
        return extract(*arguments, **options)

    monkeypatch.setattr(math_verify.parser, "extract_target_from_pred", wait)
    monkeypatch.setattr(module, "MATH_LIMIT_S", 2)
    assert call(math_equivalence, ["\\boxed{5}"], False, answer=["5"]) == [1.0] and not waits


def test_math_equivalence_has_a_time_limit(monkeypatch):
    call(math_equivalence, ["<answer>5</answer>"], False, answer=["5"])  # imports what it needs
    monkeypatch.setattr(module, "MATH_LIMIT_S", 2)  # without the limit this takes hours
    texts = ["<answer>9^{9^{9}}</answer>", "<answer>5</answer>"]
    assert call(math_equivalence, texts, False, answer=["5", "5"]) == [0.0, 1.0]


@both
def test_reasoning_gym_score_equals_the_gym_scorers(chat):
    names = ("chain_sum", "countdown")
    tasks = [{"name": name, "weight": 1.0, "config": {}} for name in names]
    rows = reasoning_gym_rows(tasks, 12, 1)
    answers = [[row["answer"], f"{row['answer']} or so", None][i % 3] for i, row in enumerate(rows)]
    texts = ["none" if a is None else f"it is <answer>{a}</answer>" for a in answers]
    columns = {name: [row[name] for row in rows] for name in ("task", "entry", "answer")}
    found = call(reasoning_gym_score, texts, chat, **columns)
    scorers = {name: reasoning_gym.create_dataset(name, size=1, seed=9) for name in names}
    assert found == [
        scorers[row["task"]].score_answer(answer, entry=row["entry"])
        for row, answer in zip(rows, answers, strict=True)
    ]
    assert {row["task"] for row in rows} == set(names) and found[0::3] == [1.0] * 4
    assert max(found[2::3]) <= 0.01, "no answer: some scorers still give a hundredth"


# How functions are called


def test_functions_get_trls_arguments():
    calls = []

    def record(prompts, completions, completion_ids, **columns):
        calls.append((prompts, completions, completion_ids, columns))
        return [0.0] * len(prompts)

    chat = [{"role": "user", "content": "hi"}]
    samples = [Sample("text", "x", [1], {"answer": 1}), Sample(chat, "y", [2, 3], {"level": "low"})]
    assert score(record, samples) == [0.0, 0.0]
    columns = {"answer": [1, None], "level": [None, "low"]}
    assert calls == [(["text", chat], ["x", as_chat("y")], [[1], [2, 3]], columns)]


@pytest.mark.parametrize("values", [(1, 0.5, None), [np.float64(1), torch.tensor(0.5), None]])
def test_numbers_of_any_kind_are_taken(values):
    found = score(lambda **kwargs: values, SAMPLES)
    assert found == [1.0, 0.5, None] and type(found[0]) is float
    for whole in (np.array([1, 0.5, 1], np.float32), torch.tensor([1, 0.5, 1])):
        assert score(lambda **kwargs: whole, SAMPLES) == [1, 0.5, 1]  # noqa: B023


@pytest.mark.parametrize(
    "values, kind, part",
    [
        ([1.0, 2.0], "result", "returned [1.0, 2.0], not a list of 1 values"),
        (1.0, "result", "returned 1.0, not a list"),
        ("1", "result", "returned '1', not a list"),
        ({0: 1.0}, "result", "returned {0: 1.0}, not a list"),
        ([np.nan], "value", "value nan is neither"),
        (["1.0"], "value", "value '1.0' is neither"),
        ([[1.0]], "value", "value [1.0] is neither"),
        ([10**600], "value", "0... is neither a finite number nor None"),
    ],
)
def test_wrong_values_are_failures(values, kind, part):
    (found,) = score(lambda **kwargs: values, SAMPLES[:1])
    assert found.kind == kind and part in found.message


def test_coroutines_are_awaited_in_one_event_loop():
    loops = set()

    async def judge(completions, **columns):
        await asyncio.sleep(0)
        loops.add(asyncio.get_running_loop())
        if completions == ["b"]:
            raise ZeroDivisionError("late")
        return [float(ord(text)) for text in completions]

    assert score(judge, SAMPLES) == [97.0, 98.0, 99.0]
    (failure,) = score(judge, SAMPLES[1:2])
    assert failure.kind == "exception" and "ZeroDivisionError" in failure.message
    assert score(judge, SAMPLES[:1]) == [97.0] and len(loops) == 1


class Panic(BaseException):
    """An exception such as extensions in Rust raise."""


@pytest.mark.parametrize("error", [asyncio.CancelledError, Panic, SystemExit, GeneratorExit])
@pytest.mark.parametrize("is_async", [False, True])
def test_base_exception_is_one_failed_reward(error, is_async):
    def fail(completions, **columns):
        if "b" in completions:
            raise error("gone")
        return [1.0] * len(completions)

    async def fail_late(**arguments):
        return fail(**arguments)

    function = per_sample(fail_late if is_async and error is not SystemExit else fail)
    first, failure, last = score(function, SAMPLES)
    assert (first, last) == (1.0, 1.0)
    assert failure.kind == "exception" and f"raised {error.__name__}" in failure.message


@pytest.fixture
def handled():
    """A handler of SIGINT as in a run, which raises Interrupt."""

    def interrupt(number, frame):
        raise Interrupt

    before = signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(**columns):
    raise KeyboardInterrupt


def test_interrupt_is_no_failed_reward():
    with pytest.raises(KeyboardInterrupt):
        score(interrupt, SAMPLES)


def test_only_a_real_interrupt_is_no_failed_reward(handled):
    (failure,) = set(score(interrupt, SAMPLES))
    assert failure.kind == "exception" and "raised KeyboardInterrupt" in failure.message
    with pytest.raises(Interrupt):
        score(lambda **columns: os.kill(os.getpid(), signal.SIGINT), SAMPLES)


class Wordless(Exception):
    """A value and exception whose methods fail."""

    def __repr__(self):
        raise ValueError("no text")

    __str__ = __float__ = __iter__ = __repr__

    def __len__(self):
        return 1


@pytest.mark.parametrize("value", [torch.empty(1, device="meta"), Wordless()])
def test_value_whose_methods_fail_is_a_failure(value):
    (failure,) = score(lambda **kwargs: [value], SAMPLES[:1])
    assert failure.kind == "value" and len(failure.message) < 2 * MAX_SHOWN
    (failure,) = score(lambda **kwargs: Wordless(), SAMPLES[:1])
    wanted = "returned a Wordless without text, not a list of 1 values, one per sample"
    assert failure == RewardFailure("result", wanted)


def test_chat_that_is_read_as_a_string_gets_a_hint():
    def strip(completions, **columns):
        return [float(text.strip() == "7") for text in completions]

    sample = SAMPLES[0]._replace(prompt=as_chat("4 + 3 ="))
    (failure,) = score(strip, [sample])
    assert failure.message.endswith("the text of a completion is completion[0]['content']")
    (failure,) = score(lambda **columns: [].strip, SAMPLES[:1])
    assert "completion[0]" not in failure.message


def test_long_message_of_an_exception_is_cut():
    line = one_line(ValueError("a" * 400 + "\n" + "b" * 10**6))
    assert line == "ValueError: " + "a" * 400 + " " + "b" * 99 + "..."


@pytest.mark.parametrize("error", [ValueError("x" * 2_000_000), Wordless(), ValueError("\udc80")])
def test_message_is_cut_and_printable(error):
    def fail(**columns):
        raise error

    (failure,) = score(fail, SAMPLES[:1])
    assert f"raised {type(error).__name__} at {__file__}:" in failure.message
    assert len(failure.message.encode()) < 600 + len(__file__)
    assert len(failure.trace) < 10_000 and "in fail" in failure.trace


def test_wrong_length_fails_all_samples():
    """One call for each would give lists of the right length."""
    message = "returned [1.0], not a list of 3 values, one per sample"
    assert score(lambda **kwargs: [1.0], SAMPLES) == [RewardFailure("result", message)] * 3


def test_failed_call_is_repeated_for_each_sample():
    sizes = []

    @per_sample
    def fragile(prompts, completions, completion_ids, **columns):
        sizes.append(len(completions))
        if "b" in completions:
            raise ZeroDivisionError("first line\nsecond line")
        return [ord(c) for c in completions]

    first, failure, last = score(fragile, SAMPLES)
    assert (first, last) == (97, 99) and sizes == [3, 1, 1, 1]
    line = fragile.__code__.co_firstlineno + 4
    message = f"raised ZeroDivisionError at {__file__}:{line}: first line second line"
    assert failure == RewardFailure("exception", message, failure.trace)
    assert failure.trace.startswith("Traceback") and "in fragile" in failure.trace


def test_logs_of_a_failed_call_are_dropped():
    @per_sample
    def fails_at_two(completion_ids, log_extra, log_metric, **columns):
        log_metric("calls", 1)
        log_extra("first", [ids[0] for ids in completion_ids])
        return [1 / (2 - ids[0]) for ids in completion_ids]

    answers = answers_of(fails_at_two, [Sample("", "", [n], {}) for n in range(3)], time)
    assert [dict(answer.columns) for answer in answers] == [{"first": n} for n in range(3)]
    assert [list(answer.metrics) for answer in answers] == [[("calls", 1.0)]] * 3
    log_too_many = per_sample(lambda log_extra, **columns: log_extra("a", [1, 2]))
    ((failure, *_),) = answers_of(log_too_many, [Sample("", "", [0], {})], time)
    assert failure.kind == "exception"


def test_combine_weights_applicable_functions():
    rewards = np.array([[1.0, 2.0], [np.nan, 2.0], [-1.0, np.nan], [0.0, 0.0], [np.nan, np.nan]])
    np.testing.assert_array_equal(combine(rewards, [0.5, 3.0]), [6.5, 6.0, -0.5, 0.0, np.nan])
    np.testing.assert_array_equal(combine(rewards, [1.0, 0.0]), [1.0, 0.0, -1.0, 0.0, np.nan])


@pytest.mark.parametrize(
    "length, wanted",
    # DAPO's own numbers: 16384 expected, 4096 more tolerated.
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0)],
)
def test_overlong_penalty(length, wanted):
    assert overlong_penalty(np.array([length]), 20480, 4096).tolist() == [wanted]
    assert overlong_penalty(np.array([length]), 20480, 0).tolist() == [0.0]


# Loading functions


@pytest.mark.parametrize(
    "path, part",
    [
        ("exact_match", "'exact_match' is not a dotted path"),
        ("no_such_module.reward", "cannot import 'no_such_module.reward': ModuleNotFoundError"),
        ("bubblespec.rewards.exact_mach", "exact_mach': AttributeError"),
        ("bubblespec.rewards.shipped.MATH_LIMIT_S", "is not a function"),
    ],
)
def test_load_reward_names_the_path(path, part):
    message = refusal(load_reward, path)
    assert message.startswith("reward.functions: ") and part in message
