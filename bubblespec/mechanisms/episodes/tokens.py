"""Token ids of observations, and tool calls in the model's turns.

Ids are only appended: no turn is ever tokenized again from its text. What stands between two turns
is the difference of two renderings of a dummy conversation, as in TRL 1.16.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable

from bubblespec.data.prompts import make_tokenize, render, render_text
from bubblespec.errors import InputError
from bubblespec.mechanisms.episodes.forms import Chat, Form, tool_message

# How added text may begin: kinds of characters that tokenizers join to what precedes them.
_BEGINNINGS = ("", "a", " a", "7", "\na", ".")
_SENTINELS = ("tool_name_q1", "key_q2", "value_q3", "content_q4")
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def base_ids(tokenizer, prompt: Chat, schemas: list[dict], adds_text: bool) -> tuple[int, ...]:
    """Return the ids that begin a prompt whatever text an environment adds: what a group shares.

    Without such text these are all ids of the prompt. The last word may become part of another
    token, so several beginnings of text replace it, and the common prefix of all renderings counts.
    """
    tokenize = make_tokenize(tokenizer, schemas)
    ids = tokenize(prompt)
    if not adds_text:
        return tuple(ids)
    text = _last_text(prompt)
    stem = text[: len(text) - len(re.split(r"\s", text)[-1])]
    variants = [_with_last_text(prompt, stem + beginning) for beginning in _BEGINNINGS]
    renderings = [ids, *map(tokenize, variants)]
    in_common = itertools.takewhile(lambda at: len(set(at)) == 1, zip(*renderings, strict=False))
    return tuple(token for token, *_ in in_common)


def tokenize_with(tokenizer, form: Form) -> Callable[[Chat], tuple[int, ...]]:
    """Return the function from a prompt to the ids that a group of episodes shares."""
    schemas, adds_text = form.schemas(), form.adds_text
    return lambda prompt: base_ids(tokenizer, prompt, schemas, adds_text)


def begin_ids(
    tokenizer,
    prompt: Chat,
    begun: Chat,
    base: tuple[int, ...],
    schemas: list[dict],
    max_length: int,
) -> list[int]:
    """Return the ids after `base` of a prompt to which an environment has added text.

    The text is cut to max_length tokens. Raises InputError if it changes `base`."""
    before, after = _last_text(prompt), _last_text(begun)
    added = after[len(before) :] if after.startswith(before) else ""  # else it stays whole

    def ids_at(num_chars: int) -> list[int]:
        cut = _with_last_text(begun, before + added[:num_chars]) if added else begun
        ids = make_tokenize(tokenizer, schemas)(cut)
        if tuple(ids[: len(base)]) != base:
            raise InputError(
                "environment.factory: text that it adds to the prompt changes earlier tokens: "
                f"{after!r:.200}"
            )
        return ids[len(base) :]

    ids = _fit(ids_at, len(added), max_length)
    if ids is None:
        raise InputError(
            f"environment.max_observation_length: {max_length} tokens are too few for the part of "
            "a prompt after its shared prefix"
        )
    return ids


def observation_ids(
    tokenizer, messages: list[dict], is_chat: bool, max_length: int
) -> list[int] | None:
    """Return the ids between two turns of the model; None where the template alone is too long.

    To fit max_length tokens the text of the messages is cut, and the template's part stays. A list
    that the template refuses or does not render becomes text, and so does one that is too long."""
    if is_chat:
        messages = [_accepted(tokenizer, message) for message in messages]

    def ids_at(num_chars: int) -> list[int]:
        cut = [_with_text(message, _text_in(message)[:num_chars]) for message in messages]
        if is_chat:
            return _suffix_ids(tokenizer, cut)
        text = "".join(message["content"] for message in cut)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def fit() -> list[int] | None:
        longest = max((len(_text_in(message)) for message in messages), default=0)
        return _fit(ids_at, longest, max_length)

    ids = fit()
    if ids is None and any(isinstance(message["content"], list) for message in messages):
        messages = [{**message, "content": _text_of(message["content"])} for message in messages]
        ids = fit()
    return ids


def _suffix_ids(tokenizer, messages: list[dict]) -> list[int]:
    """Return what a chat template renders for messages that follow a turn's stop token.

    Equals TRL's `_get_tool_suffix_ids`."""
    dummy = _dummy_before(messages)
    before = render(tokenizer, dummy)
    if tokenizer.eos_token_id in before:  # a template may put a line break after it
        before = before[: len(before) - before[::-1].index(tokenizer.eos_token_id)]
    ids = render(tokenizer, dummy + messages, add_generation_prompt=True)
    if ids[: len(before)] != before:
        raise InputError("model.path: its chat template changes a turn when messages follow it")
    return ids[len(before) :]


