"""The example that shows the idea in one file."""

import runpy

from tests.helpers.warm import ROOT


def test_minimal_loop_tokens_equal_without_drafts():
    train = runpy.run_path(f"{ROOT}/examples/minimal_loop.py")["train"]
    train.__globals__["MAX_NEW_TOKENS"] = 64
    plain, drafted = train(3, use_drafts=False), train(3, use_drafts=True)
    assert [digest for digest, _, _ in drafted] == [digest for digest, _, _ in plain]
    assert any(reward > 0 for _, _, reward in plain)
    assert sum(forwards for _, forwards, _ in drafted) < 0.9 * sum(n for _, n, _ in plain)
