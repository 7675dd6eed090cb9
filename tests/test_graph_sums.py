"""The process group of sums in CUDA graphs, on gloo of one rank, where tensors only claim a GPU."""

import pytest
import torch
import torch.distributed as dist

from bubblespec.distributed.ranks import Ranks
from bubblespec.mechanisms.tp_tail.shards import TPGroup

GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):
    """A tensor of this CPU that says that it is on a GPU."""

    device = GPU


@pytest.fixture
def groups(monkeypatch) -> list:
    """The groups of all sums, over gloo that is taken for NCCL."""
    found, all_reduce, new_group, zeros = [], dist.all_reduce, dist.new_group, torch.zeros

    def reduce(tensor, group=None, async_op=False):
        found.append(group)
        return all_reduce(tensor.as_subclass(torch.Tensor), group=group, async_op=async_op)

    def new(backend, timeout):
        assert backend == "nccl" and timeout.total_seconds() == 120
        return new_group(backend="gloo", timeout=timeout)

    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(dist, "new_group", new)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield found
    dist.destroy_process_group()


def tp_group(monkeypatch, device: torch.device) -> TPGroup:
    ranks = Ranks(torch.device("cpu"), timeout_s=60.0)
    ranks.device = device
    if device == GPU:
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    return TPGroup(ranks)


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def test_captured_sums_have_a_group_of_their_own(monkeypatch, groups):
    """It is made once, when the ranks first connect, and the other sums are in the ranks' own."""
    tp, tensor = tp_group(monkeypatch, GPU), torch.ones(3).as_subclass(OnGpu)
    assert tp.can_capture
    tp.all_reduce_(tensor)
    assert groups == [None] and num_groups() == 1
    for _ in range(2):
        tp.connect(tensor)
    first, *others = groups[1:]
    assert first is not None and first is not dist.group.WORLD and others == [first, first]
    assert num_groups() == 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tp.all_reduce_(tensor)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tp.all_reduce_(tensor)
    assert groups[4:] == [first, None] and num_groups() == 2


def test_sums_on_a_cpu_have_no_group_of_graphs(monkeypatch, groups):
    tp = tp_group(monkeypatch, torch.device("cpu"))
    tp.all_reduce_(torch.ones(3))
    assert not tp.can_capture and num_groups() == 1 and tp._captured is None
