"""Whole runs with a quantised copy against the same without: it changes no token.

With speculative.planning=always the copy drafts whatever its forwards take. More of its runs are in
test_exact_runs.py and test_episode_runs.py.
"""

import numpy as np

from bubblespec.mechanisms.quantized import mechanism
from tests.helpers.clocks import train_in_virtual_time
from tests.helpers.plain import REWARD, TINY, check_same, plain_run
from tests.helpers.runs import ALWAYS_DRAFT, digests, read
from tests.helpers.threads import train_on_threads

OPTIONS = [*TINY, REWARD]
COPY = ["speculative.method=quantized", ALWAYS_DRAFT]
EVALUATIONS = ["run.eval_steps=1", "eval.temperature=0.4"]


def num_drafted(folder) -> float:
    return sum(line.get("drafts/quantized/tokens", 0.0) for line in read(folder))


def test_copy_drafts_in_evaluations(tmp_path_factory, tmp_path):
    plain = plain_run(tmp_path_factory, *OPTIONS, *EVALUATIONS)
    train_in_virtual_time(*OPTIONS, *EVALUATIONS, *COPY, f"run.output_dir={tmp_path}")
    check_same(tmp_path, plain)
    assert num_drafted(tmp_path) > 100
    evaluations = [[x for x in read(of) if "eval/digest" in x] for of in (plain, tmp_path)]
    for before, after in zip(*evaluations, strict=True):
        assert after["eval/digest"] == before["eval/digest"]
        assert after["eval/forwards"] < before["eval/forwards"]
        assert after["eval/spec_accept_rate"] > 0.8
    assert evaluations[0]


def test_copy_without_numbers_on_one_rank_is_given_up(
    tmp_path_factory, monkeypatch, tmp_path, capfd
):
    begin, spoilt = mechanism.QuantizedMechanism.begin_rollout, []

    def begin_rollout(self, plan):
        begin(self, plan)
        if plan.step == 1 and not spoilt:
            spoilt.append(self)
            for part in self.copy.parts.values():
                part.inverse.fill_(np.nan)

    monkeypatch.setattr(mechanism.QuantizedMechanism, "begin_rollout", begin_rollout)
    plain = plain_run(tmp_path_factory, *OPTIONS)
    train_on_threads(2, *OPTIONS, *COPY, f"run.output_dir={tmp_path}")
    assert digests(tmp_path) == digests(plain)
    assert capfd.readouterr().err.count("quantized drafts no more: ") == 1
    drafts = [line.get("drafts/quantized/tokens", 0) for line in read(tmp_path)]
    assert drafts[0] > drafts[1] > 0 == drafts[2]


def test_line_says_why_no_copy_drafts(tmp_path, capfd):
    options = [*OPTIONS, "speculative.method=quantized", "quantized.bits=4", "run.max_steps=1"]
    train_in_virtual_time(*options, f"run.output_dir={tmp_path}")
    assert capfd.readouterr().err.count("no quantised copy drafts: this device has no product") == 1
    assert not num_drafted(tmp_path)


def test_run_goes_on_where_no_copy_can_be_made(monkeypatch, tmp_path, capfd):
    """A model's own code may do anything with its layers."""

    def fail(*arguments):
        raise AttributeError("'QuantizedLinear' object has no attribute 'weight'")

    monkeypatch.setattr(mechanism, "QuantizedDraftModel", fail)
    train_in_virtual_time(*OPTIONS, *COPY, "run.max_steps=1", f"run.output_dir={tmp_path}")
    (line,) = (x for x in capfd.readouterr().err.splitlines() if "no quantised copy" in x)
    assert "'QuantizedLinear' object has no attribute 'weight'" in line
    assert len(digests(tmp_path)) == 1 and not num_drafted(tmp_path)
