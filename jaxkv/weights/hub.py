"""Turns what people write for a model into a local directory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxkv.errors import NO_GGUF, CheckpointError

WITHOUT_WEIGHTS = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
ALLOW_PATTERNS = ("*.safetensors", *WITHOUT_WEIGHTS)
OF_CODE = ("*.py", "*.tiktoken", "tiktoken.model")
"""Python code of a tokenizer, and what it reads: fetched only where the caller trusts it."""

IGNORE_PATTERNS = ("original/*", "metal/*", "consolidated*.safetensors")
"""These hold the same weights once more, for other programs (gpt-oss, Mistral)."""

# The hub's own rule, here so that a typo is found without a network.
_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"(?!.*(?:--|\.\.))(?:{_PART}/)?{_PART}(?<!\.git)", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Says how the hub is asked: with which token (None: the user's own, if there is one), and
    where what it gives is kept (None: the hub's cache).
    """

    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | os.PathLike[str] | None = None

    def settings(self) -> dict[str, Any]:
        """Returns what was given, as keywords of huggingface_hub."""
        given = {"token": self.token, "cache_dir": self.cache_dir}
        return {name: value for name, value in given.items() if value is not None}


PUBLIC = Access()


def resolve_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    only: tuple[str, ...] = ALLOW_PATTERNS,
    access: Access = PUBLIC,
    option: str = "model",
) -> Path:
    """Finds the local directory of a model, or of the tokenizer that `option` names: `model` itself
    if it is one, else the hub's snapshot of `org/name` or `name`.

    Fetches `only` files of these names, by default weights, JSON, chat templates and vocabularies:
    no code, no pickle. A PathLike is always meant as a path.
    Raises: CheckpointError for a path that is no directory and for what is neither path nor hub id;
    ValueError for a revision of a local directory; OSError when the hub cannot be reached or does
    not give the files.
    """
    text = os.path.expanduser(os.fspath(model))
    if os.path.isdir(text):
        if revision is not None:
            raise ValueError(
                f"{text}: expected no revision for a local directory, got {revision!r}"
            )
        return Path(text)
    if isinstance(model, os.PathLike) or _looks_like_path(text):
        if option == "tokenizer":
            raise CheckpointError(
                f"tokenizer: {text}: expected a directory with tokenizer.json or "
                f"tokenizer_config.json, got {_kind(text)}"
            )
        raise CheckpointError(
            f"{text}: expected a directory with config.json and *.safetensors, got {_kind(text)}"
        )
    if not _HUB_ID.fullmatch(text):
        raise CheckpointError(
            f"{option}: expected a local directory or a hub id such as org/name, got {text[:200]!r}"
        )
    return _fetch(text, revision, only, access)


def with_weights(model: str | os.PathLike[str], directory: Path, access: Access) -> Path:
    """Returns `directory`, which `resolve_model` has found without weights, with them: a snapshot
    stays of the same commit.
    """
    text = os.path.expanduser(os.fspath(model))
    if os.path.isdir(text):
        return directory
    return _fetch(text, directory.name, ALLOW_PATTERNS, access)


def _looks_like_path(text: str) -> bool:
    return (
        text.startswith((".", "/", "~"))
        or "\\" in text
        or text.count("/") > 1
        or os.path.exists(text)
    )


def _kind(text: str) -> str:
    if not os.path.exists(text):
        return "nothing there"
    is_gguf = text.endswith(".gguf")
    return f"a file; {NO_GGUF if is_gguf else 'pass the directory that holds it'}"


def _fetch(hub_id: str, revision: str | None, only: tuple[str, ...], access: Access) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    # The base is the HTTP library's root error: httpx2 under hub 2.x, httpx under 1.x.
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=list(only),
                ignore_patterns=list(IGNORE_PATTERNS),
                **access.settings(),
            )
        )
    # ValueError: an address of the hub (HF_ENDPOINT) that is none.
    except (
        *(transport_error, LocalEntryNotFoundError, OfflineModeIsEnabled),
        ValueError,
    ) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise OSError(
            f"{hub_id}{at}: expected its files from the Hugging Face hub, got "
            f"{type(error).__name__}: {error}\n"
            "Check the id, and HF_ENDPOINT if it is set; set HF_TOKEN or hf_token if the model is "
            "private or gated; without a network pass a local directory, "
            "or set HF_HUB_OFFLINE=1 if the hub's cache holds the model."
        ) from error
