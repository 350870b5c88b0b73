"""Notebooks are stored as nbformat writes them and without results, so that a diff shows what
people wrote.

.ci/run executes them.
"""

import json
import re
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
FIELDS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "id", "metadata", "source", "execution_count", "outputs"},
}


def stored(notebook: dict) -> str:
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def problems(notebook: dict) -> list[str]:
    cells = notebook["cells"]
    found = [
        f"{cell['id']}: has results"
        for cell in cells
        if cell.get("outputs") or cell.get("execution_count")
    ]
    found += [f"{cell['id']}: has metadata" for cell in cells if cell["metadata"]]
    found += [
        f"{cell['id']}: wrong fields" for cell in cells if cell.keys() != FIELDS[cell["cell_type"]]
    ]
    if (notebook["nbformat"], notebook["nbformat_minor"], notebook["metadata"]) != (4, 5, METADATA):
        found.append("not a plain Python 3 notebook of format 4.5")
    if len({cell["id"] for cell in cells}) < len(cells):
        found.append("an id comes twice")
    for before, cell in pairwise(cells):
        if before["cell_type"] == cell["cell_type"] == "code":
            found.append(f"{cell['id']}: no text explains this code")
    paths = re.findall(r"`([\w/]+\.(?:md|py))`", "".join("".join(cell["source"]) for cell in cells))
    return found + [f"{path} does not exist" for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_plain_and_anything_else_is_seen(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert path.read_text(encoding="utf-8") == stored(notebook)
    assert problems(notebook) == []
    position, code = next(
        (i, cell) for i, cell in enumerate(notebook["cells"]) if cell["cell_type"] == "code"
    )
    changes = [
        {"execution_count": 3},
        {"outputs": [{}]},
        {"metadata": {"collapsed": True}},
        {"attachments": {}},
    ]
    changes += [
        {"id": notebook["cells"][0]["id"]},
        {"cell_type": "markdown"},
        {"source": ["see `docs/no.md`"]},
    ]
    for change in changes:
        changed = deepcopy(notebook)
        changed["cells"][position] = code | change
        assert problems(changed), change
    assert problems(notebook | {"metadata": METADATA | {"accelerator": "GPU"}})
    assert problems(notebook | {"nbformat_minor": 4})
    assert problems(
        notebook | {"cells": [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]}
    )
