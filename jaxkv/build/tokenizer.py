"""Loads a tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxkv.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def load_tokenizer(directory: Path) -> Any:
    """Loads the directory's Hugging Face tokenizer. transformers is imported here, on first use;
    remote code is never run.
    """
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{directory}: expected {' or '.join(TOKENIZER_FILES)}, got neither; pass "
            f"tokenizer=DIR, or "
            "skip_tokenizer_init=True to work with token ids only"
        )
    # Without this, transformers tells on stderr that it found no PyTorch, which it is not asked for
    # here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory}: its tokenizer cannot be read: {type(error).__name__}: {error}"
        ) from error
