"""Environments in process: the same tokens as TRL's own functions and tool loop, turns and their
ends."""

import copy
import functools
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from bubblespec.data.prompts import make_tokenize
from bubblespec.errors import InputError
from bubblespec.mechanisms.episodes.environments import Environments
from bubblespec.mechanisms.episodes.forms import Host, add_text, load_form, tool_message
from bubblespec.mechanisms.episodes.tokens import base_ids, begin_ids, observation_ids, parse_calls
from tests.helpers.checks import refusal
from tests.helpers.environments import (
    FAMILIES,
    HERE,
    Calculator,
    call_text,
    make_config,
    make_prompt,
    make_tokenizer,
    play,
)

trl = pytest.importorskip("trl")

CHAT = [{"role": "user", "content": "What is"}]
ADDED = ["", "a", "land", " land", "7", "\n\nland", "?", "...", "é", "\t", " " * 5]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(family):
    return make_tokenizer(family)


@pytest.fixture(scope="module")
def chatml():
    return make_tokenizer()


def trainer_of_trl(tokenizer, **fields):
    fields |= {"_is_vlm": False, "processing_class": tokenizer, "_tokenizer": tokenizer}
    trainer = SimpleNamespace(chat_template=None, chat_template_kwargs={}, **fields)
    trainer._get_tool_suffix_ids = lambda messages: trl.GRPOTrainer._get_tool_suffix_ids(
        trainer, messages
    )
    return trainer


@pytest.mark.parametrize(
    "results",
    [
        ["7"],
        [""],
        ["<b>\n\n", "two"],
        [{"error": "é"}],
        [[1, 2]],
        [[{"type": "text", "text": "x"}]],
    ],
    ids=str,
)
def test_observation_ids_equal_trl(family, tokenizer, results):
    messages = [tool_message("add", result) for result in results]
    given = copy.deepcopy(messages)
    if family == "qwen3" and isinstance(results[0], list):  # its template shows nothing of lists
        given = [tool_message("add", "[1, 2]" if results == [[1, 2]] else "x")]
    wanted = trainer_of_trl(tokenizer)._get_tool_suffix_ids(given)
    assert observation_ids(tokenizer, messages, True, 10_000) == wanted


@pytest.mark.parametrize("added", [None, *ADDED])
def test_base_and_beginning_equal_the_prompt_of_trl(tokenizer, added):
    form = load_form(f"{HERE}.Calculator", [])
    prompts = [
        CHAT,
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "7. "}],
    ]
    for prompt in prompts:
        base = base_ids(tokenizer, prompt, form.schemas(), form.adds_text)
        assert len(base) > 5
        begun = prompt
        if added is not None:
            last = {**prompt[-1], "content": prompt[-1]["content"] + added}
            begun = [*prompt[:-1], last]
        wanted = tokenizer.apply_chat_template(
            conversation=[begun],
            tools=form.tools(Calculator()),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )["input_ids"][0]
        ids = begin_ids(tokenizer, prompt, begun, base, form.schemas(), 10_000)
        assert list(base) + ids == wanted


def test_turn_begun_by_the_prompt_is_continued(tokenizer):
    begun = [*CHAT, {"role": "assistant", "content": "Let me think"}]
    base = base_ids(tokenizer, begun, [], True)
    longer = add_text(begun, [{"type": "text", "text": ": 3 "}, {"type": "text", "text": "+ 4"}])
    assert longer[-1] == {"role": "assistant", "content": "Let me think: 3 + 4"}
    ids = [*base, *begin_ids(tokenizer, begun, longer, base, [], 100)]
    wanted = tokenizer.apply_chat_template(longer, continue_final_message=True, tokenize=False)
    assert ids == tokenizer(wanted, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids).endswith("Let me think: 3 + 4")
    with pytest.raises(TypeError, match="parts that are not text"):
        add_text(CHAT, [{"type": "image"}])


def test_base_is_the_whole_prompt_without_additions(tokenizer):
    assert list(base_ids(tokenizer, CHAT, [], False)) == make_tokenize(tokenizer)(CHAT)
    assert not load_form(f"{HERE}.Silent", []).adds_text
    assert not load_form(None, [f"{HERE}.search"]).adds_text


@pytest.mark.parametrize("added", ADDED)
def test_base_of_a_text_prompt(added):
    tokenizer = make_tokenizer()
    text = "What is this? What is"
    base = base_ids(tokenizer, text, [], True)
    ids = begin_ids(tokenizer, text, text + added, base, [], 99)
    assert len(base) >= 3
    assert list(base) + ids == tokenizer(text + added)["input_ids"]


