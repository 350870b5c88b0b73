"""Reads how a checkpoint turns hidden states into a vector or scores: sentence-transformers' files,
or the head of a sequence classifier.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv.errors import CheckpointError
from jaxkv.models.families import ConfigReader, Layout, read_config
from jaxkv.models.spec import ModelSpec
from jaxkv.weights.load import FLOATS
from jaxkv.weights.safetensors import Checkpoint

MODULES = "modules.json"
TRANSFORMER = "sentence_bert_config.json"
CLASSIFIER = "ForSequenceClassification"
HEADS = ("score.weight", "score.bias", "lm_head.weight")
"""Tensors that a classifier's head may be made of."""

MAX_BYTES = 1_000_000
MAX_MODULES = 16

MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 0.5 + 0.5 * np.tanh(0.5 * x),  # which does not overflow
    "Softmax": lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum(),
}
"""By the last part of the class's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """Computes activation(weight_FD @ x + bias_F) on the host, in float32."""

    weight_FD: np.ndarray
    bias_F: np.ndarray | None
    activation: str

    def __call__(self, x_D: np.ndarray) -> np.ndarray:
        x_F = self.weight_FD @ x_D
        return ACTIVATIONS[self.activation](x_F if self.bias_F is None else x_F + self.bias_F)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooling:
    """Says what becomes of a prompt's hidden states (behind the final norm).

    kind: the state of its "last" or first ("cls") token, or their "mean". normalizes: a vector's
    length is 1 then. folders: of the dense layers behind, in order, with their activations.
    labels: rows of a classifier's head, 0 without one, whose scores go through `activation`;
    yes_no: tokens whose rows of the language model's head, the second less the first, are that
    head. `dense` and `head` are there once they are `loaded`.
    """

    kind: str = "last"
    normalizes: bool = True
    folders: tuple[tuple[str, str], ...] = ()
    labels: int = 0
    activation: str = "Sigmoid"
    yes_no: tuple[int, int] | None = None
    dense: tuple[Dense, ...] = field(default=(), compare=False)
    head: Dense | None = field(default=None, compare=False)

    def size(self, hidden_size: int) -> int:
        """Counts the numbers of a vector."""
        return len(self.dense[-1].weight_FD) if self.dense else hidden_size

    def embedding(
        self, pooled_D: np.ndarray, dimensions: int | None, normalize: bool | None
    ) -> np.ndarray:
        """Returns the vector, its first `dimensions` numbers if that is given."""
        x = pooled_D
        for dense in self.dense:
            x = dense(x)
        x = x[:dimensions]
        return unit(x) if (self.normalizes if normalize is None else normalize) else x

    def scores(self, pooled_D: np.ndarray, *, activate: bool) -> np.ndarray:
        """Returns a score for each label. Raises: ValueError without a classifier's head."""
        if self.head is None:
            raise ValueError(
                "expected a model with a classifier's head (*ForSequenceClassification, or "
                "classifier_from_token in hf_overrides), got one without"
            )
        return replace(self.head, activation=self.activation if activate else "Identity")(pooled_D)

    def loaded(self, directory: Path, layout: Layout, hidden_size: int) -> Pooling:
        """Returns it with its own weights. Raises: CheckpointError."""
        dense, size = list[Dense](), hidden_size
        for folder, kind in self.folders:
            dense.append(_checked(_read_dense(directory / folder, kind), size, directory / folder))
            size = len(dense[-1].weight_FD)
        if not self.labels:
            return replace(self, dense=tuple(dense))
        with Checkpoint.open(directory) as checkpoint:
            arrays = {name: checkpoint.read(name) for name in checkpoint.names if name in HEADS}
            if self.yes_no is not None and "lm_head.weight" not in arrays:
                names = (layout.top["embed"].source, "embed_tokens.weight")
                found = [name for name in names if name in checkpoint.entries]
                if found:
                    arrays["lm_head.weight"] = checkpoint.read(found[0])
            return self.with_head(arrays, directory, hidden_size)

    def with_head(
        self, arrays: Mapping[str, np.ndarray | jax.Array], where: Path, hidden_size: int
    ) -> Pooling:
        """Returns it with a classifier's head of these arrays. Raises: CheckpointError."""
        if not self.labels:
            return self
        if self.yes_no is None:
            name, rows = "score.weight", np.arange(self.labels)
        else:
            name, rows = "lm_head.weight", np.array(self.yes_no)
        if name not in arrays:
            raise CheckpointError(f"{where}: missing tensor {name}, a classifier's head")
        stored = arrays[name]
        if str(stored.dtype) not in FLOATS:
            raise CheckpointError(
                f"{where}: {name}: expected one of {', '.join(FLOATS)} of a classifier's head, got "
                f"{stored.dtype} (quantised heads are not built)"
            )
        fits = stored.ndim == 2 and (self.yes_no is not None or len(stored) == self.labels)
        if not fits or int(rows.max()) >= len(stored):
            raise CheckpointError(
                f"{where}: {name}: expected {self.labels} rows, got shape {stored.shape}"
            )
        weight_FD = np.array(stored[rows], np.float32)
        if self.yes_no is not None:
            weight_FD = weight_FD[1:] - weight_FD[:1]
        bias = arrays.get("score.bias") if self.yes_no is None else None
        bias_F = None if bias is None else np.array(bias, np.float32)
        head = Dense(weight_FD=weight_FD, bias_F=bias_F, activation=self.activation)
        return replace(self, head=_checked(head, hidden_size, where / name))


