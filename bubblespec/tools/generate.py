"""Generate responses of a checkpoint or a model to your own prompts, with a run's own engine:

python -m bubblespec generate CHECKPOINT_OR_MODEL PROMPT_OR_FILE [--num-generations N]
    [--config FILE] [--nproc-per-node N] [--responses OUT.jsonl] [section.key=value ...]

PROMPT_OR_FILE is a text, or a JSON or JSONL file with a column `prompt` of texts or chats. Sampling
and system prompt are those of the checkpoint's run, or of --config. For a model without --config a
text is a user's message if the model has a chat template.
"""

import os
import re
from functools import partial

from bubblespec.data.prompts import build_prompt_set, make_tokenize
from bubblespec.data.rows import FILE_FORMATS, load_rows, suffix_of
from bubblespec.distributed.ranks import ranks_from_environment
from bubblespec.engine.sampling import EVALUATION
from bubblespec.errors import InputError
from bubblespec.mechanisms import Run
from bubblespec.telemetry.files import completion_of
from bubblespec.telemetry.report import short_names
from bubblespec.telemetry.reporter import show_phase
from bubblespec.telemetry.summary import shorten
from bubblespec.tools import make_parser, parse
from bubblespec.tools.evaluate import (
    Policy,
    add_arguments,
    build,
    check_outputs,
    read_policy,
    write_responses,
)
from bubblespec.types import Group, Prompt

MAX_LENGTH = 1 << 20  # of a prompt: no configured limit holds for one's own
PLAIN = {"data": {"path": "none"}, "run": {"output_dir": "none"}}  # sections of a model alone


def main(arguments: list[str]) -> None:
    """Generate, and print prompts and responses. Raises InputError."""
    parser = make_parser("generate")
    add_arguments(parser)
    parser.add_argument("prompts", metavar="PROMPT_OR_FILE", help="a text, or a JSON or JSONL file")
    option, what = ("--num-generations", "--num_generations"), "responses to each prompt"
    parser.add_argument(*option, type=int, default=1, metavar="N", help=what)
    given = parse(parser, arguments, needs_config=False)
    if more := [text for text in given.overrides if not re.match(r"[\w.]+=", text)]:
        wanted = "give one prompt, or a file of several"
        raise InputError(f"PROMPT_OR_FILE: {wanted}; {more[0]!r} is not section.key=value")
    sets = {name.partition("=")[0] for name in given.overrides}
    overrides = [*given.overrides, f"eval.num_generations={given.num_generations}"]
    overrides += ["eval.num_prompts=1", "eval.functions=[]"]
    policy = read_policy(given.policy, given.config, overrides, PLAIN)
    config = policy.config
    config.reward.functions = []
    of_run = None  # column of the training data
    if not any(name.startswith("data.columns") for name in sets):
        of_run, config.data.columns = config.data.columns.get("prompt"), {}
    is_plain = given.config is None and policy.folder is None and "data.as_chat" not in sets

    def read_prompts(run: Run, policy: Policy) -> list[Prompt]:
        if is_plain:
            run.config.data.as_chat = run.tokenizer.chat_template is not None
        return own_prompts(run, given.prompts, of_run)

    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        check_outputs(ranks, {"--responses": given.responses})
        evaluator, prompts = build(policy, ranks, read_prompts)
        with show_phase(ranks, "generating"):
            groups = [Group(prompt, EVALUATION) for prompt in prompts]
            rollout = groups, given.num_generations, evaluator.params, policy.num_updates
            samples, _ = evaluator.generate(*rollout)
        if not ranks.is_main:
            return
        scorer = evaluator.sampler.scorer
        if given.responses:
            names = short_names(scorer.names_of(None))
            write_responses(given.responses, samples, names, scorer.tokenizer)
            return
        for index in range(len(samples)):
            text = samples.prompt_of(index).text
            last = text if isinstance(text, str) else str(text[-1].get("content"))
            cut = " (cut off at rollout.max_completion_length)" * bool(samples.is_truncated[index])
            print(f"prompt: {shorten(last)}\nresponse{cut}: ", end="")
            print(completion_of(samples, index, scorer.tokenizer), flush=True)


def own_prompts(run: Run, given: str, of_run: str | None) -> list[Prompt]:
    """Return the prompts of a text or a file; room for the longest is made. Raises InputError.

    of_run: column that a file without a column `prompt` may have instead."""
    data = run.config.data
    rows = [{"prompt": given}]
    if os.path.exists(given) or suffix_of(given) in FILE_FORMATS:
        load = partial(load_rows, given, None, "train", key="PROMPT_OR_FILE")
        try:
            rows = load(columns=data.columns)
        except InputError:
            if of_run is None:
                raise
            rows = load(columns={"prompt": of_run})
    prompts = build_prompt_set(
        rows,
        run.tokenize or make_tokenize(run.tokenizer),
        MAX_LENGTH,
        system_prompt=data.system_prompt,
        as_chat=data.as_chat,
        key="PROMPT_OR_FILE",
    ).prompts
    if not prompts:
        raise InputError(f"PROMPT_OR_FILE: no prompt has at most {MAX_LENGTH:,} tokens")
    run.config.rollout.max_prompt_length = max(len(prompt.token_ids) for prompt in prompts)
    return prompts
