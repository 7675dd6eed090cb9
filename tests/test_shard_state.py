"""Sharded optimizer state on three ranks: equal bits without sharding, and states for any ranks."""

import copy

import torch
from test_optimizer import CONFIG, STEPS, Small

from bubblespec.distributed.ranks import Ranks
from bubblespec.learn import optimizer as module
from bubblespec.learn.optimizer import MOMENTS, Optimizer
from tests.helpers.ranks import run_ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make(dtype: torch.dtype, shard_state: bool, ranks: Ranks) -> tuple[Small, Optimizer]:
    config = copy.copy(CONFIG)
    config.shard_state = shard_state
    config.learning_rate = 1e-3  # below bfloat16's resolution: masters and weights drift apart
    model = Small(dtype)
    return model, Optimizer(model, config, STEPS, ranks)


def train(model: Small, optimizer: Optimizer, ranks: Ranks, steps: range) -> list[float]:
    """Every rank has a micro-batch of its own. Returns the gradient norms."""
    norms = []
    for step in steps:
        model.loss(step, ranks.rank).backward()
        ranks.all_reduce_(optimizer.flat_grad)
        before = [param._version for param in optimizer.params]
        norms.append(optimizer.step(step)[0])
        now = [param._version for param in optimizer.params]
        assert all(n > b for n, b in zip(now, before, strict=True)), "copies are told"
    return norms


def bits(tensors) -> list[list[float]]:
    return [t.detach().double().flatten().tolist() for t in tensors]


def state_size(optimizer: Optimizer) -> int:
    tensors = [state[key] for state in optimizer.local.state.values() for key in MOMENTS]
    masters = list(optimizer.updated.values()) if optimizer.has_masters else []
    return sum(t.numel() for t in tensors + masters)


def same_state(a: dict, b: dict) -> bool:
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    return bool(a["parameters"])


def save(optimizer: Optimizer, ranks: Ranks) -> tuple[dict | None, list[int]]:
    sent, broadcast = [], ranks.broadcast_

    def counted(tensor: torch.Tensor, source: int) -> torch.Tensor:
        sent.append(tensor.numel())
        return broadcast(tensor, source)

    ranks.broadcast_ = counted
    state = optimizer.state_dict()
    del ranks.broadcast_
    return state, sent


def with_and_without(ranks: Ranks, folder: str) -> dict:
    seen, module.PIECE = {}, 7
    for name, dtype in DTYPES.items():
        plain_model, plain = make(dtype, False, ranks)
        model, sharded = make(dtype, True, ranks)
        empty = {"num_updates": 0, "parameters": {}}
        assert sharded.state_dict() == (empty if ranks.is_main else None)
        sizes = [state_size(sharded), state_size(plain)]
        half, rest = range(STEPS // 2), range(STEPS // 2, STEPS)
        norms = [train(model, sharded, ranks, half), train(plain_model, plain, ranks, half)]
        (state, sent), (plain_state, unsent) = save(sharded, ranks), save(plain, ranks)
        assert len(sent) > 10 and max(sent) == module.PIECE and not unsent
        if ranks.is_main:
            assert same_state(state, plain_state)  # does not show whether it was sharded
            torch.save({"model": model.state_dict(), "optimizer": state}, f"{folder}/{name}.pt")
        ranks.barrier()
        saved = torch.load(f"{folder}/{name}.pt", mmap=True, weights_only=True)
        norms[0] += train(model, sharded, ranks, rest)
        norms[1] += train(plain_model, plain, ranks, rest)
        runs = [bits(model.parameters()), bits(plain_model.parameters())]
        for shard_state in (True, False):
            again, continued = make(dtype, shard_state, ranks)
            again.load_state_dict(saved["model"])
            continued.load_state_dict(saved["optimizer"])
            train(again, continued, ranks, rest)
            runs.append(bits(again.parameters()))
        assert sizes == [state_size(sharded), state_size(plain)], "all of it is made at set-up"
        seen[name] = {"norms": norms, "runs": runs, "sizes": sizes}
    return seen


def test_sharding_changes_no_bit_and_divides_state(tmp_path):
    results = run_ranks(tmp_path, with_and_without, 3, str(tmp_path), timeout_s=200)
    sizes = [
        [p.numel() for p in Small(torch.float32).parameters() if p.requires_grad and p.ndim == n]
        for n in (2, 1)
    ]
    for name, dtype in DTYPES.items():
        of_name = [result[name] for result in results]
        start = bits(Small(dtype).parameters())
        for result in of_name:
            assert result["norms"][0] == result["norms"][1]
            assert all(run == of_name[0]["runs"][0] for run in result["runs"])
            assert result["runs"][0] != start
        copies = 3 if name == "bfloat16" else 2
        whole = copies * sum(map(sum, sizes))
        assert [result["sizes"][1] for result in of_name] == [whole] * 3
        assert sum(result["sizes"][0] for result in of_name) == whole
        assert max(result["sizes"][0] for result in of_name) < 0.6 * whole
    # One rank loads what three have saved.
    for name, dtype in DTYPES.items():
        saved = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        model, optimizer = make(dtype, True, Ranks(torch.device("cpu")))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert same_state(optimizer.state_dict(), saved["optimizer"])
        assert saved["optimizer"]["num_updates"] == STEPS // 2
