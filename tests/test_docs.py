"""The blocks of Python in documentation run, in order, and print what they say that they print."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("quick_compile")

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAID = re.compile(r"print\(.*\)  # ([^:\n]*)")


@pytest.mark.parametrize(
    ("page", "num_blocks", "num_said"),
    [
        ("docs/functional.md", 8, 8),
        ("docs/pooling.md", 1, 0),
        ("docs/pictures.md", 2, 0),
        ("docs/sessions.md", 6, 8),
        ("docs/tiers.md", 1, 0),
        ("docs/usage.md", 3, 0),
        ("README.md", 3, 0),
    ],
)
def test_the_blocks_of_a_page_run_and_print_what_they_say(
    page, num_blocks, num_said, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    if not (ROOT / page).is_file():
        pytest.skip(f"{page} is in the checkout only")
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = BLOCK.findall(text.replace('"path/to/checkpoint"', ""))  # the demo model
    names, said = {}, []
    for block in blocks:
        exec(compile(block, page, "exec"), names)  # noqa: S102
        printed = capsys.readouterr().out
        said += SAID.findall(block)
        assert all(text.removesuffix(" ...") in printed for text in SAID.findall(block))
    assert (len(blocks), len(said)) == (num_blocks, num_said)
