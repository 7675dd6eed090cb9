"""The table of docs/troubleshooting.md on kernels and GPUs: tests compare printed lines with it."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
HEADING = "## A kernel or a GPU fails"


def rows() -> dict[str, str]:
    """What a run prints, by what fails."""
    text = PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0]
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {what.strip(): says.strip().strip("`") for what, says, _ in cells[2:]}


def says(what: str, line: str) -> bool:
    """Whether a line is the one that the page has for a fault."""
    pattern = ".+".join(map(re.escape, rows()[what].split("…")))
    return re.fullmatch(pattern, line) is not None
