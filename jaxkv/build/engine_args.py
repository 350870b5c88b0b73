"""`EngineArgs`: the arguments of an engine as a value that scripts make, change and hand on."""

from __future__ import annotations

import argparse
import json
from dataclasses import field, fields, make_dataclass
from typing import Any, Self, get_type_hints

from jaxkv.build.options import ABOUT, EngineOptions, flag_name, flag_settings
from jaxkv.build.vllm_arguments import FOREIGN, as_options


def _declared() -> list[tuple[str, Any, Any]]:
    """Returns (name, type, field) of every option and of vLLM's other arguments."""
    hints = get_type_hints(EngineOptions)
    ours = [
        (one.name, hints[one.name], field(default=one.default, repr=not _is_secret(one.name)))
        for one in fields(EngineOptions)
    ]
    others = {name: other.default for name, other in FOREIGN.items()} | {"enforce_eager": False}
    return ours + [(name, Any, field(default=value)) for name, value in others.items()]


def _is_secret(name: str) -> bool:
    check = ABOUT[name].check
    return check is not None and check.is_secret


def _check(arguments: EngineArgs) -> None:
    arguments.options()


_Arguments: Any = make_dataclass("_Arguments", _declared(), namespace={"__post_init__": _check})


class EngineArgs(_Arguments):
    """Holds the arguments of `LLM` under vLLM's names, one field each, to be assigned as well.

        args = EngineArgs(model="path/to/checkpoint", max_model_len=4096)
        llm = LLM.from_engine_args(args)  # or LLM(**dataclasses.asdict(args))

    Raises: ValueError for what `LLM` refuses, when made and again when an engine is made of it;
    TypeError for a name that nobody knows.
    """

    def options(self) -> EngineOptions:
        """Returns the options that these arguments stand for. Raises: ValueError."""
        return EngineOptions(**as_options(self.keywords(), ABOUT))

    def keywords(self) -> dict[str, Any]:
        """Returns the arguments by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each argument, but for secrets, with its default, and returns the
        parser: `LLM(**vars(parser.parse_args()))` takes all of them.
        """
        hints = get_type_hints(EngineOptions)
        group = parser.add_argument_group("arguments of the engine")
        for one in fields(cls):
            names = [flag_name(one.name)]
            if (about := ABOUT.get(one.name)) is None:
                settings = _foreign_flag(one.default)
            elif _is_secret(one.name):
                continue
            else:
                settings = flag_settings(hints[one.name], about.doc, one.default)
                names += about.aliases
            group.add_argument(*names, dest=one.name, default=one.default, **settings)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Makes arguments of what was parsed; what the parser has beside them is left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in known})


class AsyncEngineArgs(EngineArgs):
    """Is the same for `AsyncLLM.from_engine_args`."""


def _foreign_flag(default: Any) -> dict[str, Any]:
    """Returns what `argparse` takes for an argument that sets nothing here."""
    settings: dict[str, Any] = {"help": "vLLM's; sets nothing here (docs/vllm.md)"}
    if isinstance(default, bool):
        return settings | {"action": argparse.BooleanOptionalAction}
    return settings | {"type": _value, "metavar": "X"}


def _value(text: str) -> Any:
    """Reads a flag of which only the value is known: a number or object of JSON, else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
