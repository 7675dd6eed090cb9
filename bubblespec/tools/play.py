"""One episode in the terminal, with a person as the model:

python -m bubblespec play --config FILE [--prompt N] [section.key=value ...]

Shows the prompt as the model sees it, and takes lines from standard input as the model's turn, up
to an empty line or the end of input; then what the environment answers, and so on until the episode
is over. Of the model only the tokenizer is loaded. On a terminal colours show the mask: the model's
tokens, which are trained on, are green, and the environment's, which are not, cyan. Elsewhere the
latter are between ⟦ and ⟧.
"""

import argparse
import io
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from bubblespec.config import Config
from bubblespec.config_file import load_config
from bubblespec.errors import InputError, log
from bubblespec.loading import load_prompts, load_tokenizer
from bubblespec.mechanisms.episodes.environments import Environments, Observation, check_environment
from bubblespec.mechanisms.episodes.episodes import episode_seed
from bubblespec.mechanisms.episodes.forms import load_form
from bubblespec.mechanisms.episodes.tokens import tokenize_with
from bubblespec.rewards.functions import Sample, load_reward, score, takes_environments

NAME = "episode"
REASONS = {
    "done": "the environment ended it",
    "no_call": "a turn without a tool call",
    "max_turns": "environment.max_turns reached",
    "length": "rollout.max_completion_length reached",
    "error": "the environment failed",
}
GREEN, CYAN, NO_COLOUR = "\033[32m", "\033[36m", "\033[0m"


def play(config: Config, number: int, lines: Iterator[str], has_colour: bool) -> None:
    """Play one episode on prompt `number` of the training data, with turns made of lines. Raises
    InputError."""
    if not config.environment.is_used:
        raise InputError("environment: has neither factory nor tools, so there are no episodes")
    options = replace(config.environment, num_workers=min(1, config.environment.num_workers))
    functions = {path: load_reward(path) for path in config.reward.functions}
    tokenizer = load_tokenizer(config)
    form = load_form(options.factory, options.tools)
    prompts = load_prompts(config, tokenizer, tokenize_with(tokenizer, form))[0].prompts
    if not 0 <= number < len(prompts):
        raise InputError(f"--prompt: {number}, but the data has {len(prompts)} usable prompts")
    prompt = prompts[number]
    check_environment(options, tokenizer, prompt.text, prompt.columns)
    stop, limit = stop_token(config, tokenizer), config.rollout.max_completion_length

    def show(ids: list[int], colour: str) -> None:
        text = tokenizer.decode(ids)
        if has_colour:
            text = f"{colour}{text}{NO_COLOUR}"
        elif ids and colour == CYAN:
            text = f"⟦{text}⟧"
        print(text, flush=True)

    with closing(Environments(options, tokenizer)) as environments:
        environments.begin(NAME, prompt, episode_seed(config.run.seed, prompt.uid, visit=0))
        begun = wait_for(environments)
        response, num_sampled, reason = begun.ids.tolist(), 0, begun.reason
        print(tokenizer.decode(list(prompt.token_ids)), end="")
        show(response, CYAN)
        print(f"[prompt: {len(prompt.token_ids)} tokens, and {len(response)} of the environment]")
        log("Type the model's turn; an empty line ends it, and Ctrl-D ends the episode.")
        while reason is None and (text := read_turn(lines)) is not None:
            turn = [*tokenizer(text, add_special_tokens=False)["input_ids"], stop]
            turn = turn[: turn.index(stop) + 1][: limit - len(response)]
            response, num_sampled = response + turn, num_sampled + len(turn)
            show(turn, GREEN)
            print(f"[turn: {len(turn)} tokens]", flush=True)
            if turn[-1] != stop:
                reason = "length"
                break
            environments.act(NAME, turn)
            observation, room = wait_for(environments), limit - len(response)
            ids, reason = observation.ids.tolist()[:room], observation.reason
            if reason is None and len(ids) == room:
                reason = "length"
            response += ids
            show(ids, CYAN)
            calls = f"tool calls: {observation.num_calls}, {observation.num_failed} of them failed"
            print(f"[observation: {len(ids)} tokens; {calls}]")
        needs_environment = any(map(takes_environments, functions.values()))
        outcome = environments.end(NAME, with_environment=needs_environment).result()
    length = f"{len(response)} of {limit} tokens, {num_sampled} trained on"
    why = reason if reason is None else f"{reason} ({REASONS[reason]})"
    print(f"[over: {why or 'end of input'}; response: {length}]")
    if form.has_reward:
        print(f"reward of the environment: {outcome.problem or outcome.reward}")
    elif outcome.problem:
        print(f"the environment failed: {outcome.problem}")
    ids = response[len(begun.ids) :]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    packed = {"environment": outcome.environment} if outcome.environment else {}
    for path, function in functions.items():
        (value,) = score(function, [Sample(prompt.text, text, ids, prompt.columns, **packed)])
        print(f"reward of {path}: {getattr(value, 'message', value)}")


def stop_token(config: Config, tokenizer) -> int:
    """The one with which a person's turns end. Raises InputError if there is none."""
    eos, stops = tokenizer.eos_token_id, config.rollout.stop_token_ids
    if not stops and eos is None:
        problem = "the tokenizer has no end-of-sequence token; give one"
        raise InputError(f"rollout.stop_token_ids: {problem}")
    return eos if not stops or eos in stops else stops[0]


def wait_for(environments: Environments) -> Observation:
    """The next observation."""
    while not (observations := environments.poll()):
        environments.wait(1.0)
    return observations[0][1]


def read_turn(lines: Iterator[str]) -> str | None:
    """Lines up to an empty one, or to the end of input; None if there are no more."""
    turn = []
    for line in lines:
        if not line.rstrip("\r\n"):
            return "\n".join(turn)
        turn.append(line.rstrip("\r\n"))
    return "\n".join(turn) if turn else None


def main(arguments: list[str]) -> None:
    """Play one episode with standard input and output."""
    parser = argparse.ArgumentParser("python -m bubblespec play", description="Play one episode")
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument("--prompt", type=int, default=0, help="index of the prompt in the data")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    given = parser.parse_intermixed_args(arguments)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    config = load_config(given.config, given.overrides)
    play(config, given.prompt, iter(sys.stdin), sys.stdout.isatty())
