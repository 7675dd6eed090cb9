"""The drafter before the first step: the policy answers the prompts of the coming steps, and the
drafter learns from that.

Responses are drawn with their own noise, so they are drafts of those steps as well. What is said
again and again is what the drafter's head is restricted to. All ranks generate, and train together:
each on responses of its own, with gradients averaged.
"""

import itertools
import json
import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.dist.ranks import Ranks
from bubblespec.engine.chains import LONGEST, Chains
from bubblespec.engine.drafter import Drafter
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import forward_hidden
from bubblespec.engine.packing import pack_sequences
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError
from bubblespec.learn.drafter_training import SEQUENCES_PER_UPDATE, DrafterTraining, lessons_of
from bubblespec.learn.microbatch import pack_responses
from bubblespec.types import Group, Row

EPOCHS = 8
LAST_RATE = 0.1  # of the learning rate, at the end of the warm start and after it
HELD_OUT = 10  # one response in so many is not learnt from, and says what is accepted
WEIGHTS_FILE, DRAFTER_FILE = "drafter.safetensors", "drafter.json"


def generate(
    batches: Sequence[list[Group]],
    config: Config,
    engine: Engine,
    params: SamplingParams,
    ranks: Ranks,
) -> list[Row]:
    """This rank's responses to the groups of coming steps, nearest first, until it has its share of
    drafter.warm_start tokens; the last of them are not finished. Raises StopRequested."""
    number, wanted = (
        config.rollout.num_generations,
        -(-config.drafter.warm_start // ranks.world_size),
    )
    waiting = (
        Row(group.sample(sample), group.prompt.token_ids, config.rollout.max_completion_length)
        for groups in batches
        for group, sample in [(group, n) for group in groups for n in range(number)][
            ranks.rank :: ranks.world_size
        ]
    )
    rows: list[Row] = []
    finished_tokens = num_tokens = 0
    engine.reset()
    options = {"unit": "tok", "unit_scale": True, "disable": not ranks.is_main}
    with tqdm(total=wanted * ranks.world_size, desc="drafter: responses", **options) as bar:
        while num_tokens < wanted and not ranks.must_stop:
            room = engine.num_slots - len(engine.rows) - len(engine.queue)
            added = list(itertools.islice(waiting, room))
            rows += added
            engine.add(added)
            if engine.is_idle:
                break
            finished_tokens += sum(len(row.tokens) for row in engine.step(params)[0])
            active = int(engine.lengths.sum()) - sum(len(row.prompt) for row in engine.rows)
            gained, num_tokens = finished_tokens + active - num_tokens, finished_tokens + active
            bar.update(gained * ranks.world_size)
    engine.collect()
    ranks.meet()
    return [row for row in rows if len(row.tokens)]


def frequent_ids(
    rows: Sequence[Row], stop_token_ids: Sequence[int], most: int, ranks: Ranks
) -> np.ndarray:
    """The `most` most frequent tokens of all ranks' responses, stop tokens among them, int64
    ascending."""
    tokens = np.concatenate([np.array(stop_token_ids, np.int64), *(row.tokens for row in rows)])
    ids, counts = np.unique(np.concatenate(ranks.gather_ragged(tokens)), return_counts=True)
    return np.sort(ids[np.argsort(-counts, kind="stable")[:most]])


@torch.no_grad()
def learn_from(
    training: DrafterTraining, model: PreTrainedModel, rows: Sequence[Row], max_tokens: int
) -> None:
    """The policy's hidden states of these responses become lessons. max_tokens: of a forward."""
    rows = sorted(
        (row for row in rows if len(row.tokens)), key=lambda row: len(row.prompt) + len(row.tokens)
    )
    while rows:
        chosen, size = [], 0
        while rows and (
            not chosen or size + len(rows[-1].prompt) + len(rows[-1].tokens) <= max_tokens
        ):
            chosen.append(rows.pop())
            size += len(chosen[-1].prompt) + len(chosen[-1].tokens)
        parts = (
            [row.prompt for row in chosen],
            [row.tokens for row in chosen],
            [row.full_logprob for row in chosen],
        )
        batch = pack_responses(
            *parts,
            ids=[row.id for row in chosen],
            order=list(range(len(chosen))),
            device=model.device,
        )
        packing = pack_sequences(batch.sequence_lengths, model.device)
        for lesson in lessons_of(
            batch, forward_hidden(model, batch.input_ids, packing, training.kernel)
        ):
            training.lessons.add(lesson)


def train(training: DrafterTraining, chains: Chains, ranks: Ranks) -> np.ndarray:
    """Learn for EPOCHS from the lessons of all ranks, together. Returns the chance that the first n
    tokens of a chain are right, on responses held out, float64 [LONGEST]. Raises StopRequested."""
    names = sorted(
        {lesson.id for lesson in training.lessons}
    )  # whole responses are held out, not pieces of them
    is_held_out = {names[n] for n in training.random.permutation(len(names))[::HELD_OUT].tolist()}
    held_out, learnt = (
        [x for x in training.lessons if (x.id in is_held_out) == wanted] for wanted in (True, False)
    )
    most = int(ranks.gather(np.array([len(learnt)])).max())
    per_epoch = -(-most // SEQUENCES_PER_UPDATE)
    total, rate = EPOCHS * per_epoch, training.optimizer.param_groups[0]["lr"]
    batches = _batches(learnt, training.random)
    with tqdm(
        total=total, unit="update", desc="drafter: training", disable=not ranks.is_main
    ) as bar:
        for number in range(total):
            for group in training.optimizer.param_groups:
                group["lr"] = rate * (1 - (1 - LAST_RATE) * number / total)
            batch = next(batches, [])
            loss = training.backward(batch) if batch else 0.0
            average_gradients(training, ranks, bool(batch))
            training.step()
            if number % 10 == 0:
                ranks.meet()
                bar.set_postfix(loss=f"{loss:.2f}")
            bar.update()
    for group in training.optimizer.param_groups:
        group["lr"] = rate * LAST_RATE
    return measure(training, chains, held_out, ranks)


def measure(
    training: DrafterTraining, chains: Chains, lessons: Sequence, ranks: Ranks
) -> np.ndarray:
    """`DrafterTraining.accepted` over the lessons of all ranks, weighted by their tokens, float64
    [LONGEST]."""
    sums = np.zeros(LONGEST + 1)
    for begin in range(0, len(lessons), SEQUENCES_PER_UPDATE):
        some = lessons[begin : begin + SEQUENCES_PER_UPDATE]
        weight = sum(len(lesson.hidden) for lesson in some)
        sums += weight * np.append(training.accepted(some, chains, LONGEST), 1.0)
    sums = ranks.gather(sums).sum(axis=0)
    return sums[:-1] / max(sums[-1], 1.0)


def average_gradients(training: DrafterTraining, ranks: Ranks, has_gradient: bool) -> None:
    """The mean over the ranks that have one."""
    if ranks.world_size == 1:
        return
    params = training.params
    flat = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params]
    )
    flat = ranks.sum_(torch.cat((flat, flat.new_full((1,), float(has_gradient)))))
    for param, part in zip(
        params, (flat[:-1] / flat[-1].clamp(min=1)).split([p.numel() for p in params]), strict=True
    ):
        param.grad = part.view_as(param)


