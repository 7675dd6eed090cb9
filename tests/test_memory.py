"""Memory: estimates against real tensors, slots by free bytes, measured peaks, and the table."""

import os
import re
import sys

import numpy as np
import psutil
import pytest
import torch
import transformers
from test_architectures import SERVED, build

from bubblespec import memory
from bubblespec.__main__ import main
from bubblespec.config import Config, ModelConfig, OptimConfig, RolloutConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.kv_cache import KVCache, pack_rows
from bubblespec.engine.model import forward_hidden, pack_sequences
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.sampling import sample
from bubblespec.learn.learner import Learner
from bubblespec.learn.lora import add_adapter
from bubblespec.learn.optimizer import Optimizer
from bubblespec.mechanisms import Run, functions
from bubblespec.mechanisms.drafter.eagle3 import config_like
from bubblespec.tools.memory import (
    CARDS,
    changed,
    fit,
    meta_model,
    needs_of,
    settings_that_fit,
    table,
)
from tests.helpers.checks import refusal
from tests.helpers.warm import ROOT

CPU = Ranks(torch.device("cpu"))


def small(**changes) -> transformers.PretrainedConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    return transformers.Qwen2Config(**sizes | {"max_position_embeddings": 4096} | changes)


def make_config(dtype: str = "float32", **changes) -> Config:
    rollout = {"max_prompt_length": 100, "max_completion_length": 412}
    rollout |= {"num_prompts_per_step": 8, "num_generations": 4}
    return Config(
        model=ModelConfig(path="x", dtype=dtype),
        rollout=RolloutConfig(**rollout | changes),
        optim=OptimConfig(max_tokens_per_microbatch=8192),
    )


def make_model(dtype: torch.dtype, length: int) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small()).to(dtype).eval()
    prepare_model(model, length)
    return model


