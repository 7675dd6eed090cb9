"""Scores of a rank's rows: the same with any number of workers, handed out as they come, and what
failures leave behind."""

import copy
import os
import random
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bubblespec.config import RewardConfig
from bubblespec.distributed.ranks import Ranks, StopRequested, signals_stop
from bubblespec.errors import InputError
from bubblespec.rewards.functions import load_reward, per_sample
from bubblespec.rewards.scorer import RewardManager, RolloutRewards
from bubblespec.types import Group, Prompt, Row, StepBatch
from tests.helpers.checks import wait_until
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import make_rows

OBEY = "tests.helpers.misbehaving_rewards.obey"
PROMPTS = [
    Prompt(prompt_id, f"prompt {prompt_id}", (prompt_id % 7, 1), {"answer": str(prompt_id)})
    for prompt_id in (900, 17)
]
GROUPS = [Group(prompt, 4) for prompt in PROMPTS]
OF_ONE = StepBatch(GROUPS[:1], 1, 4)
CPU = torch.device("cpu")


class Words:
    """Decodes token n as "n", leaving token 0 out as a special token; or as the n-th of the given
    texts."""

    def __init__(self, texts: list[str] | None = None):
        self.texts = texts

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        if self.texts is not None:
            return [self.texts[row[0]] for row in ids]
        return [" ".join(str(n) for n in row if n or not skip_special_tokens) for row in ids]


@pytest.fixture
def make_scorer():
    """make_scorer(texts, num_workers, ..., functions, ranks) -> a Scorer, closed at the end."""
    made = []

    def make(texts=None, functions=(OBEY,), ranks=None, **options) -> RewardManager:
        if not isinstance(functions, dict):
            functions = {path: load_reward(path) for path in functions}
        config, ranks = RewardConfig(functions=list(functions), **options), ranks or Ranks(CPU)
        made.append(RewardManager(config, functions, Words(texts), ranks))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def finished_rows(count: int) -> list[Row]:
    rows = make_rows(GROUPS[:1], count, 10)
    for row in rows:
        row.tokens = np.array([row.id.sample])
    return rows


def scores(scorer: RewardManager, rows: list[Row], told=(), step: int | None = 7) -> np.ndarray:
    """Rewards of rows of one prompt, some of which are told of as they finish."""
    scoring = scorer.begin(OF_ONE, step)
    for i in told:
        scoring.on_finished(rows[i])
    return scoring.collect(rows)


def test_rows_are_scored_with_text_and_prompt_columns(make_scorer):
    rows = make_rows(GROUPS, 2, 10)
    for row in rows:
        row.tokens = np.array([row.id.prompt_id, row.id.sample])
    calls = []

    @per_sample
    def record(prompts, completions, completion_ids, answer):
        calls.append((prompts, completions, completion_ids, answer))
        return [1.0, 2.0, 3.0, 4.0]

    scoring = make_scorer(functions={"a.record": record}, num_workers=0).begin(
        StepBatch(GROUPS, 2, 2)
    )
    assert scoring.collect(rows).tolist() == [[1.0], [2.0], [3.0], [4.0]]
    texts = ["prompt 900", "prompt 900", "prompt 17", "prompt 17"]
    ids = [[900, 0], [900, 1], [17, 0], [17, 1]]
    assert calls == [(texts, ["900", "900 1", "17", "17 1"], ids, ["900", "900", "17", "17"])]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_number_of_workers_changes_no_reward_or_failure(make_scorer, capsys, num_workers):
    texts = ["value 0.5", "raise x", "none", "wrong nan", "value 2", "exit 0"]
    wanted = [0.5, -1.0, np.nan, -1.0, 2.0, -1.0]
    scorer = make_scorer(texts, num_workers=num_workers, reward_on_error=-1.0)
    rows = finished_rows(6)
    np.testing.assert_array_equal(scores(scorer, rows, told=[3, 0, 5])[:, 0], wanted)
    metrics = scorer.take_metrics()
    assert metrics.pop("reward/function_s") > 0
    assert 0 <= metrics.pop("reward/overlapped_share") <= 1
    assert metrics == {"reward/errors": 3}
    assert scorer.take_metrics() == {"reward/errors": 0, "reward/function_s": 0.0}
    warnings = [w for w in capsys.readouterr().err.splitlines() if w.startswith("warning: ")]
    assert len(warnings) == 2, "one for each kind"
    assert "(exception, step 8, prompt 900, sample 1); 2 of 6" in warnings[0]
    scorer.config.reward_on_error = None
    with pytest.raises(InputError, match=r"raised ZeroDivisionError .* sample 1\)$"):
        scores(scorer, rows)
    assert "in act" in capsys.readouterr().err, "its traceback"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_function_failing_for_a_whole_step_ends_the_run(make_scorer, num_workers):
    """For instance by asking for a missing column; another function that works does not help."""
    functions = ["bubblespec.rewards.answer_format", "bubblespec.rewards.code.passes_tests"]
    scorer = make_scorer(functions=functions, num_workers=num_workers)
    says = r"passes_tests: failed for all 3 responses of a step; raised TypeError.*'tests'"
    with pytest.raises(InputError, match=says):
        scores(scorer, finished_rows(3))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_functions_of_groups_see_whole_groups(make_scorer, num_workers):
    """However rows of groups finish in turn; another function takes each row by itself."""
    functions = ["tests.helpers.rewards.better_than", "tests.helpers.rewards.remainder"]
    rows = make_rows(GROUPS, 3, 10)
    for row, token in zip(rows, [3, 1, 2, 5, 6, 5], strict=True):
        row.tokens = np.array([token])
    scoring = make_scorer(functions=functions, num_workers=num_workers).begin(
        StepBatch(GROUPS, 2, 3)
    )
    assert scoring.scorer.sees_groups(0)
    for number in (3, 0, 5, 2):
        scoring.on_finished(rows[number])
    assert scoring.take_scored() == []
    scoring.on_finished(rows[4])
    assert {row.id.prompt_id for row, _ in take(scoring, 3)} == {17}
    wanted = [[2, 3], [0, 1], [1, 2], [0, 5], [2, 6], [0, 5]]
    assert scoring.collect(rows).tolist() == wanted
    with pytest.raises(ValueError, match="3 of 4 samples of group"):
        scores(scoring.scorer, finished_rows(3))


