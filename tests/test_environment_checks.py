"""Which environments, tokenizers and chat templates are refused, each in one line, and which
pass."""

import contextlib
from pathlib import Path

import pytest

from bubblespec.config.file import load_config
from bubblespec.loading import load_tokenizer
from bubblespec.mechanisms.episodes.environments import check_environment
from bubblespec.mechanisms.episodes.forms import tool_message
from bubblespec.mechanisms.episodes.tokens import observation_ids
from examples.calculator import Calculator
from tests.helpers.checks import refusal
from tests.helpers.environments import (
    FAMILIES,
    FORGETFUL,
    HERE,
    NO_TOOLS,
    make_config,
    make_tokenizer,
)

pytest.importorskip("trl")

CHAT = [{"role": "user", "content": "What is"}]


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request):
    return make_tokenizer(request.param)


@pytest.fixture(scope="module")
def chatml():
    return make_tokenizer()


def add(a: int, b: int) -> int:
    """Add, as the calculator does.

    Args:
        a: A number.
        b: Another.
    """
    return a + b


CALCULATOR, GUESS, SEARCH = (f"{HERE}.{name}" for name in ("Calculator", "Guess", "search"))
ADD = f"{__name__}.add"
REFUSED = {
    "no dotted path": ({"factory": "Calculator"}, "not a dotted path"),
    "no such module": ({"factory": "nowhere.Game"}, "cannot import"),
    "no class": ({"factory": SEARCH}, "not a class"),
    "no form": ({"factory": f"{HERE}.Formless"}, "neither `reset`"),
    "no hints": ({"factory": f"{HERE}.Untyped"}, "type hints"),
    "no docstring": ({"factory": f"{HERE}.Undocumented"}, "docstring"),
    "no function": ({"tools": [CALCULATOR]}, "not a function"),
    "text and tools": ({"factory": GUESS, "tools": [SEARCH]}, "cannot be combined with tools"),
    "columns": ({"factory": f"{HERE}.Picky"}, "cannot be called with the columns"),
    "one name twice": ({"factory": CALCULATOR, "tools": [ADD]}, "two tools are named 'add'"),
    "small limit": ({"factory": CALCULATOR, "max_observation_length": 3}, "fewer than"),
}


@pytest.mark.parametrize("options, hint", REFUSED.values(), ids=REFUSED)
def test_environment_is_refused(chatml, options, hint):
    config = make_config(**{key: value for key, value in options.items() if key != "factory"})
    config.factory = options.get("factory")
    assert hint in refusal(check_environment, config, chatml, CHAT, ["answer"])


NO_CALLS = NO_TOOLS.replace("{% for", "{{ tools | tojson if tools }}{% for", 1)
NO_TAGS = "{{ tools | tojson }}{{ messages | tojson }}"
NO_SEVEN = Path("configs/chatml_tools.jinja").read_text()
NO_SEVEN = NO_SEVEN.replace("(message.content or '')", "(message.content | replace('7', ''))")
TEMPLATES = {
    "no tools": ("Calculator", NO_TOOLS, "no tool format"),
    "no calls": ("Calculator", NO_CALLS, "leaves out tool calls"),
    "no tags": ("Calculator", NO_TAGS, "no response_template"),
    "no numbers": ("Calculator", NO_SEVEN, "does not render a tool's result"),
    "prefix with tools": ("Calculator", FORGETFUL, "preserve prefixes"),
    "prefix": ("Guess", FORGETFUL, "preserve prefixes"),
    "raises": ("Guess", "{{ raise_exception('no') }}", "fails on"),
}


@pytest.mark.parametrize("factory, template, hint", TEMPLATES.values(), ids=TEMPLATES)
def test_template_is_refused(factory, template, hint):
    tokenizer = make_tokenizer(template=template)
    assert hint in refusal(check_environment, make_config(factory), tokenizer, CHAT, ["number"])


def test_text_prompts_are_refused_for_tools_only(chatml):
    check_environment(make_config("Guess"), chatml, "What is", ["number"])
    config = make_config("Calculator")
    assert "chat prompts" in refusal(check_environment, config, chatml, "What is", [])
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    check_environment(make_config("Guess"), tokenizer, "What is", ["number"])
    for name in ("Guess", "Calculator"):
        assert "no chat template" in refusal(
            check_environment, make_config(name), tokenizer, CHAT, []
        )


def test_good_environments_pass(tokenizer):
    for factory in ("Calculator", "Guess", "Silent"):
        check_environment(make_config(factory), tokenizer, CHAT, ["number"])
    check_environment(make_config(None, tools=[f"{HERE}.search"]), tokenizer, CHAT, [])


def test_configured_template_replaces_template_without_tools(tmp_path):
    """That of configs/smollm2_calculator.yaml, for its environment."""
    make_tokenizer(template=NO_TOOLS).save_pretrained(tmp_path)
    config = load_config("configs/smollm2_calculator.yaml", [f"model.path={tmp_path}"])
    tokenizer, environment = load_tokenizer(config), config.environment
    check_environment(environment, tokenizer, CHAT, ["answer"])
    ids = observation_ids(tokenizer, [tool_message("calculate", 7)], True, 64)
    assert tokenizer.decode(ids) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    config.model.chat_template_path = None
    plain = load_tokenizer(config)
    assert "no tool format" in refusal(check_environment, environment, plain, CHAT, ["answer"])
    config.model.chat_template_path = f"{tmp_path}/none.jinja"
    assert "model.chat_template_path: cannot read" in refusal(load_tokenizer, config)


@pytest.mark.parametrize(
    "expression, reward", [("3 + 4", 1.0), ("-3*(2 - 4) + 2", 0.2), ("2 ** 9", 0.0), ("a", 0.0)]
)
def test_calculator_scores_the_last_result(expression, reward):
    calculator = Calculator()
    calculator.reset(answer="7")
    with contextlib.suppress(ValueError):
        assert calculator.calculate(expression) == eval(expression)
    assert calculator.get_reward() == reward
