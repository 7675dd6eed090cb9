"""Reward models: logits are those of transformers' own forward one by one, on any number of ranks;
what is scored in idle time; bad input; and whole runs."""

import json
import random
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bubblespec.config import Config, ModelConfig, RewardConfig
from bubblespec.config.combinations import combination_problems
from bubblespec.config.file import load_config
from bubblespec.data.prompts import reasoning_gym_rows
from bubblespec.distributed.ranks import Ranks
from bubblespec.mechanisms import Run
from bubblespec.mechanisms.reward_models import mechanism
from bubblespec.mechanisms.reward_models.mechanism import (
    ModelPool,
    RewardModelsMechanism,
    ScoreResponses,
    divide,
)
from bubblespec.mechanisms.reward_models.model import RewardModel, load
from bubblespec.records import IdleUse, RolloutRecord
from bubblespec.rewards.functions import Sample
from bubblespec.rewards.scorer import RewardManager
from bubblespec.rollout.plan import SLICE_S, RankView
from bubblespec.telemetry.report import short_names
from bubblespec.tools.memory import needs_of, planned_model
from bubblespec.types import Group, Prompt, StepBatch
from scripts import tiny_reward_model as tiny
from scripts.tiny_policy import worked_solution
from tests.helpers.checks import refusal
from tests.helpers.clocks import Clock
from tests.helpers.models import GPT2, GQA, SIZES, VOCAB, WIDE, config_of
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import make_rows
from tests.helpers.runs import digests, read, steps_of, train_here
from tests.helpers.threads import train_on_threads

TINY, SHIPPED = "configs/tiny_policy", "configs/tiny_reward_model"
CPU = torch.device("cpu")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHAT = [{"role": "user", "content": "1 + 1 ="}]
BERT = {**SIZES, **WIDE, "vocab_size": VOCAB, "pad_token_id": 0}
LONG = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
# (kind, base, options, how its sequences are batched)
KINDS = {
    "llama": ("Llama", GQA, {}, "packed"),
    "window": ("Mistral", GQA, {"sliding_window": 7}, "packed"),
    "gpt2": ("GPT2", GPT2, {}, "packed"),
    "encoder": ("Bert", BERT, {}, "padded"),
    "dynamic rotary": ("Llama", GQA, {"rope_parameters": LONG}, "packed"),
}

pytestmark = pytest.mark.usefixtures("exact_norms")


def tokenizer_of(template: str | None = None):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = template
    return tokenizer


def classifier(kind: str, base: dict, dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = config_of(kind, base, num_labels=1, **options)
    auto_class = transformers.AutoModelForSequenceClassification
    return auto_class.from_config(config).to(dtype).eval().requires_grad_(False)


def reward_model(kind="Llama", base=GQA, max_tokens=64, template=None, **options) -> RewardModel:
    model = classifier(kind, base, **options)
    return RewardModel(model, tokenizer_of(template), max_tokens, "a/model")


def made_up(count: int, longest: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, VOCAB, rng.integers(1, longest)) for _ in range(count)]


def one_by_one(model, sequences) -> np.ndarray:
    """transformers' own forward."""
    with torch.inference_mode():
        found = [model(input_ids=torch.from_numpy(ids)[None]).logits[0, 0] for ids in sequences]
    return np.array(found)


@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_transformers_one_by_one(name):
    kind, base, options, batching = KINDS[name]
    found = reward_model(kind, base, **options)
    sequences = [*made_up(20), np.array([0]), np.array([5, 0, 7, 0, 0])]  # 0 is padding
    wanted = one_by_one(classifier(kind, base, **options), sequences)
    assert found.batching == batching and np.ptp(wanted) > 0.1
    np.testing.assert_allclose(found.logits(sequences), wanted, rtol=0, atol=1e-12)
    with torch.inference_mode():
        together = found._compute([torch.from_numpy(ids) for ids in sequences])
    if name != "dynamic rotary":
        np.testing.assert_allclose(together, wanted, rtol=0, atol=1e-12)


