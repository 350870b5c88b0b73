"""Makes pages of docs/ fit the documentation site (a hook of mkdocs.yml): the arguments of `LLM`
are filled in, and links to notebooks lead to the site's.
"""

from dataclasses import fields
from typing import Any

from jaxkv.build.options import ABOUT, EngineOptions

PLACE = "<!-- arguments of LLM -->"


def arguments() -> str:
    """Returns a table of the keywords of `LLM`: name, default, sentence."""
    defaults = {one.name: one.default for one in fields(EngineOptions)}
    rows = [f"| `{name}` | `{defaults[name]!r}` | {about.doc} |" for name, about in ABOUT.items()]
    return "\n".join(["| argument | default | |", "|---|---|---|", *rows])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns a page as the site has it: there notebooks/ lies in docs/ instead of beside it."""
    return markdown.replace(PLACE, arguments()).replace("../notebooks/", "notebooks/")
