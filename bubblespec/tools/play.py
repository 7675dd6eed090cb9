"""One episode in the terminal, with a person as the model:

python -m bubblespec play --config FILE [--prompt N] [section.key=value ...]

Shows the prompt as the model sees it, takes lines from standard input up to an empty one as the
model's turn, then shows the environment's answer, and so on until the episode is over. Only the
tokenizer of the model is loaded. On a terminal colours show the mask: tokens of the model, which
are trained on, are green, those of the environment cyan. Elsewhere the latter are between ⟦ and ⟧.
"""

import io
import itertools
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from bubblespec.config import Config
from bubblespec.config.file import load_config
from bubblespec.errors import InputError, log
from bubblespec.loading import load_prompts, load_tokenizer
from bubblespec.mechanisms.episodes.environments import Environments, Observation, check_environment
from bubblespec.mechanisms.episodes.episodes import episode_seed
from bubblespec.mechanisms.episodes.forms import load_form
from bubblespec.mechanisms.episodes.tokens import tokenize_with
from bubblespec.rewards.functions import Sample, load_reward, score, takes_environments
from bubblespec.tools import make_parser, parse

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
    """Play one episode on prompt `number` of the training data, with turns made of lines."""
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
            response += turn
            num_sampled += len(turn)
            show(turn, GREEN)
            print(f"[turn: {len(turn)} tokens]", flush=True)
            if turn[-1] != stop:
                reason = "length"
                break
            environments.act(NAME, turn)
            observation, room = wait_for(environments), limit - len(response)
            ids = observation.ids.tolist()[:room]
            reason = observation.reason or ("length" if len(ids) == room else None)
            response += ids
            show(ids, CYAN)
            calls = f"tool calls: {observation.num_calls}, {observation.num_failed} of them failed"
            print(f"[observation: {len(ids)} tokens; {calls}]")
        needs_environment = any(map(takes_environments, functions.values()))
        outcome = environments.end(NAME, with_environment=needs_environment).result()
    why = "end of input" if reason is None else f"{reason} ({REASONS[reason]})"
    length = f"{len(response)} of {limit} tokens, {num_sampled} trained on"
    print(f"[over: {why}; response: {length}]")
    if form.has_reward:
        print(f"reward of the environment: {outcome.problem or outcome.reward}")
    elif outcome.problem:
        print(f"the environment failed: {outcome.problem}")
    ids = response[len(begun.ids) :]
    (completion,) = tokenizer.batch_decode([ids], skip_special_tokens=True)
    progress = (0, config.run.max_steps)
    sample = Sample(prompt.text, completion, ids, prompt.columns, progress=progress)
    if outcome.environment:
        sample = sample._replace(environment=outcome.environment)
    for path, function in functions.items():
        (value,) = score(function, [sample])
        print(f"reward of {path}: {getattr(value, 'message', value)}")


def stop_token(config: Config, tokenizer) -> int:
    """Return the token that ends a person's turns. Raises InputError if there is none."""
    eos, stops = tokenizer.eos_token_id, config.rollout.stop_token_ids
    if not stops and eos is None:
        raise InputError(
            "rollout.stop_token_ids: the tokenizer has no end-of-sequence token; set an id"
        )
    return eos if not stops or eos in stops else stops[0]


def wait_for(environments: Environments) -> Observation:
    """Wait for the next observation."""
    while not (observations := environments.poll()):
        environments.wait(1.0)
    return observations[0][1]


def read_turn(lines: Iterator[str]) -> str | None:
    """Return the lines up to an empty one or the end of input; None if none are left."""
    stripped = (line.rstrip("\r\n") for line in lines)
    if (first := next(stripped, None)) is None:
        return None
    return "\n".join([first, *itertools.takewhile(bool, stripped)]) if first else ""


def main(arguments: list[str]) -> None:
    """Play one episode with standard input and output."""
    parser = make_parser("play")
    parser.add_argument("--prompt", type=int, default=0, help="index of the prompt in the data")
    given = parse(parser, arguments)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    config = load_config(given.config, given.overrides)
    play(config, given.prompt, iter(sys.stdin), sys.stdout.isatty())
