"""Each page keeps to its budget of words, and links lead somewhere.

`python tests/test_pages.py` prints the words of each page.
"""

import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script

from tests.helpers.documents import ROOT, anchors, documents, num_words, prose, read_document

# Words at most. docs/lab/ is a record and has no budget; a new page takes its words from others.
BUDGETS = {
    "README.md": 700,
    # use
    "docs/quickstart.md": 900,
    "docs/install.md": 600,
    "docs/data-and-rewards.md": 1500,
    "docs/models.md": 700,
    "docs/environments.md": 1300,
    "docs/recipes.md": 1300,
    "docs/coming-from.md": 1500,
    "docs/gpus.md": 1500,
    "docs/stop-and-resume.md": 700,
    # watch
    "docs/metrics.md": 1400,
    "docs/troubleshooting.md": 1700,
    # understand
    "docs/how-it-works.md": 1500,
    "docs/drafts-in-detail.md": 1200,
    "docs/exactness.md": 900,
    "docs/simulator.md": 700,
    "docs/benchmarks.md": 1300,
    # change
    "docs/architecture.md": 1500,
    "docs/extending.md": 1100,
    # reference
    "docs/configuration.md": 3000,
}
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_budgets_are_those_of_all_pages():
    assert sorted(BUDGETS) == sorted(PAGES)
    assert sum(BUDGETS.values()) == 25_000


@pytest.mark.parametrize("name", PAGES)
def test_page_keeps_to_its_budget(name):
    assert num_words(read_document(name)) <= BUDGETS[name]


@pytest.mark.parametrize("name", documents())
def test_links_lead_somewhere(name):
    for target in LINK.findall(prose(name)):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        where = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
        assert (ROOT / where).exists(), target
        assert not anchor or not where.endswith(".md") or anchor in anchors(prose(where)), target


def test_every_page_is_linked_from_the_readme():
    linked = {target.partition("#")[0] for target in LINK.findall(prose("README.md"))}
    assert set(PAGES) - {"README.md"} <= linked


def test_pages_named_in_code_exist():
    """Error messages, docstrings, names of other trainers and notebooks name files of docs/."""
    files = [ROOT / "train.py", ROOT / "Makefile", *ROOT.rglob("configs/*.yaml")]
    for folder in ("bubblespec", "benchmarks", "examples", "notebooks", "scripts"):
        for ending in ("py", "toml", "json", "ipynb"):
            files += (ROOT / folder).rglob(f"*.{ending}")
    for file in files:
        for page in re.findall(r"docs/\w[\w/-]*\.md", file.read_text(encoding="utf-8")):
            assert (ROOT / page).exists(), f"{file}: {page}"


def test_pages_have_no_commits_or_dates():
    """Evidence with commit, date and machine is in docs/lab/, and some on the benchmark page."""
    for name in set(PAGES) - {"docs/benchmarks.md"}:
        text = read_document(name)
        assert not re.search(r"\bcommits? [0-9a-f]{7,8}\b|\b202\d-\d\d-\d\d\b|\b1[12]-\d\d\b", text)


if __name__ == "__main__":
    counts = {name: num_words(read_document(name)) for name in PAGES}
    for name, count in counts.items():
        print(f"{count:6,d} of {BUDGETS.get(name, 0):6,d}  {name}")
    print(f"{sum(counts.values()):6,d} of {sum(BUDGETS.values()):6,d}  all pages")