def test_rotary_that_depends_on_neighbours_is_fed_alone():
    longer = {**LONG, "original_max_position_embeddings": 20}
    base = {**GQA, "rope_parameters": longer, "pad_token_id": None}
    found, sequences = reward_model(base=base), made_up(5)
    assert found.batching == "alone"
    wanted = one_by_one(classifier("Llama", base), sequences)
    np.testing.assert_allclose(found.logits(sequences), wanted, rtol=0, atol=1e-12)


def test_float64_scores_do_not_depend_on_others():
    found, sequences = reward_model(max_tokens=1000), made_up(30)
    wanted = found.logits(sequences)
    order = np.random.default_rng(2).permutation(30)
    assert found.logits([sequences[i] for i in order]) == [wanted[i] for i in order]
    assert [found.logits([ids])[0] for ids in sequences] == wanted


@pytest.mark.parametrize("batching", ["packed", "padded", "alone"])
def test_batches_hold_each_sequence_once_within_limit(batching):
    lengths = np.random.default_rng(3).integers(1, 90, 50).tolist()
    given = SimpleNamespace(
        batching=batching, max_tokens=80, model=SimpleNamespace(dtype=torch.float32)
    )
    batches = list(RewardModel.batches(given, lengths))
    assert sorted(index for chosen in batches for index in chosen) == list(range(50))
    for chosen in batches:
        own = [lengths[index] for index in chosen]
        size = max(own) * len(own) if batching == "padded" else sum(own)
        assert len(own) == 1 or (size <= 80 and batching != "alone")
    assert (len(batches) == 50) == (batching == "alone")
    given.model.dtype = torch.float64
    assert all(len(chosen) == 1 for chosen in RewardModel.batches(given, lengths))


def test_float32_batches_equal_one_by_one_within_rounding():
    found, sequences = reward_model(max_tokens=1000, dtype=torch.float32), made_up(30)
    assert len(list(found.batches([len(ids) for ids in sequences]))) == 1
    wanted = one_by_one(classifier("Llama", GQA, torch.float32), sequences)
    np.testing.assert_allclose(found.logits(sequences), wanted, rtol=0, atol=1e-5)


# Texts


def test_texts_are_those_of_trl():
    found = reward_model(template=TEMPLATE)
    for prompt, wanted in (
        ("1 + 1 =", "1 + 1 = 2"),
        (CHAT, "user: 1 + 1 =\nassistant:  2\n"),
        ([*CHAT, {"role": "assistant", "content": "It is"}], "user: 1 + 1 =\nassistant: It is 2\n"),
    ):
        ids = found.tokens_of(prompt, " 2")
        assert ids.tolist() == found.tokenizer(wanted, add_special_tokens=False)["input_ids"]
    assert CHAT == [{"role": "user", "content": "1 + 1 ="}], "not changed"


def test_long_texts_lose_their_beginning(capsys):
    base = {**GQA, "max_position_embeddings": 16}
    pool = ModelPool(reward_model(base=base), Clock())
    ids = pool.model.tokens_of("1" * 10 + "2" * 12, "345")
    wanted = pool.model.tokenizer("2" * 12 + "345", add_special_tokens=False)["input_ids"]
    assert len(ids) == 16 and ids[1:].tolist() == wanted
    for _ in range(2):
        pool.finish(Ranks(CPU))
    (warning,) = capsys.readouterr().err.splitlines()
    says = "a/model: 1 texts are longer than its 16 positions; it scores their last ones"
    assert warning == f"warning: reward {says}"


# Scores of rows


def manager_of(model: RewardModel, ranks: Ranks, **keys) -> RewardManager:
    config = RewardConfig(functions=["a/model"], num_workers=0, **keys)
    pool = ModelPool(model, ranks.clock)
    return RewardManager(config, {"a/model": pool}, tokenizer_of(), ranks)


