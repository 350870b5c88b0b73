"""What a model loses by the codec of its KV cache, beside the bytes that it saves.

    python scripts/kv_lab.py --json docs/benchmarks/kv_lab.json --plot docs/benchmarks/kv_lab.svg
    python scripts/kv_lab.py --codecs int8,int4 --windows 2 --trials 8 --seeds 2      a quick look

On the demo model, and on one that is the same function with outliers in its keys: in each layer and KV head some pairs
of rotary channels are larger in k and as much smaller in q, and every key has one constant vector more, which softmax
does not see. Each sequence is computed as one prompt whose keys and values, its own included, are read back from pages
in the codec, by the engine's own attention (XLA). Compared with bfloat16 pages, weights and everything else in float32:

nll      nats per token of held-out library text, in windows, and the change in percent
kl       KL divergence of the next token's distribution from that with bfloat16 pages, nats per token
top1     share of tokens whose likeliest successor stays the same
logits   root mean square of the change of logits, as part of their spread over the vocabulary
recall   share of the values that are recalled whole, teacher-forced, at a distance in tokens

Each seed draws its own windows, questions and outliers; intervals are 95% of Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_generate import environment
from demo_data import BOS, Corpus, build_corpus, recall_trial
from tokenizers import Tokenizer

from jaxkv.config import EngineConfig
from jaxkv.engine.model import MEAN_TOKENS
from jaxkv.engine.pool import empty_kv
from jaxkv.kv.codecs import CODECS, Codec, bits_per_value, get_codec
from jaxkv.llm import DEMO
from jaxkv.models.decoder import forward, logits
from jaxkv.models.families import read_config, read_family
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Batch
from jaxkv.steps import key_means
from jaxkv.weights.load import load_weights

LENGTH, PAGE = 1024, 16
DISTANCES = (250, 900)
OUTLIER_PAIRS, OUTLIER = 3, 8.0
OFFSET = 4.0
"""Of the constant vector: keys of this model are about 1 large."""

WITH_MEAN = " with mean"
"""After a codec's name: of keys as they are, also where the engine takes their mean from them first."""