def _dummy_before(messages: list[dict]) -> list[dict]:
    """Return a conversation that these messages may follow."""
    turn: dict = {"role": "assistant", "content": ""}
    if messages and messages[0]["role"] == "tool":  # some templates repeat the name of the call
        function = {"name": messages[0]["name"], "arguments": {}}
        turn["tool_calls"] = [{"type": "function", "function": function}]
    return [{"role": "user", "content": "dummy"}, turn]


def _accepted(tokenizer, message: dict) -> dict:
    """Return the message, with text for a list that the template refuses or does not render."""
    content = message["content"]
    if isinstance(content, str):
        return message
    empty = {**message, "content": ""}
    with contextlib.suppress(InputError):
        shown, nothing = (
            render_text(tokenizer, [*_dummy_before([message]), last]) for last in (message, empty)
        )
        if shown != nothing:
            return message
    return {**message, "content": _text_of(content)}


def _text_of(content: str | list) -> str:
    """Return content as text: that of its parts, if all of them are text."""
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, dict) else {} for part in content]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    is_text = all(part.get("type") == "text" for part in parts)
    return "".join(texts) if texts and is_text and len(texts) == len(parts) else str(content)


def _fit(ids_at: Callable[[int], list[int]], num_chars: int, max_length: int) -> list[int] | None:
    """Return `ids_at(n)` for the largest n up to num_chars with at most max_length ids, or None.

    Takes time in proportion to max_length, however long the text is."""
    fits, fails, best = -1, num_chars + 1, None
    middle = min(num_chars, 8 * max_length)
    while fits + 1 < fails:
        ids = ids_at(middle)
        if len(ids) <= max_length:
            fits, best = middle, ids
        else:
            fails = middle
        is_open = fails > num_chars
        middle = min(2 * middle + 1, num_chars) if is_open else (fits + fails) // 2
    return best


def parse_calls(tokenizer, ids: list[int], prefix: list[int], schemas: list[dict]) -> list[dict]:
    """Return the tool calls in a turn, as {name, arguments} or {name, error}.

    They are parsed by the tokenizer's response template; without one, or where that fails, they
    are between <tool_call> tags. prefix: all ids before the turn, as a template may begin it.
    """
    if getattr(tokenizer, "response_template", None) is not None:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            message = tokenizer.parse_response(ids, prefix=prefix, tools=schemas) or {}
            return [_checked(call) for call in message.get("tool_calls") or []]
    calls = []
    for text in _TOOL_CALL.findall(tokenizer.decode(ids)):
        try:
            calls.append(_checked(json.loads(text)))
        except (ValueError, RecursionError) as error:
            calls.append({"name": "unknown", "error": f"Invalid JSON in a tool call: {error}"})
    return calls