def rows_of_prompt(prompt, count: int = 6):
    groups = [Group(Prompt(7, prompt, (1,), {}), 0)]
    rows = make_rows(groups, count, 30)
    for row, tokens in zip(rows, made_up(count), strict=True):
        row.tokens = tokens
    return rows, StepBatch(groups, 1, count)


def scenario(ranks, count: int) -> list[list[float]]:
    """Return the scores of this rank's rows; some are scored before the rollout ends."""
    torch.set_num_threads(1)
    model = classifier("Llama", {**GQA, "vocab_size": 312})
    manager = manager_of(RewardModel(model, tokenizer_of(), 64, "a/model"), ranks)
    rows, launch = rows_of_prompt("1 + 1 =", count)
    own = [row for row in rows if row.id.sample % ranks.world_size == ranks.rank]
    scoring = manager.begin(launch, 0)
    for row in own[: ranks.rank]:
        scoring.on_finished(row)
    manager.own_pools[0].run()
    scores = scoring.collect(own)[:, 0]
    return [[row.id.sample, score] for row, score in zip(own, scores.tolist(), strict=True)]


def test_scores_are_equal_bit_for_bit_on_any_ranks(tmp_path):
    (alone,) = run_ranks(tmp_path, scenario, 1, 9)
    assert len({score for _, score in alone}) == 9
    found = run_ranks(tmp_path, scenario, 3, 9)
    assert sorted(pair for of_rank in found for pair in of_rank) == alone


def test_rank_without_rows_scores_its_share():
    sizes = np.array([50, 10, 10, 10, 10, 10])
    assert divide(sizes, 2).tolist() == [0, 1, 1, 1, 1, 1]
    rng = np.random.default_rng(4)
    for num_ranks in (1, 2, 5):
        sizes = rng.integers(1, 100, 40)
        load = np.bincount(divide(sizes, num_ranks), sizes, num_ranks)
        assert np.ptp(load) <= sizes.max() and load.sum() == sizes.sum()
    assert divide(np.zeros(0, np.int64), 3).tolist() == []


@pytest.mark.parametrize("what", ["nan", "template"])
def test_failures_are_counted_and_replaced(what, monkeypatch, capsys):
    template = "{{ raise_exception('no such role') }}" if what == "template" else None
    model = reward_model(base={**GQA, "vocab_size": 312}, template=template)
    prompt = CHAT if what == "template" else "1 + 1 ="
    if what == "nan":
        monkeypatch.setattr(model, "logits", lambda given: [float("nan")] * len(given))
    rows, launch = rows_of_prompt(prompt, 2)
    manager = manager_of(model, Ranks(CPU), reward_on_error=-1.0)
    monkeypatch.setattr(manager, "count", lambda answers, end_s: [])
    scores = manager.begin(launch, 0).collect(rows)
    assert scores.tolist() == [[-1.0], [-1.0]]
    kind = "value" if what == "nan" else "exception"
    assert f"({kind}, step 1, prompt 7, sample 0)" in capsys.readouterr().err


# Idle time


class FakeModel:
    """Takes a millisecond per token of virtual time; the logit is the number of tokens."""

    max_tokens, num_truncated, max_length, path = 100, 0, 1000, "a/model"

    def __init__(self, clock: Clock):
        self.clock, self.fed = clock, []

    def tokens_of(self, prompt, completion):
        return np.zeros(len(completion), np.int64)

    def batches(self, sizes):
        return [list(range(len(sizes)))]

    def logits(self, sequences):
        self.fed.append([len(ids) for ids in sequences])
        self.clock.sleep(1e-3 * sum(self.fed[-1]))
        return [float(len(ids)) for ids in sequences]


def scoring_task(frees_cache: bool = False, num_ranks: int = 2):
    clock = Clock()
    pool = ModelPool(FakeModel(clock), clock)
    engine = SimpleNamespace(is_waiting=True, is_idle=True)
    record = RolloutRecord(idle={ScoreResponses.name: IdleUse()})
    task = ScoreResponses([pool], num_ranks, frees_cache)
    task.begin(RankView(0, engine, {}, record))
    return task, pool, engine


