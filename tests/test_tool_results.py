"""Tools of all kinds, and what their results become for the model."""

import asyncio
import functools
from pathlib import Path

import pytest

from bubblespec.mechanisms.episodes.environments import Observation, Outcome
from bubblespec.mechanisms.episodes.forms import load_form
from tests.helpers.environments import call_text, make_config, make_prompt, make_tokenizer, play

GIVE = call_text("chatml", "give", number=1)
END = "<|im_end|>"


class Giver:
    _make = staticmethod(lambda: None)

    def reset(self, **columns) -> None: ...

    def give(self, number: int) -> str:
        """Give something.

        Args:
            number: Any number.
        """
        return self._make()


@pytest.fixture(scope="module")
def chatml():
    return make_tokenizer()


def answer(tokenizer, turn: str, factory: str = f"{__name__}.Giver") -> tuple[Observation, Outcome]:
    (_, observation), outcome = play(factory, tokenizer, make_prompt(), [turn])
    return observation, outcome


LISTS = {
    "texts": (["a", "b"], "['a', 'b']"),
    "mixed": ([1, {"b": None}], "[1, {'b': None}]"),
    "parts": ([{"type": "text", "text": "one"}, {"type": "text", "text": " two"}], "one two"),
    "image": ([{"type": "image", "image": "x"}], "[{'type': 'image', 'image': 'x'}]"),
    "nothing": ([], "[]"),
}


@pytest.mark.parametrize("returned, shown", LISTS.values(), ids=LISTS)
def test_list_results_under_the_projects_template_are_text(monkeypatch, returned, shown):
    """configs/chatml_tools.jinja adds contents to text, so that it refuses lists."""
    tokenizer = make_tokenizer(template=Path("configs/chatml_tools.jinja").read_text())
    monkeypatch.setattr(Giver, "_make", staticmethod(lambda: returned))
    observation, _ = answer(tokenizer, GIVE)
    assert tokenizer.decode(observation.ids) == (
        f"\n<|im_start|>tool\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert observation.num_failed == 0


WITHOUT_TEXT = {
    "generator": (lambda: (n for n in "ab"), "generator"),
    "object": (object, "object"),
    "list of objects": (lambda: [object()], "list"),
    "own text fails": (lambda: Silly(), "no text today"),
}


class Silly:
    def __str__(self) -> str:
        raise ValueError("no text today")


@pytest.mark.parametrize("make, says", WITHOUT_TEXT.values(), ids=WITHOUT_TEXT)
def test_result_without_text_is_an_error(chatml, monkeypatch, make, says):
    monkeypatch.setattr(Giver, "_make", staticmethod(make))
    observation, _ = answer(chatml, GIVE)
    text = chatml.decode(observation.ids)
    assert says in text and "'error'" in text and "0x" not in text
    assert observation.num_failed == 1


@pytest.mark.parametrize("value", ["<a at 0x1f>", {"a": "<b at 0x1f>"}, ["<c at 0x1f>"]], ids=str)
def test_plain_data_with_an_address_is_shown(chatml, monkeypatch, value):
    monkeypatch.setattr(Giver, "_make", staticmethod(lambda: value))
    observation, _ = answer(chatml, GIVE)
    assert "at 0x1f" in chatml.decode(observation.ids) and observation.num_failed == 0


class Kinds:
    def reset(self, **columns) -> None: ...

    @staticmethod
    def static(a: int) -> int:
        """Double.

        Args:
            a: A number.
        """
        return 2 * a

    @classmethod
    def of_class(cls, a: int) -> str:
        """Name the class.

        Args:
            a: A number.
        """
        return f"{cls.__name__} {a}"

    @functools.lru_cache  # noqa: B019
    def cached(self, a: int) -> int:
        """Square.

        Args:
            a: A number.
        """
        return a * a

    @functools.lru_cache  # noqa: B019
    def _hidden(self, a: int) -> int: ...

    @property
    def number(self) -> int:
        raise ValueError

    Inner = Silly


def test_methods_of_all_kinds_are_tools(chatml):
    form = load_form(f"{__name__}.Kinds", [])
    names = [schema["function"]["name"] for schema in form.schemas()]
    assert names == ["cached", "of_class", "static"]
    calls = "".join(call_text("chatml", name, a=3).removesuffix(END) for name in names)
    observation, _ = answer(chatml, calls + END, f"{__name__}.Kinds")
    texts = chatml.decode(observation.ids).split("<|im_end|>")
    assert [text.rpartition("\n")[2] for text in texts[:3]] == ["9", "Kinds 3", "6"]
    assert observation.num_failed == 0


def test_cancellation_is_an_error_of_the_tool(chatml, monkeypatch):

    def cancel():
        raise asyncio.CancelledError("gone")

    monkeypatch.setattr(Giver, "_make", staticmethod(cancel))
    monkeypatch.setattr(Giver, "get_reward", lambda self: cancel(), raising=False)
    observation, outcome = answer(chatml, GIVE)
    assert "{'error': 'gone'}" in chatml.decode(observation.ids) and observation.num_failed == 1
    assert outcome.problem == "CancelledError: gone" and outcome.reward is None


def test_interrupt_in_a_tool_ends_the_run(chatml, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(Giver, "_make", staticmethod(interrupt))
    with pytest.raises(KeyboardInterrupt):
        answer(chatml, GIVE)


def test_long_lists_are_cut_as_text(chatml, monkeypatch):
    monkeypatch.setattr(Giver, "_make", staticmethod(lambda: ["word"] * 5000))
    observation, _ = answer(chatml, GIVE)
    assert observation.reason is None
    assert len(observation.ids) <= make_config().max_observation_length
    assert chatml.decode(observation.ids).startswith("\n<|im_start|>tool\n['word', 'word', ")
