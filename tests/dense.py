"""The reference of whole generations: a decoder in numpy that knows no pages, chunks or batches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file


@dataclass(frozen=True)
class Dense:
    """A Llama-like decoder in numpy, without pages, chunks or batches: [T, T] attention over one
    sequence.
    """

    directory: Path
    windows: tuple[int | None, ...]
    kv_dtype: str
    dtype: str = "float64"

    @cached_property
    def config(self) -> dict:
        return json.loads((self.directory / "config.json").read_text())

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        return {
            name: x.astype(self.dtype)
            for name, x in load_file(self.directory / "model.safetensors").items()
        }

    def logits(self, ids: list[int]) -> np.ndarray:
        """[T, V]: at each position, of the next token."""
        embed = self.tensors["model.embed_tokens.weight"]
        x = embed[ids]
        for layer, window in enumerate(self.windows):
            x = x + self._attention(self._norm(x, layer, "input_layernorm"), layer, window)
            h = self._norm(x, layer, "post_attention_layernorm")
            gate = self._linear(h, layer, "mlp.gate_proj")
            up = self._linear(h, layer, "mlp.up_proj")
            x = x + self._linear(gate / (1 + np.exp(-gate)) * up, layer, "mlp.down_proj")
        x = self._rms(x) * self.tensors["model.norm.weight"]
        return x @ self.tensors.get("lm_head.weight", embed).T

    def greedy(self, ids: list[int], count: int) -> tuple[list[int], float]:
        """The tokens, and the smallest lead that one of them has over the next likeliest."""
        tokens, lead = list(ids), np.inf
        for _ in range(count):
            *_, second, best = np.sort(last := self.logits(tokens)[-1])
            lead = min(lead, best - second)
            tokens.append(int(last.argmax()))
        return tokens[len(ids) :], lead

    def _attention(self, h: np.ndarray, layer: int, window: int | None) -> np.ndarray:
        q, k, v = (self._heads(h, layer, name) for name in "qkv")
        k, v = (self.stored(x, layer).repeat(q.shape[0] // x.shape[0], axis=0) for x in (k, v))
        scores = np.where(
            self.seen(len(h), window), q @ k.swapaxes(1, 2) / q.shape[2] ** 0.5, -np.inf
        )
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        out = self.attended(weights / weights.sum(axis=2, keepdims=True), v)
        return self._linear(out.swapaxes(0, 1).reshape(len(h), -1), layer, "self_attn.o_proj")

    def stored(self, x: np.ndarray, layer: int) -> np.ndarray:
        """What a layer's keys or values [K, T, H] are once they have been in its cache."""
        return x.astype(np.dtype(getattr(ml_dtypes, self.kv_dtype, self.kv_dtype))).astype(
            self.dtype
        )

    def seen(self, length: int, window: int | None) -> np.ndarray:
        """[T, T] bool: which keys a query sees."""
        distance = np.subtract.outer(np.arange(length), np.arange(length))
        return (distance >= 0) & (distance < (window or np.inf))

    def attended(self, weights: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Weights [N, T, T] and values [N, T, H] -> [N, T, H]."""
        return weights @ v

    def _heads(self, h: np.ndarray, layer: int, name: str) -> np.ndarray:
        """Normed and rotated [heads, T, H]."""
        heads = self.config["num_attention_heads" if name == "q" else "num_key_value_heads"]
        x = (
            self._linear(h, layer, f"self_attn.{name}_proj")
            .reshape(len(h), heads, -1)
            .swapaxes(0, 1)
        )
        norm = self.tensors.get(f"model.layers.{layer}.self_attn.{name}_norm.weight")
        x = x if norm is None else self._rms(x) * norm
        half = x.shape[2] // 2
        rope = self.config.get("rope_parameters", self.config)
        angle = np.outer(
            np.arange(len(h)), rope.get("rope_theta", 10000.0) ** (-np.arange(half) / half)
        )
        angle = angle.astype(self.dtype)
        a, b = x[..., :half], x[..., half:]
        turned = np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=2
        )
        return x if name == "v" else turned

    def _linear(self, x: np.ndarray, layer: int, name: str) -> np.ndarray:
        prefix = f"model.layers.{layer}.{name}"
        return x @ self.tensors[f"{prefix}.weight"].T + self.tensors.get(f"{prefix}.bias", 0.0)

    def _norm(self, x: np.ndarray, layer: int, name: str) -> np.ndarray:
        return self._rms(x) * self.tensors[f"model.layers.{layer}.{name}.weight"]

    def _rms(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"])