def submit(pool: ModelPool, *sizes: int) -> list[Future]:
    return [pool.submit([Sample("", "x" * size, [], {})]) for size in sizes]


def test_slices_score_longest_first_within_their_time():
    task, pool, _ = scoring_task()
    futures = submit(pool, 5, 70, 20, 25, 4)
    assert not task.can_begin() and task.rate == 0, "what a slice takes is not known yet"
    submit(pool, 30)
    pool.score([pool.queue.pop()])
    while task.can_begin():
        seconds, saved_s = task.next_slice()
        assert saved_s == pytest.approx(seconds / 2, rel=1e-3)
        task.run_slice()
    assert pool.model.fed == [[30], [70], [25, 20, 4], [5]]
    assert max(map(sum, pool.model.fed[2:])) <= 1e3 * SLICE_S + 1
    (answers,) = zip(*(future.result() for future in futures), strict=True)
    assert [answer.reward for answer in answers] == [5, 70, 20, 25, 4]
    use = task.view.record.idle["score"]
    assert use.seconds == pytest.approx(0.124, rel=1e-3)
    assert use.saved_s == use.expected_s * 2 == pytest.approx(use.seconds, rel=1e-3)
    task.finish(Ranks(CPU))
    assert {span.kind for span in task.view.record.slices} == {"score"}


def test_rank_with_rows_to_decode_does_not_score():
    task, pool, engine = scoring_task(frees_cache=True)
    submit(pool, 3, 4)
    pool.score([pool.queue.pop()])
    assert task.can_begin()
    engine.is_idle = False  # the cache is held
    assert not task.can_begin()
    task.frees_cache = False
    assert task.can_begin()
    task.view.unfinished, engine.is_waiting = {0: None}, False
    assert not task.can_begin()
    engine.is_waiting = True  # all rows wait for environments
    assert task.can_begin()


def test_abandoned_rollout_leaves_nothing_to_score():
    _, pool, _ = scoring_task()
    released = []
    sampler = SimpleNamespace(board=object(), ranks=Ranks(CPU), config=Config())
    sampler.config.rollout.free_cache_engine = True
    sampler.engine = SimpleNamespace(release=lambda: released.append(1))
    made = RewardModelsMechanism(sampler, [pool])
    submit(pool, 8)
    plan = SimpleNamespace(scoring=object(), works=[])
    made.begin_rollout(plan)
    assert not pool.queue and [work.name for work in plan.works] == ["score"]
    pool.finish(Ranks(CPU))
    assert not released
    (future,) = submit(pool, 8)
    pool.finish(Ranks(CPU))
    assert future.result()[0].reward == 8 and released == [1]
    made.end_rollout(plan)
    assert made.metrics(Ranks(CPU), plan) == {"reward/model_s": pytest.approx(8e-3, rel=1e-3)}
    assert made.metrics(Ranks(CPU), plan) == {"reward/model_s": 0}
    (future,) = submit(pool, 8)
    future.cancel()
    pool.finish(Ranks(CPU))


# Bad input


def saved(folder, num_labels: int = 1, kind: str = "SequenceClassification", **options) -> str:
    torch.manual_seed(0)
    config = config_of("Llama", {**GQA, "vocab_size": 312}, num_labels=num_labels, **options)
    getattr(transformers, f"AutoModelFor{kind}").from_config(config).save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return str(folder)


def config_with(path: str, **reward) -> Config:
    model = ModelConfig(path=TINY, dtype="float64", device="cpu")
    return Config(model=model, reward=RewardConfig(functions=[path], **reward))


@pytest.mark.parametrize(
    "num_labels, kind, says",
    [
        (3, "SequenceClassification", "has 3 labels; a reward model has one"),
        (1, "CausalLM", "lack score.weight; it is no LlamaForSequenceClassification of one label"),
    ],
)
def test_models_of_another_kind_are_refused(tmp_path, num_labels, kind, says):
    path = saved(tmp_path / "model", num_labels, kind)
    line = refusal(load, config_with(path), path, CPU, 0)
    assert line.startswith("reward.functions: ") and line.endswith(says)


