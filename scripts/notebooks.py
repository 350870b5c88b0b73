"""Makes notebooks/NAME.ipynb, which Colab opens, from notebooks/NAME.py, which people write.

    python scripts/notebooks.py [NAME ...]    # needs the extra `notebook`; all of them without NAME

Each is executed, and stored with what its cells print and draw. A source is in jupytext's percent
format: `# %%` begins code, `# %% [markdown]` text in comments. What a cell with `tags=["measures"]`
says is not stored: such figures are those of the machine that the notebook runs on.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
HEAD = re.compile(r"^# %%(?: (\[markdown\]))?(?: tags=(\[.*\]))?\n", re.MULTILINE)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def convert(source: str) -> dict[str, Any]:
    """Returns the notebook of a source, without results. Raises: ValueError if anything stands
    before the first cell.
    """
    before, *parts = HEAD.split(source)
    if before:
        raise ValueError(f"expected a line of # %% first, got {before[:80]!r}")
    cells = []
    for number, at in enumerate(range(0, len(parts), 3)):
        markdown, tags, text = parts[at : at + 3]
        text = text.strip("\n")
        if markdown:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        cell = {
            "cell_type": "markdown" if markdown else "code",
            "id": f"cell-{number}",
            "metadata": {"tags": json.loads(tags)} if tags else {},
            "source": text.splitlines(keepends=True),
        }
        if not markdown:
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """Returns the notebook with results. Raises: what nbclient does if a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    node = nbformat.reads(json.dumps(notebook), as_version=4)
    NotebookClient(node, timeout=300, kernel_name="python3", record_timing=False).execute()
    node.metadata = METADATA
    for cell in node.cells:
        if "measures" in cell.metadata.get("tags", ()):
            cell.outputs, cell.execution_count = [], None
    return json.loads(nbformat.writes(node))


def stored(notebook: dict[str, Any]) -> str:
    """Returns the text of a notebook's file."""
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the notebooks from their sources.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as quickstart")
    names = parser.parse_args().names or sorted(path.stem for path in NOTEBOOKS.glob("*.py"))
    for name in names:
        source = (NOTEBOOKS / f"{name}.py").read_text(encoding="utf-8")
        text = stored(execute(convert(source)))
        (NOTEBOOKS / f"{name}.ipynb").write_text(text, encoding="utf-8")
        print(f"{name}.ipynb: {len(text) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
