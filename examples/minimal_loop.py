"""The idea of bubblespec in one file: python examples/minimal_loop.py

Synchronous RL generates a batch, scores it, updates the policy, and only then generates the next
batch. While the longest responses are finished, most of the machine waits. Here that idle time
generates the *next* batch, with the weights of this step. Its tokens are drafts: after the update,
one forward checks a whole draft, and keeps what the new weights would have said.

Two things make drafts both useful and safe:

- A token is argmax(logits / temperature + noise), with noise that depends only on the sample's name
  and the token's position. A draft is made with the noise that its sample will have, so only the
  change of the weights can make a token differ. Almost all are right.
- A draft token is accepted only if it is the very token that the new weights give. So the tokens
  are those of a loop without drafts, which the equal digests at the end show.

The package does the same on many ranks, with drafts from several sources. See README.md.
"""

import hashlib
import os

import numpy as np
import reasoning_gym
import torch
import transformers

from bubblespec.engine.arrays import packed, unpacked
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import forward_hidden, output_head, pack_sequences
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.types import Prompt, Row, SampleId

MODEL = os.path.join(os.path.dirname(__file__), "../configs/tiny_policy")
SHORT = {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1}
LONG = {**SHORT, "min_terms": 10, "max_terms": 14}  # few, but each step waits for them
LONG_EVERY = 5  # prompts
NUM_STEPS = 8
NUM_PROMPTS = 8
NUM_GENERATIONS = 4
MAX_PROMPT_LENGTH = 160
MAX_NEW_TOKENS = 128
LEARNING_RATE = 1e-4
SEED = 0


class OwnDrafts:
    """Proposes each sample's draft, as long as the response follows it (a `Proposer`)."""

    def __init__(self, drafts: dict[SampleId, np.ndarray]):
        self.remaining = dict(drafts)

    def propose(self, rows, lengths, room, budget, ahead) -> tuple[np.ndarray, np.ndarray]:
        """Return the rest of each row's draft; the engine feeds as much as fits."""
        return packed([self.remaining.get(row.id) for row in rows])

    def observe(self, rows, tokens, num_gained, num_draft, num_accepted) -> None:
        """Keep the rest of drafts that agree with the gained tokens."""
        for row, gained in zip(rows, unpacked(tokens, num_gained), strict=True):
            draft = self.remaining.pop(row.id, np.empty(0, np.int64))
            if len(draft) > len(gained) and np.array_equal(draft[: len(gained)], gained):
                self.remaining[row.id] = draft[len(gained) :]


def generate(
    engine: Engine, params: SamplingParams, rows: list[Row], coming: list[Row], drafts: dict
) -> dict[SampleId, np.ndarray]:
    """Generate `rows` to their end, and verify their drafts.

    Slots that become free meanwhile begin `coming`, the rows of the next step. Return the tokens of
    these so far: their drafts.
    """
    engine.reset()  # keys and values of older weights are of no use
    engine.add(rows + coming)
    proposer = OwnDrafts(drafts)
    while any(row.finish is None for row in rows):
        engine.step(params, proposer)
    engine.collect()  # the tokens of unfinished rows
    return {row.id: row.tokens for row in coming if len(row.tokens)}


def make_prompts(tokenizer, count: int) -> list[Prompt]:
    """Make prompts of sums; one in LONG_EVERY is long."""
    tasks = [
        reasoning_gym.create_dataset("chain_sum", size=count, seed=SEED, **task)
        for task in (SHORT, LONG)
    ]
    prompts = []
    for prompt_id in range(count):
        entry = tasks[prompt_id % LONG_EVERY == 0][prompt_id]
        ids = tokenizer(entry["question"], add_special_tokens=False)["input_ids"]
        prompts.append(
            Prompt(prompt_id, entry["question"], tuple(ids), {"answer": entry["answer"]})
        )
    return prompts


def rewards_of(texts: list[str], answers: list[str]) -> np.ndarray:
    """Return 1 where the text in <answer> tags is right, else 0: float64 [prompts, generations]."""
    given = [text.rpartition("<answer>")[2].partition("</answer>")[0].strip() for text in texts]
    right = [one == other for one, other in zip(given, answers, strict=True)]
    return np.array(right, float).reshape(NUM_PROMPTS, NUM_GENERATIONS)


