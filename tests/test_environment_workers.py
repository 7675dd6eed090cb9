"""Environments in worker processes: the same as in process, many at once; a call that hangs or
crashes costs its own turn alone, and other episodes are replayed."""

import math
import os
import signal

import pytest

from bubblespec.distributed import worker as worker_process
from bubblespec.distributed.worker import MAX_REPLY_BYTES
from bubblespec.mechanisms.episodes.environments import Environments, Observation
from bubblespec.mechanisms.episodes.tokens import base_ids
from tests.helpers.checks import PATIENCE_S, is_alive, pids_in, wait_until
from tests.helpers.clocks import ClockThatSkips
from tests.helpers.environments import call_text, make_config, make_prompt, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


class Player:
    """Environments of one class, and how a test acts in them."""

    def __init__(self, factory: str, tokenizer, **options):
        config = make_config(factory, **{"num_workers": 1, "timeout_s": 900.0, **options})
        self.environments = Environments(config, tokenizer)
        self.tokenizer = tokenizer
        self.seen: dict = {}

    def begin(self, *names, seed: int = 0, is_draft=False, **columns) -> list[Observation]:
        for name in names:
            text = make_prompt().text
            form, schemas = self.environments.form, self.environments.schemas
            base = base_ids(self.tokenizer, text, schemas, form.adds_text)
            prompt = make_prompt(text, base, **columns)
            self.environments.begin(name, prompt, seed, is_draft=is_draft)
        return self.await_all(*names)

    def say(self, name, text: str) -> None:
        self.environments.act(name, self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def call(self, name, tool: str, **arguments) -> str:
        self.say(name, call_text("chatml", tool, **arguments))
        return self.text(*self.await_all(name))

    def text(self, observation: Observation) -> str:
        said = self.tokenizer.decode(observation.ids)
        return said.removeprefix("\n<|im_start|>tool\n").partition("<|im_end|>")[0]

    def await_all(self, *names) -> list[Observation]:
        def all_are_there() -> bool:
            self.seen |= dict(self.environments.poll())
            return self.seen.keys() >= set(names)

        wait_until(all_are_there)
        return [self.seen.pop(name) for name in names]

    def reward(self, name) -> float | None:
        return self.environments.end(name).result(PATIENCE_S).reward


@pytest.fixture
def make_player(tokenizer):
    """make_player(factory, **options) -> Player, closed at the end."""
    made = []

    def make(factory: str = "Unruly", **options) -> Player:
        made.append(Player(factory, tokenizer, **options))
        return made[-1]

    yield make
    for player in made:
        player.environments.close()


@pytest.fixture
def clock(monkeypatch) -> ClockThatSkips:
    clock = ClockThatSkips()
    monkeypatch.setattr(worker_process, "time", clock)
    monkeypatch.setattr(worker_process, "MAX_LOOKS", math.inf)  # what it skips counts
    return clock


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))


@pytest.mark.parametrize(
    "factory, texts",
    [
        (
            "Calculator",
            [call_text("chatml", "add", a=1, b=2), call_text("chatml", "numbers", upto=2)],
        ),
        ("Guess", ["7", "2"]),
    ],
)
def test_workers_answer_like_environments_in_process(make_player, factory, texts):
    said, rewards = [], []
    for num_workers in (0, 2):
        player = make_player(factory, num_workers=num_workers)
        names = [("train", n) for n in range(6)]
        player.begin(*names, number=5, added=" an island")
        for text in texts:
            for name in names:
                player.say(name, text)
            said.append([o.ids.tolist() for o in player.await_all(*names)])
        rewards.append([player.reward(name) for name in names])
    assert said[:2] == said[2:] and said[0][0]
    assert rewards[0] == rewards[1] and rewards[0][0] > 0


