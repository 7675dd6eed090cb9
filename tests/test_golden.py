"""Tokens and weights are those of earlier versions."""

import json

import pytest

from tests.helpers.golden import PATH, RUNS, differences, run


@pytest.mark.parametrize("name", RUNS)
def test_run_equals_recorded_run(name, tmp_path):
    """If a change of tokens or updates is wanted: python tests/helpers/golden.py --accept."""
    with open(PATH, encoding="utf-8") as file:
        wanted = json.load(file)
    found = differences(name, run(name, str(tmp_path)), wanted[name])
    assert not found, "\n".join(found[:5])