def make_learner(config: Config, kernel: str = "sdpa") -> Learner:
    model = make_model(getattr(torch, config.model.dtype), memory.max_length(config))
    optimizer = Optimizer(model, config.optim, 10, CPU)
    return Learner(
        config=config,
        ranks=CPU,
        model=model,
        reference=None,
        optimizer=optimizer,
        kernel=kernel,
        params=SamplingParams(),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lasting_needs_equal_real_tensors(dtype):
    config = make_config(dtype)
    learner = make_learner(config)
    needs = memory.estimate(config, meta_model(small(), getattr(torch, dtype)), 1)
    adamw = learner.optimizer.local
    state = [s[k] for s in adamw.state.values() for k in ("exp_avg", "exp_avg_sq")]
    if dtype == "bfloat16":  # float32 master weights
        state += [p for group in adamw.param_groups for p in group["params"]]
    assert needs.weights == sum(p.nbytes for p in learner.model.parameters())
    assert needs.gradients == learner.optimizer.flat_grad.nbytes
    assert needs.optimizer == sum(t.nbytes for t in state)


def test_lora_and_reference_needs_equal_real_tensors():
    """With LoRA the reference is the base itself, else a copy of the policy."""
    config = make_config("bfloat16")
    config.model.lora_r = 4
    config.loss.kl_coef = 0.1
    planned = meta_model(small(), torch.bfloat16)
    add_adapter(planned, config.model, seed=0)
    model = transformers.AutoModelForCausalLM.from_config(small()).to(torch.bfloat16)
    add_adapter(model, config.model, seed=0)
    optimizer = Optimizer(model, config.optim, 10, CPU)
    needs = memory.estimate(config, planned, 1)
    adapter = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert needs.weights == sum(p.nbytes for p in model.parameters()) and needs.reference == 0
    assert needs.gradients == optimizer.flat_grad.nbytes == 4 * adapter
    assert needs.optimizer == 3 * 4 * adapter
    config.model.lora_r = 0
    model = meta_model(small(), torch.bfloat16)
    assert memory.estimate(config, model, 1).reference == sum(p.nbytes for p in model.parameters())


HEADS = ["llama", "gpt2", "gpt_neox", "deepseek_v2"]  # ways to give their number
HEADS += ["gemma3", "gemma4", "gemma4_keys", "gemma4_shared"]


@pytest.mark.parametrize("name", HEADS)
def test_kv_bytes_equal_cache(name):
    model = build(*SERVED[name], torch.float32)
    prepare_model(model, 16)
    cache = KVCache(1, 1)
    packing = pack_rows(cache, np.array([0]), np.array([1]), torch.device("cpu"))
    with torch.no_grad():
        forward_hidden(model, torch.zeros(1, dtype=torch.int64), packing)
    assert memory.kv_bytes(model.config, 4) == cache.num_bytes()


def test_drafter_has_the_keys_of_its_own_layer():
    config, model = make_config(), build(*SERVED["gemma4_shared"], torch.float32)
    plain = needs_of(config, model, 1)
    config.speculative.method = "drafter"
    own = memory.kv_bytes(config_like(model.config), 4)
    assert needs_of(config, model, 1).slot - plain.slot == own * memory.max_length(config)


def test_activations_are_within_twice_the_kept_memory():
    config, tokens = make_config("bfloat16"), 512
    config.optim.max_tokens_per_microbatch = tokens
    model = make_model(torch.bfloat16, tokens)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    packing = pack_sequences([tokens], torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward_hidden(model, torch.zeros(tokens, dtype=torch.int64), packing)
    held = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)
    head = tokens * 512 * 2 + 2 * 512 * 128 * 2
    layers = memory.estimate(config, model, 1).training - head
    assert held / 2 < layers < 2 * held
    config.model.gradient_checkpointing = True
    one_again = memory.estimate(config, model, 1).training - head
    assert layers * 1.5 / 4 < one_again < layers * 2 / 4, "one layer of four is there at a time"


def test_batch_invariant_forwards_keep_sums_of_all_splits():
    """A row of 2,148 keys has five splits of 512; other forwards keep those of 256 tokens."""
    config = make_config("bfloat16", max_completion_length=2048, max_num_batched_tokens=4096)
    of_a_token, found = 5 * 4 * (32 + 2) * 4, []  # splits, heads, numbers, bytes
    for config.model.batch_invariant, tokens in ((False, 256), (True, 4096)):
        assert memory.split_bytes(config, small()) == tokens * of_a_token
        found.append(memory.estimate(config, meta_model(small(), torch.bfloat16), 1).rollout)
    assert found[1] - found[0] == 4096 * (of_a_token - 512 * 2), "they are more than the logits"
    config.rollout.max_completion_length = 412
    assert memory.split_bytes(config, small()) == 0


FORWARD = 5_000_000


class Cuda:
    """A card of 1 GB with `free` bytes, and the peaks of a gradient step and a forward."""

    device = torch.device("cuda")

    def __init__(self, monkeypatch, free: float, peak: float, others: tuple[int, ...] = ()):
        self.rank, self.world_size, self.is_main, self.others = 0, 1 + len(others), True, others
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**9))
        for name in ("memory_reserved", "memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda device: 50_000)
        monkeypatch.setattr(memory, "gradient_peak", lambda config, learner: peak)
        monkeypatch.setattr(memory, "forward_peak", lambda config, learner: FORWARD)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        return np.stack([array, *(np.full_like(array, other) for other in self.others)])


def with_mechanisms(needs: memory.Needs, config, ranks) -> memory.Needs:
    run = Run(config, ranks, meta_model(small(), getattr(torch, config.model.dtype)))
    for add in functions("add_needs"):
        needs = add(needs, run)
    return needs


def test_slots_fill_free_memory_of_every_gpu(monkeypatch):
    config = make_config()
    learner = make_learner(config)
    needs = memory.estimate(config, learner.model, 1)
    peak = FORWARD + 40 * needs.slot
    free = peak + 0.1 * 10**9 + 4.5 * needs.slot

    def slots(free: float, others: tuple[int, ...] = ()) -> tuple[int, int | None, int]:
        cuda = Cuda(monkeypatch, free, peak, others)
        return memory.choose_slots(config, learner, cuda, with_mechanisms(needs, config, cuda))

    assert slots(free) == (4, None, 0)
    assert slots(free + needs.slot) == (5, None, 0)
    assert slots(free + 13 * needs.slot, others=(7, 5)) == (5, None, 16), "the minimum of all ranks"
    assert slots(10 * free) == (64, None, 0), "more are of no use"
    message = refusal(slots, free - 4 * needs.slot)
    assert message.startswith("rollout.max_num_seqs: auto, but slots of 512 tokens need ")
    config.rollout.free_cache_engine = True
    assert slots(free) == (44, None, 0)
    config.rollout.gpu_memory_utilization = 0.9 + 7 * needs.slot / 10**9
    assert slots(free) == (51, None, 0)
    config.rollout.gpu_memory_utilization = 0.9
    config.optim.stream_gradients, config.rollout.free_cache_engine = True, False
    assert slots(free + FORWARD) == (4, None, 0)


def test_pages_fill_free_memory(monkeypatch):
    """Slots of 512 tokens are two pages; a slot is one for a prompt of 100 tokens and one more."""
    config = make_config("bfloat16")
    learner = make_learner(config, "varlen")
    needs = memory.estimate(config, learner.model, 1)
    peak, page = FORWARD + 40 * needs.slot, needs.slot // 2
    free = peak + 0.1 * 10**9 + 1.5 * page  # one of them is spare

    def chosen(num_pages: int, wanted: int | str = "auto", others=()) -> tuple[int, int, int]:
        config.rollout.max_num_seqs = wanted
        cuda = Cuda(monkeypatch, free + num_pages * page, peak, others)
        return memory.choose_slots(config, learner, cuda, with_mechanisms(needs, config, cuda))

    assert [chosen(n) for n in (2, 3, 9)] == [(1, 2, 0), (1, 3, 0), (4, 9, 0)]
    assert [chosen(9, n) for n in (3, 5)] == [(3, 6, 0), (4, 9, 0)]
    assert chosen(50, others=(8,)) == (3, 7, 16), "the minimum of all ranks"
    assert chosen(500) == (64, 128, 0), "more are of no use"
    message = refusal(chosen, 1)
    assert message.startswith("rollout.max_num_seqs: auto, but slots of 512 tokens need ")


def test_slots_are_at_most_the_useful_number(monkeypatch):
    def slots(method: str, num_slots: int | str, **changes) -> int:
        config = make_config(max_num_seqs=num_slots, **changes)  # 8 prompts x 4 responses
        config.speculative.method = method
        learner = make_learner(config)
        needs = memory.estimate(config, learner.model, 1)
        return memory.choose_slots(config, learner, CPU, needs)[0]

    assert [slots(method, "auto") for method in ("none", "suffix", "bubble")] == [32, 32, 64]
    assert slots("bubble", "auto", max_num_batched_tokens=40) == 40
    assert [slots("bubble", 500), slots("none", 500), slots("none", 7)] == [500, 32, 7]
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 10**6)
    assert refusal(slots, "none", 7).startswith("rollout.max_num_seqs: 7, but slots of 512 tokens")


