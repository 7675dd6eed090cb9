"""The comparison of suffix drafts: every arm proposes from what it may know alone, and the counts are what they say."""

import importlib.util
import json
import sys

import numpy as np
import pytest

from benchmarks import suffix_vs_published as benchmark
from benchmarks.suffix import play
from bubblespec.speculate.suffix import GroupIndex

PROMPT = [7, 8, 9]
NO_ARCTIC = importlib.util.find_spec("arctic_inference") is None


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def make(name: str, history=(), drafts=(), prompt=tuple(PROMPT), samples: int = 2):
    arms = benchmark.make_arms(4)
    if name not in arms:
        pytest.skip(f"{name} is not installed")
    return arms[name](list(prompt), list(history), list(drafts), samples)


def test_lookup_is_what_transformers_generates(make_model):
    """Greedy generation by transformers with its own prompt lookup makes as many forwards as the replay counts passes."""
    import torch

    model = make_model("llama", torch.float64)
    prompt = torch.tensor([[5, 11, 5, 11, 5, 11, 5]])
    limits = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = model.generate(prompt, **limits)[0, prompt.shape[1] :].numpy().astype(np.int32)
    forwards = []
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    again = model.generate(prompt, prompt_lookup_num_tokens=4, **limits)[0, prompt.shape[1] :].numpy()
    hook.remove()
    assert (again == text).all()
    count = play(benchmark.Lookup(prompt[0].tolist(), [], 1, False), [text], 4)
    assert count["tokens"] == 60 and 60 / count["passes"] > 1
    assert abs(count["passes"] - len(forwards)) <= 1  # generate makes no forward for what max_new_tokens cuts off


def test_lookup_in_all_text_takes_drafts_first():
    lookup = make("lookup, all text", history=[ints(50, 51)], drafts=[ints(40, 41), ints(60)])
    assert lookup.propose(0, 4)[0].tolist() == [40, 41]  # and ends where the text does
    alone = make("lookup", history=[ints(50, 51)], drafts=[ints(40, 41)])
    assert len(alone.propose(0, 4)[0]) == 0
    alone.extend(0, ints(7, 8))
    assert alone.propose(0, 4)[0].tolist() == [9, 7, 8]  # what followed 7, 8 in the prompt
    assert len(alone.propose(1, 4)[0]) == 0  # the other sample has not said it
    lookup.extend(1, ints(30, 31, 32))
    lookup.extend(0, ints(30, 31))
    assert lookup.propose(0, 4)[0].tolist() == [32]


@pytest.mark.parametrize("name", ["ours", "arctic, whole", "lookup, all text"])
def test_arms_know_drafts_history_and_samples(name):
    text = np.arange(10, 40, dtype=np.int32)
    other = np.arange(50, 80, dtype=np.int32)
    for knowledge in ({"drafts": [text, other]}, {"history": [other, text]}):
        count = play(make(name, **knowledge), [text, other], 4)
        assert count["tokens"] == 60
        assert count["passes"] <= 2 * (3 + 30 / 5)  # 5 tokens a pass, once a match has been found
    assert play(make(name), [text, other], 4)["passes"] == 60  # nothing known, nothing repeated
    index = make(name)
    index.extend(1, text)
    count = play(index, [text], 4)
    assert count["passes"] <= 3 + 30 / 5


@pytest.mark.skipif(NO_ARCTIC, reason="arctic-inference is not installed")
def test_arctic_with_its_limits_proposes_no_more_than_it_matched():
    text = np.arange(10, 40, dtype=np.int32)
    index = make("arctic", history=[text], samples=1)
    index.extend(0, text[:2])
    tokens, match, _ = index.propose(0, 4)
    assert tokens.tolist() == text[2:4].tolist() and match == 2
    index.extend(0, text[2:6])
    assert index.propose(0, 4)[0].tolist() == text[6:10].tolist()


def test_counts_are_those_of_the_replay(tmp_path):
    """One token a pass without proposals; with its own text as draft, the window and one more."""
    text = list(range(10, 40))
    groups = [benchmark.Group(PROMPT, [[90]], [text], {"0.1": [text]})]
    arms = benchmark.make_arms(4)
    blind = benchmark.measure(groups, "0.1", False, False, arms["ours"], 4)
    assert blind["tokens_per_pass"] == 1.0 and blind["proposed_per_pass"] == 0.0 and blind["accepted_share"] == 0.0
    seeing = benchmark.measure(groups, "0.1", True, True, arms["ours"], 4)
    assert seeing["tokens_per_pass"] == 5.0 and seeing["accepted_share"] == 1.0 and seeing["sources"]["own"] == 24
    assert seeing["propose_us"] > 0 and seeing["extend_us"] > 0


def test_whole_run_on_generated_text(monkeypatch, tmp_path, capsys):
    text, out = tmp_path / "text.json", tmp_path / "out.json"
    options = "--num-prompts 2 --num-generations 2 --max-new-tokens 24 --learning-rate 0 2e-3 --window 4"
    monkeypatch.setattr(sys, "argv", f"suffix_vs_published.py {options} --text {text} --json {out}".split())
    assert benchmark.main() == 0
    groups = [benchmark.Group(**group) for group in json.loads(text.read_text())]
    assert len(groups) == 2 and all(len(g.history) == len(g.drafts) == len(g.responses["0.002"]) == 2 for g in groups)
    # unmoved weights and the same noise: the draft is the response, and another step's noise gives another one
    assert all(g.responses["0"] == g.drafts for g in groups) and any(g.history != g.drafts for g in groups)
    figures = {(r["case"], r["arm"]): r for r in json.loads(out.read_text())["results"]}
    exact = figures["samples, history, drafts (0)", "ours"]
    assert exact["accepted_share"] > 0.9
    passes = sum(-(-len(response) // 5) for g in groups for response in g.responses["0"])
    tokens = sum(len(response) for g in groups for response in g.responses["0"])
    assert exact["tokens_per_pass"] == pytest.approx(tokens / passes)
    # the recorded text gives the same figures again, times apart
    before = capsys.readouterr().out
    assert benchmark.main() == 0
    again = {(r["case"], r["arm"]): r for r in json.loads(out.read_text())["results"]}
    assert {k: v["tokens_per_pass"] for k, v in again.items()} == {k: v["tokens_per_pass"] for k, v in figures.items()}
    assert before.count("| ours |") == 4


def test_a_missing_folder_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["suffix_vs_published.py", "--model", "no/such/folder"])
    assert benchmark.main() == 2
    assert capsys.readouterr().err == "error: --model: no folder no/such/folder; `make smollm2` makes that of smollm2\n"


def test_ours_is_the_index_of_the_trainer():
    assert isinstance(make("ours"), GroupIndex)
