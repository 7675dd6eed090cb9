"""Token ids of what an environment says, and tool calls in what the model says.

Ids are only appended: no token of a turn is ever made again from its text. What stands between two
turns is the difference of two renderings of a dummy conversation, as in TRL 1.16.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable

from bubblespec.data.prompts import make_tokenize, render, render_text
from bubblespec.errors import InputError
from bubblespec.mechanisms.episodes.forms import Chat, Form, tool_message

# How added text may begin and end: kinds of characters that tokenizers join to what is before them.
_BEGINNINGS = ("", "a", " a", "7", "\na", ".")
_SENTINELS = ("tool_name_q1", "key_q2", "value_q3", "content_q4")
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def prompt_ids(tokenizer, prompt: Chat, schemas: list[dict]) -> list[int]:
    """The ids of a prompt, which the model's turn follows."""
    return make_tokenize(tokenizer, schemas)(prompt)


def base_ids(tokenizer, prompt: Chat, schemas: list[dict], adds_text: bool) -> tuple[int, ...]:
    """The ids with which a prompt begins whatever text an environment adds to it: what a group
    shares. All of its ids if none is added.

    The last word may become part of another token, so it is left out: it is replaced by several
    beginnings of text, and what all renderings have in common counts.
    """
    ids = prompt_ids(tokenizer, prompt, schemas)
    if not adds_text:
        return tuple(ids)
    text = _last_text(prompt)
    stem = text[: len(text) - len(re.search(r"\S*\Z", text)[0])]
    variants = [_with_last_text(prompt, stem + beginning) for beginning in _BEGINNINGS]
    renderings = [ids, *(prompt_ids(tokenizer, variant, schemas) for variant in variants)]
    columns = itertools.takewhile(
        lambda column: len(set(column)) == 1, zip(*renderings, strict=False)
    )
    return tuple(column[0] for column in columns)


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
    """The ids after `base` of a prompt that an environment has begun, cut to max_length tokens.
    Raises InputError if they do not begin with `base`."""
    before, after = _last_text(prompt), _last_text(begun)
    added = after[len(before) :] if after.startswith(before) else ""  # else it stays whole

    def ids_at(num_chars: int) -> list[int]:
        cut = _with_last_text(begun, before + added[:num_chars]) if added else begun
        ids = prompt_ids(tokenizer, cut, schemas)
        if tuple(ids[: len(base)]) != base:
            raise InputError(
                "environment.factory: text that it adds to the prompt changes earlier tokens: "
                f"{after!r:.200}"
            )
        return ids[len(base) :]

    ids = _fit(ids_at, len(added), max_length)
    if ids is None:
        raise InputError(
            f"environment.max_observation_length: {max_length} tokens are too few for the "
            f"part of a prompt after its shared prefix"
        )
    return ids


def observation_ids(
    tokenizer, messages: list[dict], is_chat: bool, max_length: int
) -> list[int] | None:
    """The ids between two turns of the model. Of more than max_length tokens the text of the
    messages is cut, so that what the template puts around it stays; None if that does not suffice.
    A list that the template refuses or shows nothing of becomes text, and so does one that is too
    long."""
    if is_chat:
        messages = [_accepted(tokenizer, message) for message in messages]

    def ids_at(num_chars: int) -> list[int]:
        cut = [
            _with_last_text([message], _last_text([message])[:num_chars])[0] for message in messages
        ]
        if is_chat:
            return _suffix_ids(tokenizer, cut)
        text = "".join(message["content"] for message in cut)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def fit() -> list[int] | None:
        longest = max((len(_last_text([message])) for message in messages), default=0)
        return _fit(ids_at, longest, max_length)

    ids = fit()
    if ids is None and any(isinstance(message["content"], list) for message in messages):
        messages = [{**message, "content": _text_of(message["content"])} for message in messages]
        ids = fit()
    return ids


