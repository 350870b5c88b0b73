"""Writes SVG and HTML that need nothing else: no server, no network, no script files.

Everything is ASCII and well-formed XML, whatever the texts are that people have sent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
"""Told apart by colour-blind readers too (Okabe and Ito); fills, on both themes."""

_LIGHT = "--paper:#fff;--ink:#1f2328;--soft:#59636e;--line:#c4ccd4;--empty:#eef1f4;--kept:#a5aeb8"
_DARK = "--paper:#15191f;--ink:#e6e9ed;--soft:#a3adb8;--line:#4a535d;--empty:#232a32;--kept:#6b7682"

_LIGHT_NOTEBOOKS = ("[data-jp-theme-light=true]", ".vscode-light", "html[theme=light]")
_DARK_NOTEBOOKS = ("[data-jp-theme-light=false]", ".vscode-dark", "html[theme=dark]")
"""Marks of Jupyter, VS Code and Colab, which have themes of their own, whatever the system says."""


def _within(marks: Iterable[str]) -> str:
    return ",".join(f"{mark} .jaxkv" for mark in marks)


STYLE = (
    f".jaxkv{{{_LIGHT};color:var(--ink);background:var(--paper);"
    "font:12px system-ui,sans-serif;max-width:100%}"
    f"@media(prefers-color-scheme:dark){{.jaxkv{{{_DARK}}}}}"
    f"{_within(_LIGHT_NOTEBOOKS)}{{{_LIGHT}}}"
    f"{_within(_DARK_NOTEBOOKS)}{{{_DARK}}}"
    "svg.jaxkv{height:auto}.jaxkv text{fill:var(--ink)}"
    ".jaxkv .soft{fill:var(--soft);color:var(--soft)}"
    ".jaxkv .head{font-size:14px;font-weight:600}"
    ".jaxkv .paper{fill:var(--paper)}.jaxkv .line{stroke:var(--line);fill:none}"
    ".jaxkv .empty{fill:var(--empty);stroke:var(--line)}.jaxkv .kept{fill:var(--kept)}"
    ".jaxkv .hatch{stroke:var(--ink);stroke-width:1.3;fill:none}"
    ".jaxkv .edge{stroke:var(--ink);stroke-width:.6;fill:none}"
    ".jaxkv table{border-collapse:collapse;margin:4px 0;font:inherit;color:var(--ink)}"
    ".jaxkv th,.jaxkv td{border-bottom:1px solid var(--line);padding:3px 8px;text-align:left;"
    "vertical-align:top;background:var(--paper)}"
    ".jaxkv .number{text-align:right;font-variant-numeric:tabular-nums}"
    ".jaxkv pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font:11px monospace;"
    "color:var(--ink);background:none}.jaxkv td pre{max-height:9em;overflow:auto}"
    ".jaxkv ol{display:flex;flex-wrap:wrap;gap:4px;padding:0;margin:6px 0;list-style:none}"
    ".jaxkv li{border:1px solid var(--soft);padding:3px 5px;max-width:14em}"
    ".jaxkv li.gone{border-style:dashed}"
)

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML file may have: control characters and halves of surrogate pairs."""


class Picture(str):
    """Is the text of an SVG file or a piece of HTML, which notebooks show as what it draws."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self):,} characters of {self.kind.upper()}>"

    @property
    def kind(self) -> str:
        """Returns "svg" or "html"."""
        return "svg" if self.startswith("<svg") else "html"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file that any browser opens, over one that is there.

        Raises: ValueError if the file's name does not end in .html or, for SVG, .svg; OSError.
        """
        suffixes = (".svg", ".html")[self.kind == "html" :]
        if Path(path).suffix not in suffixes:
            raise ValueError(f"path: expected a name that ends in {suffixes}, got {path}")
        Path(path).write_text(self, encoding="ascii")


def escape(text: object) -> str:
    """Returns a text as XML and HTML say it, in ASCII."""
    clean = _NOT_XML.sub("\ufffd", str(text))
    clean = clean.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    clean = clean.replace('"', "&quot;").replace("'", "&#39;")
    return clean.encode("ascii", "xmlcharrefreplace").decode()


def shorten(text: str, most: int) -> str:
    """Returns at most so many characters of a text, with a sign where it was cut."""
    return text if len(text) <= most else f"{text[: max(0, most - 1)]}\u2026"


def tag(name: str, content: str = "", **attributes: object) -> str:
    """Writes an element around `content`, which is markup already. Attributes are texts and
    numbers; `_` in their names stands for a hyphen, at the end for nothing.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        said = f"{value:.1f}" if isinstance(value, float) else escape(value)
        parts.append(f' {key.rstrip("_").replace("_", "-")}="{said}"')
    return "".join([*parts, f">{content}</{name}>" if content else "/>"])


def text(x: float, y: float, said: object, **attributes: object) -> str:
    """Writes a line of text into an SVG."""
    return tag("text", escape(said), x=float(x), y=float(y), **attributes)


def title(said: object) -> str:
    """Writes what a browser shows under the pointer, and reads aloud."""
    return tag("title", escape(said))


def hatch(x: float, y: float, width: float, height: float, step: float = 4.0) -> str:
    """Returns path data of diagonal strokes through a rectangle: what stands beside a colour, for
    those who do not see it.
    """
    strokes, offset = [], step / 2 - height
    while offset < width:
        left, right = max(offset, 0.0), min(offset + height, width)
        low, high = y + height - (left - offset), y + height - (right - offset)
        strokes.append(f"M{x + left:.1f} {low:.1f}L{x + right:.1f} {high:.1f}")
        offset += step
    return "".join(strokes)


def svg(said: str, description: str, width: float, height: float, body: Iterable[str]) -> Picture:
    """Writes a whole SVG file, named `said` and described to those who cannot see it."""
    content = [title(said), tag("desc", escape(description)), tag("style", STYLE)]
    content.append(tag("rect", class_="paper", width="100%", height="100%"))
    attributes = {"class_": "jaxkv", "role": "img", "width": int(width), "height": int(height)}
    box = f"0 0 {int(width)} {int(height)}"
    return Picture(
        tag(
            "svg",
            "\n".join([*content, *body]),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=box,
            **attributes,
        )
    )


def html(*content: str) -> Picture:
    """Writes a piece of HTML with the style that its tables and texts need."""
    return Picture(tag("div", "\n".join([tag("style", STYLE), *content]), class_="jaxkv"))
