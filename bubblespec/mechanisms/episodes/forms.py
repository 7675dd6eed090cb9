"""The forms of environments, and one episode of each.

- TRL's class: `__init__()`, `reset(**columns) -> str | None`, whose text is appended to the last
  message of the prompt, and public methods as tools; optionally `get_reward()`.
- Plain functions as tools, alone or besides those of such a class.
- SkyRL-gym's text environment: `init(prompt)`, `step(action)`, whose result has observations (chat
  messages), reward and done, and `close()`. The whole text of a turn is the action.

This module runs in workers, and imports nothing heavy. Replies are plain data, for JSON.
"""

import asyncio
import base64
import copy
import inspect
import json
import math
import pickle
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from bubblespec.config.imports import awaited, import_function, import_path, keep_settings
from bubblespec.distributed.worker import MAX_REPLY_BYTES
from bubblespec.errors import InputError, is_interrupt, one_line

NO_TOOLS = ("reset", "get_reward")
_ADDRESS = re.compile(r"<.+ at 0x[0-9a-fA-F]+>")
Chat = str | list[dict]
"""A prompt: text, or chat messages."""


@dataclass
class Form:
    """An environment as the configuration names it."""

    factory: Any
    """Class of the environment; None with functions alone."""
    functions: list[Callable] = field(default_factory=list)
    """Tools besides the methods of the class."""

    @property
    def is_text(self) -> bool:
        """Whether the text of a turn is the action, instead of the tool calls in it."""
        return hasattr(self.factory, "step") and hasattr(self.factory, "init")

    @property
    def has_reward(self) -> bool:
        """Whether episodes have a reward of their own."""
        return self.is_text or hasattr(self.factory, "get_reward")

    @property
    def adds_text(self) -> bool:
        """Whether the start of an episode may add text to its prompt.

        Only a reset that is declared to return None cannot."""
        if self.factory is None or self.is_text:
            return self.is_text
        return inspect.signature(self.factory.reset).return_annotation not in (None, "None")

    def tools(self, instance: Any) -> list[Callable]:
        """Return all tools in TRL's order: functions, then the methods of the class by name."""
        if self.factory is None or self.is_text:
            return self.functions
        names = [name for name, _ in inspect.getmembers(self.factory, _is_method)]
        public = [name for name in names if not name.startswith("_") and name not in NO_TOOLS]
        return self.functions + [getattr(instance, name) for name in public]

    def schemas(self) -> list[dict]:
        """Return the schemas of all tools, from type hints and docstrings.

        Raises InputError for a tool without them, and for two of one name."""
        from transformers.utils import get_json_schema

        schemas, names = [], set()
        # without __init__, which may start what belongs in a worker
        for tool in self.tools(self.factory and object.__new__(self.factory)):
            if tool.__name__ in names:
                raise InputError(
                    f"environment: two tools are named '{tool.__name__}', so calls would be "
                    "ambiguous; rename one of them"
                )
            names.add(tool.__name__)
            try:
                schemas.append(get_json_schema(tool))
            except Exception as error:  # of several kinds, by what is missing
                raise InputError(
                    f"environment: {tool.__qualname__} cannot be a tool: it needs type hints "
                    f"and a docstring with an Args section: {one_line(error)}"
                ) from error
        return schemas

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise InputError if reset cannot be called with the prompt and these columns."""
        if self.factory is None or self.is_text:
            return
        given = dict.fromkeys(["prompt", *columns])
        try:
            inspect.signature(self.factory.reset).bind(None, **given)
        except TypeError as error:
            raise InputError(
                f"environment.factory: {self.factory.__name__}.reset cannot be called with the "
                f"columns {sorted(given)}: {error}"
            ) from error


def load_form(factory: str | None, tools: list[str]) -> Form:
    """Import the configured class and functions. Raises InputError if they have no known form."""
    functions = [import_function("environment.tools", path, "my_module.my_tool") for path in tools]
    if factory is None:
        return Form(None, functions)
    made = import_path("environment.factory", factory, "my_module.MyEnvironment")
    if not isinstance(made, type):
        raise InputError(f"environment.factory: '{factory}' is not a class")
    form = Form(made, functions)
    if not form.is_text and not hasattr(made, "reset"):
        raise InputError(
            f"environment.factory: '{factory}' has neither `reset`, as TRL's environments have, "
            "nor `init` and `step`, as SkyRL-gym's have"
        )
    if form.is_text and tools:
        raise InputError(
            f"environment.tools: '{factory}' reads whole turns, so it cannot be combined with tools"
        )
    return form


class Host:
    """The running episodes of one process, by number."""

    def __init__(self, form: Form):
        self._form = form
        self._episodes: dict[int, ToolEpisode | TextEpisode] = {}

    def answer(self, request: bytes) -> dict:
        """Reply to a pickled (method, number, arguments).

        The reply is what the method returns, or its `error`, and has the `seconds` that it took."""
        begin_s = time.monotonic()
        try:
            method, number, arguments = pickle.loads(request)
            with keep_settings():
                reply = getattr(self, method)(number, *arguments)
        except BaseException as error:  # such as SystemExit and CancelledError
            if is_interrupt(error):
                raise
            reply = {"error": one_line(error)}
        return reply | {"seconds": time.monotonic() - begin_s}

    def begin(self, number: int, prompt: Chat, columns: dict, seed: int) -> dict:
        """Start an episode. The reply's `prompt` includes the text that the environment adds."""
        kind = TextEpisode if self._form.is_text else ToolEpisode
        self._episodes[number] = episode = kind(self._form)
        return {"prompt": episode.begin(prompt, columns, seed)}

    def act(self, number: int, action: Any) -> dict:
        """Answer a turn: its tool calls, or its text."""
        return self._episodes[number].act(action)

    def end(self, number: int, with_reward: bool, with_environment: bool) -> dict:
        """Forget an episode; reply with its `reward`, a finite number or None.

        On request the reply has the pickled `environment`, in base64."""
        episode = self._episodes.pop(number)
        try:
            reward = episode.reward() if with_reward else None
            if reward is not None and not math.isfinite(reward := float(reward)):
                raise ValueError(f"the reward is {reward}")
            packed = pickle.dumps(episode.environment) if with_environment else b""
        finally:
            episode.close()
        return {"reward": reward, "environment": base64.b64encode(packed).decode()}