def count_allocations(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5000)


@pytest.mark.parametrize("max_tokens", [512, 900, 8193])
def test_gradient_peak_measures_a_full_micro_batch(monkeypatch, max_tokens):
    config = make_config()
    config.optim.max_tokens_per_microbatch = max_tokens
    learner = make_learner(config)
    before = [p.clone() for p in learner.model.parameters()]
    count_allocations(monkeypatch)
    seen, accumulate = [], learner.accumulate_gradient

    def counted(batch, *arguments):
        seen.append((batch.input_ids.numel(), len(batch.target), max(batch.sequence_lengths)))
        return accumulate(batch, *arguments)

    learner.accumulate_gradient = counted
    assert memory.gradient_peak(config, learner) == 4000
    assert seen == [(max_tokens, max_tokens, 512)]
    assert not learner.optimizer.flat_grad.any()
    for state in learner.optimizer.local.state.values():
        assert not any(tensor.any() for tensor in state.values())
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_forward_peak_samples_all_tokens(monkeypatch):
    config, fed, sampled = make_config(max_num_batched_tokens=700), [], []
    learner = make_learner(config)
    count_allocations(monkeypatch)

    def counted(logits, keys, num_generated, params):
        sampled.append((tuple(logits.shape), params.temperature))
        return sample(logits, keys, num_generated, params)

    monkeypatch.setattr(memory, "sample", counted)
    learner.model.base_model.register_forward_hook(
        lambda module, args, kwargs, out: fed.append(kwargs["packing"].lengths), with_kwargs=True
    )
    assert memory.forward_peak(config, learner) == 4000
    assert fed == [[512, 188]] and sampled == [((700, 512), 1.0)]


def test_host_token_budget_is_a_share_of_free_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 10**12)  # a server of eight GPUs
    drafts, history = memory.host_token_budget(CPU)
    assert drafts >= 10**10 and history >= 4 * 10**8
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 10**9)
    assert memory.host_token_budget(CPU) == (12_500_000, 500_000)
    monkeypatch.undo()
    whole = memory.free_host_bytes()
    assert 0 < whole <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.free_host_bytes() == pytest.approx(whole / 4, rel=0.5)


