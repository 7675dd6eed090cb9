"""Our suffix drafts against published ones: python benchmarks/suffix_vs_published.py [--model tiny|smollm2|FOLDER] [--json OUT]

The text is generated first, with the engine at temperature 1: under the starting weights a response of an earlier epoch and a
draft for every sample, then one AdamW step on other prompts (as in accept_rules.py), then the response that the draft was made
for, with the draft's noise. These responses are replayed: the samples of a prompt advance in lockstep, each asks for up to
--window tokens in every pass and gains those that come true, and one more. All arms know the same at every moment: the tokens so
far of all samples of the group, and, by case, earlier responses to the prompt, and drafts.

ours                `bubblespec.speculate.suffix.GroupIndex`
arctic              SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) as in arctic-inference with its defaults: a proposal is
                    no longer than the match behind it, and ends where the counted probability falls below 0.1
arctic, prompts     the same with the end of the prompt in front of every cached text, so that it matches at the first token too
arctic, whole       the latter without the two limits
lookup              transformers' prompt lookup (Saxena 2023), with n-grams up to 2, its default: in the row's prompt and text
lookup, all text    the same in drafts, earlier responses and the other samples as well, which stand before the prompt in this
                    order, each after the end of the prompt

A proposal's time includes what turns it into an array. Arms that are not installed are left out. Of arctic-inference only the
suffix cache is needed, and it builds without CUDA: with nanobind 2.9.2 installed, run cmake and ninja on csrc/suffix_decoding of
its source package, and put the library that comes out into arctic_inference/suffix_decoding, somewhere on PYTHONPATH.
"""

import argparse
import copy
import importlib.util
import json
import os
import sys
from dataclasses import asdict, dataclass

import numpy as np
import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.accept_rules import generate, load_prompts, one_step, policy_gradient
from benchmarks.generate import MODELS, commit
from benchmarks.suffix import play
from bubblespec.engine.model import prepare_model
from bubblespec.engine.sampling import SamplingParams
from bubblespec.speculate.suffix import SOURCE_NAMES, GroupIndex

LEARNING_RATES = {"tiny": (2e-4, 2e-3), "smollm2": (1e-5, 1e-4)}
TREE_DEPTH = 64  # arctic's default, and so the longest context that it looks up
PROMPT_END = 8  # tokens; as many as GroupIndex compares
BORDER = -1  # between texts that are searched as one
NO_TEXT = np.empty(0, np.int32)


@dataclass
class Group:
    """The samples of one prompt. All tokens are lists of int; history, drafts and responses[learning rate] have one a sample."""

    prompt: list[int]
    history: list[list[int]]
    drafts: list[list[int]]
    responses: dict[str, list[list[int]]]