class ToolEpisode:
    """An episode whose tools are called as in TRL's loop, with the same messages."""

    def __init__(self, form: Form):
        self.environment: Any = form.factory and form.factory()
        self._tools = {tool.__name__: tool for tool in form.tools(self.environment)}

    def begin(self, prompt: Chat, columns: dict, seed: int) -> Chat:
        if self.environment is None:
            return prompt
        reset = self.environment.reset
        own = copy.deepcopy(prompt)  # which reset may change
        added = reset(**{"prompt": own, **_seed_for(reset, seed), **columns})
        return prompt if added is None else add_text(prompt, added)

    def act(self, calls: list[dict]) -> dict:
        """Call tools. calls: {name, arguments}, or {name, error} for what cannot be parsed."""
        results, waiting = [], []  # coroutines run together, and come last
        for call in calls:
            name = call["name"]
            try:
                if "error" in call:
                    raise ValueError(call["error"])
                if name not in self._tools:
                    raise ValueError(f"Tool {name} not found.")
                tool = self._tools[name]
                result = tool(**call["arguments"])
                if inspect.isawaitable(result):
                    waiting.append((name, result))
                else:
                    results.append((name, result))
            except BaseException as error:  # such as SystemExit and CancelledError
                if is_interrupt(error):
                    raise
                results.append((name, error))
        if waiting:
            names, coroutines = zip(*waiting, strict=True)
            results += zip(names, awaited(_gather(coroutines)), strict=True)
        results = [(name, _checked(result)) for name, result in results]
        num_failed = sum(isinstance(result, BaseException) for _, result in results)
        messages = [tool_message(name, result) for name, result in results]
        return {"messages": messages, "num_failed": num_failed, "done": False}

    def reward(self) -> float | None:
        """Return the environment's reward, if it has one."""
        get_reward = getattr(self.environment, "get_reward", None)
        return None if get_reward is None else awaited(get_reward())

    def close(self) -> None:
        """Do nothing: in TRL's class a method of this name is a tool."""