def unit(x: np.ndarray) -> np.ndarray:
    """Returns a vector of length 1 in its direction; zeros stay."""
    return x / max(float(np.linalg.norm(x)), 1e-12)


def read_pooling(
    directory: Path,
    config: ConfigReader,
    spec: ModelSpec,
    layout: Layout,
    runner: str,
    tokenizer: Any | None,
) -> Pooling | None:
    """Returns how the checkpoint pools, None where it is to generate: `runner` says so, or is auto
    and nothing says that it pools.

    Raises: CheckpointError for files that ask for something else than what is built.
    """
    has_modules = os.path.lexists(directory / MODULES)
    from_token = config.get("classifier_from_token")
    is_classifier = _is_classifier(config)
    if runner == "generate":
        return None
    if runner == "auto" and not says_that_it_pools(directory, config):
        return None
    if not is_classifier:
        return _of_modules(directory, spec) if has_modules else Pooling()
    if from_token is not None:
        if spec.scales.logits != 1 or spec.scales.logit_cap or _heads(layout) - {"head"}:
            raise config.fail(
                "classifier_from_token",
                "a model whose logits are its head times a state (no bias, factor or soft cap)",
            )
        config.refuse("is_original_qwen3_reranker", True)  # vLLM's word for the same
        yes_no = _token_ids(config, from_token, tokenizer)
        return Pooling(labels=1, yes_no=yes_no, activation="Sigmoid")
    id2label = config.section("id2label").values
    labels = config.size("num_labels", len(id2label) or 2, at_most=2**20)
    is_one = labels == 1 or config.get("problem_type") == "multi_label_classification"
    own = config.section("sentence_transformers").get("activation_fn")
    named = config.get("sbert_ce_default_activation_function") if own is None else own
    activation = "Sigmoid" if is_one else "Softmax"
    if config.get("problem_type") == "regression":
        activation = "Identity"
    if named is not None:
        activation = _activation(str(named), config.where)
    return Pooling(labels=labels, activation=activation)


def says_that_it_pools(directory: Path, config: ConfigReader) -> bool:
    """Tells whether files are of a model that makes vectors or scores, not text."""
    return os.path.lexists(directory / MODULES) or _is_classifier(config)


def _is_classifier(config: ConfigReader) -> bool:
    names = config.get("architectures") or ("",)
    is_named = str(names[0] if isinstance(names, list) else "").endswith(CLASSIFIER)
    return is_named or config.get("classifier_from_token") is not None


def pooling_layout(layout: Layout) -> Layout:
    """Returns the layout of a model that pools: without a language model's head, whose tensors the
    checkpoint may have.
    """
    heads = _heads(layout)
    top = {name: leaf for name, leaf in layout.top.items() if name not in heads}
    # What narrows the last state is the model's own in transformers.
    sources = [re.escape(layout.top[name].source) for name in heads - {"head_down"}]
    derived = (*layout.derived, *sources, r"lm_head\.(weight|bias)", r"score\..*")
    return replace(layout, top=top, derived=derived)


def _heads(layout: Layout) -> set[str]:
    """Returns the leaves that are there for logits alone."""
    return {name for name in layout.top if name.startswith("head")}


def _token_ids(config: ConfigReader, given: Any, tokenizer: Any | None) -> tuple[int, int]:
    """Returns the ids of the tokens that mean no and yes."""
    if tokenizer is None:
        raise ValueError("classifier_from_token: expected a tokenizer, got none")
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    known = tokenizer.get_vocab()
    if not is_pair or not all(isinstance(word, str) and word in known for word in given):
        raise config.fail("classifier_from_token", "two tokens, for no and yes")
    return known[given[0]], known[given[1]]


def _activation(name: str, where: str) -> str:
    """Returns the known name of a class. Raises: CheckpointError for another."""
    last = name.rpartition(".")[2]
    if last not in ACTIVATIONS:
        raise CheckpointError(
            f"{where}: activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r:.80}"
        )
    return last