def test_hanging_call_is_killed_and_other_episodes_replayed(make_player, clock, tmp_path):
    """The hung call is its turn's error, and is undone; nothing is left of its process. Two calls
    have twice the time."""
    player, path = make_player(), tmp_path / "pids"
    player.begin("a", "b", kind="seeded")
    drawn = {name: [player.call(name, "draw")] for name in "ab"}
    first = call_text("chatml", "hang", path=str(path)).removesuffix("<|im_end|>")
    player.say("a", first + call_text("chatml", "draw"))
    player.say("b", call_text("chatml", "draw"))  # waits behind it
    wait_until(lambda: len(pids_in(path)) == 2)
    clock.skipped += 1800.0
    (hung,) = player.await_all("a")
    assert player.text(hung) == "{'error': 'no answer within 1800 s'}"
    assert (hung.reason, hung.num_calls, hung.num_failed) == (None, 2, 2)
    assert not any(is_alive(pid) for pid in pids_in(path))
    drawn["b"].append(player.text(*player.await_all("b")))
    drawn["a"].append(player.call("a", "draw"))
    assert drawn["a"] == drawn["b"] and drawn["a"][0] != drawn["a"][1]
    assert player.reward("a") == player.reward("b") == sum(map(int, drawn["a"]))


def test_killed_worker_is_replaced_unnoticed(make_player):
    player = make_player("Unruly")
    player.begin("a", "b", kind="seeded")
    pid = int(player.call("b", "process"))
    drawn = [player.call("a", "draw") for _ in range(2)]
    kill(pid)
    drawn.append(player.call("a", "draw"))
    assert len(set(drawn)) == 3
    assert player.reward("a") == sum(map(int, drawn))


def test_crash_is_retried_once_and_then_an_error(make_player, tmp_path):
    player = make_player()
    player.begin("a", kind="seeded")
    assert player.call("a", "die", marker=str(tmp_path / "marker")) == "survived"
    said = player.call("a", "die", marker="")
    assert said == "{'error': 'its process was ended by SIGKILL'}"
    assert int(player.call("a", "draw")) == player.reward("a")


def test_flood_is_bounded(make_player):
    player = make_player()
    player.begin("a")
    assert len(player.call("a", "flood", size=MAX_REPLY_BYTES // 4)) > 100
    assert "too large" in player.call("a", "flood", size=MAX_REPLY_BYTES)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_changes_by_reset_reach_no_other_episode(make_player, num_workers):
    player, words = make_player("UsesUp", num_workers=num_workers), ["red", "green"]
    texts = []
    for name in ("a", "b"):
        (begin,) = player.begin(name, words=words)
        texts.append(player.tokenizer.decode(begin.ids))
    assert words == ["red", "green"]
    assert "1 red green" in texts[0] and texts[0] == texts[1]


def test_abandoned_episodes_are_not_run(make_player, clock, tmp_path):
    """A call behind one that hangs is not made once its episode has ended."""
    player, paths = make_player(), [tmp_path / "one", tmp_path / "two"]
    player.begin("a", "b", "c")
    for name, path in zip("ab", paths, strict=True):
        player.say(name, call_text("chatml", "hang", path=str(path)))
    player.say("c", call_text("chatml", "add", a=1, b=2))
    wait_until(lambda: len(pids_in(paths[0])) == 2)
    futures = [player.environments.end(name, with_reward=False) for name in "ab"]
    clock.skipped += 900.0
    assert player.text(*player.await_all("c")) == "3"
    assert all(future.result(PATIENCE_S).reward is None for future in futures)
    assert not pids_in(paths[1]) and not player.seen


def test_calls_of_drafts_delay_no_other_calls(make_player, tmp_path):
    player, path = make_player(), tmp_path / "pids"
    player.begin("draft", is_draft=True)
    player.say("draft", call_text("chatml", "hang", path=str(path)))
    wait_until(lambda: len(pids_in(path)) == 2)
    player.begin("own")
    assert player.call("own", "add", a=1, b=2) == "3"
    player.environments.close()
    player.environments.close()
    assert not any(is_alive(pid) for pid in pids_in(path)), "also busy ones are closed"
