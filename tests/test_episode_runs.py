"""Whole runs of episodes: tokens are those of a run without drafts on any number of ranks, whatever
is used to be faster, killed and resumed. In the style of test_exact_runs.py."""

from collections import defaultdict
from itertools import chain, groupby

import numpy as np
import pytest

from bubblespec.mechanisms.episodes import environments as module
from bubblespec.mechanisms.episodes.environments import Environments
from bubblespec.trainer import Trainer
from tests.helpers import games
from tests.helpers.plain import STEPS, check_same, plain_run
from tests.helpers.runs import ALWAYS_DRAFT, read
from tests.helpers.threads import train_on_threads

NUM_ROWS = 18
TINY = ["data.tasks=[{name: chain_sum, weight: 1.0, config: {max_terms: 3, max_digits: 1}}]"]
TINY += ["rollout.num_prompts_per_step=6", "rollout.num_generations=3"]
TINY += ["rollout.max_prompt_length=400", "rollout.max_completion_length=72"]
TINY += ["environment.max_observation_length=40", "environment.num_workers=0"]
TINY += ["environment.max_turns=5", "data.size=64", f"run.max_steps={STEPS}", "run.eval_steps=0"]
TINY += ["run.save_steps=2", "model.dtype=float64", "optim.learning_rate=1e-3"]
DRAFTS = ["speculative.method=bubble+suffix", ALWAYS_DRAFT]
OPTIONS = {
    "plain": [],
    "few slots": ["rollout.max_num_seqs=5", "rollout.max_num_batched_tokens=9"],
    "drafts": DRAFTS,
    "late": DRAFTS,  # observations
    "drafter": ["speculative.method=bubble+suffix+drafter", "drafter.warm_start=100", ALWAYS_DRAFT],
    "copy": ["speculative.method=bubble+suffix+quantized", ALWAYS_DRAFT],
    "one turn": [*DRAFTS, "environment.draft=false"],
    "streamed": ["optim.stream_gradients=true"],
    "workers": ["environment.num_workers=2", "reward.num_workers=1"],
}
METRICS = {"drafts": "bubble/drafted_tokens", "late": "rollout/spec_accepted_tokens"}
METRICS |= {"drafter": "drafts/drafter/tokens", "copy": "drafts/quantized/tokens"}
# shape, options, ranks, how the run is interrupted
CASES = [
    ("game", "few slots+workers", 2, None),
    ("game", "drafts", 4, "kill"),
    ("game", "late+drafter", 2, None),
    ("game", "late+few slots", 1, None),
    ("calculator", "copy+few slots", 2, "kill"),
    ("calculator", "drafts+streamed", 2, "stop"),
    ("calculator", "one turn", 1, None),
    ("tail batching", "late", 4, "kill"),
    ("tail batching", "late+streamed", 1, None),
]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    policy = games.copy_policy(tmp_path_factory.mktemp("policy"))
    tail = ["tail_batching.enabled=true", "tail_batching.over_sampling_ratio=1.5"]
    game = [f"environment.factory={games.GAME}", "reward.functions=[]"]
    return {
        "game": game,
        "tail batching": [*game, *tail],
        "calculator": [
            f"environment.factory={games.CALCULATOR}",
            "reward.functions=[tests.helpers.games.remaining]",
            "reward.weights=[1.0,0.5]",
            f"model.path={policy}",
            "data.as_chat=true",
            "rollout.stop_token_ids=[0,21,24]",  # two digits, so that turns are short
            "optim.learning_rate=1e-4",  # or drafts are wrong from the beginning
        ],
    }


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.setattr(module, "parse_calls", games.parse_calls)


