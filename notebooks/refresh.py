"""Executes notebooks and stores their outputs: python -m notebooks.refresh [NAME ...]

By default all of them. People read notebooks on the web before they run them;
tests/test_notebooks.py compares the stored text with that of a fresh execution.
"""

import os
import sys

import nbformat
from nbclient import NotebookClient

FOLDER = os.path.dirname(os.path.abspath(__file__))
TIME_LIMIT_S = 300  # for any cell, on a busy machine


def main() -> int:
    names = sys.argv[1:] or sorted(
        name.removesuffix(".ipynb") for name in os.listdir(FOLDER) if name.endswith(".ipynb")
    )
    for name in names:
        path = os.path.join(FOLDER, f"{name}.ipynb")
        if not os.path.isfile(path):
            print(f"error: there is no {path}", file=sys.stderr)
            return 2
        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": FOLDER}}
        options = {"kernel_name": "python3", "resources": resources, "record_timing": False}
        NotebookClient(notebook, timeout=TIME_LIMIT_S, **options).execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":  # without warnings of the machine
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        # without the version of the machine
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
