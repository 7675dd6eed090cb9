"""How many slots fit, of an engine and of all ranks together, and the printed table."""

import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from test_memory_needs import make_config, small

from bubblespec import checks, memory
from bubblespec.config import Config, load_config
from bubblespec.dist.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError
from bubblespec.memory_needs import meta_model, work_out
from bubblespec.types import Row, SampleId
from tests.helpers.warm import ROOT, python

CPU = Ranks(torch.device("cpu"))


class Ranks3:
    """Rank 0 of three, of which the others have room for 5 and 7 slots."""

    world_size, device = 3, torch.device("cuda")

    def gather(self, array):
        return np.stack([array, np.full_like(array, 5), np.full_like(array, 7)])


def slots_on_cuda(
    monkeypatch, config: Config, free: float, has_moments: bool = True, ranks=Ranks3
) -> int:
    """`free` bytes of a card of 1 GB, of which the allocator holds some itself."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - 1000, 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 51_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50_000)
    return memory.choose_num_slots(config, meta_model(small(), torch.float32), has_moments, ranks())


def test_slots_fill_what_is_free_and_all_ranks_take_the_least(monkeypatch):
    config = make_config(max_tokens=512)
    config.rollout.max_batch_tokens = 4000
    needs = work_out(config, meta_model(small(), torch.float32), 3)
    assert needs.rollout > needs.training
    base = needs.rollout + memory.HEADROOM * 1e9
    assert slots_on_cuda(monkeypatch, config, base + 4.5 * needs.slot) == 4
    assert slots_on_cuda(monkeypatch, config, base + 5.5 * needs.slot) == 5
    assert slots_on_cuda(monkeypatch, config, base + 9.5 * needs.slot) == 5, (
        "the least of all ranks"
    )
    assert (
        slots_on_cuda(
            monkeypatch, config, base + 4.5 * needs.slot + needs.moments, has_moments=False
        )
        == 4
    )
    with pytest.raises(InputError, match=r"^rollout.num_slots: .* optim.max_tokens_per_microbatch"):
        slots_on_cuda(monkeypatch, config, base + 0.5 * needs.slot)
    config = make_config(max_tokens=8192)  # now the gradient step needs more
    needs = work_out(config, meta_model(small(), torch.float32), 3)
    assert needs.training > needs.rollout + 20 * needs.slot
    free = needs.training + memory.HEADROOM * 1e9 + 2.5 * needs.slot
    assert slots_on_cuda(monkeypatch, config, free) == 2
    config.rollout.free_cache_engine = True
    assert slots_on_cuda(monkeypatch, config, free) == 5
    with pytest.raises(InputError, match=r"^rollout.num_slots: "):
        slots_on_cuda(monkeypatch, config, free - 3 * needs.slot)


def slots_that_fit(config: Config) -> list[int]:
    """By card, as the table has them, keys and values not freed."""
    lines = memory.table(config, meta_model(small(), torch.float32), 2).splitlines()
    return [int(line.split("slots: ")[1].split(" fit")[0]) for line in lines if "slots: " in line]


def test_streamed_gradients_are_there_beside_forwards(monkeypatch):
    """Both count; where keys and values are given back before the first slice, what is freed is as
    without streaming."""
    config = make_config(max_tokens=8192)
    config.optim.stream_gradients = True
    needs = work_out(config, meta_model(small(), torch.float32), 3)
    free = needs.training + needs.rollout + memory.HEADROOM * 1e9 + 2.5 * needs.slot
    assert slots_on_cuda(monkeypatch, config, free) == 2
    with_streaming = slots_that_fit(config)
    config.rollout.free_cache_engine = True
    assert (
        slots_on_cuda(
            monkeypatch, config, needs.training + memory.HEADROOM * 1e9 + 2.5 * needs.slot
        )
        == 5
    )
    config.optim.stream_gradients, config.rollout.free_cache_engine = False, False
    room = 80e9
    assert needs.room_for_cache(room, False, True) == needs.room_for_cache(room, False) - min(
        needs.rollout, needs.training
    )
    assert (
        needs.room_for_cache(room, True, True)
        == needs.room_for_cache(room, True)
        == room - needs.rollout
    )
    without = slots_that_fit(config)
    assert len(without) == 2 and all(a < b for a, b in zip(with_streaming, without, strict=True))


def test_a_drafter_takes_room_from_slots(monkeypatch):
    """It is not there yet when they are chosen; each slot has its part of it."""
    config = make_config(max_tokens=512)
    config.rollout.max_batch_tokens = 4000
    without = slots_that_fit(config)
    config.speculative.method = "bubble+suffix+drafter"
    needs = work_out(config, meta_model(small(), torch.float32), 3)
    slot = needs.slot + needs.drafter_slot
    assert needs.drafter > 2 * slot > 2 * needs.slot
    free = max(needs.rollout, needs.training) + needs.drafter + memory.HEADROOM * 1e9 + 4.5 * slot
    assert slots_on_cuda(monkeypatch, config, free) == 4
    assert slots_on_cuda(monkeypatch, config, free - slot) == 3
    assert all(a > b for a, b in zip(without, slots_that_fit(config), strict=True))
    printed = memory.table(config, meta_model(small(), torch.float32), 2)
    assert f"{needs.host_lessons / 1e9:.1f} GB of responses for its drafter" in printed


def test_graphs_take_a_slot_for_their_padding(monkeypatch):
    config = make_config(max_tokens=512)
    config.rollout.max_batch_tokens = 4000
    needs = work_out(config, meta_model(small(), torch.float32), 3)
    free = needs.rollout + memory.HEADROOM * 1e9 + 4.5 * needs.slot
    config.model.dtype = "bfloat16"  # the kernels' type; float32 has no graphs
    assert slots_on_cuda(monkeypatch, config, free) == 3
    config.rollout.enforce_eager = True
    assert slots_on_cuda(monkeypatch, config, free) == 4
    config.rollout.enforce_eager, config.model.attention = False, "sdpa"
    assert slots_on_cuda(monkeypatch, config, free) == 4


def test_slots_are_never_more_than_are_of_use():
    model = meta_model(small(), torch.float32)

    def slots(method: str, num_slots: int | str, max_batch_tokens: int = 2048) -> int:
        config = make_config()  # 8 prompts x 4 responses
        config.speculative.method, config.rollout.num_slots = method, num_slots
        config.rollout.max_batch_tokens = max_batch_tokens
        return memory.choose_num_slots(config, model, True, CPU)

    assert slots("none", "auto") == slots("suffix", "auto") == 32
    assert slots("bubble", "auto") == slots("bubble+suffix", "auto") == 64
    assert slots("bubble", "auto", max_batch_tokens=40) == 40
    assert [slots("bubble", 500), slots("none", 500), slots("none", 7)] == [500, 32, 7]
    config = make_config()
    config.speculative.method = "none"
    most = [memory.most_slots(config, 1), memory.most_slots(config, 2)]
    config.rollout.placement = "in_turn"
    most.append(memory.most_slots(config, 2))
    config.tail_batching.enabled = True
    assert [*most, memory.most_slots(config, 2)] == [32, 32, 16, 32], (
        "of 32, 16 and 16 rows a rank, and with deferred ones 16 more"
    )


def test_rows_that_all_ranks_share_take_what_slots_leave(monkeypatch):
    config, model = make_config(max_tokens=512), meta_model(small(), torch.float32)
    config.rollout.max_batch_tokens = 4000
    needs, key_heads = work_out(config, model, 3), model.config.num_key_value_heads
    row = needs.shared_row
    assert row == needs.slot * -(-key_heads // 3) // key_heads
    base = needs.rollout + memory.HEADROOM * 1e9 + 2 * needs.slot

    def chosen(room: float, wanted="auto", num_slots: int = 2) -> int:
        slots_on_cuda(monkeypatch, config, base + room)
        config.rollout.tp_tail_max_rows = wanted
        return memory.choose_tp_rows(config, model, True, num_slots, Ranks3())

    assert [chosen(3.5 * row), chosen(0.5 * row), chosen(-0.5 * row)] == [3, 0, 0]
    config.rollout.free_cache_engine = True  # of slots, but these rows' stay in a gradient step
    assert chosen(3.5 * row) == 3
    monkeypatch.setattr(
        memory.Needs, "training", property(lambda needs: needs.rollout + 2 * needs.slot + 2 * row)
    )
    assert chosen(3.5 * row) == 1
    config.rollout.free_cache_engine = False
    monkeypatch.undo()
    assert chosen(40 * row) == 5, "the least of all ranks"
    assert chosen(0.5 * row, wanted=9) == 9


def test_rows_that_are_asked_for_are_counted_before_slots(monkeypatch):
    config, model = make_config(max_tokens=512), meta_model(small(), torch.float32)
    config.rollout.max_batch_tokens = 4000
    without = slots_that_fit(config)
    config.rollout.tp_tail_max_rows = 40
    needs = work_out(config, model, 3)
    assert needs.shared == 40 * needs.shared_row > 5 * needs.slot
    free = needs.rollout + memory.HEADROOM * 1e9 + 4.5 * needs.slot
    assert slots_on_cuda(monkeypatch, config, free + needs.shared) == 4
    with pytest.raises(
        InputError,
        match=r"GB of activations and 0.02 GB of rollout.tp_tail_max_rows do not fit the 0.\d+ GB",
    ):
        slots_on_cuda(monkeypatch, config, free)
    assert all(a < b for a, b in zip(slots_that_fit(config), without, strict=True))
    printed = memory.table(config, model, 2)
    assert (
        f"{work_out(config, model, 2).shared / 1e9:8.2f}  of 40 rows that all ranks decode together"
        in printed.splitlines()
    )


def test_rows_that_are_asked_for_are_refused_where_they_do_not_fit(monkeypatch):
    """By hand: 3 slots of 512 positions on each of 2 ranks, and 4 rows of which a rank has one of
    two key/value heads. A position has keys and values of 4 layers and 2 heads of 32 numbers in
    float32, and 32 bytes on the host."""
    config, model = make_config(), meta_model(small(), torch.float32)
    config.rollout.tp_tail_max_rows = 4
    needed = 512 * (3 * (4 * 2 * 2 * 32 * 4 + 32) + 4 * (4 * 2 * 32 * 4 + 32))
    ranks = SimpleNamespace(device=torch.device("cpu"), world_size=2)
    monkeypatch.setattr(checks, "free_host_bytes", lambda: needed)
    checks.check_memory(config, ranks, model, 3)
    monkeypatch.setattr(checks, "free_host_bytes", lambda: needed - 1)
    with pytest.raises(
        InputError, match=r"3 slots of 512 tokens and the 4 of rollout.tp_tail_max_rows need"
    ):
        checks.check_memory(config, ranks, model, 3)


def test_released_keys_and_values_are_made_again():
    model = transformers.AutoModelForCausalLM.from_config(small()).double().eval()
    prepare_model(model, 512)
    engine = Engine(ModelRunner(model, 3, 64, seed=0))

    def generate() -> list[list[int]]:
        rows = [Row(SampleId(1, 0, j), (1, 2, 3), 20) for j in range(4)]
        return [row.tokens.tolist() for row in engine.run(rows, SamplingParams())]

    wanted = generate()
    assert engine.runner.cache.num_bytes() > 0
    engine.add([Row(SampleId(9, 0, 0), (7, 8), 20)])
    engine.step(SamplingParams())
    engine.release()
    assert engine.runner.cache.num_bytes() == 0 and engine.is_idle
    assert generate() == wanted


# The command


def test_the_command_prints_the_sum(tmp_path):
    small().save_pretrained(tmp_path)
    done = python(
        "-m",
        "bubblespec.memory",
        "--config",
        "configs/qwen2.5_7b.yaml",
        "--world-size",
        "4",
        f"model.path={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    said = {
        name: float(number)
        for number, name in re.findall(r"^ *(\d+\.\d+)  (\w+)", done.stdout, re.MULTILINE)
    }
    assert {
        "weights",
        "gradients",
        "master",
        "moments",
        "lasting",
        "activations",
        "loss",
        "keys",
    } <= said.keys()
    config = load_config(os.path.join(ROOT, "configs/qwen2.5_7b.yaml"))
    needs = work_out(config, meta_model(small(), torch.bfloat16), 4)
    assert said["activations"] == pytest.approx(needs.activations / 1e9, abs=0.005)
    assert "4 x 80 GB: fits" in done.stdout and "4 x 141 GB: fits" in done.stdout
    assert needs.masters < needs.gradients, "sharded"


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["model.path=/nowhere"], "model.path: cannot read the configuration of /nowhere"),
        (["--world-size", "0"], "--world-size: 0 must be at least 1"),
    ],
)
def test_bad_input_is_one_line(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        ["memory", "--config", os.path.join(ROOT, "configs/qwen2.5_7b.yaml"), *arguments],
    )
    assert memory.main() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {says}") and error.count("\n") == 1


def test_what_does_not_fit_is_said():
    config = make_config("bfloat16")
    model = meta_model(
        small(vocab=50_000, hidden_size=8192, intermediate_size=20_000, num_hidden_layers=10),
        torch.bfloat16,
    )
    printed = memory.table(config, model, 8).splitlines()
    assert "8 x 80 GB: DOES NOT FIT" in printed[-3] and "8 x 141 GB: DOES NOT FIT" in printed[-2]
    config.optim.shard_state = True
    printed = memory.table(config, model, 8).splitlines()
    assert "8 x 80 GB: DOES NOT FIT" in printed[-3] and "8 x 141 GB: fits" in printed[-2]
