"""Checks of reward functions before the first step: columns, references, and a trial call."""

from collections.abc import Collection
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial

from bubblespec.config import Config
from bubblespec.data.schedule import PromptSet
from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import InputError, log
from bubblespec.rewards.functions import (
    ARGUMENTS,
    RewardFailure,
    RewardFunction,
    Sample,
    check_arguments,
    sees_groups,
    takes_environments,
)
from bubblespec.rewards.scorer import Scorer
from bubblespec.types import Prompt

RESPONSE = "0"  # harmless as an answer, a text and a program
MAX_CHECKED = 1000  # rows: parsing the references of all may take minutes


def check_columns(names: Collection[str], renamed: Collection[str], source: str) -> None:
    """Raise InputError for a column named as a reward's argument. renamed: by the configuration."""
    for name in ARGUMENTS:
        if name in names and name not in renamed:
            raise InputError(
                f"data.columns: the column '{name}' of {source} is named like an argument of "
                f"reward functions; rename it, as in data.columns={{my_{name}: {name}}}"
            )


def check_references(
    functions: dict[str, RewardFunction], prompts: list[Prompt], source: str
) -> None:
    """Warn of rows of `source` that no function can score; raise InputError if all of them."""
    checks = [
        getattr(function, "can_score", lambda columns: True) for function in functions.values()
    ]
    prompts = prompts[:MAX_CHECKED]
    without = [p for p in prompts if not any(can_score(p.columns) for can_score in checks)]
    if not functions or not without:
        return
    row = f"{str(without[0].text)!r:.100}, answer {without[0].columns.get('answer')!r:.50}"
    if "tests" in without[0].columns:
        row += f", tests {without[0].columns['tests']!r:.100} (an empty program must not pass them)"
    line = f"no reward function can score {len(without)} of {len(prompts)} rows of {source}"
    if len(without) == len(prompts):
        raise InputError(f"reward.functions: {line}; the first is {row}")
    log(f"warning: {line}; these rows are left out of updates; the first is {row}")


def check_weights(config: Config, has_environment: bool) -> list[float]:
    count, weights = len(config.reward.functions) + has_environment, config.reward.weights
    if not count and config.loss.loss_type != "distillation":
        problem = "is empty, and environment.factory has no get_reward"
        raise InputError(f"reward.functions: {problem}; one of the two must score responses")
    if weights is not None and len(weights) != count:
        needed = f"{count} are needed, the environment's last" if has_environment else f"{count}"
        raise InputError(f"reward.weights: {len(weights)} weights, but {needed}")
    return weights or [1.0] * count


def check_prompts(
    config: Config,
    functions: dict[str, RewardFunction],
    train_prompts: PromptSet,
    eval_prompts: list[Prompt],
    ranks: Ranks,
    eval_functions: dict[str, RewardFunction],
    *,
    answers_turns: bool,
    has_reward: bool,
) -> None:
    """Raise InputError where functions lack columns or there are too few prompts."""
    sources = {"the data": train_prompts.prompts, "the held-out data": eval_prompts}
    for source, prompts in sources.items():
        if not prompts:
            continue
        columns = prompts[0].columns
        check_columns(columns, config.data.columns.values(), source)
        for path, function in functions.items():
            check_arguments(path, function, columns, source, answers_turns)
        if prompts is eval_prompts:
            given = columns, source, answers_turns, "eval.functions"
            for path, function in eval_functions.items():
                check_arguments(path, function, *given)
        if not has_reward:  # of environments, which may score any row
            ranks.agree(partial(check_references, functions, prompts, source))
    num_prompts = config.rollout.num_prompts_per_step
    train_prompts.batch(config.run.seed, 0, num_prompts)  # raises where there are too few
    if num_prompts < ranks.world_size:
        shortage = f"{num_prompts} prompts for {ranks.world_size} ranks"
        raise InputError(f"rollout.num_prompts_per_step: {shortage}; each rank needs at least one")


def begin_trial(
    scorer: Scorer, functions: dict[str, RewardFunction], prompt: Prompt, num_generations: int
) -> dict[str, Future]:
    """Submit a call of each function on responses to a prompt, but for those of environments."""
    ids = scorer.tokenizer(RESPONSE, add_special_tokens=False)["input_ids"]
    sample, trial = Sample(prompt.text, RESPONSE, ids, prompt.columns, progress=scorer.progress), {}
    for number, (path, function) in enumerate(functions.items()):
        if not takes_environments(function):
            size = num_generations if sees_groups(function) else 2  # to see that each has its value
            trial[path] = scorer.pool.submit(number, [sample] * size)
    return trial


def end_trial(scorer: Scorer, trial: dict[str, Future]) -> None:
    """Wait for the calls.

    Raises InputError for a function that does not return one value per sample. Other failures are
    warnings, as real responses may have none."""
    scorer.pool.run()
    wait(trial.values(), return_when=FIRST_EXCEPTION)
    for path, future in trial.items():
        if future.cancel() or not future.done():
            continue
        reward = future.result()[0].reward  # raises where no worker can be started
        if not isinstance(reward, RewardFailure):
            continue
        problem = f"{path}: {reward.message}"
        if reward.kind == "result":
            key = "reward" if path in scorer.paths else "eval"
            raise InputError(f"{key}.functions: {problem}")
        log(f"warning: reward {problem} ({reward.kind}, in a trial on the response {RESPONSE!r})")
