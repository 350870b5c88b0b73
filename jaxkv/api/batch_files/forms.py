"""Says what a line asks for and what its row looks like: the contract of every form, and the plain
form.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from jaxkv.api.response_parts import Parser
from jaxkv.config import SamplingParams, is_int, nearest_parameter
from jaxkv.lora.request import LoRARequest
from jaxkv.requests.outputs import RequestOutput
from jaxkv.requests.pooling import EmbeddingRequestOutput, PoolingParams
from jaxkv.structured import read_structured

LineId = str | int
Output = RequestOutput | EmbeddingRequestOutput


def hashed(line_id: LineId | None, num_bytes: int) -> bytes:
    """Returns a hash of an id that is the same in every process, which Python's own is not."""
    return hashlib.blake2b(json.dumps(line_id).encode(), digest_size=num_bytes).digest()


@dataclass(frozen=True, slots=True)
class Defaults:
    """Has the parameters of what a line leaves out: the run's, without a seed.

    `has_max_tokens`: the run says how many; where it does not, OpenAI's chats go on as long as the
    context allows. `models`: the names by which OpenAI's lines may call the model. `decode`: makes
    text of tokens, None without a tokenizer. `seed`: the run's, of which each line's is made.
    `pools`: the model makes vectors in place of text. `adapters`: by the names that lines may have
    in place of the model's. `parser` takes answers to OpenAI's chats apart.
    """

    params: SamplingParams
    has_max_tokens: bool
    models: tuple[str, ...]
    decode: Callable[[Sequence[int]], str] | None
    seed: int
    pools: bool
    adapters: Mapping[str, LoRARequest]
    parser: Parser | None

    def adapter(self, name: str | None) -> LoRARequest | None:
        """Returns the adapter of this name, None for a name of the model or none at all. Raises:
        ValueError for any other.
        """
        if name is None or name in self.models:
            return None
        if name not in self.adapters:
            names = " or ".join(map(repr, self.models))
            others = "or an adapter of --lora-modules, " if self.adapters else ""
            raise ValueError(
                f"model: expected {names}, which this run is of (--served-model-name has another "
                f"name), {others}got {name!r:.80}"
            )
        return self.adapters[name]


@dataclass(frozen=True, slots=True)
class Asking:
    """Holds what a line asks of the engine, and what else its form wants to know for the row."""

    prompt: Any
    params: SamplingParams | PoolingParams
    rest: Any = None
    lora_request: LoRARequest | None = None

    @property
    def request(self) -> tuple[Any, Any, LoRARequest | None]:
        """Returns it as `LLM.as_completed` and `embed_as_completed` take it."""
        return self.prompt, self.params, self.lora_request


@dataclass(frozen=True, slots=True)
class Job:
    """Holds a line that runs."""

    line_id: LineId
    form: Form
    asking: Asking


@dataclass(frozen=True, slots=True)
class Written:
    """Says which line a row of an output is of: its id, or for a line without one its number."""

    line_id: LineId | None
    number: int | None
    is_error: bool


class Form(ABC):
    """Is one way to write lines and rows. Each line says by its keys which one it is.

    A form tells its rows from those of others, and every row begins with the key "id".
    """

    id_key: ClassVar[str]
    """The key of a line that has its id."""

    @abstractmethod
    def id_of(self, line: Mapping[str, Any]) -> LineId:
        """Returns the id of a line. Raises: ValueError if it has none."""

    @abstractmethod
    def ask(self, line: Mapping[str, Any], defaults: Defaults) -> Asking:
        """Reads what a line asks for.

        Raises: ValueError naming the key of what is unknown, wrong or not supported: nothing in a
        line is ignored.
        """

    @abstractmethod
    def row(self, job: Job, output: Output, defaults: Defaults) -> dict[str, Any]:
        """Returns the row of a line that ran."""

    @abstractmethod
    def refusal(self, line_id: LineId | None, number: int, message: str) -> dict[str, Any]:
        """Returns the row of a line that did not; without an id the row has its number."""

    @abstractmethod
    def read(self, row: Mapping[str, Any]) -> Written | None:
        """Reads a row; None for one of another form. Raises: ValueError for one that is none."""


