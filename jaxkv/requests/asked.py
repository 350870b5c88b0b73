"""Says what a submission was made from, in JSON: by it another process makes the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from jaxkv.config import BeamSearchParams, SamplingParams
from jaxkv.lora.request import LoRARequest
from jaxkv.requests.pooling import PoolingParams
from jaxkv.structured import StructuredOutputsParams
from jaxkv.weights.adapters import Adapter

Params = SamplingParams | BeamSearchParams | PoolingParams

KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (SamplingParams, BeamSearchParams, PoolingParams)
}

UNSENT = {"output_kind", "skip_clone"}
"""One is for who reads the output, the other may be anything and changes nothing."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Holds what `Intake` made a submission from: its number, and what a caller gave, with the
    tokens of the prompt in place of its other forms.
    """

    number: int
    params: Params
    priority: int = 0
    salt: str = ""

    def to_json(
        self,
        text: str | None,
        tokens: Sequence[int],
        lora: LoRARequest | None = None,
        adapter: Adapter | None = None,
    ) -> dict[str, Any]:
        """Returns it with the prompt's text and tokens, and what names its adapter."""
        return {
            "number": self.number,
            "prompt": {
                "prompt": text,
                "prompt_token_ids": list(tokens),
                "cache_salt": self.salt,
            },
            "kind": type(self.params).__name__,
            "params": _changed(self.params),
            "priority": self.priority,
            "lora": None if lora is None or adapter is None else adapter_to_json(lora, adapter),
        }


def adapter_to_json(lora: LoRARequest, adapter: Adapter) -> tuple[list[Any], str]:
    """Returns the name, number and path of an adapter, and what was read there."""
    return [lora.name, lora.adapter_id, lora.path], adapter.digest.hex()


def params_of(message: Mapping[str, Any]) -> Params:
    """Returns the parameters that `to_json` wrote."""
    values = dict(message["params"])
    if (structured := values.get("structured_outputs")) is not None:
        values["structured_outputs"] = StructuredOutputsParams(**structured)
    made: Params = KINDS[message["kind"]](**values)
    return made


def _changed(params: Params) -> dict[str, Any]:
    """Returns the fields that do not have their default."""
    found = {}
    for one in fields(params):
        value = getattr(params, one.name)
        if value != one.default and one.name not in UNSENT:
            found[one.name] = asdict(value) if isinstance(value, StructuredOutputsParams) else value
    return found