def test_functions_of_groups_see_samples_in_order(make_scorer):
    """However they finish: a function may prefer the first of two alike, or draw at random."""
    places = {"a.f": lambda completions, **columns: [float(i) for i in range(len(completions))]}
    scorer = make_scorer(functions=places, num_workers=0)
    assert scores(scorer, finished_rows(4), told=[3, 1, 0]).ravel().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_group_fails_as_a_whole_and_alone(make_scorer, num_workers):
    functions = ["tests.helpers.rewards.better_than"]
    alike = [
        Group(Prompt(prompt_id, text, (1,), {}), 4) for prompt_id, text in ((1, "a"), (2, "b"))
    ]
    scorer = make_scorer(functions=functions, num_workers=num_workers, reward_on_error=-1.0)
    rows = make_rows(alike, 2, 10)
    for row, token in zip(rows, [3, 1, 2, 5], strict=True):
        row.tokens = np.array([token])
    scoring = scorer.begin(StepBatch(alike, 2, 2))
    broken = scoring._finished.setdefault(rows[0].id[:2], {})
    scoring.on_finished(rows[0])
    broken[rows[0].id] = broken[rows[0].id]._replace(prompt="of another group")
    assert scoring.collect(rows).tolist() == [[-1.0], [-1.0], [0.0], [1.0]]
    assert scorer.take_metrics()["reward/errors"] == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_changes_by_a_function_reach_no_other_call(make_scorer, num_workers):
    chat = [{"role": "user", "content": "hi"}]
    columns = {"words": ["a", "b"], "nested": {"list": [1, 2, 3]}}
    columns["same"] = columns["words"]
    prompt = Prompt(5, chat, (1, 2), columns)
    before = copy.deepcopy((prompt.text, prompt.columns))
    names = ("use_up", "use_up_alone")
    paths = [f"tests.helpers.misbehaving_rewards.{name}" for name in names]
    scorer = make_scorer(functions=paths, num_workers=num_workers)
    for draw_index in range(2):
        launch = StepBatch([Group(prompt, draw_index)], 1, 3)
        rows = make_rows(launch.groups, 3, 10)
        for row in rows:
            row.tokens = np.array([1, 2])
        rewards = scorer.begin(launch, draw_index).collect(rows)
        assert rewards.tolist() == [[321.0, 321.0]] * 3
    assert (prompt.text, prompt.columns) == before


