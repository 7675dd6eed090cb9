"""Write the tables of docs/metrics.md from bubblespec/metrics.toml:

python -m scripts.write_metrics
"""

import re
from pathlib import Path

from bubblespec.metrics import TABLE

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def page() -> str:
    """Return the page with the rows of the table in the sections of these names."""
    text = PAGE.read_text(encoding="utf-8")
    for title, rows in TABLE.items():
        lines = []
        for names, row in rows.items():
            quoted = ", ".join(f"`{name}`" for name in names.split(", "))
            lines.append(f"| {quoted} | {row['text']} |\n")
        section = rf"(\n## {re.escape(title)}\n(?:(?!\n## ).)*?\|---\|---\|\n)(?:\|[^\n]*\n)*"
        text, found = re.subn(section, lambda m, of=lines: m[1] + "".join(of), text, flags=re.S)
        assert found == 1, title
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