_KINDS = ("prompt", "prompt_token_ids", "messages")
_NOT_IN_LINES = {"n", "logprobs", "prompt_logprobs", "prompt_logprobs_start"}
_PARAMS = {one.name for one in fields(SamplingParams)} - _NOT_IN_LINES
_COUNTED = ("finish_reason", "num_prompt_tokens", "num_output_tokens")
_RESULTS = ({"id", "text", *_COUNTED}, {"id", "token_ids", *_COUNTED})


def changed(params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """Returns the parameters with some fields changed as JSON says them, which has an object for
    structured_outputs. Raises: ValueError.
    """
    asked = changes.get("structured_outputs")
    if isinstance(asked, dict):
        changes = {**changes, "structured_outputs": read_structured(asked)}
    return replace(params, **changes)


class Plain(Form):
    """Is jaxkv's own form: {"id", "prompt" or "prompt_token_ids" or "messages", "params"}, and
    "model" for an adapter.
    """

    id_key = "id"

    def id_of(self, line: Mapping[str, Any]) -> LineId:
        line_id: Any = line.get("id")
        if is_int(line_id) or isinstance(line_id, str):
            return line_id
        raise ValueError(f"id: expected a whole number or a text, got {line_id!r:.80}")

    def ask(self, line: Mapping[str, Any], defaults: Defaults) -> Asking:
        if defaults.pools:
            raise ValueError("expected a line for /v1/embeddings: this model makes vectors")
        if unknown := sorted(line.keys() - {"id", "params", "model", *_KINDS}):
            raise ValueError(f"unknown keys: {', '.join(unknown)}")
        given = [kind for kind in _KINDS if kind in line]
        if len(given) != 1:
            raise ValueError(
                f"expected one of {', '.join(_KINDS)}, got {' and '.join(given) or 'none'}"
            )
        if not isinstance(line.get("messages", []), list):
            raise ValueError(f"messages: expected a list, got {type(line['messages']).__name__}")
        changes = line.get("params", {})
        if not isinstance(changes, dict):
            raise ValueError(f"params: expected an object, got {type(changes).__name__}")
        if unknown := sorted(changes.keys() - _PARAMS):
            near = {name: nearest_parameter(name) for name in unknown}
            told = (f"{name} (nearest: {near[name]})" if near[name] else name for name in unknown)
            raise ValueError(f"params: unknown or not possible in a batch: {', '.join(told)}")
        params = changed(defaults.params, changes)
        name = line.get("model")
        if not isinstance(name, str | None):
            raise ValueError(f"model: expected a text, got {type(name).__name__}")
        lora = None if name is None else defaults.adapter(name)
        return Asking({given[0]: line[given[0]]}, params, lora_request=lora)

    def row(self, job: Job, output: Output, defaults: Defaults) -> dict[str, Any]:
        params = job.asking.params
        if not isinstance(output, RequestOutput) or not isinstance(params, SamplingParams):
            raise TypeError(f"output: expected one of text, got {type(output).__name__}")
        done = output.outputs[0]
        is_text = params.detokenize and defaults.decode is not None
        shown = {"text": done.text} if is_text else {"token_ids": done.token_ids}
        counted = (done.finish_reason, len(output.prompt_token_ids), len(done.token_ids))
        return {"id": job.line_id, **shown, **dict(zip(_COUNTED, counted, strict=True))}

    def refusal(self, line_id: LineId | None, number: int, message: str) -> dict[str, Any]:
        if line_id is None:
            return {"id": None, "line": number, "error": message}
        return {"id": line_id, "error": message}

    def read(self, row: Mapping[str, Any]) -> Written | None:
        keys = row.keys()
        if keys == {"id", "line", "error"} and row["id"] is None and is_int(row["line"]):
            return Written(None, row["line"], True)
        if keys == {"id", "error"} or keys in _RESULTS:
            return Written(self.id_of(row), None, "error" in row)
        return None