def test_later_batch_of_a_step_may_fail_as_a_whole(make_scorer):
    """Dynamic sampling's further batches can be a single prompt."""
    scorer, rows = make_scorer(["value 1", "value 2", "raise x"], num_workers=0), finished_rows(3)
    assert scores(scorer, rows[:2]).tolist() == [[1.0], [2.0]]
    assert scores(scorer, rows[2:]).tolist() == [[0.0]]
    scorer.take_metrics()
    with pytest.raises(InputError, match="failed for all 1 responses"):
        scores(scorer, rows[2:])


def test_other_ranks_decide_whether_all_have_failed(make_scorer):
    """The other rank has a good response; alone this rank would have ended the run."""
    num_rows, num_failed = 4.0, 3.0
    ranks, gather = Ranks(CPU), Ranks.all_gather

    def gather_failures(own):
        if len(own) != 4:  # stop requests
            return gather(ranks, own)
        return np.stack((own, [0.5, 0.5, num_rows, num_failed]))

    ranks.all_gather = gather_failures
    scorer = make_scorer(["raise x", "raise y"], num_workers=0, ranks=ranks)
    assert scores(scorer, finished_rows(2)).tolist() == [[0.0], [0.0]]
    metrics = scorer.take_metrics()
    assert metrics.pop("reward/function_s") > 0.5 and 0 < metrics.pop("reward/overlapped_share") < 1
    assert metrics == {"reward/errors": 5}
    num_failed = 4.0
    with pytest.raises(InputError, match="failed for all 6 responses"):
        scores(scorer, finished_rows(2))


def test_seconds_are_measured_by_the_rank_clock(make_scorer):
    """Only the function moves the clock. Calls before the end of rollouts overlap."""
    ranks, now = Ranks(CPU), [5.0]
    ranks.clock = SimpleNamespace(monotonic=lambda: now[0])

    @per_sample
    def slow(prompts, completions, **columns) -> list[float]:
        now[0] += 3.0
        return [float(len(c)) for c in completions]

    scorer = make_scorer(functions={"a.f": slow}, num_workers=0, ranks=ranks)
    rows = finished_rows(2)
    for told, seconds, share in ((), 3.0, 0.0), ((1,), 6.0, 0.5):
        scoring = scorer.begin(OF_ONE)
        for i in told:
            scoring.on_finished(rows[i])
        assert len(scoring.take_scored()) == len(told)
        assert scoring.collect(rows).shape == (2, 1)
        metrics = scorer.take_metrics()
        assert metrics["reward/function_s"] == seconds
        assert metrics["reward/overlapped_share"] == share


# Scores as they come


# What two functions are told, each by its half of the completion, and what comes of it: a number,
# None where it does not apply, or the kind of failure.
HALVES = {"value 0.5": 0.5, "value -2": -2.0, "none": None, "raise boom": "exception"}
HALVES |= {"wrong nan": "value", "die killed": "crash"}
HALF_FUNCTIONS = [
    "tests.helpers.misbehaving_rewards.obey_left",
    "tests.helpers.misbehaving_rewards.obey_right",
]


def take(scoring: RolloutRewards, count: int) -> list[tuple[Row, np.ndarray]]:
    taken: list = []

    def are_there() -> bool:
        taken.extend(scoring.take_scored())
        return len(taken) >= count

    wait_until(are_there)
    return taken


