"""Loads a tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxkv.errors import CheckpointError
from jaxkv.models.families import check_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PAIR = ("vocab.json", "merges.txt")
"""These two are enough as well."""

TEMPLATE = "chat_template.json"
"""Has the template in older checkpoints of models with pictures, for what prepares those."""

OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", TEMPLATE)
"""Files that are read beside them, where they are there."""

ADVICE = (
    "fetch the file again, pass tokenizer=DIR, or skip_tokenizer_init=True to work with token ids "
    "only"
)


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """Loads the directory's Hugging Face tokenizer. transformers is imported here, on first use.

    trust_remote_code: runs Python code of the directory where the tokenizer is made of it.
    Raises: CheckpointError naming the file that cannot be read.
    """
    # A directory or a broken link would be passed over, and its tokens with it.
    for name in TOKENIZER_FILES + OTHER_FILES:
        if os.path.lexists(directory / name) and not (directory / name).is_file():
            raise CheckpointError(
                f"{directory / name}: expected a file, got a directory or a broken link; {ADVICE}"
            )
    is_there = {name: (directory / name).is_file() for name in (*TOKENIZER_FILES, *PAIR)}
    if not any(is_there[name] for name in TOKENIZER_FILES) and not all(
        is_there[name] for name in PAIR
    ):
        raise CheckpointError(
            f"{directory}: expected {' or '.join(TOKENIZER_FILES)}, got neither; pass "
            f"tokenizer=DIR, or "
            "skip_tokenizer_init=True to work with token ids only"
        )
    # Without this, transformers tells on stderr that it found no PyTorch, which it is not asked for
    # here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    with _NamingTheFile(directory):
        kind: Any = known_class(directory)
        if kind is None:
            from transformers import AutoTokenizer as kind
        tokenizer = kind.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    if tokenizer.chat_template is None and (directory / TEMPLATE).is_file():
        tokenizer.chat_template = check_json(directory / TEMPLATE).get("chat_template")
    # transformers takes anything, and fails when it uses them.
    for key, kinds, expected in (
        ("chat_template", (str, dict, type(None)), "a text"),
        ("model_max_length", (int, float), "a number"),
    ):
        if not isinstance(value := getattr(tokenizer, key), kinds):
            raise CheckpointError(
                f"{directory / TOKENIZER_FILES[1]}: {key}: expected {expected}, got "
                f"{type(value).__name__}; {ADVICE}"
            )
    # Some tokenizer_config.json ask for it: spaces before punctuation go, so a token's text in its
    # log-probability would be another one than in the output.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
OF_MODELS = {
    "CohereTokenizer": ("cohere", "cohere2"),
    "GPT2Tokenizer": ("gpt2", "gpt_neo", "gptj", "jais2", "opt", "phi", "starcoder2"),
    "GPTNeoXTokenizer": ("falcon_mamba", "gpt_neox", "mamba", "mamba2", "olmo", "olmoe"),
    "GemmaTokenizer": (
        *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"),
        "recurrent_gemma",
    ),
    "LlamaTokenizer": ("llama",),
    "Qwen2Tokenizer": ("qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
    "Qwen3_5Tokenizer": ("qwen3_5_text",),
}
"""Classes that AutoTokenizer takes of these model types where tokenizer_config.json names them."""

ALWAYS = {
    "qwen2": "Qwen2Tokenizer",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
}
"""Classes that it takes of these model types, whatever is named."""

ALWAYS_GENERIC = (
    *("mistral", "mixtral", "ministral", "ministral3", "mistral3"),
    *("granite", "granitemoe", "granitemoehybrid", "granitemoeshared"),
    *("olmo2", "olmo3", "olmo_hybrid", "flex_olmo", "glm", "glm4", "glm4_moe", "glm4_moe_lite"),
    *("ernie4_5", "ernie4_5_moe", "hyperclovax", "jamba", "mimo_v2_flash", "minicpm3"),
    *("minimax_m2", "nemotron", "persimmon", "phi3", "phimoe", "stablelm"),
)
"""Model types of which it takes the generic class, whatever is named."""


def known_class(directory: Path) -> Any | None:
    """Returns the class that transformers' AutoTokenizer would choose, where the files leave no
    doubt; else None: then it has to be asked, which imports torch wherever that is installed.
    """
    files = [directory / name for name in ("tokenizer.json", "tokenizer_config.json")]
    if not all(file.is_file() for file in files) or (directory / "tekken.json").exists():
        return None
    config = check_json(files[1])
    name = config.get("tokenizer_class")
    if not isinstance(name, str) or "auto_map" in config:
        return None
    import transformers

    model = directory / "config.json"
    model_type = check_json(model).get("model_type") if model.is_file() else None
    if not isinstance(model_type, str | None):
        return None
    if model_type in ALWAYS:
        return getattr(transformers, ALWAYS[model_type], None)
    if name in GENERIC or model_type in ALWAYS_GENERIC:
        return transformers.PreTrainedTokenizerFast
    name = name.removesuffix("Fast")
    if model_type not in OF_MODELS.get(name, ()):
        return None
    # Llama 3's file under Llama 2's name, as some checkpoints have it.
    if name == "LlamaTokenizer" and "ByteLevel" in files[0].read_text(encoding="utf-8"):
        return transformers.PreTrainedTokenizerFast
    return getattr(transformers, name, None)


def check_vocabulary(tokenizer: Any, vocab_size: int, directory: Path) -> None:
    """Raises CheckpointError for a tokenizer of more tokens than the model has.

    What is added to it does not count: fine-tuned models are known to come with a padding token
    that has no embedding. A prompt that holds one is refused.
    """
    if (num_tokens := tokenizer.vocab_size) > vocab_size:
        raise CheckpointError(
            f"{directory}: expected a tokenizer of at most {vocab_size} tokens, as vocab_size of "
            f"the model's config.json says, got {num_tokens}: is it another model's? Pass "
            f"tokenizer=DIR, or skip_tokenizer_init=True"
        )


class _NamingTheFile:
    """Raises a CheckpointError instead of any `Exception` of its block, but for a lack of memory.

    There is no list of types to catch: tokenizers raises bare `Exception`, huggingface_hub types of
    its own, and transformers whatever a value of another kind leads to.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, MemoryError):
            return
        files = [self._directory / name for name in TOKENIZER_FILES + OTHER_FILES]
        files = [file for file in files if file.is_file()]
        for file in files:
            if file.suffix == ".json":
                check_json(file)
        raise CheckpointError(
            f"{self._culprit(error, files)}: its tokenizer cannot be read: "
            f"{type(error).__name__}: {error}; {ADVICE}"
        ) from error

    def _culprit(self, error: Exception, files: list[Path]) -> str:
        """Returns the file that the error is about, or the directory with all that it may be."""
        from huggingface_hub.errors import StrictDataclassError

        # transformers reads config.json for the kind of tokenizer, and checks all of it.
        if isinstance(error, StrictDataclassError):
            return str(self._directory / "config.json")
        # The library of that file raises nothing else.
        if type(error) is Exception:
            return str(self._directory / TOKENIZER_FILES[0])
        return f"{self._directory} ({', '.join(file.name for file in files)})"
