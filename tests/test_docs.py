"""What documentation says is so: its blocks of Python run, in order, and print what they say that
they print; messages that it explains are the code's; its links lead somewhere.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jaxkv import LLM
from jaxkv.programs.compiled import Programs

pytestmark = pytest.mark.usefixtures("quick_compile")

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
NOT_RUN = "# Not run in this page's test: "
SAID = re.compile(r"print\(.*\)  # ([^:\n]*)")
PAGES = [
    ("README.md", 2, 0),
    ("docs/choosing.md", 1, 0),
    pytest.param("docs/functional.md", 8, 8, marks=pytest.mark.slow),
    ("docs/how_it_works.md", 1, 1),
    pytest.param("docs/pictures.md", 2, 0, marks=pytest.mark.slow),
    ("docs/pooling.md", 1, 0),
    ("docs/sessions.md", 6, 8),
    pytest.param("docs/speculation.md", 1, 0, marks=pytest.mark.slow),
    pytest.param("docs/start/colab.md", 2, 0, marks=pytest.mark.slow),
    ("docs/start/laptop.md", 1, 0),
    ("docs/tiers.md", 1, 0),
    pytest.param("docs/transformers.md", 2, 0, marks=pytest.mark.slow),
    ("docs/usage.md", 5, 0),
]
ELSEWHERE = ["docs/server.md"]  # tests/api/test_server.py
LINK = re.compile(r"\]\(([^)\s]+)\)")


def values_of(case: Any) -> tuple:
    """Takes those of a slow case."""
    return getattr(case, "values", case)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[str]:
    """Returns the blocks of Python that run."""
    found = [textwrap.dedent(text) for _, text in BLOCK.findall(page.read_text(encoding="utf-8"))]
    return [block for block in found if not block.startswith(NOT_RUN)]


@pytest.fixture
def checkout() -> None:
    if not (ROOT / "docs").is_dir():
        pytest.skip("the documentation is in the checkout only")


@pytest.fixture
def only_what_runs(monkeypatch) -> None:
    """Programs that no block runs are not compiled."""
    monkeypatch.setattr(Programs, "compile_in_background", lambda self: None)


@pytest.mark.usefixtures("checkout", "only_what_runs")
@pytest.mark.parametrize(("page", "num_blocks", "num_said"), PAGES)
def test_the_blocks_of_a_page_run_and_print_what_they_say(
    page, num_blocks, num_said, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    names, said = {}, []
    blocks = blocks_of(ROOT / page)
    if any("structured_outputs" in block for block in blocks):
        pytest.importorskip("llguidance")
    for block in blocks:
        block = block.replace('"path/to/checkpoint"', "")  # the demo model
        exec(compile(block, page, "exec"), names)  # noqa: S102
        printed = capsys.readouterr().out
        said += SAID.findall(block)
        assert all(text.removesuffix(" ...") in printed for text in SAID.findall(block))
    assert (len(blocks), len(said)) == (num_blocks, num_said)


@pytest.mark.usefixtures("checkout")
def test_no_page_has_blocks_that_nothing_runs():
    have = {page.relative_to(ROOT).as_posix() for page in pages() if blocks_of(page)}
    assert have == {page for page, *_ in map(values_of, PAGES)} | set(ELSEWHERE)


def messages() -> list[str]:
    """Returns every text in the code, with an ellipsis for each field of an f-string."""
    texts = []
    for file in sorted((ROOT / "jaxkv").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    one.value if isinstance(one, ast.Constant) else "..." for one in node.values
                ]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def is_said(message: str, texts: list[str]) -> bool:
    """Tells whether one of these texts has the message's words in their order; `...` is anything."""
    words = ".*".join(re.escape(part) for part in message.split("..."))
    pattern = re.compile(words, re.DOTALL)
    return any(pattern.search(text) for text in texts)


@pytest.mark.usefixtures("checkout")
def test_every_message_that_troubleshooting_explains_is_one_of_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = "".join(re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    with pytest.raises(ValueError, match="model_type") as made_of_parts:
        LLM(hf_overrides={"model_type": "no_model"})
    texts = [*messages(), str(made_of_parts.value)]
    assert len(quoted.splitlines()) > 40
    assert [message for message in quoted.splitlines() if not is_said(message, texts)] == []
    assert not is_said("max_model_len: expected at least ..., got ...", texts)


def is_good(page: Path, link: str) -> bool:
    """Tells whether a link leads to a file, from docs/ to one that the site has too."""
    if "://" in link or link.startswith("#"):
        return True
    target = (page.parent / link.split("#")[0]).resolve()
    on_site = target.is_relative_to(ROOT / "docs") or target.is_relative_to(ROOT / "notebooks")
    return target.exists() and (on_site or not page.is_relative_to(ROOT / "docs"))


@pytest.mark.usefixtures("checkout")
def test_links_lead_to_files_and_every_page_is_on_the_site():
    """Those within docs/ are also checked by `mkdocs build --strict`, with their anchors."""
    texts = [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "jaxkv/demo/README.md"]
    links = [(page, link) for page in texts for link in LINK.findall(page.read_text("utf-8"))]
    assert [(str(page), link) for page, link in links if not is_good(page, link)] == []
    page = ROOT / "docs/index.md"
    assert not is_good(page, "no.md")
    assert not is_good(page, "../README.md")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    names = [page.relative_to(ROOT / "docs").as_posix() for page in pages()[1:]]
    assert [name for name in names if f" {name}\n" not in site] == [], "nav of mkdocs.yml"