@pytest.mark.parametrize("num_workers", [0, 2])
def test_handing_out_scores_changes_no_result(make_scorer, num_workers):
    """Rows finish, and scores are taken, at random: `collect` returns and counts what the functions
    were told to do. Scores handed out are the same, at most once for each row, and only for
    finished rows without a failure. Some rows finish at `collect`, others are dropped, as if their
    groups were deferred."""
    rng = random.Random(num_workers)
    options = {"num_workers": num_workers, "reward_on_error": -7.0}
    scorer = make_scorer([], functions=HALF_FUNCTIONS, **options)
    kinds = [text for text in HALVES if num_workers or "die" not in text]
    odds = [1 if isinstance(HALVES[text], str) else 4 for text in kinds]
    for round_number in range(4):
        halves = [rng.choices(kinds, odds, k=2) for _ in range(rng.randint(2, 14))]
        halves.append(["value -2", "value 0.5"])  # else a function could fail for all
        scorer.tokenizer = Words([" / ".join(pair) for pair in halves])
        rows, found = finished_rows(len(halves)), [[HALVES[h] for h in pair] for pair in halves]
        failed = [[isinstance(reward, str) for reward in pair] for pair in found]
        wanted = np.where(failed, -7.0, np.where(failed, None, found).astype(float))
        numbers = list(range(len(rows)))
        told = rng.sample(numbers, rng.randint(len(rows) // 2, len(rows)))
        scored = {i for i in told if not any(failed[i])}
        dropped = {i for i in numbers[:-1] if i not in told and rng.random() < 0.5}

        scoring, handed_out = scorer.begin(OF_ONE, round_number), []
        for i in told:
            scoring.on_finished(rows[i])
            if rng.random() < 0.5:
                handed_out += scoring.take_scored()
        if round_number % 2:  # all that there is to take
            handed_out += take(scoring, len(scored) - len(handed_out))
        taken = [row.id.sample for row, _ in handed_out]
        assert len(set(taken)) == len(taken) and set(taken) <= scored
        assert set(taken) == scored or round_number % 2 == 0
        for row, rewards in handed_out:
            assert row is rows[row.id.sample] and rewards.dtype == np.float64
            np.testing.assert_array_equal(rewards, wanted[row.id.sample])
            rewards += 1.0  # they are the taker's

        kept = [i for i in numbers if i not in dropped]
        np.testing.assert_array_equal(scoring.collect([rows[i] for i in kept]), wanted[kept])
        assert scorer.take_metrics()["reward/errors"] == sum(sum(failed[i]) for i in kept)


# Told to stop while rewards are waited for


def signal_when(condition) -> threading.Thread:
    """Start a thread that sends this process SIGTERM once `condition()` holds."""

    def wait() -> None:
        wait_until(condition)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def stops_in_a_reward(ranks: Ranks, folder: str) -> str:
    """Rank 0 waits for a reward that hangs, rank 1 for rank 0; only rank 1 is sent a signal, when
    it has come to the meeting."""
    path = os.path.join(folder, "hangs")
    texts = [f"hang sleeping {path}" if ranks.rank == 0 else "value 1", "value 2"]
    config = RewardConfig(functions=[OBEY], num_workers=1, timeout_s=3600.0)
    scorer = RewardManager(config, {OBEY: load_reward(OBEY)}, Words(texts), ranks)
    ranks.barrier()
    before = ranks.watchdog.count
    try:
        with signals_stop(ranks):
            if ranks.rank == 1:
                thread = signal_when(lambda: ranks.watchdog.count > before and os.path.exists(path))
            try:
                scores(scorer, finished_rows(2))
            except StopRequested:
                ranks.barrier()  # what a save needs still works
                return "stopped"
            finally:
                if ranks.rank == 1:
                    thread.join()
    finally:
        scorer.close()
    return "scored"


def test_all_ranks_stop_while_one_waits_for_a_reward(tmp_path):
    assert run_ranks(tmp_path, stops_in_a_reward, 2, str(tmp_path)) == ["stopped", "stopped"]


def test_stop_abandons_a_call_in_this_process(make_scorer, monkeypatch):
    """It might wait for processes that the signal has ended."""
    ranks, is_finished = Ranks(CPU), []
    scorer = make_scorer(["value 5"], num_workers=0, ranks=ranks)

    def run() -> None:
        signal.raise_signal(signal.SIGTERM)
        is_finished.append(True)

    monkeypatch.setattr(scorer.pool, "run", run)
    with signals_stop(ranks), pytest.raises(StopRequested):
        scores(scorer, finished_rows(1))
    assert not is_finished and ranks.exit_code == 128 + signal.SIGTERM


def test_stop_abandons_pending_scores(make_scorer, tmp_path):
    """The next batch gets its own answers, though the worker was at one of the batch before and
    others were queued behind it."""
    mark, ranks = tmp_path / "mark", Ranks(CPU)
    texts = ["value 5", f"wait {mark}", "raise x", "value 6"]
    scorer = make_scorer(texts, num_workers=1, ranks=ranks, timeout_s=3600.0)
    rows, given_up = finished_rows(4), scorer.begin(OF_ONE)
    for row in rows[:3]:
        given_up.on_finished(row)
    ((row, rewards),) = take(given_up, 1)
    assert row is rows[0] and rewards.tolist() == [5.0]
    ranks.must_stop = True
    with pytest.raises(StopRequested):
        given_up.collect(rows)
    ranks.must_stop = False
    scoring = scorer.begin(OF_ONE)
    scoring.on_finished(rows[3])
    mark.touch()
    ((row, rewards),) = take(scoring, 1)
    assert row is rows[3] and rewards.tolist() == [6.0]
    assert scoring.collect([rows[1], rows[3]]).tolist() == [[1.0], [6.0]]
