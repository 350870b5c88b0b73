"""Notebooks are made of their sources, and hold no results of other machines' making.

.ci/run executes them.
"""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ["kv_as_a_value", "plan_a_tpu", "quickstart", "smaller_caches"]
BARE = {"outputs": [], "execution_count": None}


def problems(notebook: dict) -> list[str]:
    """Lists what is wrong with the results and the text of a stored notebook."""
    found = []
    for cell in notebook["cells"]:
        outputs = cell.get("outputs", [])
        if any(one["output_type"] == "error" or one.get("name") == "stderr" for one in outputs):
            found.append(f"{cell['id']}: shows an error or a warning")
        if outputs and "measures" in cell["metadata"].get("tags", ()):
            found.append(f"{cell['id']}: has figures of one machine")
        if re.search(r"/(?:tmp|home|root)/", json.dumps(outputs)):
            found.append(f"{cell['id']}: has a path of one machine")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if not any(cell["outputs"] for cell in code):
        found.append("was not executed")
    for before, cell in pairwise(notebook["cells"]):
        if before["cell_type"] == "markdown" == cell["cell_type"] and not "".join(
            cell["source"]
        ).startswith("#"):
            found.append(f"{cell['id']}: goes on with the text above it")
    texts = "".join("".join(cell["source"]) for cell in notebook["cells"])
    paths = re.findall(r"`([\w/]+\.(?:md|py))`", texts)
    return found + [f"{path} does not exist" for path in paths if not (ROOT / path).exists()]


def test_every_source_has_a_notebook(scripts):
    made = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert made == {path.stem for path in (ROOT / "notebooks").glob("*.py")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_source_executed(name, script):
    made = script("notebooks")
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert text == made.stored(notebook)
    assert problems(notebook) == []
    bare = [cell | BARE if cell["cell_type"] == "code" else cell for cell in notebook["cells"]]
    source = (ROOT / "notebooks" / f"{name}.py").read_text(encoding="utf-8")
    assert made.convert(source) == notebook | {"cells": bare}, "python scripts/notebooks.py"


@pytest.mark.parametrize(
    "change",
    [
        {"outputs": [{"output_type": "error"}]},
        {"outputs": [{"output_type": "stream", "name": "stderr"}]},
        {"outputs": [{"output_type": "stream", "text": ["/tmp/model"]}]},
        {"outputs": [{"output_type": "stream"}], "metadata": {"tags": ["measures"]}},
        {"source": ["see `docs/no.md`"]},
    ],
)
def test_what_a_notebook_may_not_hold_is_seen(change):
    cell = {"cell_type": "code", "id": "cell-0", "metadata": {}, "source": [], **BARE}
    good = {"outputs": [{"output_type": "stream", "name": "stdout", "text": ["1"]}]}
    assert problems({"cells": [cell | good]}) == []
    assert problems({"cells": [cell | good, cell | change]})
    assert problems({"cells": [cell]}) == ["was not executed"]