@pytest.mark.parametrize("shape, used, ranks, interruption", CASES)
def test_run_equals_plain_run(
    shapes, tmp_path_factory, monkeypatch, tmp_path, shape, used, ranks, interruption
):
    plain, used = plain_run(tmp_path_factory, *TINY, *shapes[shape]), used.split("+")
    assert all(line["episodes/turns"] > 1.5 for line in read(plain))
    if "late" in used:
        monkeypatch.setattr(Environments, "poll", games.delay(Environments.poll))
    extra = [option for name in used for option in OPTIONS[name]]
    options = [*TINY, *shapes[shape], "speculative.method=none", *extra]
    options.append(f"run.output_dir={tmp_path}")
    if interruption == "kill":
        train_on_threads(ranks, *options, ends_in=STEPS - 1, is_killed=True)
    elif interruption == "stop":
        train_on_threads(ranks, *options, ends_in=1)
    resumed = 2 if interruption == "stop" else ranks  # with others than it began with
    train_on_threads(resumed, *options)
    lines = read(tmp_path)
    same = ["loss", "entropy", "reward", "rewards/environment/mean", "completions/mean_length"]
    if shape != "tail batching":  # which defers episodes that are over
        same += [key for key in lines[0] if key.startswith("episodes/stop/")]
    is_exact = ranks == resumed == 2 and "streamed" not in used
    check_same(tmp_path, plain, same, is_exact=is_exact)
    for line in lines if "drafts" in used else ():
        num_sampled = NUM_ROWS * line["completions/mean_length"]  # observations do not count
        covered = line["rollout/spec_coverage"] * num_sampled
        assert covered == pytest.approx(round(covered), abs=1e-6)
    for key in (METRICS[name] for name in used if name in METRICS):
        assert sum(line.get(key, 0) for line in lines) > 0, key


def test_responses_contain_the_real_observations(shapes, monkeypatch, tmp_path):
    """In a random environment, whose observations come late and differ from those of the drafts,
    though its seed is the same. It is given what was sampled, turn by turn."""
    real, poll, begin = defaultdict(list), games.delay(Environments.poll), Environments.begin
    said, seeds, act = {}, defaultdict(list), Environments.act

    def noted_begin(environments, row, prompt, seed, **options):
        real[row.id], said[row.id] = [], []  # the row of the step comes after its drafts
        seeds[row.id[:2]].append(seed)
        begin(environments, row, prompt, seed, **options)

    def noted_act(environments, row, ids):
        said[row.id].append(ids.tolist())
        act(environments, row, ids)

    def noted_poll(environments):
        observations = poll(environments)
        for row, observation in observations:
            real[row.id].append(observation.ids.tolist())
        return observations

    checked = []
    report = Trainer.report

    def checked_report(trainer, record, metrics):
        samples = record.samples
        for name, tokens, logprob in zip(samples.ids, samples.tokens, samples.logprob, strict=True):
            runs = groupby(zip(tokens.tolist(), np.isnan(logprob), strict=True), lambda at: at[1])
            runs = [(kind, [token for token, _ in run]) for kind, run in runs]
            spans = [run for is_observed, run in runs if is_observed]
            turns = [run for is_observed, run in runs if not is_observed]
            assert said[name] == turns[: len(said[name])] and len(turns) <= len(said[name]) + 1
            wanted = [ids for ids in real[name] if ids]
            if len(tokens) == 72:  # the last one may have been cut
                spans, wanted = list(chain(*spans)), list(chain(*wanted))
                wanted = wanted[: len(spans)]
            assert spans == wanted
            checked.append(len(spans))
        report(trainer, record, metrics)

    monkeypatch.setattr(Environments, "begin", noted_begin)
    monkeypatch.setattr(Environments, "act", noted_act)
    monkeypatch.setattr(Environments, "poll", noted_poll)
    monkeypatch.setattr(Trainer, "report", checked_report)
    options = [*TINY, *shapes["game"], *DRAFTS, f"environment.factory={games.DICE}"]
    options += [f"run.output_dir={tmp_path}"]
    train_on_threads(1, *options)
    assert sum(line["bubble/drafted_tokens"] for line in read(tmp_path)) > 0
    assert np.mean(checked) > 1
    assert all(len(set(of_group)) == 1 for of_group in seeds.values())
    assert len({of_group[0] for of_group in seeds.values()}) == len(seeds)


@pytest.mark.parametrize(
    "options, problem",
    [
        (["rollout.tp_tail_max_rows=4"], "rollout.tp_tail_max_rows: 4, but episodes cannot move"),
        (["run.trace=true"], "run.trace: traces have no turns"),
        (["environment.max_observation_length=72"], "must be below rollout.max_completion_length"),
        (["reward.weights=[1,1]"], "2 weights"),
        ([f"environment.factory={games.CALCULATOR}"], "tools need chat prompts"),
        (["environment.factory=tests.helpers.environments.Silent"], "must score responses"),
    ],
)
def test_impossible_combination_is_refused(shapes, tmp_path, options, problem):
    with pytest.raises(Exception, match=problem):
        base = [*TINY, *shapes["game"], *options, f"run.output_dir={tmp_path}"]
        train_on_threads(1, *base)
