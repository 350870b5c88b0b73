"""Reads and writes the lines of OpenAI's batches: a request to an endpoint, and its response.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...",
     "body": {...}}, "error": null}
    {"id": "batch_req_...", "custom_id": "a", "response": null, "error": {"code", "message"}}

A bad line without a custom_id of its own has "id": "batch_req_line_N" and "custom_id": null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxkv.api.batch_files.forms import Asking, Defaults, Form, Job, LineId, Output, Written, hashed
from jaxkv.api.openai_answers import Answer
from jaxkv.api.openai_format import CHAT, COMPLETIONS, read_body
from jaxkv.api.openai_vectors import EMBEDDINGS, Vectors, read_vectors

KEYS = {"custom_id", "method", "url", "body"}
_ROW_KEYS = {"id", "custom_id", "response", "error"}
_BY_NUMBER = "batch_req_line_"
_NOT_BUILT = ("/v1/responses", "/v1/moderations")


class OpenAI(Form):
    """Is the form of OpenAI's batches, for chats, completions and embeddings."""

    id_key = "custom_id"

    def id_of(self, line: Mapping[str, Any]) -> LineId:
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str):
            raise ValueError(f"custom_id: expected a text, got {custom_id!r:.80}")
        return custom_id

    def ask(self, line: Mapping[str, Any], defaults: Defaults) -> Asking:
        if unknown := sorted(line.keys() - KEYS):
            raise ValueError(f"unknown keys: {', '.join(unknown)}")
        if line.get("method") != "POST":
            raise ValueError(f"method: expected 'POST', got {line.get('method')!r:.80}")
        url, body = line.get("url"), line.get("body")
        possible = (EMBEDDINGS,) if defaults.pools else (CHAT, COMPLETIONS)
        if not isinstance(url, str) or url not in possible:
            built = " (which is not built here)" if url in _NOT_BUILT else ""
            if url in (CHAT, COMPLETIONS, EMBEDDINGS):
                built = " (a model makes either text or vectors: --runner)"
            raise ValueError(f"url: expected {' or '.join(possible)}, got {url!r:.80}{built}")
        if not isinstance(body, dict):
            raise ValueError(f"body: expected an object, got {type(body).__name__}")
        if defaults.decode is None:
            raise ValueError("body: expected a tokenizer, got skip_tokenizer_init=True")
        if url == EMBEDDINGS:
            wanted = read_vectors(body)
            if len(wanted.inputs) > 1:
                raise ValueError(f"input: expected one in a line, got {len(wanted.inputs)}")
            lora = defaults.adapter(wanted.model)
            vectors = Vectors(wanted.model or defaults.models[0], is_base64=wanted.is_base64)
            return Asking(wanted.inputs[0], wanted.params, vectors, lora)
        asked = read_body(url, body, defaults.params, parser=defaults.parser)
        lora = defaults.adapter(asked.model)
        if asked.stream:
            raise ValueError("stream: expected false in a batch, got true")
        if len(asked.inputs) > 1:
            raise ValueError(f"prompt: expected one in a line, got {len(asked.inputs)}")
        params = asked.params
        if defaults.has_max_tokens and not _says_max_tokens(body):
            params = replace(params, max_tokens=defaults.params.max_tokens)
        name = f"{'chatcmpl' if url == CHAT else 'cmpl'}-{_hex(self.id_of(line))}"
        model = asked.model or defaults.models[0]
        answer = Answer(
            asked=asked, model=model, decode=defaults.decode, parser=defaults.parser, id=name
        )
        return Asking(asked.inputs[0], params, answer, lora)

    def row(self, job: Job, output: Output, defaults: Defaults) -> dict[str, Any]:
        number, answer = _hex(job.line_id), job.asking.rest
        response = {
            "status_code": 200,
            "request_id": f"req_{number}",
            "body": answer.whole([output]),
        }
        return {
            "id": f"batch_req_{number}",
            "custom_id": job.line_id,
            "response": response,
            "error": None,
        }

    def refusal(self, line_id: LineId | None, number: int, message: str) -> dict[str, Any]:
        known = line_id is not None
        return {
            "id": f"batch_req_{_hex(line_id)}" if known else f"{_BY_NUMBER}{number}",
            "custom_id": line_id,
            "response": None,
            "error": {"code": "invalid_request", "message": message},
        }

    def read(self, row: Mapping[str, Any]) -> Written | None:
        if row.keys() != _ROW_KEYS:
            return None
        is_error = row["error"] is not None
        if row["custom_id"] is not None:
            return Written(self.id_of(row), None, is_error)
        number = str(row["id"]).removeprefix(_BY_NUMBER)
        if not (is_error and number.isascii() and number.isdecimal()):
            raise ValueError(f"id: expected {_BY_NUMBER} and a number, got {row['id']!r:.80}")
        return Written(None, int(number), is_error)


def _hex(line_id: LineId | None) -> str:
    """Returns a number that is the same whenever a line runs."""
    return hashed(line_id, 12).hex()


def _says_max_tokens(body: Mapping[str, Any]) -> bool:
    names = ("max_tokens", "max_completion_tokens")
    return any(body.get(name) is not None for name in names)
