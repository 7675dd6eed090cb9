"""Evaluations with the responses of the one before as drafts: against plain generation, and apart
from training."""

from dataclasses import replace

import numpy as np
import pytest
from bubblespec.idle.draft_planning import Item, Outlook
from bubblespec.idle.evaluation_ahead import next_evaluation, plan_evaluation
from bubblespec.idle.set_up_speculation import assemble
from bubblespec.idle.speculation import Speculation
from test_rollout_loop import (
    LIMIT,
    MAX_LENGTH,
    PARAMS,
    PROMPTS,
    SEED,
    BoardWithSlowRank,
    as_dict,
    fixed_cost,
    new_model,
    update,
)
from test_speculation import RANKS, make, make_config, make_sampler

from bubblespec.config import Config
from bubblespec.draft.store import DraftStore
from bubblespec.engine.engine import Engine
from bubblespec.engine.noise import EVALUATION
from bubblespec.engine.runner import ModelRunner
from bubblespec.planner.windows import WINDOWS
from bubblespec.records import RolloutRecord
from bubblespec.rollout.sampler import Sampler
from bubblespec.types import Draft, Group, Row, SampleId, Samples
from tests.helpers.runs import digests, read, run, run_until_killed

GROUPS = [Group(prompt, EVALUATION) for prompt in PROMPTS]


def make_evaluation(
    config: Config, model, num_slots: int = 24, num_ticks: int = 30
) -> tuple[Speculation, Sampler]:
    """num_ticks: after which the other rank has no rows left."""
    speculation = assemble(config, RANKS, BoardWithSlowRank(num_ticks), fixed_cost(), PROMPTS)
    return speculation, make_sampler(
        speculation, Engine(ModelRunner(model, num_slots, MAX_LENGTH, SEED))
    )


def by_id(samples: Samples) -> dict:
    return {
        sample: tokens.tolist() for sample, tokens in zip(samples.ids, samples.tokens, strict=True)
    }


def plain(model, num_generations: int = 2, params=PARAMS) -> tuple[dict, int]:
    """What plain generation gives under the weights as they are, and in how many forwards."""
    engine = Engine(ModelRunner(model, 64, MAX_LENGTH, SEED))
    rows = [
        Row(group.sample(number), group.prompt.token_ids, LIMIT)
        for group in GROUPS
        for number in range(num_generations)
    ]
    done = as_dict(engine.run(rows, params))
    return {sample: tokens for sample, (tokens, _) in done.items()}, engine.num_forwards


def evaluate(
    sampler: Sampler, version: int, num_generations: int = 2, params=PARAMS
) -> tuple[dict, RolloutRecord]:
    samples, record = sampler.evaluate(GROUPS, num_generations, params, version)
    return by_id(samples), record