def _of_modules(directory: Path, spec: ModelSpec) -> Pooling:
    """Reads what sentence-transformers does behind the model."""
    where = directory / MODULES
    kinds = [(_kind(module, where), module.get("path", "")) for module in _modules(where)]
    names = [kind for kind, _ in kinds]
    if names[:2] != ["Transformer", "Pooling"] or kinds[0][1] not in ("", "."):
        raise CheckpointError(
            f"{where}: expected a Transformer in this folder and a Pooling, got {names}"
        )
    if os.path.lexists(directory / TRANSFORMER):
        # Its max_seq_length cuts texts there; here that is asked for (`truncate_prompt_tokens`).
        read_config(directory, TRANSFORMER).refuse("do_lower_case", False)
    rest = names[2:]
    normalizes = rest[-1:] == ["Normalize"]
    if any(kind != "Dense" for kind in rest[: len(rest) - normalizes]):
        raise CheckpointError(
            f"{where}: expected Dense and then Normalize behind the Pooling, got {rest}"
        )
    folders = [path for kind, path in kinds if kind == "Dense"]
    dense = [(path, read_config(directory / path)) for path in folders]
    found = [
        (path, _activation(str(one.get("activation_function", "Tanh")), one.where))
        for path, one in dense
    ]
    return Pooling(
        kind=_mode(read_config(directory / kinds[1][1]), spec),
        normalizes=normalizes,
        folders=tuple(found),
    )


def _modules(where: Path) -> list[dict[str, Any]]:
    if not where.is_file() or where.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"{where}: expected a file of at most {MAX_BYTES} bytes")
    try:
        modules = json.loads(where.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: expected JSON, got {error}") from error
    is_list = isinstance(modules, list) and 0 < len(modules) <= MAX_MODULES
    if not is_list or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{where}: expected a list of 1 to {MAX_MODULES} objects")
    return modules


def _kind(module: dict[str, Any], where: Path) -> str:
    """Returns the last part of a module's class, having looked at its path: it must not leave the
    checkpoint.
    """
    path = module.get("path", "")
    is_inside = isinstance(path, str) and not os.path.isabs(path) and ".." not in Path(path).parts
    if not is_inside or not isinstance(module.get("type"), str):
        raise CheckpointError(
            f"{where}: expected a type and a folder beside it, got {module!r:.200}"
        )
    return module["type"].rpartition(".")[2]


def _mode(config: ConfigReader, spec: ModelSpec) -> str:
    modes = [key for key, value in config.values.items() if key in MODES and value is True]
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes.append(f"pooling_mode_{named}" if f"pooling_mode_{named}" in MODES else named)
    others = [
        key
        for key, value in config.values.items()
        if key.startswith("pooling_mode_") and value is True and key not in MODES
    ]
    if len(modes) != 1 or others or modes[0] not in MODES:
        raise CheckpointError(
            f"{config.where}: expected one of {', '.join(MODES)} to be true, got "
            f"{[*modes, *others]}"
        )
    config.refuse("include_prompt", True)
    size = config.get("word_embedding_dimension", spec.hidden_size)
    if size != spec.hidden_size:
        raise config.fail("word_embedding_dimension", f"the model's {spec.hidden_size}")
    return MODES[modes[0]]


def _read_dense(directory: Path, activation: str) -> Dense:
    with Checkpoint.open(directory) as checkpoint:
        unknown = set(checkpoint.names) - {"linear.weight", "linear.bias"}
        weight_FD = np.array(checkpoint.read("linear.weight"), np.float32)
        bias_F = None
        if "linear.bias" in checkpoint.entries:
            bias_F = np.array(checkpoint.read("linear.bias"), np.float32)
    if unknown or weight_FD.ndim != 2:
        raise CheckpointError(
            f"{directory}: expected linear.weight [out, in] and linear.bias [out]"
        )
    return Dense(weight_FD=weight_FD, bias_F=bias_F, activation=activation)


def _checked(dense: Dense, size: int, where: Path) -> Dense:
    """Returns it. Raises: CheckpointError unless it takes vectors of this size and is finite."""
    weight_FD, bias_F = dense.weight_FD, dense.bias_F
    if weight_FD.shape[1] != size or not len(weight_FD):
        raise CheckpointError(f"{where}: expected [out, {size}], got shape {weight_FD.shape}")
    if bias_F is not None and bias_F.shape != weight_FD.shape[:1]:
        raise CheckpointError(
            f"{where}: expected a bias of {len(weight_FD)} numbers, got shape {bias_F.shape}"
        )
    if not all(x is None or np.isfinite(x).all() for x in (weight_FD, bias_F)):
        raise CheckpointError(f"{where}: expected finite values")
    return dense
