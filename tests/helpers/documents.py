"""The pages of the project: their text, fenced blocks, anchors and words."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "docs/lab", "benchmarks", "notebooks", "notebooks/data")
# A block, with the name of its file in the line above it: `my_run.yaml`:
BLOCK = re.compile(r"(?:^`([\w./-]+)`:\n+)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_document(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> list[tuple[str, str, str]]:
    """Return (language, file name or "", text) of the fenced blocks of a document."""
    return [(language, name, block) for name, language, block in BLOCK.findall(text)]


def files(text: str) -> dict[str, str]:
    """Return the files that a document shows, by name; blocks of one file are joined."""
    found: dict[str, str] = {}
    for _, name, block in blocks(text):
        if name:
            found[name] = found.get(name, "") + block
    return found


def documents() -> list[str]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")]
    return ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in found)]


def prose(name: str) -> str:
    """Return a document without its fenced blocks."""
    return BLOCK.sub("", read_document(name))


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def num_words(text: str) -> int:
    """Count words: what white space separates and has a letter or digit, code included."""
    return sum(any(map(str.isalnum, word)) for word in text.split())
