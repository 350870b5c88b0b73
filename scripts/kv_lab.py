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
attention  the same of the attention's outputs against those of exact keys and values, mean over the layers
recall   share of the values that are recalled whole, teacher-forced, at a distance in tokens

A codec's name stands for what the engine does; "fitted" and "unfitted" after it are keys with and without `fit_keys`.
Rows without bits are of what the engine does not do: some keys and values exact, or turboquant4 with keys of 3 bits and
a bit of QJL. Each seed draws its own
windows, questions and outliers; intervals are 95% of Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from jaxkv.engine.model import FIT_TOKENS
from jaxkv.engine.pool import empty_kv
from jaxkv.kv.codecs import CODECS, Codec, bits_per_value, decode, get_codec
from jaxkv.kv.state import GroupKV, PagedKV
from jaxkv.llm import DEMO
from jaxkv.models.decoder import forward, logits
from jaxkv.models.families import read_config, read_family
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Batch
from jaxkv.ops.attention.moments import Moments
from jaxkv.steps import fit_keys
from jaxkv.weights.load import load_weights

LENGTH, PAGE = 1152, 16
WINDOW = 1024
DISTANCES = (250, 1000)
OUTLIER_PAIRS, OUTLIER = 3, 8.0
OFFSET = 4.0
"""Of the constant vector: keys of this model are about 1 large."""

T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t for 95%, two-sided, by how many seeds there are."""


@dataclass(frozen=True)
class Exact:
    """Which keys and values have not been through the codec: of the first tokens of a sequence, of the tokens that a
    query has just passed, of the layers at both ends."""

    first: int = 0
    recent: int = 0
    layers: int = 0


EXCEPTIONS = {
    "": Exact(),
    "first page exact": Exact(first=PAGE),
    "last 64 tokens exact": Exact(recent=64),
    "first and last layer exact": Exact(layers=1),
}


QJL = "one bit of keys as QJL"


@dataclass(frozen=True)
class Qjl:
    """A reference, for the laboratory alone: what `codec` leaves of a key is stored as its length and, a bit for each
    coordinate, the signs of a random projection. Products with queries are then right on average.

    Source: TurboQuant, arXiv 2504.19874, algorithm 2, and QJL, arXiv 2406.03482.
    """

    codec: Codec

    def stored(self, x: jax.Array) -> jax.Array:
        """The vectors that are left of vectors [..., H]."""
        kept = decode(self.codec, self.codec.encode(x))
        rest, size = x - kept, x.shape[-1]
        projection = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
        signs = jnp.sign(jnp.matmul(rest, projection.T, precision="highest"))
        length = jnp.linalg.norm(rest, axis=-1, keepdims=True)
        return kept + (np.pi / 2) ** 0.5 / size * length * jnp.matmul(signs, projection, precision="highest")


@dataclass(frozen=True)
class Pages:
    """How keys and values are stored: `fitted` as by `steps.fit_keys`, read by `exact` or, None, by the engine."""

    codec: Codec
    fitted: bool
    exact: Exact | None = None
    qjl: Qjl | None = None
    """Of keys, in place of `codec`."""


@dataclass(frozen=True)
class Stored(Moments):
    """Attention of one sequence whose keys and values have been stored, but for `exact`.

    The "page" of a layer is the relative squared error of its output. `passes`: what the next layer gets is the output
    of exact keys and values, so that all errors are of one layer alone.
    """

    codec: Codec
    exact: Exact
    num_layers: int
    passes: bool
    qjl: Qjl | None = None

    def attend(self, q_TNH: Any, k_TKH: Any, v_TKH: Any, group: GroupKV, *_: Any, layer: Any, scale: float, **__: Any):  # type: ignore[no-untyped-def]
        num_tokens, kv_heads = k_TKH.shape[:2]
        position = jnp.arange(num_tokens)
        distance = position[:, None] - position[None, :]
        is_exact = (position[None, :] < self.exact.first) | (distance < self.exact.recent)
        is_exact |= (layer < self.exact.layers) | (layer >= self.num_layers - self.exact.layers)
        q_TKGH = q_TNH.reshape(num_tokens, kv_heads, -1, q_TNH.shape[2])

        def attention(stored: bool) -> jax.Array:
            pairs = [(x, x) for x in (k_TKH, v_TKH)]
            if stored:
                pairs = [(decode(self.codec, self.codec.encode(x)), x) for x, _ in pairs]
            if stored and self.qjl is not None:
                pairs[0] = (self.qjl.stored(k_TKH), k_TKH)
            of_keys = [jnp.einsum("tkgh,skh->kgts", q_TKGH, x, precision="highest") for x in pairs[0]]
            s = jnp.where(is_exact, of_keys[1], of_keys[0]) * scale
            p = jax.nn.softmax(jnp.where(distance >= 0, s, -jnp.inf), axis=-1)
            parts = (jnp.where(is_exact, 0, p), jnp.where(is_exact, p, 0))
            outs = [jnp.einsum("kgts,skh->tkgh", *x, precision="highest") for x in zip(parts, pairs[1], strict=True)]
            return (outs[0] + outs[1]).reshape(q_TNH.shape)

        true, found = attention(False), attention(True)
        error = jnp.sum((found - true) ** 2) / jnp.sum(true**2)
        return true if self.passes else found, replace(group, pages=group.pages.at[layer].set(error))


class Model:
    """The demo model's function, with `variant` "outliers" in another form."""

    def __init__(self, variant: str, seed: int) -> None:
        self.spec, layout = read_family(read_config(DEMO))
        self.weights = load_weights(DEMO, self.spec, layout, dtype="float32")
        layers = self.weights["layers"]
        (group,) = self.spec.groups
        shape = (self.spec.num_layers, group.num_kv_heads, self.spec.head_dim)
        less = np.zeros(shape, np.float32)
        if variant == "outliers":
            rng = np.random.default_rng(seed)
            layers = self._with_outliers(layers, rng)
            # Few channels of the constant vector are large, as in models that have such keys.
            less = (-OFFSET * rng.normal(size=shape) * (rng.random(shape) < 0.15)).astype(np.float32)
        self.weights["layers"] = layers | {"k_affine": affine(less, np.ones_like(less))}
        token_T = np.random.default_rng(0).integers(0, self.spec.vocab_size, FIT_TOKENS)
        found = np.stack(fit_keys(self.weights, token_T, spec=self.spec, placement=None))
        mean, factor = np.moveaxis(found.reshape(*shape[:2], 2, -1), 2, 0)
        self.fitted = self.weights | {"layers": layers | {"k_affine": affine(less + mean, factor)}}

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
        weights = self.fitted if pages.fitted else self.weights
        make = program(self.spec, pages.codec) if pages.exact is None else stored(self.spec, pages)
        return np.asarray(make(weights, padded, np.int32(len(token_T))))[: len(token_T)]

    def attention_error(self, pages: Pages, token_T: np.ndarray) -> float:
        """Of WINDOW tokens, mean over the layers."""
        weights = self.fitted if pages.fitted else self.weights
        return float(attention_error(self.spec, pages.codec)(weights, token_T))