def test_under_the_same_weights_an_evaluation_is_verified_window_by_window():
    """All is accepted, so that no more forwards are needed than the longest response has windows;
    but for two, in which prompts are fed and the first tokens sampled."""
    model = new_model()
    speculation, sampler = make_evaluation(make_config("bubble"), model)
    wanted, num_forwards = plain(model)
    first, record = evaluate(sampler, 0)
    assert (
        first == wanted
        and record.own_forwards == num_forwards
        and record.acceptance.draft_tokens == 0
    )
    longest = max(map(len, wanted.values()))
    assert longest > 20
    for version, fixed_window, most in (
        (4, 8, 2 + -(-longest // 9)),
        (8, None, 2 + -(-longest // 9)),
    ):
        speculation.evaluation.proposer.fixed_window = fixed_window
        again, record = evaluate(sampler, version)
        assert again == wanted and record.own_forwards <= most < num_forwards / 3
        assert record.acceptance.draft_tokens == record.acceptance.accepted_tokens > 0
        assert set(record.acceptance.by_source) == {"aligned"}
    assert len(WINDOWS) > 1 and record.own_forwards < 2 + -(-longest // 9), (
        "planned windows get wider than 8"
    )


@pytest.mark.parametrize("num_slots", [3, 24])
@pytest.mark.parametrize("method", ["bubble", "suffix", "bubble+suffix"])
def test_evaluations_are_those_of_plain_generation(method, num_slots):
    """Under weights that change between them, with more and with fewer responses than the one
    before had, at another temperature, and with rows that wait for slots."""
    model = new_model()
    _, sampler = make_evaluation(make_config(method), model, num_slots)
    accepted = 0
    for version, (num_generations, temperature) in enumerate(
        [(2, 0.9), (2, 0.9), (4, 0.9), (1, 0.9), (3, 0.5), (3, 0.5)]
    ):
        update(model, version)
        params = replace(PARAMS, temperature=temperature)
        made, record = evaluate(sampler, 2 * version, num_generations, params)
        assert made == plain(model, num_generations, params)[0]
        accepted += record.acceptance.accepted_tokens
        assert set(record.acceptance.by_age) <= {2}, "the one before was two updates ago"
    assert accepted > 20


# Of an evaluation, and, as what drafts have won is settled with seconds of the machine's clock, not
# the same in any two runs.
APART = ("evaluation.", "account", "pace")


def test_nothing_of_an_evaluation_is_in_what_training_knows():
    """Steps between evaluations: what training has learnt and keeps is the same as without them,
    and nothing of it is drafted."""

    def live(evaluates: bool) -> Speculation:
        model, config = new_model(), make_config()
        config.run.max_steps, config.speculative.check_every = 4, 0
        speculation, sampler = make_evaluation(config, model)
        for step in range(3):
            if evaluates:
                evaluate(sampler, step)
            sampler.engine.reset()  # as an evaluation leaves it
            sampler.sample(step)
            update(model, step)
        if evaluates:
            evaluate(sampler, 3)
        return speculation

    plain, speculation = (
        {
            key: array
            for key, array in live(evaluates).state_dict().items()
            if not key.startswith(APART)
        }
        for evaluates in (False, True)
    )
    assert (
        plain.keys() == speculation.keys()
        and len(plain["drafts.tokens"])
        and len(plain["survival.counts"])
    )
    assert [key for key in plain if not np.array_equal(plain[key], speculation[key])] == []


@pytest.mark.parametrize("bound", [0, 30, 75])
def test_the_longest_responses_are_kept_where_not_all_fit(bound):
    model = new_model()
    speculation, sampler = make_evaluation(make_config(max_draft_tokens=bound), model)
    wanted, _ = plain(model)
    for version in range(2):
        made, record = evaluate(sampler, version)
        store = speculation.evaluation.store
        assert made == wanted and store.num_tokens <= bound < sum(map(len, wanted.values()))
    kept = {
        sample: len(tokens) for sample, tokens in wanted.items() if store.get(sample) is not None
    }
    left = bound - sum(kept.values())
    assert all(len(wanted[sample]) > left for sample in wanted if sample not in kept)
    assert bool(kept) == (record.acceptance.accepted_tokens > 0) == (bound > 0)


def test_rows_with_the_longest_drafts_begin_first_and_groups_keep_together():
    speculation, _ = make_evaluation(make_config(), new_model())
    drafts = speculation.evaluation
    for group, lengths in zip(GROUPS, [(3, 9), (5, 20), (12, 1)], strict=True):
        for number, length in enumerate(lengths):
            drafts.store.put(group.sample(number), Draft(np.zeros(length, np.int32), True, 0))
    rows = [Row(group.sample(number), (1, 2), LIMIT) for group in GROUPS for number in range(3)]
    order = [(row.id.uid, row.id.sample) for row in drafts.begin(dict(enumerate(rows)), 1).values()]
    assert order == [(GROUPS[n].prompt.uid, number) for n in (1, 2, 0) for number in range(3)]


def test_a_saved_evaluation_is_the_draft_of_a_restored_run(tmp_path):
    """Through a file; and a checkpoint of a run without speculation has none."""
    model = new_model()
    speculation, sampler = make_evaluation(make_config(), model)
    nothing = make(make_config("none")).state_dict()
    assert not any(key.startswith("evaluation.") for key in nothing)
    wanted, _ = evaluate(sampler, 0)
    np.savez(tmp_path / "state.npz", **speculation.state_dict())
    restored, sampler = make_evaluation(make_config(), model)
    restored.load_state_dict(nothing)
    assert len(restored.evaluation.store) == 0
    with np.load(tmp_path / "state.npz") as arrays:
        restored.load_state_dict(dict(arrays))
    assert {
        sample: restored.evaluation.store.get(sample).tokens.tolist() for sample in wanted
    } == wanted
    made, record = evaluate(sampler, 3)
    assert (
        made == wanted
        and record.acceptance.accepted_tokens > 20
        and set(record.acceptance.by_age) == {3}
    )
    without = make(make_config("none"))
    without.load_state_dict(speculation.state_dict())
    assert without.evaluation is None


def test_evaluations_are_plain_where_speculation_is_off_or_draws_other_noise():
    """Under point_mass a response was drawn from the very noise that would verify it."""
    config = make_config()
    config.speculative.rule = "point_mass"
    assert make(config).evaluation is None and make(make_config("none")).evaluation is None
    assert make(make_config("suffix")).evaluation is not None


# Drafted ahead


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_a_coming_evaluation_is_drafted_by_ranks_that_wait(evaluates_first):
    """In the last rollouts before it, under newer weights than those of the evaluation before, if
    there was one."""
    model, config = new_model(), make_config(lookahead=1)
    config.speculative.check_every = 0
    config.eval.num_generations, config.run.eval_steps, config.run.max_steps = 2, 4, 4
    speculation, sampler = make_evaluation(config, model, num_ticks=150)
    if evaluates_first:
        evaluate(sampler, 0)
    for step in range(4):
        rollouts = sampler.sample(step).rollouts
        update(model, step)
    drafts = [
        speculation.store.get(name) for group in GROUPS for name in map(group.sample, range(2))
    ]
    assert {draft.version for draft in drafts} <= {2, 3} and all(
        draft.is_finished for draft in drafts
    )
    assert all(
        forward.own_rows == 0 or forward.ahead_rows == 0 for forward in rollouts[0].forwards
    ), "and never beside rows"
    made, record = evaluate(sampler, 4)
    assert made == plain(model)[0]
    assert record.acceptance.by_age.keys() <= {1, 2} and len(speculation.store) == 0


def test_drafts_made_anew_are_what_the_weights_of_then_generate():
    """Those of the last rollout, from stale drafts that are verified on the way."""
    model, config = new_model(), make_config(lookahead=1)
    config.speculative.check_every = 0
    config.eval.num_generations, config.run.eval_steps, config.run.max_steps = 2, 3, 3
    speculation, sampler = make_evaluation(config, model, num_ticks=150)
    evaluate(sampler, 0)
    stale = {
        name: draft.tokens.tolist() for name, draft in speculation.evaluation.store._drafts.items()
    }
    sampler.sample(0)
    for number in range(3):
        update(model, number)
    wanted, _ = plain(model)
    assert stale != wanted
    rollout = sampler.sample(2).rollouts[0]
    assert {name: speculation.store.get(name).tokens.tolist() for name in wanted} == wanted
    assert sum(forward.draft_tokens for forward in rollout.forwards if not forward.own_rows) > 0


@pytest.mark.parametrize(
    "changed",
    [
        {"step": 2},  # six rollouts away
        {"step": 8},  # behind the last evaluation
        {"eval_steps": 0},
        {"temperature": 0.5},  # rollouts sample at another one
        {"version": 6},  # of the weights of now
    ],
)
def test_what_is_planned_of_an_evaluation(changed):
    """All that is not finished, or stale; the longest groups first; dearer where more of it is
    expected to be wrong."""
    options = {"step": 6, "eval_steps": 8, "temperature": None, "version": 0}

    def planned(
        step: int,
        eval_steps: int,
        temperature: float | None,
        version: int,
        share_behind: float = 0.25,
    ) -> list[Item]:
        config = make_config()
        config.speculative.check_every = 0
        config.run.eval_steps, config.run.max_steps = eval_steps, 8
        config.eval.num_generations, config.eval.temperature = 2, temperature
        evaluation = assemble(config, RANKS, None, fixed_cost(), PROMPTS).evaluation
        evaluation.share_behind = share_behind
        for length, group in enumerate(GROUPS, 10):
            evaluation.store.put(group.sample(0), Draft(np.zeros(length, np.int32), True, version))
            evaluation.store.put(
                group.sample(1), Draft(np.zeros(length + 5, np.int32), True, version)
            )
        cost, shape = np.array([1e-2, 1e-3, 1e-3, 0.0, 0.0]), {"num_ranks": 2, "num_slots": 8}
        return plan_evaluation(config, step, evaluation, made, Outlook(), cost, **shape)

    made = DraftStore(1000)
    items = planned(**options)
    assert [item.id for item in items] == [
        group.sample(number) for group in GROUPS[::-1] for number in (0, 1)
    ]
    assert not any(item.pays for item in items) and all(
        item.saves_s > 0 and item.costs_s > 0 for item in items
    )
    # 17 tokens, of which a quarter is behind the difference: there a token costs 2 ms, and a whole
    # forward beside no other row
    assert items[1].saves_s == pytest.approx(17 / 4 * 12e-3)
    assert items[1].costs_s == pytest.approx(17 * 3 / 4 * 1e-3 + 17 / 4 * (2e-3 + 1e-2 / 8))
    assert planned(**options, share_behind=0.5)[1].saves_s > items[1].saves_s
    assert planned(**options | changed) == []
    for number, sample in enumerate(item.id for item in items[:3]):
        made.put(sample, Draft(np.zeros(5, np.int32), number > 0, 5))
    left = {item.id for item in planned(**options)}
    assert left == {item.id for item in items} - {items[1].id, items[2].id}, (
        "made in the rollout before"
    )


def test_which_evaluation_comes_next():
    config = Config()
    config.run.eval_steps, config.run.max_steps = 3, 8
    assert [next_evaluation(config, step) for step in range(9)] == [3, 3, 3, 6, 6, 6, 8, 8, None]
    config.run.eval_steps = 0
    assert next_evaluation(config, 2) is None


def test_a_draft_made_anew_replaces_an_older_one_unless_that_goes_further_the_same_way():
    speculation, name = make(make_config()), GROUPS[0].sample(0)
    drafts, coming = speculation.evaluation, SampleId(PROMPTS[0].uid, 7, 0)
    speculation.store.put(coming, Draft(np.ones(3, np.int32), True, 5))

    def renewed(old: list[int], new: list[int], is_finished: bool) -> list[int]:
        drafts.store.put(name, Draft(np.array(old, np.int32), True, 0))
        speculation.store.put(name, Draft(np.array(new, np.int32), is_finished, 5))
        drafts.renew([name, GROUPS[0].sample(1)], speculation.store)
        assert list(speculation.store._drafts) == [coming]
        return drafts.store.get(name).tokens.tolist()

    assert renewed([1, 2, 3, 4], [1, 2], False) == [1, 2, 3, 4]
    assert renewed([1, 2, 3, 4], [1, 2], True) == [1, 2]
    assert renewed([1, 2, 3, 4], [1, 5], False) == [1, 5]
    assert renewed([1, 2], [1, 2, 3], False) == [1, 2, 3]


# --- runs of train.py ---

EVALUATED = ["eval.num_prompts=6", "eval.num_generations=3", "run.eval_steps=3", "run.max_steps=6"]


def evaluations(folder) -> dict[int, dict]:
    return {line["step"]: line for line in read(folder) if "eval/reward" in line}


def test_evaluations_of_runs_are_the_same_with_and_without_drafts(tmp_path):
    """On one and on two ranks; after a kill; and where the number of responses has changed
    since."""
    run(tmp_path / "plain", 1, *EVALUATED, "speculative.method=none")
    run(tmp_path / "drafts", 2, *EVALUATED)
    plain, drafts = evaluations(tmp_path / "plain"), evaluations(tmp_path / "drafts")
    assert digests(tmp_path / "plain") == digests(tmp_path / "drafts")
    assert plain.keys() == drafts.keys() == {0, 3, 6}
    for step, line in plain.items():
        is_measured = {"timing_s/eval", "eval/forwards", "eval/spec_accept_rate"}
        assert all(
            line[key] == pytest.approx(drafts[step][key])
            for key in line.keys() - is_measured - {"eval/digest"}
        )
        assert line["eval/digest"] == drafts[step]["eval/digest"]
        assert line["eval/spec_accept_rate"] == 0 and (
            drafts[step]["eval/spec_accept_rate"] > 0.3
        ) == (step > 0)
        assert step == 0 or drafts[step]["eval/forwards"] < line["eval/forwards"]
    assert len({line["eval/digest"] for line in plain.values()}) > 1

    killed = tmp_path / "killed"
    run_until_killed(killed, 2, 3, *EVALUATED, "eval.num_generations=2")
    before = evaluations(killed)
    run(killed, 2, *EVALUATED)
    after = evaluations(killed)
    assert [step for step in after if after[step]["eval/digest"] == plain[step]["eval/digest"]] == [
        3,
        6,
    ]
    assert before.keys() == {0, 3} and after[0] == before[0] and after[3] != before[3]
    assert after[3]["eval/spec_accept_rate"] > 0.3