def _checked(call) -> dict:
    """Check a call: {type, function: {name, arguments}}, or {name, arguments}."""
    call = call if isinstance(call, dict) else {}
    function, kind = call.get("function", call), call.get("type", "function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        return {"name": "unknown", "error": "A tool call needs a name and arguments."}
    if kind != "function":
        return {"name": name, "error": f"Unsupported tool call type: {kind}"}
    arguments = function.get("arguments")
    return {"name": name, "arguments": {} if arguments is None else arguments}


def check_tokens(
    tokenizer, prompt: Chat, schemas: list[dict], is_text: bool, max_length: int
) -> None:
    """Raise InputError if the tokenizer cannot serve such episodes."""
    if isinstance(prompt, str):
        if schemas:
            raise InputError(
                "environment: tools need chat prompts; set data.as_chat=true for string prompts"
            )
        return
    if tokenizer.chat_template is None:
        raise InputError("model.path: its tokenizer has no chat template, but prompts are chats")
    if schemas:
        _check_tool_format(tokenizer, prompt, schemas)
    if schemas or is_text:
        role = {"role": "user"} if is_text else {"role": "tool", "name": "dummy"}
        _check_prefix(tokenizer, {**role, "content": "dummy"})
        if observation_ids(tokenizer, [{**role, "content": ""}], True, max_length) is None:
            raise InputError(
                f"environment.max_observation_length: {max_length} tokens are fewer than the chat "
                "template puts around an empty observation"
            )


def _check_tool_format(tokenizer, prompt: list[dict], schemas: list[dict]) -> None:
    if make_tokenize(tokenizer, schemas)(prompt) == make_tokenize(tokenizer)(prompt):
        raise InputError(
            "model.path: its chat template ignores tools, so the model has no tool format; set "
            "model.chat_template_path to one that has (configs/chatml_tools.jinja is an example)"
        )
    name, key, value, content = _SENTINELS
    result = {"role": "tool", "name": name, "content": content}
    before = _dummy_before([result])
    before[-1]["tool_calls"][0]["function"]["arguments"] = {key: value}
    text = tokenizer.decode(render(tokenizer, [*before, result]))
    if not all(sentinel in text for sentinel in _SENTINELS):
        raise InputError(
            "model.path: its chat template leaves out tool calls or their results, so the model "
            "has no tool format"
        )
    if getattr(tokenizer, "response_template", None) is None and "<tool_call>" not in text:
        raise InputError(
            "model.path: its tokenizer has no response_template, by which tool calls are parsed, "
            "and its chat template has no <tool_call> tags"
        )
    part = {"type": "text", "text": content}
    for returned in (content, [content], [part], {content: 1}, None, 7, 0.5):
        message = _accepted(tokenizer, tool_message(name, returned))
        shown = render_text(tokenizer, [*_dummy_before([message]), message])
        wanted = content if content in str(returned) else str(returned)
        if wanted not in shown:
            raise InputError(
                f"model.path: its chat template does not render a tool's result: {returned!r} "
                f"becomes {shown!r:.200}"
            )


def _check_prefix(tokenizer, observation: dict) -> None:
    """Require more than `_suffix_ids`: what follows the stop token must stay as well."""
    dummy = _dummy_before([observation])
    before = render(tokenizer, dummy)
    after = render(tokenizer, [*dummy, observation], add_generation_prompt=True)
    if after[: len(before)] != before:
        raise InputError(
            "model.path: its chat template does not preserve prefixes: it renders a turn "
            "differently when messages follow it (TRL's get_training_chat_template corrects some)"
        )


def _last_text(prompt: Chat) -> str:
    """Return the text at the end of a prompt, to which an environment may add."""
    return prompt if isinstance(prompt, str) else _text_in(prompt[-1])


def _with_last_text(prompt: Chat, text: str) -> Chat:
    return text if isinstance(prompt, str) else [*prompt[:-1], _with_text(prompt[-1], text)]


def _text_in(message: dict) -> str:
    """Return the content of a message, or the text of its last part."""
    content = message["content"]
    if isinstance(content, list):
        last = content[-1] if content else None
        content = last.get("text", "") if isinstance(last, dict) else ""
    return content or ""


def _with_text(message: dict, text: str) -> dict:
    content: str | list = text
    if isinstance(parts := message["content"], list):
        if not parts or not isinstance(parts[-1], dict) or "text" not in parts[-1]:
            return message
        content = [*parts[:-1], {**parts[-1], "text": text}]
    return {**message, "content": content}