def _batches(lessons: list, random: np.random.Generator) -> Iterator[list]:
    """Without end, each epoch in another order; of similar lengths, so that little is padded."""
    while lessons:
        order = random.permutation(len(lessons))
        pool = 8 * SEQUENCES_PER_UPDATE
        for begin in range(0, len(order), pool):
            some = sorted(
                (lessons[n] for n in order[begin : begin + pool]),
                key=lambda lesson: len(lesson.hidden),
            )
            parts = [
                some[k : k + SEQUENCES_PER_UPDATE]
                for k in range(0, len(some), SEQUENCES_PER_UPDATE)
            ]
            yield from (parts[k] for k in random.permutation(len(parts)))


def describe(model: PreTrainedModel) -> dict:
    """What a drafter's policy must agree in."""
    return {
        "policy": type(model).__name__,
        "hidden_size": model.get_output_embeddings().weight.shape[1],
        "vocab_size": model.get_output_embeddings().weight.shape[0],
    }


def save_drafter(folder: str, training: DrafterTraining, accepted: np.ndarray) -> None:
    """Weights, tokens and what is accepted, as two files of a folder. Raises OSError."""
    drafter = training.drafter
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()
    }
    save_file(tensors, os.path.join(folder, WEIGHTS_FILE))
    about = describe(drafter.policy) | {
        "ids": drafter.ids.tolist(),
        "accepted": np.asarray(accepted).tolist(),
        "learning_rate": training.optimizer.param_groups[0]["lr"],
        "num_updates": training.num_updates,
    }
    with open(os.path.join(folder, DRAFTER_FILE), "w", encoding="utf-8") as file:
        json.dump(about, file)


def load_drafter(
    folder: str, model: PreTrainedModel, seed: int, key: str = "drafter.path"
) -> tuple[Drafter, dict]:
    """A saved drafter for this policy, and what is saved about it. Raises InputError where it is
    none, or another policy's."""
    try:
        with open(os.path.join(folder, DRAFTER_FILE), encoding="utf-8") as file:
            about = json.load(file)
        for name, wanted in describe(model).items():
            if about[name] != wanted:
                raise InputError(
                    f"{key}: the drafter in {folder} is of a policy with {name} {about[name]}, this one's is {wanted}"
                )
        about = _checked(about)
        tensors = load_file(os.path.join(folder, WEIGHTS_FILE))
        drafter = Drafter(model, about["ids"], seed)
        drafter.load_state_dict(tensors)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{key}: no drafter of this policy can be read from {folder}: {reason}"
        ) from error
    return drafter, about


def _checked(about: dict) -> dict:
    """What is saved about a drafter, with its tokens and what is accepted as arrays. Raises
    ValueError, KeyError, TypeError."""
    ids, accepted = np.array(about["ids"], np.int64), np.array(about["accepted"], np.float64)
    if (
        ids.ndim != 1
        or not len(ids)
        or (np.diff(ids) <= 0).any()
        or ids[0] < 0
        or ids[-1] >= about["vocab_size"]
    ):
        raise ValueError(f"{DRAFTER_FILE}: ids must be token ids, ascending")
    if accepted.shape != (LONGEST,) or not ((accepted >= 0) & (accepted <= 1)).all():
        raise ValueError(f"{DRAFTER_FILE}: accepted must be {LONGEST} chances")
    if not about["learning_rate"] > 0 or int(about["num_updates"]) < 0:
        raise ValueError(f"{DRAFTER_FILE}: learning_rate must be above 0, num_updates at least 0")
    return about | {"ids": ids, "accepted": accepted}