def test_missing_folder_and_damaged_weights_are_named(tmp_path):
    path = str(tmp_path / "none")
    line = refusal(load, config_with(path), path, CPU, 0)
    assert line == f"reward.functions: there is no folder {path}"
    path = saved(tmp_path / "model", rms_norm_eps=float("nan"))
    line = refusal(load, config_with(path), path, CPU, 0)
    assert "its logits are not finite" in line


def test_chats_need_a_chat_template():
    pool = ModelPool(reward_model(), Clock())
    run = Run(config_with("a/model"), Ranks(CPU), rewards={"a/model": pool})
    mechanism.check(run, [Prompt(1, "text", (1,), {})])
    line = refusal(mechanism.check, run, [Prompt(1, CHAT, (1,), {})])
    assert line == (
        "reward.functions: the tokenizer of a/model has no chat template, but prompts of the data "
        "are chats"
    )


def test_names_in_metrics_have_no_slash():
    names = ["org/model-0.6B", "a.f", "./x/last", "y/last/"]
    assert short_names(names) == ["model-0.6B", "f", "x.last", "y.last"]
    config = config_with("a/b")
    config.eval.functions = ["org/digest"]
    assert any("eval/digest" in line for line in combination_problems(config))


def test_memory_counts_models_on_the_gpu_alone(tmp_path):
    path = saved(tmp_path / "model")
    config = config_with(path)
    config.model.device = "auto"
    needs = needs_of(config, planned_model(config, TINY), 2)
    loaded = load(config, path, CPU, 0)
    size = sum(p.numel() for p in loaded.model.parameters())
    assert needs.others["reward models"] == 8 * size
    assert needs.scoring == 8192 * (11 * 64 + 4 * 96) * 8
    free = config.rollout
    room = needs.scoring + needs.training + needs.rollout + 10
    free.free_cache_engine = True
    assert needs.room_for_cache(room, config) == room - needs.rollout
    free.free_cache_engine = False
    assert needs.room_for_cache(room, config) == room - max(needs.scoring, needs.training)
    config.reward.model_device = "cpu"
    assert needs_of(config, planned_model(config, TINY), 2).scoring == 0


# Runs

OPTIONS = ["model.path=configs/tiny_policy", "model.dtype=float64", "data.size=60"]
OPTIONS += ["rollout.num_prompts_per_step=6", "rollout.num_generations=3", "run.max_steps=3"]
OPTIONS += ["rollout.max_completion_length=32", "run.save_steps=1", "run.eval_steps=3"]
OPTIONS += ["eval.num_prompts=4", "eval.num_generations=2", "optim.learning_rate=1e-3"]
OPTIONS += ["speculative.planning=always", "run.timeline_steps=[2]"]


def test_runs_are_equal_on_any_ranks_and_resume(tmp_path, monkeypatch):
    path = saved(tmp_path / "model")
    # In virtual time scoring would take none, and so save none.
    monkeypatch.setattr(ScoreResponses, "rate", property(lambda task: float(task.can_begin())))
    rewards = [f"reward.functions=[{path},bubblespec.rewards.exact_match]"]
    rewards += ["reward.weights=[1.0,0.5]", "reward.num_workers=0"]
    options = [*OPTIONS, *rewards]
    train_here(tmp_path / "one", *options, short=[])
    two = f"run.output_dir={tmp_path / 'two'}"
    train_on_threads(2, *options, two, ends_in=1, is_killed=True)
    train_on_threads(2, *options, two)
    assert digests(tmp_path / "one") == digests(tmp_path / "two") and len(digests(tmp_path / "one"))
    pairs = list(zip(read(tmp_path / "one"), read(tmp_path / "two"), strict=True))
    keys = ["rewards/model/mean", "eval/rewards/model/mean", "reward", "rewards/exact_match/mean"]
    for key in keys:
        found = [(one[key], two[key]) for one, two in pairs if key in one]
        assert found and all(one == two for one, two in found), (key, found)
    assert all(line["rewards/model/std"] > 0 for line in steps_of(tmp_path / "two"))
    assert any(line["idle/score/expected_s"] >= 0 for line in steps_of(tmp_path / "two"))
    saved(tmp_path / "model", initializer_range=0.3)
    again = [*options, two, "run.max_steps=4"]
    line = refusal(train_here, tmp_path / "two", *again)
    assert "reward.functions: weights that stay as they are differ" in line