def write_group(folder, names: tuple[str, str, str], *figures: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in zip(names[:2], figures, strict=False):
        (folder / name).write_text(f"{figure}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {figures[2]}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    "lines, root, names, no_limit",
    [("3:cpu:/\n0::/a/b\n", "", V2, "max"), ("4:cpu,memory:/a/b\n", "memory", V1, 2**63 - 4096)],
)
def test_memory_of_a_container_is_in_its_limits(
    tmp_path, monkeypatch, lines, root, names, no_limit
):
    process, groups = tmp_path / "process", tmp_path / "groups"
    monkeypatch.setattr(memory, "PROCESS", process)
    monkeypatch.setattr(memory, "CGROUPS", groups)
    host = psutil.virtual_memory()._replace(available=6000, total=8000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: host)
    assert memory.host_bytes() == (6000, 8000), "without control groups"
    process.mkdir()
    (process / "cgroup").write_text(lines)
    inner, outer = groups / root / "a" / "b", groups / root / "a"
    write_group(inner, names, no_limit, 50, 0)
    assert memory.host_bytes() == (6000, 8000)
    write_group(outer, names, 4000, 3500, 300)
    assert memory.host_bytes() == (800, 4000), "the cache of files is freed on demand"
    write_group(groups / root, names, 1000, 1500, 0)  # a container has its own group at the root
    assert memory.host_bytes() == (0, 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    write_group(groups / root, names, 1000, 400, 0)
    assert memory.free_host_bytes() == 300


def small_size() -> int:
    return sum(p.numel() for p in meta_model(small(), torch.bfloat16).parameters())


def call(monkeypatch, *arguments: str) -> int:
    config = os.path.join(ROOT, "configs/qwen2.5_7b.yaml")
    monkeypatch.setattr(sys, "argv", ["", "memory", "--config", config, *arguments])
    return main()


def test_command_prints_a_table_or_one_line(monkeypatch, tmp_path, capsys):
    small().save_pretrained(tmp_path)
    assert call(monkeypatch, "--world-size", "4", f"model.path={tmp_path}") == 0
    printed = capsys.readouterr().out
    names = set(re.findall(r"^ *[\d.]+  (\w+)", printed, re.M))
    assert {"weights", "gradients", "optimizer", "total", "gradient", "keys"} <= names
    assert all(f"4 x {card}: fits; " in printed for card in CARDS)
    assert "M parameters in bfloat16, 4 ranks; MB on each" in printed
    (weights,) = re.findall(r"^ *([\d.]+)  weights", printed, re.M)
    assert float(weights) == pytest.approx(2e-6 * small_size(), rel=0.01), "bfloat16, in MB"
    small(hidden_size=16384, num_hidden_layers=80).save_pretrained(tmp_path)
    assert call(monkeypatch, "--world-size", "1", f"model.path={tmp_path}") == 1
    printed = capsys.readouterr().out
    assert printed.count("DOES NOT FIT") == 3 and "try model.lora_r=8, a smaller model" in printed
    assert call(monkeypatch) == 0, "the shapes of the hub's model are shipped"
    assert "7.62 B parameters" in capsys.readouterr().out
    transformers.MambaConfig(hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path)
    assert call(monkeypatch, f"model.path={tmp_path}") == 2
    error = capsys.readouterr().err
    assert error.endswith("...\nerror: model.path: mamba has no layers with attention\n")
    assert call(monkeypatch, "model.path=/nowhere") == 2
    error = capsys.readouterr().err
    _, line = error.splitlines()
    assert line.startswith("error: model.path: there is no folder /nowhere")


LARGE = {"hidden_size": 8192, "intermediate_size": 20_000, "num_hidden_layers": 10}


def test_table_marks_gpus_with_too_little_memory():
    config, model = make_config("bfloat16"), meta_model(small(**LARGE), torch.bfloat16)
    assert table(config, model, 8).count("DOES NOT FIT") == 3
    config.optim.shard_state = True
    *_, first, advice, second = table(config, model, 8).splitlines()
    assert "8 x 80 GB: DOES NOT FIT" in first and "8 x 141 GB: fits" in second
    assert advice.startswith("  fits with ") and "shard_state" not in advice


def test_advice_makes_a_run_fit_and_no_setting_is_spare():
    config = make_config("bfloat16")
    model, total = meta_model(small(**LARGE), torch.bfloat16), CARDS["80 GB"]

    def fits(settings: dict) -> bool:
        other = changed(config, settings)
        return fit(other, needs_of(other, model, 8), 8, total)[0]

    settings = settings_that_fit(config, model, 8, total)
    assert settings["optim.shard_state"] and fits(settings) and not fits({})
    for name in settings:
        assert not fits({key: value for key, value in settings.items() if key != name})
    assert settings_that_fit(config, model, 8, 1e9) == {}
    assert not config.optim.shard_state, "the configuration stays as it is"


def test_teacher_is_counted_for_whole_run():
    config = make_config("bfloat16")
    model, teacher = (meta_model(small(hidden_size=n), torch.bfloat16) for n in (128, 256))
    without, needs = (memory.estimate(config, model, 1, other) for other in (None, teacher))
    size = sum(p.nbytes for p in teacher.parameters())
    assert needs.lasting - without.lasting == needs.teacher == size
    # its hidden states, and twice the logits, as no micro-batch needs chunks
    assert needs.training - without.training == 8192 * (256 * 2 + 512 * 2)
    (row,) = re.findall(r"([\d.]+)  teacher\n", table(config, model, 1, teacher))
    assert float(row) == pytest.approx(size / 1e6, abs=0.005), "MB"
    assert "teacher" not in table(config, model, 1)