class TextEpisode:
    """An episode whose reward is the sum of its steps' rewards."""

    def __init__(self, form: Form):
        self.environment: Any = None
        self._factory = form.factory
        self._reward = 0.0

    def begin(self, prompt: Chat, columns: dict, seed: int) -> Chat:
        takes = inspect.signature(self._factory).parameters
        given = {"env_config": {}, "extras": columns}  # as SkyRL-gym makes its environments
        self.environment = self._factory(**{key: given[key] for key in given if key in takes})
        init = self.environment.init
        returned = init(copy.deepcopy(prompt), **_seed_for(init, seed))
        if isinstance(returned, tuple):  # with metadata
            returned = returned[0]
        if returned is None:
            return prompt
        if isinstance(prompt, str) and isinstance(returned, str):
            return _plain(returned)
        return _messages(returned, "init")

    def act(self, text: str) -> dict:
        step = self.environment.step(text)
        if isinstance(step, dict):
            step = SimpleNamespace(**step)
        if getattr(step, "postprocessed_action", None) not in (None, text):
            raise ValueError("step changed the action, but its tokens are generated already")
        self._reward += float(step.reward)
        messages = _messages(step.observations, "step")
        return {"messages": messages, "num_failed": 0, "done": bool(step.done)}

    def reward(self) -> float:
        return self._reward

    def close(self) -> None:
        if hasattr(self.environment, "close"):
            self.environment.close()


def add_text(prompt: Chat, added: Any) -> Chat:
    """Return the prompt with text added, in a chat to its last message.

    There, as in TRL, the text may be a list of parts."""
    if isinstance(added, list) and not isinstance(prompt, str):
        if any(part["type"] != "text" for part in added):
            raise TypeError(f"reset returned {added!r:.200}, which has parts that are not text")
        added = "".join(part["text"] for part in added)
    if not isinstance(added, str):
        raise TypeError(f"reset returned {added!r:.200}, neither text nor None")
    if isinstance(prompt, str):
        return prompt + _plain(added)
    return [*prompt[:-1], {**prompt[-1], "content": _plain((prompt[-1]["content"] or "") + added)}]


def tool_message(name: str, result: Any) -> dict:
    """Return the message with a tool's result, or with the exception that it has raised.

    As in TRL, a list of plain data stays a list."""
    if isinstance(result, BaseException):
        result = {"error": str(result)}
    content = result if isinstance(result, list) and _is_plain(result) else str(result)
    return {"role": "tool", "name": name, "content": _plain(content)}


def _checked(result: Any) -> Any:
    """Return a tool's result, or an error if its text has an address in memory.

    Such text, that of a generator for instance, has no meaning and differs in a replay."""
    try:
        if isinstance(result, str | BaseException) or _is_plain(result):
            return result
        if _ADDRESS.search(str(result)):
            return TypeError(f"The tool returned a {type(result).__name__}, which has no text.")
    except Exception as error:  # of its own __str__
        return error
    return result


def _is_plain(value: Any) -> bool:
    """Whether JSON keeps the value as it is."""
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError, RecursionError):
        return False


def _is_method(member: Any) -> bool:
    """Whether a member of a class is a method written in Python.

    It may be static, a class method, or wrapped by a decorator such as functools.lru_cache."""
    return inspect.isfunction(inspect.unwrap(getattr(member, "__func__", member)))


def _messages(value: Any, method: str) -> list[dict]:
    """Check the chat messages that a text environment has returned."""
    for message in value if isinstance(value, list) else [value]:
        text = message.get("content") if isinstance(message, dict) else None
        if not (isinstance(text, str) and isinstance(message.get("role"), str)):
            raise TypeError(f"{method} returned {value!r:.200}, not chat messages")
    return _plain(value)


def _plain(value: Any) -> Any:
    """Replace surrogates, which cannot be tokenized, in text and in lists and mappings of it."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _seed_for(function: Callable, seed: int) -> dict:
    """Return the keyword argument `seed`, if the function takes it."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"seed": seed} if takes_any or "seed" in parameters else {}


async def _gather(coroutines) -> list:
    return await asyncio.gather(*coroutines, return_exceptions=True)


def bounded(reply: dict) -> dict:
    """Return the reply, or an error if it is too large or not plain data."""
    try:
        size = len(json.dumps(reply))
        problem = None if size <= MAX_REPLY_BYTES else f"a reply of {size} bytes is too large"
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"a reply is not plain data: {error}"
    return reply if problem is None else {"error": problem, "seconds": reply["seconds"]}


def make_answer(form: dict) -> Callable[[bytes], dict]:
    """Return the function by which a worker replies (`worker.serve`)."""
    host = Host(load_form(**form))
    return lambda request: bounded(host.answer(request))