def test_tiny_model_tells_right_sums_from_wrong_ones():
    config = load_config("configs/tiny_reward_model.yaml", [])
    assert config.reward_models == [SHIPPED]
    model = load(config, SHIPPED, CPU, 0)
    assert model.batching == "packed"
    quality = json.loads(Path(SHIPPED, "quality.json").read_text())
    assert quality["auc"] > 0.95
    assert sum(file.stat().st_size for file in Path(SHIPPED).iterdir()) < 1_000_000
    right, wrong, cut = [], [], []
    for number, row in enumerate(reasoning_gym_rows(tiny.TASKS, 200, 5)):
        solution = worked_solution(row["entry"])
        flawed = worked_solution(row["entry"], random.Random(number), slip_rate=1.0)
        texts = solution, flawed, solution.partition("<")[0]
        for scored, text in zip((right, wrong, cut), texts, strict=True):
            scored += model.logits([model.tokens_of(row["prompt"], text)])
    assert (np.array(right) > np.array(wrong)).mean() > 0.9
    assert (np.array(cut) < 0).mean() > 0.9, "without an answer"


def test_made_up_solutions_have_their_labels():
    """By the teacher of the policy, whose solutions are right; the tokens are the tokenizer's."""
    tokenizer, chance, kinds = tiny.build_tokenizer(), random.Random(0), Counter()
    for row in reasoning_gym_rows(tiny.TASKS, 300, 6):
        tokens, labels, is_right = tiny.made_up_solution(row["entry"], chance)
        text, solution = "".join(tokens), worked_solution(row["entry"])
        assert len(tokens) == len(labels) and is_right == (text == solution)
        wanted = tokenizer.tokenize(solution)
        for token, of_solution, label in zip(tokens, wanted, labels, strict=False):
            assert label == (token == of_solution), text
            if token != of_solution:
                break
        if tiny.OTHER not in tokens:
            assert tokenizer.tokenize(text) == tokens
        kinds[is_right, len(tokens) == len(wanted)] += 1
    assert set(kinds) == {(True, True), (False, True), (False, False)}


def test_short_training_of_tiny_model_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "ROWS", 32)
    monkeypatch.setattr(tiny, "POOL_ROWS", 64)
    arguments = ["--max-steps", "30", "--problems", "16", "--output", str(tmp_path)]
    tiny.main(arguments)
    quality = json.loads((tmp_path / "quality.json").read_text())
    assert quality["steps"] == 30 and quality["last_loss"] < quality["first_loss"]
    config = config_with(str(tmp_path))
    assert load(config, str(tmp_path), CPU, 0).batching == "packed"
    again = tmp_path / "again"
    tiny.main([*arguments[:-1], str(again)])
    first, second = (load_file(f / "model.safetensors") for f in (tmp_path, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_policy_learns_from_the_tiny_model(tmp_path):
    """Exact matches are measured, not rewarded. 256 samples: two standard errors are 0.06."""
    options = ["run.max_steps=20", "run.save_steps=20", "eval.num_prompts=64"]
    train_here(tmp_path, *options, config="configs/tiny_reward_model.yaml", short=())
    exact = [line["eval/exact_match"] for line in read(tmp_path) if "eval/exact_match" in line]
    assert len(exact) == 2 and exact[0] < 0.6 and exact[1] > exact[0] + 0.15
