"""Defines how callers name an adapter, under vLLM's names."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Names a LoRA adapter in PEFT's form: a directory with adapter_config.json and
    adapter_model.safetensors. Source: LoRA, arXiv 2106.09685.

    lora_name and lora_int_id are the caller's; which adapter it is, for the prefix cache too, only
    the files say. They are read when a request comes, and again after they have changed.
    Raises: ValueError naming the field. What is wrong with the files is found when a request is
    accepted.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name: expected a text, got {self.lora_name!r:.80}")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id: expected a number >= 1, got {self.lora_int_id!r:.80}")
        is_path = isinstance(self.lora_path, str | os.PathLike)
        if not is_path or not os.fspath(self.lora_path):
            raise ValueError(f"lora_path: expected a directory, got {self.lora_path!r:.80}")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return os.fspath(self.lora_path)
