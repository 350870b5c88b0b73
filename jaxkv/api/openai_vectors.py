"""Reads the bodies of OpenAI's requests for embeddings and writes their answers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxkv.api.openai_format import BodyError, Keys, key_of, prompts_of
from jaxkv.requests.pooling import EmbeddingRequestOutput, PoolingParams

EMBEDDINGS = "/v1/embeddings"
FORMATS = ("float", "base64")


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedVector:
    """Holds what a body asks for. `is_base64`: the vector is written as bytes of float32."""

    model: str | None
    prompt: dict[str, Any]
    params: PoolingParams
    is_base64: bool


def read_embedding(body: Mapping[str, Any]) -> AskedVector:
    """Reads the body of a request for the vector of one input; `truncate_prompt_tokens` is vLLM's.

    Raises: BodyError.
    """
    keys = Keys(body)
    inputs = prompts_of(keys.take_any("input"), "input")
    if len(inputs) > 1:
        raise BodyError(f"input: expected one in a line, got {len(inputs)}", "input")
    form = keys.take("encoding_format", str, "float")
    if form not in FORMATS:
        raise BodyError(
            f"encoding_format: expected one of {', '.join(FORMATS)}, got {form!r:.80}",
            "encoding_format",
        )
    given = {name: keys.take(name, int) for name in ("dimensions", "truncate_prompt_tokens")}
    try:
        params = PoolingParams(**given)
    except ValueError as error:
        raise BodyError(str(error), key_of(error, body.keys())) from error
    model = keys.take("model", str)
    keys.end()
    return AskedVector(model=model, prompt=inputs[0], params=params, is_base64=form == "base64")


@dataclass(frozen=True, slots=True)
class Vectors:
    """Writes the answer to a request for embeddings."""

    model: str
    is_base64: bool

    def whole(self, outputs: Sequence[EmbeddingRequestOutput]) -> dict[str, Any]:
        """Returns the body of the answer; outputs: of each input."""
        count = sum(len(output.prompt_token_ids) for output in outputs)
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(output)}
            for index, output in enumerate(outputs)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    def _written(self, output: EmbeddingRequestOutput) -> list[float] | str:
        vector = output.outputs.embedding
        if not self.is_base64:
            return vector
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