def record(folder: str, learning_rates: list[float], arguments: argparse.Namespace) -> list[Group]:
    """Generate the text of all groups."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = load_prompts(tokenizer, arguments.prompts, 2 * arguments.num_prompts, arguments.seed)
    prepare_model(model, max(len(p.token_ids) for p in prompts) + arguments.max_new_tokens)
    end = model.generation_config.eos_token_id
    stop = {tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])} - {None}
    params = SamplingParams(stop_token_ids=tuple(sorted(stop)))
    start = copy.deepcopy(model)
    arguments.sequences = arguments.num_prompts * arguments.num_generations  # of one call of `generate`
    trained_on, drafted = prompts[::2], prompts[1::2]
    with tqdm(total=3 + len(learning_rates), unit="rollout") as bar:

        def texts(model, step: int) -> list[list[list[int]]]:
            """The responses to each of `drafted`."""
            rows = generate(model, drafted, step, arguments, params)
            bar.update()
            return [[row.tokens.tolist() for row in rows if row.id.uid == prompt.uid] for prompt in drafted]

        rows = generate(start, trained_on, 0, arguments, params)
        bar.update()
        gradient = policy_gradient(model, rows, 1.0, arguments.seed)
        parts = zip(drafted, texts(start, 0), texts(start, 1), strict=True)
        groups = [Group(list(prompt.token_ids), history, drafts, {}) for prompt, history, drafts in parts]
        for learning_rate in learning_rates:
            one_step(model, start, gradient, learning_rate)
            for group, responses in zip(groups, texts(model, 1), strict=True):
                group.responses[f"{learning_rate:g}"] = responses
    return groups


class Arctic:
    """arctic-inference's cache behind GroupIndex's methods. texts: what was generated before, oldest first; limits: keyword
    arguments of its `speculate`."""

    def __init__(self, prompt: list[int], texts: list[np.ndarray], num_samples: int, has_prompts: bool, limits: dict):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=TREE_DEPTH)
        self.limits = limits
        tokens = np.array(prompt, np.int32)
        before = tokens[-PROMPT_END if has_prompts else len(prompt) :]
        for i, text in enumerate(texts):
            self.cache.start_request(("text", i), NO_TEXT)
            self.cache.add_active_response(("text", i), np.concatenate((before, text)))
            self.cache.stop_request(("text", i))
        for sample in range(num_samples):
            # The end of the prompt comes with the response: the samples' texts are cached without their prompts.
            self.cache.start_request(sample, tokens[: len(tokens) - len(before)])
            self.cache.add_active_response(sample, before)
        self.contexts = [tokens[-TREE_DEPTH:]] * num_samples

    def propose(self, sample: int, max_tokens: int) -> tuple[np.ndarray, int, int]:
        draft = self.cache.speculate(sample, self.contexts[sample], max_spec_tokens=max_tokens, **self.limits)
        return np.array(draft.token_ids, np.int32), draft.match_len, 0

    def extend(self, sample: int, tokens: np.ndarray) -> None:
        self.cache.add_active_response(sample, tokens)
        self.contexts[sample] = np.concatenate((self.contexts[sample], tokens))[-TREE_DEPTH:]


class Lookup:
    """transformers' prompt lookup behind GroupIndex's methods. texts: what it searches besides prompt and own text; with
    `uses_samples` the other samples too."""

    def __init__(self, prompt: list[int], texts: list[np.ndarray], num_samples: int, uses_samples: bool):
        self.texts, self.uses_samples = texts, uses_samples
        self.own = [np.array(prompt, np.int32)] * num_samples
        self.prompt_length = len(prompt)

    def propose(self, sample: int, max_tokens: int) -> tuple[np.ndarray, int, int]:
        texts = list(self.texts)
        if self.uses_samples:
            texts += [own[self.prompt_length :] for j, own in enumerate(self.own) if j != sample]
        before = self.own[sample][: self.prompt_length][-PROMPT_END:]
        parts = [part for text in texts for part in (before, text, [BORDER])]
        context = torch.from_numpy(np.concatenate((*parts, self.own[sample])).astype(np.int64))[None]
        generator = PromptLookupCandidateGenerator(num_output_tokens=max_tokens, max_length=context.shape[1] + max_tokens + 1)
        found = generator.get_candidates(context)[0][0, context.shape[1] :].numpy().astype(np.int32)
        border = np.flatnonzero(found == BORDER)
        return found[: border[0]] if len(border) else found, 0, 0

    def extend(self, sample: int, tokens: np.ndarray) -> None:
        self.own[sample] = np.concatenate((self.own[sample], tokens))


def ours(prompt: list[int], history: list[np.ndarray], drafts: list[np.ndarray]) -> GroupIndex:
    index = GroupIndex([(text, 0.0) for text in history], prompt=prompt)
    for sample, draft in enumerate(drafts):
        index.add_draft(sample, draft)
    return index


def make_arms(window: int) -> dict:
    """By name: a function of prompt, history, drafts and the number of samples that makes what proposes for a group."""
    whole = {"max_spec_factor": 0.0, "max_spec_offset": float(window), "min_token_prob": 0.0}
    arms = {
        "ours": lambda prompt, history, drafts, n: ours(prompt, history, drafts),
        "arctic": lambda prompt, history, drafts, n: Arctic(prompt, [*history, *drafts], n, False, {}),
        "arctic, prompts": lambda prompt, history, drafts, n: Arctic(prompt, [*history, *drafts], n, True, {}),
        "arctic, whole": lambda prompt, history, drafts, n: Arctic(prompt, [*history, *drafts], n, True, whole),
        "lookup": lambda prompt, history, drafts, n: Lookup(prompt, [], n, False),
        "lookup, all text": lambda prompt, history, drafts, n: Lookup(prompt, [*drafts, *history], n, True),
    }
    if importlib.util.find_spec("arctic_inference") is None:
        print("arctic-inference is not installed: its arms are left out", file=sys.stderr)
        arms = {name: make for name, make in arms.items() if not name.startswith("arctic")}
    return arms


def measure(groups: list[Group], rate: str, uses_history: bool, uses_drafts: bool, make, window: int) -> dict[str, float]:
    """One arm in one case. The time of a proposal is that in the quickest group, since other processes only add to it."""
    counts = []
    for group in groups:
        responses, drafts, history = (
            [np.array(text, np.int32) for text in texts] for texts in (group.responses[rate], group.drafts, group.history)
        )
        index = make(group.prompt, history if uses_history else [], drafts if uses_drafts else [], len(responses))
        counts.append(play(index, responses, window))
    total = {key: sum(count[key] for count in counts) for key in counts[0]}
    return {
        "tokens_per_pass": total["tokens"] / total["passes"],
        "proposed_per_pass": total["proposed"] / total["passes"],
        "accepted_share": total["accepted"] / max(total["proposed"], 1),
        "propose_us": min(count["propose_ns"] / count["passes"] for count in counts) / 1000,
        "extend_us": min(count["extend_ns"] / count["tokens"] for count in counts) / 1000,
        "sources": {name: total[name] for name in SOURCE_NAMES},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, smollm2, or a Hugging Face folder")
    parser.add_argument("--prompts", help="text file, one prompt a line (default: chain sums)")
    parser.add_argument("--num-prompts", type=int, default=8, help="groups to replay; as many other prompts are trained on")
    parser.add_argument("--num-generations", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--learning-rate", type=float, nargs="+", help="of the step between draft and response")
    parser.add_argument("--window", type=int, default=16, help="most tokens of a proposal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", help="JSON file of the generated text: read if it is there, else written")
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    folder = MODELS.get(arguments.model, arguments.model)
    rates = arguments.learning_rate or list(LEARNING_RATES.get(arguments.model, LEARNING_RATES["smollm2"]))
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if arguments.text and os.path.exists(arguments.text):
        with open(arguments.text, encoding="utf-8") as file:
            groups = [Group(**group) for group in json.load(file)]
    elif os.path.isdir(folder):
        groups = record(folder, rates, arguments)
        if arguments.text:
            with open(arguments.text, "w", encoding="utf-8") as file:
                json.dump([asdict(group) for group in groups], file)
    else:
        print(f"error: --model: no folder {folder}; `make smollm2` makes that of smollm2", file=sys.stderr)
        return 2
    rates = list(groups[0].responses)
    lengths = [len(text) for group in groups for text in group.responses[rates[0]]]
    print(
        f"{arguments.model}, {len(groups)} groups of {len(groups[0].drafts)}, responses of {np.mean(lengths):.0f} tokens on "
        f"average, up to {arguments.window} proposed tokens, commit {commit()}\n"
    )
    # label, responses, whether history is known, whether drafts are
    cases = [("samples", rates[0], False, False), ("samples, history", rates[0], True, False)]
    cases += [(f"samples, history, drafts ({rate})", rate, True, True) for rate in rates]
    print("| known (learning rate) | arm | tokens a pass | proposed a pass | accepted | us a proposal | us a token to extend |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for label, rate, uses_history, uses_drafts in cases:
        for name, make in make_arms(arguments.window).items():
            r = measure(groups, rate, uses_history, uses_drafts, make, arguments.window)
            results.append({"case": label, "arm": name, **r})
            print(
                f"| {label} | {name} | {r['tokens_per_pass']:.2f} | {r['proposed_per_pass']:.1f} | {r['accepted_share']:.3f} "
                f"| {r['propose_us']:.1f} | {r['extend_us']:.1f} |",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {"model": arguments.model, "commit": commit(), "window": arguments.window, "results": results}, file, indent=1
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
