"""One episode through a pipe: turns from standard input, the mask and the rewards on the screen."""

import io
import os
import re
import sys

import pytest

from bubblespec.__main__ import main
from tests.helpers import games
from tests.helpers.warm import ROOT

TWO_TERMS = "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
SUM = ["--config", "configs/tiny_episodes.yaml", "data.size=64", "eval.num_prompts=4"]
SUM += [f"data.tasks=[{{name: chain_sum, config: {TWO_TERMS}}}]"]
GIVEN = "reward.functions=[bubblespec.rewards.exact_match]"
BLOCK = re.compile(r"^```python my_calculator.py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SUM_OF = re.compile(r"(\d+) ([+-]) (\d+)[⟦ ]*=")


@pytest.fixture
def calculator(tmp_path, monkeypatch):
    """Arguments that play the calculator of docs/environments.md."""
    with open(os.path.join(ROOT, "docs/environments.md"), encoding="utf-8") as file:
        (tmp_path / "my_calculator.py").write_text("\n".join(BLOCK.findall(file.read())))
    (tmp_path / "policy").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    options = [*SUM, f"model.path={games.copy_policy(tmp_path / 'policy')}", "data.as_chat=true"]
    options += ["environment.factory=my_calculator.Calculator", "environment.max_turns=8"]
    options += ["environment.max_observation_length=120"]
    options += ["reward.functions=[my_calculator.brevity]", "rollout.max_prompt_length=400"]
    return [*options, "rollout.max_completion_length=400"]


@pytest.fixture
def run(monkeypatch, capsys):
    """run(arguments, input) -> exit code, standard output and standard error."""

    def run(arguments: list[str], text: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["", "play", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = main()
        return code, *capsys.readouterr()

    return run


def terms(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b) * (1 if sign == "+" else -1)) for a, sign, b in SUM_OF.findall(text)]


@pytest.mark.parametrize("num_wrong, reward", [(0, "1.0"), (1, "0.66"), (3, "0.0")])
def test_sum_game_asks_again_after_a_wrong_answer(run, num_wrong, reward):
    (asked,) = terms(run(SUM)[1])
    turns = [*["<answer>999</answer>"] * num_wrong, f"<answer>{sum(asked)}</answer>"][:3]
    code, said, _ = run(SUM, "\n\n".join(turns))
    assert code == 0
    assert "[over: done (" in said and f"reward of the environment: {reward}" in said
    assert said.count("\u27e6") == len(turns)  # the end of the prompt, and the questions after it
    assert all(f"{turn}<|endoftext|>\n[turn: " in said for turn in turns)
    assert "\033" not in said


def test_wrong_answers_and_end_of_input(run):
    code, said, _ = run(SUM, "I do not\nknow\n\n\n")
    assert code == 0
    assert "I do not\nknow<|endoftext|>\n[turn: " in said
    assert "\n<|endoftext|>\n[turn: 1 tokens]" in said  # an empty line alone is a turn
    assert len(terms(said)) == 3
    assert "[over: end of input;" in said and "reward of the environment: 0.0" in said


def test_counts_add_up(run):
    _, said, _ = run(SUM, "1\n\n2\n\n3\n\n")
    begun = int(re.search(r"and (\d+) of the environment", said)[1])
    turns = [int(count) for count in re.findall(r"\[turn: (\d+)", said)]
    observed = [int(count) for count in re.findall(r"\[observation: (\d+)", said)]
    assert len(turns) == len(observed) == 3 and observed[2] == 0
    total = begun + sum(turns) + sum(observed)
    assert f"response: {total} of 256 tokens, {sum(turns)} trained on]" in said


@pytest.mark.parametrize("text", ["1 " * 200, "1 " * 20 + "\n\n" + "1 " * 20])
def test_response_ends_at_the_limit(run, text):
    code, said, _ = run([*SUM, "rollout.max_completion_length=70"], text)
    assert code == 0 and "reached); response: 70 of 70 tokens" in said


@pytest.mark.parametrize("is_right", [True, False])
def test_tools_are_called(run, calculator, is_right):
    (asked,) = terms(run(calculator)[1])
    a, b = asked if is_right else (1, sum(asked))
    turns = [f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>']
    turns += ['<tool_call>{"name": "add", </tool_call>', '<tool_call>{"name": "guess"}</tool_call>']
    turns += ["I have done it."]
    code, said, error = run(calculator, "\n\n".join(turns))
    assert code == 0, error
    assert f"⟦<tool>{a + b}<" in said
    assert "Invalid JSON in a tool call" in said and "Tool guess not found" in said
    assert said.count("tool calls: 1, 1 of them failed") == 2
    assert "tool calls: 0, 0 of them failed" in said and "[over: no_call (" in said
    assert f"reward of the environment: {float(is_right)}" in said
    assert "reward of my_calculator.brevity: -0.1" in said


def test_prompts_are_chosen(run):
    _, first, _ = run(SUM)
    _, third, _ = run([*SUM, "--prompt", "2"])
    assert terms(first) != terms(third)


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--config", "configs/nothing.yaml"], "--config: no file"),
        ([*SUM, "environment.factory=null", GIVEN], "neither factory nor tools"),
        ([*SUM, "--prompt", "64"], "--prompt: 64, but the data has"),
        ([*SUM, "--prompt", "-1"], "--prompt: -1"),
        ([*SUM, "environment.factory=nowhere.Game"], "cannot import"),
        ([*SUM, "environment.max_turns=0"], "max_turns"),
    ],
)
def test_bad_input_is_refused_in_one_line(run, arguments, problem):
    code, _, error = run(arguments)
    assert code == 2 and problem in error and error.count("\n") == 1