def _suffix_ids(tokenizer, messages: list[dict]) -> list[int]:
    """What a chat template renders after the stop token of a turn that these messages follow.
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
    """A conversation that these messages may follow."""
    turn = {"role": "assistant", "content": ""}
    if messages and messages[0]["role"] == "tool":  # some templates repeat the name of the call
        function = {"name": messages[0]["name"], "arguments": {}}
        turn["tool_calls"] = [{"type": "function", "function": function}]
    return [{"role": "user", "content": "dummy"}, turn]


def _accepted(tokenizer, message: dict) -> dict:
    """The message, with text instead of a list that the template refuses or shows nothing of."""
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
    """Content as text: that of its parts, where they have nothing else."""
    if isinstance(content, str):
        return content
    is_text = all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    texts = [part.get("text") for part in content] if content and is_text else [None]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else str(content)


def _fit(ids_at: Callable[[int], list[int]], num_chars: int, max_length: int) -> list[int] | None:
    """`ids_at(n)` for the largest n up to num_chars with at most max_length ids; None if there is
    none. Takes time in proportion to max_length, however long the text is."""
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
    """The tool calls in a turn, as {name, arguments} or {name, error}. By the tokenizer's response
    template where it has one; otherwise, or where that fails, between <tool_call> tags.

    prefix: all ids before the turn, as a template may begin it.
    """
    if getattr(tokenizer, "response_template", None) is not None:
        try:
            message = tokenizer.parse_response(ids, prefix=prefix, tools=schemas) or {}
            return [_checked(call) for call in message.get("tool_calls") or []]
        except (ValueError, TypeError, RecursionError):
            pass
    calls = []
    for text in _TOOL_CALL.findall(tokenizer.decode(ids)):
        try:
            calls.append(_checked(json.loads(text)))
        except (ValueError, RecursionError) as error:
            calls.append({"name": "unknown", "error": f"Invalid JSON in a tool call: {error}"})
    return calls


def _checked(call) -> dict:
    """A call of either shape: {type, function: {name, arguments}}, or {name, arguments}."""
    kind = call.get("type", "function") if isinstance(call, dict) else None
    function = call.get("function", call) if isinstance(call, dict) else None
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
    """Raises InputError if the tokenizer cannot serve such episodes."""
    is_chat = not isinstance(prompt, str)
    if not is_chat and schemas:
        raise InputError(
            "environment: tools need chat prompts; set data.as_chat=true for string prompts"
        )
    if is_chat and tokenizer.chat_template is None:
        raise InputError("model.path: its tokenizer has no chat template, but prompts are chats")
    if schemas:
        _check_tool_format(tokenizer, prompt, schemas)
    if is_chat and (schemas or is_text):
        role = {"role": "user"} if is_text else {"role": "tool", "name": "dummy"}
        _check_prefix(tokenizer, {**role, "content": "dummy"})
        if observation_ids(tokenizer, [{**role, "content": ""}], True, max_length) is None:
            raise InputError(
                f"environment.max_observation_length: {max_length} tokens are fewer than the chat "
                "template puts around an empty observation"
            )


def _check_tool_format(tokenizer, prompt: list[dict], schemas: list[dict]) -> None:
    if prompt_ids(tokenizer, prompt, schemas) == prompt_ids(tokenizer, prompt, []):
        raise InputError(
            "model.path: its chat template ignores tools, so the model has no tool format"
        )
    name, key, value, content = _SENTINELS
    call = {"type": "function", "function": {"name": name, "arguments": {key: value}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": name, "content": content}
    messages = [{"role": "user", "content": "dummy"}, turn, result]
    text = tokenizer.decode(render(tokenizer, messages))
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
    """More than what `_suffix_ids` needs: also what follows the stop token must stay."""
    turn = {"role": "assistant", "content": ""}
    if observation["role"] == "tool":
        call = {"type": "function", "function": {"name": "dummy", "arguments": {}}}
        turn["tool_calls"] = [call]
    dummy = [{"role": "user", "content": "dummy"}, turn]
    before = render(tokenizer, dummy)
    if (
        render(tokenizer, [*dummy, observation], add_generation_prompt=True)[: len(before)]
        != before
    ):
        raise InputError(
            "model.path: its chat template does not preserve prefixes: it renders a turn "
            "differently when messages follow it (TRL's get_training_chat_template corrects some)"
        )


def _last_text(prompt: Chat) -> str:
    """Where text is added: a string itself, the last content of a chat, or its last part."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1]["content"]
    if isinstance(content, list):
        last = content[-1] if content else None
        content = last.get("text", "") if isinstance(last, dict) else ""
    return content or ""


def _with_last_text(prompt: Chat, text: str) -> Chat:
    if isinstance(prompt, str):
        return text
    content = prompt[-1]["content"]
    if isinstance(content, list):
        if not content or not isinstance(content[-1], dict) or "text" not in content[-1]:
            return prompt
        text = [*content[:-1], {**content[-1], "text": text}]
    return [*prompt[:-1], {**prompt[-1], "content": text}]