T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t for 95%, two-sided, by how many seeds there are."""


@dataclass(frozen=True)
class Pages:
    """How keys and values are stored; `centered`: keys without their mean (`steps.key_means`)."""

    codec: Codec
    centered: bool


class Model:
    """The demo model's function, with `variant` "outliers" in another form."""

    def __init__(self, variant: str, seed: int) -> None:
        self.spec, layout = read_family(read_config(DEMO))
        self.weights = load_weights(DEMO, self.spec, layout, dtype="float32")
        layers = self.weights["layers"]
        (group,) = self.spec.groups
        shape = (self.spec.num_layers, group.num_kv_heads * self.spec.head_dim)
        less = np.zeros(shape, np.float32)
        if variant == "outliers":
            rng = np.random.default_rng(seed)
            layers = self._with_outliers(layers, rng)
            # Few channels of the constant vector are large, as in models that have such keys.
            less = (-OFFSET * rng.normal(size=shape) * (rng.random(shape) < 0.15)).astype(np.float32)
        self.weights["layers"] = layers | {"k_mean": less}
        token_T = np.random.default_rng(0).integers(0, self.spec.vocab_size, MEAN_TOKENS)
        means = np.stack(key_means(self.weights, token_T, spec=self.spec, placement=None))
        self.centered = self.weights | {"layers": layers | {"k_mean": less + means}}

    def _with_outliers(self, layers: dict[str, jax.Array], rng: np.random.Generator) -> dict[str, jax.Array]:
        (group,) = self.spec.groups
        count, heads, head_dim = self.spec.num_layers, group.num_kv_heads, self.spec.head_dim
        factor = np.ones((count, heads, head_dim), np.float32)
        for layer in range(count):
            for head in range(heads):
                pairs = rng.choice(head_dim // 2, OUTLIER_PAIRS, replace=False)
                factor[layer, head, pairs] = factor[layer, head, pairs + head_dim // 2] = OUTLIER
        of_queries = factor.repeat(self.spec.num_heads // heads, axis=1)
        k, q = (x.reshape(count, -1, 1) for x in (factor, of_queries))
        return layers | {"k": layers["k"] * k, "q": layers["q"] / q}

    def run(self, pages: Pages, token_T: np.ndarray) -> np.ndarray:
        """Logits [T, V] of a sequence of at most LENGTH tokens, after each of them."""
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(token_T)] = token_T
        weights = self.centered if pages.centered else self.weights
        return np.asarray(program(self.spec, pages.codec)(weights, padded, np.int32(len(token_T))))[: len(token_T)]


@cache
def program(spec: ModelSpec, codec: Codec) -> Any:
    """(weights, tokens [LENGTH], how many of them are real) -> logits after each of them."""

    @jax.jit
    def run(weights: Any, token_T: jax.Array, length: jax.Array) -> jax.Array:
        config = EngineConfig(
            max_model_len=LENGTH, max_num_seqs=1, max_num_batched_tokens=LENGTH, block_size=PAGE,
            num_pages=LENGTH // PAGE, decode_steps=8, seed=0,
        )  # fmt: skip
        kv = empty_kv(spec, config, codec, backend="xla")
        table_BW = jnp.arange(LENGTH // PAGE, dtype=jnp.int32)[None]
        (group,) = kv.groups
        rows = {"table_BW": table_BW, "first_BW": table_BW * PAGE, "len_B": jnp.zeros(1, jnp.int32)}
        kv = kv.replace(groups=(group.replace(**rows),))
        position_T = jnp.arange(LENGTH, dtype=jnp.int32)
        row_T = jnp.where(position_T < length, 0, 1)
        counts: Any = (jnp.zeros(1, jnp.int32), length[None], jnp.int32(0), jnp.int32(1))
        batch = Batch(token_T, position_T, row_T, *counts)
        _, x_TD = forward(weights, kv, batch, spec=spec, backend="xla")
        return logits(weights, x_TD, spec=spec)

    return run


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def windows(corpus: Corpus, rng: random.Random, count: int) -> Iterator[np.ndarray]:
    """Held-out text of LENGTH tokens from random lines on."""
    lines = corpus.held_out_lines
    for _ in range(count):
        start = rng.randrange(len(lines) - 400)
        ids = corpus.tokenizer.encode("".join(lines[start : start + 400]), add_special_tokens=False).ids
        yield np.array([BOS, *ids][:LENGTH], np.int32)


def of_text(model: Model, codecs: dict[str, Pages], texts: list[np.ndarray]) -> dict[str, dict[str, float]]:
    """By codec the figures of held-out text."""
    sums: dict[str, list[list[float]]] = {name: [] for name in codecs}
    for token_T in texts:
        base = model.run(codecs["bfloat16"], token_T)[:-1]
        base_log, spread = log_softmax(base), base.std(axis=-1)
        for name, codec in codecs.items():
            found = model.run(codec, token_T)[:-1]
            log = log_softmax(found)
            change = (found - found.mean(axis=-1, keepdims=True)) - (base - base.mean(axis=-1, keepdims=True))
            of_token = [
                -np.take_along_axis(log, token_T[1:, None], axis=-1)[:, 0],
                (np.exp(base_log) * (base_log - log)).sum(axis=-1),
                log.argmax(axis=-1) == base_log.argmax(axis=-1),
                (change**2).mean(axis=-1) / spread**2,
            ]
            sums[name].append([float(np.mean(x)) for x in of_token])
    means = {name: np.mean(rows, axis=0) for name, rows in sums.items()}
    return {
        name: {
            "nll": float(nll),
            "nll_change": float(100 * (nll / means["bfloat16"][0] - 1)),
            "kl": float(kl),
            "top1": float(top1),
            "logits": float(mean_square**0.5),
        }
        for name, (nll, kl, top1, mean_square) in means.items()
    }


def of_recall(model: Model, codecs: dict[str, Pages], trials: list[tuple[list[int], int]]) -> dict[str, float]:
    """By codec the share of trials whose whole answer is the likeliest continuation."""

    def is_right(codec: Pages, ids: list[int], start: int) -> bool:
        found = model.run(codec, np.array(ids, np.int32))[start - 1 : -1].argmax(axis=-1)
        return bool((found == ids[start:]).all())

    return {name: float(np.mean([is_right(codec, *trial) for trial in trials])) for name, codec in codecs.items()}


def measure(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Adds to `result`, variant by variant and seed by seed, and writes it after each."""
    corpus = build_corpus(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    codecs = {}
    for name in ("bfloat16", *options.codecs):
        codec = get_codec(name.removesuffix(WITH_MEAN), platform="cpu", dtype="float32")
        codecs[name] = Pages(codec, codec.centers_keys and not name.endswith(WITH_MEAN))
    head_dim = Model("plain", 0).spec.head_dim
    result["bits"] = {name: bits_per_value(pages.codec, head_dim) for name, pages in codecs.items()}
    result["variants"] = {variant: [] for variant in ("plain", "outliers")}
    for variant, seen in result["variants"].items():
        for seed in range(options.seeds):
            started, rng, model = time.monotonic(), random.Random(seed), Model(variant, seed)
            one: dict[str, Any] = of_text(model, codecs, list(windows(corpus, rng, options.windows)))
            for distance in DISTANCES:
                trials = [recall_trial(rng, corpus, distance) for _ in range(options.trials)]
                trials = [(ids[-LENGTH:], start - max(0, len(ids) - LENGTH)) for ids, start in trials]
                for name, share in of_recall(model, codecs, trials).items():
                    one[name][f"recall_{distance}"] = share
            seen.append(one)
            print(f"{variant}, seed {seed}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95% interval (nan of a single value)."""
    half = T95[len(values)] * np.std(values, ddof=1) / len(values) ** 0.5 if len(values) in T95 else float("nan")
    return float(np.mean(values)), float(half)


def table(result: dict[str, Any]) -> str:
    recalls = [f"recall_{distance}" for distance in DISTANCES]
    names = ["nll_change", "kl", "top1", "logits", *recalls]
    rows = []
    for variant, seen in result["variants"].items():
        rows.append(f"{variant:26s}{'bits':>7s}" + "".join(f"{name:>19s}" for name in names))
        for codec, bits in result["bits"].items():
            cells = (interval([one[codec][name] for one in seen]) for name in names)
            rows.append(f"  {codec:24s}{bits:7.3f}" + "".join(f"{mean:11.4f} ±{half:6.4f}" for mean, half in cells))
    return "\n".join(rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """KL over bits per value, a line for each variant."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for variant, seen in result["variants"].items():
        points = []
        for codec, bits in result["bits"].items():
            if codec != "bfloat16":
                points.append((bits, *interval([one[codec]["kl"] for one in seen]), codec))
        points.sort()
        x, y, half, labels = zip(*points, strict=True)
        axes.errorbar(x, y, yerr=np.minimum(half, np.array(y) * 0.99), fmt="o", capsize=3, label=variant)
        if variant == "plain":
            for at, of, name in zip(x, y, labels, strict=True):
                axes.annotate(name, (at, of), textcoords="offset points", xytext=(5, -10), fontsize=8)
    axes.set(xlabel="bits per value, scales included", ylabel="KL from bfloat16 pages, nats per token", yscale="log")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quantised = [name for name in CODECS if name not in ("bfloat16", "float32")]
    parser.add_argument("--codecs", default=",".join([*quantised, f"int4{WITH_MEAN}", f"turboquant4{WITH_MEAN}"]))
    parser.add_argument("--windows", type=int, default=8, help="of each seed")
    parser.add_argument("--trials", type=int, default=48, help="of each seed and distance")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG or PNG; needs matplotlib")
    options = parser.parse_args()
    options.codecs = options.codecs.split(",")
    result: dict[str, Any] = environment() | {"command": " ".join(sys.argv)}
    measure(options, result)
    print(table(result))
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