def test_scripted_episode_equals_the_tool_loop_of_trl(family, tokenizer):
    """TRL's own loop with turns that are given instead of generated."""
    turns = [
        call_text(family, "add", a=1, b=2),
        call_text(family, "fail"),
        call_text(family, "nothing"),
        call_text(family, "numbers", upto=3),
        call_text(family, "later", text="an island"),
        call_text(family, "add", a=1),
        "The answer is 7." + tokenizer.eos_token,
    ]
    ids = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
    if family in ("chatml", "qwen2.5"):  # TRL does not parse without a response template
        tokenizer = make_tokenizer(family)
        tokenizer.response_template = trl.chat_template_utils.qwen3_template
    columns = {"start": 10, "added": " 7?"}
    form = load_form(f"{HERE}.Calculator", [])
    prompt = make_prompt(**columns)
    (begin, *observations), outcome = play("Calculator", tokenizer, prompt, turns)
    assert observations[-1].reason == "no_call" and len(observations[-1].ids) == 0

    environment = Calculator()
    begun = [{"role": "user", "content": "What is" + environment.reset(prompt=CHAT, **columns)}]
    tools = {tool.__name__: tool for tool in form.tools(environment)}
    if family == "qwen3":  # its template shows nothing of lists
        tools["numbers"] = functools.wraps(tools["numbers"])(lambda upto: str(list(range(upto))))
    is_async = {name: name == "later" for name in tools}
    prompt_tokens = tokenizer.apply_chat_template(
        begun, tools=list(tools.values()), add_generation_prompt=True, return_dict=False
    )
    thread, loop, ready = trl.trainer.utils.start_event_loop_in_daemon(name="tools")
    ready.wait()
    rest = iter(ids[1:])
    trainer = trainer_of_trl(
        tokenizer,
        max_tool_calling_iterations=100,
        max_completion_length=100_000,
        use_vllm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=100_000)),
        environment_factories=None,
        tools=list(tools.values()),
        async_loop=loop,
        _sync_tool_dicts=[{name: t for name, t in tools.items() if not is_async[name]}],
        _async_tool_dicts=[{name: t for name, t in tools.items() if is_async[name]}],
        _generate_single_turn=lambda *_, **__: ([next(rest)], None),
    )
    first = trl.chat_template_utils.parse_response(
        tokenizer, ids[0], prefix=prompt_tokens, tools=trainer.tools
    )
    mask, _, (completion,), _, num_calls, num_failed, _ = trl.GRPOTrainer._tool_call_loop(
        trainer, [begun], [prompt_tokens], [list(ids[0])], [[first]], None, None, {}
    )
    trl.trainer.utils.shutdown_event_loop_in_daemon(thread, loop)

    assert [*prompt.token_ids, *begin.ids] == prompt_tokens
    pairs = list(zip(ids, observations, strict=True))
    assert completion == [token for turn, o in pairs for token in [*turn, *o.ids.tolist()]]
    assert mask[0] == [m for turn, o in pairs for m in [1] * len(turn) + [0] * len(o.ids)]
    assert num_calls == sum(o.num_calls for o in observations) == 6
    assert num_failed == sum(o.num_failed for o in observations) == 3
    assert outcome.reward == environment.get_reward()
    assert pickle.loads(outcome.environment).results == environment.results


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("no call", []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [("f", {"a": 1})]),
        ('<tool_call>\n{"name": "f"}\n</tool_call> and <tool_call>{"name": "g"}</tool_call>', None),
        ("<tool_call>{oops</tool_call>", "Invalid JSON"),
        ('<tool_call>{"name": "f"', "Invalid JSON"),
        ("<tool_call>[1]</tool_call>", "needs a name"),
        ('<tool_call>{"name": 1}</tool_call>', "needs a name"),
        ('<tool_call>{"type": "x", "function": {"name": "f"}}</tool_call>', "tool call"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "Invalid JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("by_template", [False, True])
def test_tool_calls_are_parsed(text, wanted, by_template):
    tokenizer = make_tokenizer("qwen3")
    if not by_template:
        tokenizer.response_template = None
    ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    calls = parse_calls(tokenizer, ids, [], load_form(f"{HERE}.Calculator", []).schemas())
    if isinstance(wanted, str):
        (call,) = calls
        assert wanted in call["error"] and isinstance(call["name"], str)
    else:
        wanted = [("f", {}), ("g", {})] if wanted is None else wanted
        assert [(call["name"], call["arguments"]) for call in calls] == wanted


def test_calls_of_one_turn_run_in_order_and_coroutines_last(chatml):
    turn = (
        '<tool_call>{"name": "later", "arguments": {"text": "last"}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        "<tool_call>{</tool_call><|im_end|>"
    )
    (_, observation), _ = play("Calculator", chatml, make_prompt(), [turn])
    said = chatml.decode(observation.ids)
    assert observation.num_calls == 3 and observation.num_failed == 1
    assert said.index("3") < said.index("Invalid JSON") < said.index("last")
    assert said.endswith("<|im_start|>assistant\n") and said.startswith("\n<|im_start|>tool\n")


def test_last_turn_is_not_run(chatml):
    turn = call_text("chatml", "add", a=1, b=2)
    (*_, last), outcome = play("Calculator", chatml, make_prompt(), [turn] * 3, max_turns=3)
    assert (last.reason, last.num_calls, len(last.ids)) == ("max_turns", 0, 0)
    assert outcome.reward == 6


def test_functions_are_tools(chatml):
    texts = [call_text("chatml", "search", query="foxes"), "The end.<|im_end|>"]
    (_, first, last), outcome = play(None, chatml, make_prompt(), texts, tools=[f"{HERE}.search"])
    assert "nothing about foxes" in chatml.decode(first.ids) and last.reason == "no_call"
    assert outcome.reward is None and outcome.problem is None


@pytest.mark.parametrize("is_chat", [True, False])
def test_text_environment(chatml, is_chat):
    prompt = make_prompt(is_chat=is_chat, number=5)
    turns = [f"{number}<|im_end|>" for number in (7, 2, 5)]
    (begin, less, more, last), outcome = play("Guess", chatml, prompt, turns)
    assert [*prompt.token_ids, *begin.ids] == make_tokenize(chatml)(prompt.text)
    around = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n" if is_chat else "{}"
    assert chatml.decode(less.ids) == around.format("less")
    assert chatml.decode(more.ids) == around.format("more")
    assert (last.reason, last.num_calls) == ("done", 0)
    assert outcome.reward == 1.5
    assert pickle.loads(outcome.environment).number == 5


def test_last_turn_of_a_text_environment_counts(chatml):
    (*_, last), outcome = play("Guess", chatml, make_prompt(number=5), ["1", "2"], max_turns=2)
    assert last.reason == "max_turns" and len(last.ids) == 0
    assert outcome.reward == 0.5


def test_seed_and_errors_of_a_text_environment(chatml):
    (_, last), _ = play("WordGame", chatml, make_prompt(), ["9"], seed=9)
    assert last.reason == "done"
    (_, last), outcome = play("Guess", chatml, make_prompt(number=5), ["break"])
    assert last.reason == "error" and "broken" in outcome.problem


@pytest.mark.parametrize("kind, same", [("seeded", True), ("random", False)])
def test_seed_reaches_reset(chatml, kind, same):
    turn, prompt = call_text("chatml", "draw"), make_prompt(kind=kind)
    said = [play("Unruly", chatml, prompt, [turn, turn], seed=3)[0][1:] for _ in range(2)]
    assert same == all(np.array_equal(a.ids, b.ids) for a, b in zip(*said, strict=True))
    assert not np.array_equal(said[0][0].ids, said[0][1].ids)


def test_error_of_reset_ends_the_episode(chatml):
    (begin,), outcome = play("Unruly", chatml, make_prompt(kind="raises"), [])
    assert begin.reason == "error" and len(begin.ids)
    assert outcome.reward is None and "no such game" in outcome.problem


@pytest.mark.parametrize("limit", [20, 40, 200])
def test_long_observations_are_cut_within_the_template(chatml, limit):
    turn = call_text("chatml", "flood", size=5000)
    (_, observation), _ = play(
        "Unruly", chatml, make_prompt(), [turn], max_observation_length=limit
    )
    said = chatml.decode(observation.ids)
    assert limit - 2 <= len(observation.ids) <= limit
    assert said.startswith("\n<|im_start|>tool\na a")
    assert said.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_too_many_observations_for_one_turn(chatml):
    turn = call_text("chatml", "flood", size=1).removesuffix("<|im_end|>") * 20 + "<|im_end|>"
    (_, observation), _ = play("Unruly", chatml, make_prompt(), [turn], max_observation_length=40)
    assert observation.reason == "too_long"


def test_long_text_of_reset_is_cut(chatml):
    prompt = make_prompt(added=" what" * 1000)
    (begin,), _ = play("Calculator", chatml, prompt, [], max_observation_length=100)
    assert 90 < len(begin.ids) <= 100
    assert chatml.decode(begin.ids).endswith("what<|im_end|>\n<|im_start|>assistant\n")


def test_beginning_with_another_base_is_refused(chatml):
    begun = [{"role": "user", "content": "Something else"}]
    base = base_ids(chatml, CHAT, [], False)
    assert "changes earlier tokens" in refusal(begin_ids, chatml, CHAT, begun, base, [], 99)


def test_observations_of_ended_episodes_are_dropped(chatml):
    environments = Environments(make_config("Guess"), chatml)
    environments.begin("a", make_prompt(number=1), 0)
    environments.end("a", with_reward=False)
    environments.begin("a", make_prompt(number=1), 0)
    environments.wait(0.0)
    assert [name for name, _ in environments.poll()] == ["a"]
    assert environments.poll() == []


@pytest.mark.parametrize("value", [math.nan, "x", None])
def test_rewards_are_finite_numbers_or_none(value, monkeypatch):
    monkeypatch.setattr(Calculator, "get_reward", lambda self: value)
    host = Host(load_form(f"{HERE}.Calculator", []))
    host.answer(pickle.dumps(("begin", 1, (CHAT, {}, 0))))
    reply = host.answer(pickle.dumps(("end", 1, (True, False))))
    assert ("error" in reply) == (value is not None) and reply.get("reward") is None


def test_columns_without_pickle_are_refused(chatml):
    environments = Environments(make_config("Calculator"), chatml)
    with pytest.raises(InputError, match="cannot be sent"):
        environments.begin("a", make_prompt(start=lambda: 0), 0)