def rows_of(prompts: list[Prompt], step: int) -> list[Row]:
    """Make the rows of a step. Their names key the noise, so they contain the step."""
    return [
        Row(SampleId(prompt.prompt_id, step, number), prompt.token_ids, MAX_NEW_TOKENS)
        for prompt in prompts
        for number in range(NUM_GENERATIONS)
    ]


def update(model, optimizer, rows: list[Row], advantages: np.ndarray, temperature: float) -> None:
    """Make a step of policy gradient: GRPO's, as on-policy samples have probability ratio 1."""
    lengths = np.array([len(row.prompt) + len(row.tokens) for row in rows])
    ids = torch.from_numpy(np.concatenate([(*row.prompt, *row.tokens) for row in rows]))
    hidden = forward_hidden(model, ids, pack_sequences(lengths, ids.device))  # one after the other
    ends = lengths.cumsum()
    response = np.concatenate(
        [np.arange(end - len(row.tokens), end) for row, end in zip(rows, ends, strict=True)]
    )
    logits = output_head(model)(hidden[response - 1]) / temperature
    logprob = logits.log_softmax(-1).gather(-1, ids[response, None])[:, 0]
    weight = np.repeat(advantages, [len(row.tokens) for row in rows]) / len(response)
    optimizer.zero_grad()
    (-logprob * torch.from_numpy(weight)).sum().backward()
    optimizer.step()


def digest_of(rows: list[Row]) -> str:
    """Return a digest of samples and tokens."""
    text = repr([(*row.id, *row.tokens.tolist()) for row in rows])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def train(num_steps: int, use_drafts: bool) -> list[tuple[str, int, float]]:
    """Train; return the digest, forwards and mean reward of each step."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    num_slots, max_length = NUM_PROMPTS * NUM_GENERATIONS, MAX_PROMPT_LENGTH + MAX_NEW_TOKENS
    prepare_model(model, max_length)
    engine = Engine(ModelRunner(model, num_slots, max_length, SEED))
    params = SamplingParams(stop_token_ids=(tokenizer.eos_token_id,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    prompts = make_prompts(tokenizer, (num_steps + 1) * NUM_PROMPTS)
    batches = [prompts[n * NUM_PROMPTS : (n + 1) * NUM_PROMPTS] for n in range(num_steps + 1)]
    steps, drafts = [], {}
    for step in range(num_steps):
        batch, next_batch = batches[step : step + 2]
        rows, num_forwards = rows_of(batch, step), engine.num_forwards
        coming = rows_of(next_batch, step + 1) if use_drafts else []
        drafts = generate(engine, params, rows, coming, drafts)
        answers = [p.columns["answer"] for p in batch for _ in range(NUM_GENERATIONS)]
        texts = [tokenizer.decode(row.tokens, skip_special_tokens=True) for row in rows]
        rewards = rewards_of(texts, answers)
        spread = rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / spread  # GRPO
        update(model, optimizer, rows, advantages.ravel(), params.temperature)
        steps.append((digest_of(rows), engine.num_forwards - num_forwards, float(rewards.mean())))
    return steps


if __name__ == "__main__":
    plain, drafted = train(NUM_STEPS, False), train(NUM_STEPS, True)
    print("step  reward  forwards without drafts, with   digests")
    for step, (one, other) in enumerate(zip(plain, drafted, strict=True), start=1):
        same = f"{one[0]} both" if one[0] == other[0] else f"{one[0]} and {other[0]}: NOT EQUAL"
        print(f"{step:4}  {one[2]:6.2f}  {one[1]:23}  {other[1]:4}   {same}")
    without, with_drafts = (sum(forwards for _, forwards, _ in steps) for steps in (plain, drafted))
    num_equal = sum(one[0] == other[0] for one, other in zip(plain, drafted, strict=True))
    print(
        f" all  {'':6}  {without:23}  {with_drafts:4}   equal in {num_equal} of {NUM_STEPS} steps"
    )
