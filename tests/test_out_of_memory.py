"""Out of memory in a micro-batch, thrown where a GPU would: the same gradient from smaller pieces,
and a warning."""

import numpy as np
import pytest
import torch
from test_update import (
    ADVANTAGES,
    GENERATIONS,
    NUM_PROMPTS,
    gradient,
    make_config,
    make_learner,
    make_samples,
)

from bubblespec.engine.model import prepare_model
from bubblespec.errors import InputError
from bubblespec.learn import learner as update
from bubblespec.learn.learner import Learner
from bubblespec.learn.microbatch import make_microbatch, make_minibatches
from bubblespec.learn.out_of_memory import split

DEVICE = torch.device("cpu")


def prepared(make_model):
    model = make_model()
    prepare_model(model, 64)
    return model


class SmallMemory:
    """A model forward that runs out of memory above `limit` tokens; where `in_backward`, only after
    part of the gradient of that micro-batch has been added."""

    def __init__(self, monkeypatch, limit: int, in_backward: bool):
        self.limit, self.in_backward, self.num_failed, self.fed = limit, in_backward, 0, []
        self.original = update.forward_hidden
        monkeypatch.setattr(update, "forward_hidden", self.forward)

    def forward(self, model, input_ids, packing, kernel):
        hidden = self.original(model, input_ids, packing, kernel)
        self.fed.append(len(input_ids))
        if len(input_ids) > self.limit:
            if not (self.in_backward and hidden.requires_grad):
                self.fail()
            # The backward pass has been through the head by then, whose gradient has been added.
            hidden.register_hook(lambda grad: self.fail())
        return hidden

    def fail(self, *_):
        self.num_failed += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("extra", [{}, {"num_minibatches": 2, "num_iterations": 2}])
def test_smaller_pieces_give_the_same_gradient_and_metrics(
    make_model, monkeypatch, capsys, in_backward, extra
):
    config, samples = make_config(max_tokens=200, **extra), make_samples()
    wanted, wanted_metrics = gradient(prepared(make_model), samples, config)
    memory = SmallMemory(monkeypatch, 40, in_backward)
    got, metrics = gradient(prepared(make_model), samples, config)
    assert memory.num_failed > 0 and max(memory.fed[-3:]) <= 40
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    for key in metrics.keys() - {"timing_s/sync"}:
        assert metrics[key] == pytest.approx(wanted_metrics[key], rel=1e-7, abs=1e-12), key
    said = capsys.readouterr().err
    assert (
        "warning: rank 0: out of memory in a micro-batch of" in said
        and "optim.max_tokens_per_microbatch" in said
    )


def test_an_update_that_was_started_again_is_that_of_the_pieces_alone(make_model, monkeypatch):
    """Bit for bit: nothing is left of the passes that failed, and the ratio is taken from the pass
    that counts."""
    samples, config, original = make_samples(), make_config(200), Learner.accumulate_gradient
    memory, tried = SmallMemory(monkeypatch, 40, in_backward=True), []

    def noting(learner, batch, *arguments):
        tried.append(batch.order)
        return original(learner, batch, *arguments)

    monkeypatch.setattr(Learner, "accumulate_gradient", noting)
    got, _ = gradient(prepared(make_model), samples, config)
    assert memory.num_failed > 0
    num_samples, pieces = NUM_PROMPTS * GENERATIONS, []
    while sum(map(len, pieces)) < num_samples:
        pieces.insert(0, tried.pop())
    learner = make_learner(prepared(make_model), config)
    _, weights, (factor,) = make_minibatches(
        samples, ADVANTAGES != 0, config=config, ranks=learner.ranks, max_tokens=200
    )
    for order in pieces:
        original(learner, make_microbatch(samples, order, DEVICE), ADVANTAGES, weights)
    assert torch.equal(got, learner.optimizer.flat_grad * factor)


def test_the_lower_limit_is_remembered(make_model, monkeypatch):
    memory, learner = (
        SmallMemory(monkeypatch, 40, in_backward=False),
        make_learner(prepared(make_model), make_config(200)),
    )
    num_failed = []
    for step in range(2):
        learner.update(make_samples(), ADVANTAGES, step)
        num_failed.append(memory.num_failed)
    assert num_failed[0] == num_failed[1] > 0 and learner.budget.max_tokens <= 80


def test_one_response_that_does_not_fit_ends_the_run(make_model, monkeypatch):
    SmallMemory(monkeypatch, 10, in_backward=False)
    with pytest.raises(
        InputError, match=r"rollout.max_completion_length: one response of \d+ tokens"
    ):
        gradient(prepared(make_model), make_samples(), make_config(200))


def test_other_errors_are_not_taken_for_it(make_model, monkeypatch):
    def broken(*_):
        raise RuntimeError("something else")

    monkeypatch.setattr(update, "forward_hidden", broken)
    with pytest.raises(RuntimeError, match="something else"):
        gradient(prepared(make_model), make_samples(), make_config(200))


@pytest.mark.parametrize("max_tokens", [1, 25, 60, 10_000])
def test_split_keeps_sequences_whole_and_in_order(max_tokens):
    samples = make_samples()
    order = np.random.default_rng(3).permutation(NUM_PROMPTS * GENERATIONS).tolist()
    batch = make_microbatch(samples, order, DEVICE)
    batch.old, batch.reference = (
        torch.arange(len(batch.target)) + 0.5,
        -torch.arange(len(batch.target)) - 0.5,
    )
    parts = split(batch, samples, max_tokens)
    assert [i for part in parts for i in part.order] == order
    assert all(sum(part.sequence_lengths) <= max_tokens or len(part.order) == 1 for part in parts)
    for name in ("lengths", "input_ids", "target", "generated", "old", "reference"):
        assert torch.equal(
            torch.cat([getattr(part, name) for part in parts]), getattr(batch, name)
        ), name
    fed = [part.input_ids[part.predicts] for part in parts]
    assert torch.equal(torch.cat(fed), batch.input_ids[batch.predicts])