def affine(mean: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Two [L, K, H] as the leaf `k_affine`."""
    return np.stack([mean, factor], axis=2).reshape(len(mean), -1)


def dense(weights: Any, token_T: jax.Array, spec: ModelSpec, attention: Stored) -> tuple[jax.Array, jax.Array]:
    """(hidden states, attention's relative squared error by layer) of one sequence without pages."""
    none: Any = np.zeros((1, 1), np.int32)
    rows: Any = {"table_BW": none, "first_BW": none, "len_B": none[0]}
    group = GroupKV(jnp.zeros(spec.num_layers), **rows, codec=attention.codec, num_layers=spec.num_layers)
    position_T = jnp.arange(len(token_T), dtype=jnp.int32)
    counts: Any = (none[0], none[0] + len(token_T), jnp.int32(0), jnp.int32(1))
    batch = Batch(token_T, position_T, position_T * 0, *counts)
    kv, x_TD = forward(weights, PagedKV((group,)), batch, spec=spec, backend=attention)
    return x_TD, kv.groups[0].pages


@cache
def attention_error(spec: ModelSpec, codec: Codec) -> Any:
    attention = Stored(codec, Exact(), spec.num_layers, passes=True)
    return jax.jit(lambda weights, token_T: jnp.mean(jnp.sqrt(dense(weights, token_T, spec, attention)[1])))


@cache
def stored(spec: ModelSpec, pages: Pages) -> Any:
    """`program` by dense attention. What comes after the sequence is not seen by it."""
    attention = Stored(pages.codec, pages.exact or Exact(), spec.num_layers, passes=False, qjl=pages.qjl)
    return jax.jit(lambda weights, token_T, _: logits(weights, dense(weights, token_T, spec, attention)[0], spec=spec))


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
    """Held-out text of WINDOW tokens from random lines on."""
    lines = corpus.held_out_lines
    for _ in range(count):
        start = rng.randrange(len(lines) - 400)
        ids = corpus.tokenizer.encode("".join(lines[start : start + 400]), add_special_tokens=False).ids
        yield np.array([BOS, *ids][:WINDOW], np.int32)


def of_text(model: Model, codecs: dict[str, Pages], texts: list[np.ndarray]) -> dict[str, dict[str, float]]:
    """By codec the figures of held-out text."""
    sums: dict[str, list[list[float]]] = {name: [] for name in codecs}
    for token_T in texts:
        base = model.run(codecs["bfloat16"], token_T)[:-1]
        base_log, spread = log_softmax(base), base.std(axis=-1)
        for name, pages in codecs.items():
            found = model.run(pages, token_T)[:-1]
            log = log_softmax(found)
            change = (found - found.mean(axis=-1, keepdims=True)) - (base - base.mean(axis=-1, keepdims=True))
            of_token = [
                -np.take_along_axis(log, token_T[1:, None], axis=-1)[:, 0],
                (np.exp(base_log) * (base_log - log)).sum(axis=-1),
                log.argmax(axis=-1) == base_log.argmax(axis=-1),
                (change**2).mean(axis=-1) / spread**2,
            ]
            error = 0.0 if pages.exact else model.attention_error(pages, token_T)
            sums[name].append([*[float(np.mean(x)) for x in of_token], error])
    means = {name: np.mean(rows, axis=0) for name, rows in sums.items()}
    return {
        name: {
            "nll": float(nll),
            "nll_change": float(100 * (nll / means["bfloat16"][0] - 1)),
            "kl": float(kl),
            "top1": float(top1),
            "logits": float(mean_square**0.5),
            "attention": float(error),
        }
        for name, (nll, kl, top1, mean_square, error) in means.items()
    }


def of_recall(model: Model, codecs: dict[str, Pages], trials: list[tuple[list[int], int]]) -> dict[str, float]:
    """By codec the share of trials whose whole answer is the likeliest continuation."""

    def is_right(codec: Pages, ids: list[int], start: int) -> bool:
        found = model.run(codec, np.array(ids, np.int32))[start - 1 : -1].argmax(axis=-1)
        return bool((found == ids[start:]).all())

    return {name: float(np.mean([is_right(codec, *trial) for trial in trials])) for name, codec in codecs.items()}


def pages_of(name: str) -> Pages:
    """What the name of a row stands for."""
    codec_name, _, exception = name.partition(", ")
    codec_name, _, fit = codec_name.partition(" ")
    codec = get_codec(codec_name, platform="cpu", dtype="float32")
    fitted = fit == "fitted" or (not fit and codec.fits_keys)
    if exception == QJL:
        one_bit_less = get_codec("turboquant3", platform="cpu", dtype="float32")
        return Pages(codec, fitted, Exact(), Qjl(one_bit_less))
    return Pages(codec, fitted, EXCEPTIONS[exception] if exception else None)


def measure(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Adds to `result`, variant by variant and seed by seed, and writes it after each."""
    corpus = build_corpus(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    codecs = {name: pages_of(name) for name in ("bfloat16", *options.codecs)}
    mixed = {f"{name}, {exception}" for name in options.mixed for exception in EXCEPTIONS if exception}
    mixed |= {f"turboquant4, {QJL}"} if options.mixed else set()
    head_dim = Model("plain", 0).spec.head_dim
    result["bits"] = {name: bits_per_value(pages.codec, head_dim) for name, pages in codecs.items()}
    result["variants"] = {variant: [] for variant in ("plain", "outliers")}
    for variant, seen in result["variants"].items():
        for seed in range(options.seeds):
            started, rng, model = time.monotonic(), random.Random(seed), Model(variant, seed)
            texts = list(windows(corpus, rng, options.windows))
            one: dict[str, Any] = of_text(model, codecs | {name: pages_of(name) for name in sorted(mixed)}, texts)
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
    names = ["nll_change", "kl", "top1", "logits", "attention", *(f"recall_{distance}" for distance in DISTANCES)]
    rows = []

    def add(row: str, seen: list[dict[str, Any]], columns: list[str]) -> None:
        cells = (interval([one[row][name] for one in seen]) for name in columns)
        bits = f"{result['bits'][row]:7.3f}" if row in result["bits"] else " " * 7
        rows.append(f"  {row:38s}{bits}" + "".join(f"{mean:10.4f} ±{half:6.4f}" for mean, half in cells))

    for variant, seen in result["variants"].items():
        rows.append(f"{variant:40s}{'bits':>7s}" + "".join(f"{name:>18s}" for name in names))
        for row in seen[0]:
            add(row, seen, names if row in result["bits"] else names[:4])
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
    unfitted = [f"{name} unfitted" for name in ("int8", "int4", "turboquant4")]
    parser.add_argument("--codecs", default=",".join([*quantised, *unfitted]))
    parser.add_argument("--mixed", default="int4,turboquant3,turboquant2.5", help="codecs with some keys exact")
    parser.add_argument("--windows", type=int, default=8, help="of each seed")
    parser.add_argument("--trials", type=int, default=48, help="of each seed and distance")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG or PNG; needs matplotlib")
    options = parser.parse_args()
    options.codecs, options.mixed = ([x for x in of.split(",") if x] for of in (options.codecs, options.mixed))
    result: dict[str, Any] = environment() | {"command": " ".join(sys.argv)}
    measure(options, result)
    print(table(result))
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
