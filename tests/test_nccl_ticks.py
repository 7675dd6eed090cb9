"""Ticks over NCCL, of two ranks that are not there: options of the group, sizes of its gathers."""

from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bubblespec.distributed.ranks import Ranks
from bubblespec.distributed.shared_memory import PLACE_BYTES
from bubblespec.rollout import board as boards
from bubblespec.rollout.board import Collectives


class NcclOptions:
    """The part of torch's `ProcessGroupNCCL.Options` that torch 2.11 to 2.13 declare."""

    def __init__(self):
        self.config = SimpleNamespace(blocking=1, cga_cluster_size=4, min_ctas=1, max_ctas=32)


@pytest.fixture
def nccl_group(monkeypatch):
    """nccl_group(Options) -> what `Collectives` has passed to `new_group`, and the size of each
    gather, over NCCL of two ranks that are not there."""

    def make(options: type | None) -> tuple[dict, list[int], Collectives]:
        if options is None:
            monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
        else:
            nccl = SimpleNamespace(Options=options)
            monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
        given, sizes = {}, []

        def gather(everyone, own, group, async_op):
            sizes.append(own.numel())
            assert everyone.numel() == 2 * own.numel() and group is given
            return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

        monkeypatch.setattr(dist, "new_group", lambda **keywords: given.update(keywords) or given)
        monkeypatch.setattr(boards, "all_gather", gather)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        ranks = Ranks(torch.device("cpu"))
        ranks.world_size, ranks.watchdog = 2, SimpleNamespace(enter=lambda place: None)
        return given, sizes, Collectives(ranks, 60.0, "nccl")

    return make


def test_nccl_ticks_use_one_cta(nccl_group):
    given, _, _ = nccl_group(NcclOptions)
    config = given["pg_options"].config
    assert config.max_ctas == 1 and config.min_ctas == 1
    # torch warns where the options have a time-out other than the group's
    assert given["pg_options"]._timeout == given["timeout"] == timedelta(seconds=120)


@pytest.mark.parametrize("options", [None, lambda: SimpleNamespace(config=SimpleNamespace())])
def test_nccl_without_cta_option_uses_defaults(nccl_group, options):
    given, _, _ = nccl_group(options)
    assert given["pg_options"] is None and given["backend"] == "nccl"


def test_nccl_connects_every_size_before_first_tick(nccl_group):
    """In steps of a factor of two, as NCCL chooses an algorithm by size."""
    _, sizes, ticks = nccl_group(NcclOptions)
    assert sizes == [1 << power for power in range(18)] and 8 * sizes[-1] == PLACE_BYTES
    ticks.post(np.zeros(5), "")
    assert len(sizes) == 19
