"""What a model loses by the codec of its KV cache, beside the bytes that it saves.

    python scripts/kv_lab.py --json docs/benchmarks/kv_lab.json --plot docs/benchmarks/kv_lab.svg
    python scripts/kv_lab.py --codecs int8,int4 --windows 2 --trials 8 --seeds 2      a quick look

On the demo model (or a deeper one: `train_demo.py --deepen`), and on one that is the same function
with outliers in its
keys: in each layer and KV head some pairs of rotary channels are larger in k and as much smaller in
q, and every key has one constant vector more, which softmax does not see. Each sequence is computed
as one prompt whose keys and values, its own included, are read back from pages in the codec, by the
engine's own attention (XLA). Compared with bfloat16 pages, weights and everything else in float32:

nll      nats per token of held-out library text, in windows, and the change in percent
kl       KL divergence of the next token's distribution from that with bfloat16 pages, nats per
         token
top1     share of tokens whose likeliest successor stays the same
logits   root mean square of the change of logits, as part of their spread over the vocabulary
attention  the same of the attention's outputs against those of exact keys and values, mean over the
           layers
recall   share of the values that are recalled whole, teacher-forced, at a distance in tokens

A codec's name stands for what the engine does; "fitted" and "unfitted" after it are keys with and
without `fit_keys`.
Rows without bits are of what the engine does not do: some keys and values exact, or turboquant4
with keys of 3 bits and a bit of QJL. Each seed draws its own windows, questions and outliers;
intervals are 95% of Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench_generate import environment
from demo_data import BOS, Corpus, build_corpus, recall_trial
from kv_lab_model import EXCEPTIONS, LENGTH, QJL, Model, Pages, pages_of
from tokenizers import Tokenizer

from jaxkv.build.model import DEMO
from jaxkv.kv.codecs import CODECS, bits_per_value

WINDOW = 1024
DISTANCES = (250, 1000)

T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t for 95%, two-sided, by how many seeds there are."""


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def windows(corpus: Corpus, rng: random.Random, count: int) -> Iterator[np.ndarray]:
    """Held-out text of WINDOW tokens from random lines on."""
    lines = corpus.held_out_lines
    for _ in range(count):
        start = rng.randrange(len(lines) - 400)
        ids = corpus.tokenizer.encode(
            "".join(lines[start : start + 400]), add_special_tokens=False
        ).ids
        yield np.array([BOS, *ids][:WINDOW], np.int32)


def of_text(
    model: Model, codecs: dict[str, Pages], texts: list[np.ndarray]
) -> dict[str, dict[str, float]]:
    """By codec the figures of held-out text."""
    sums: dict[str, list[list[float]]] = {name: [] for name in codecs}
    for token_T in texts:
        base = model.run(codecs["bfloat16"], token_T)[:-1]
        base_log, spread = log_softmax(base), base.std(axis=-1)
        for name, pages in codecs.items():
            found = model.run(pages, token_T)[:-1]
            log = log_softmax(found)
            change = (found - found.mean(axis=-1, keepdims=True)) - (
                base - base.mean(axis=-1, keepdims=True)
            )
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


def of_recall(
    model: Model, codecs: dict[str, Pages], trials: list[tuple[list[int], int]]
) -> dict[str, float]:
    """By codec the share of trials whose whole answer is the likeliest continuation."""

    def is_right(codec: Pages, ids: list[int], start: int) -> bool:
        found = model.run(codec, np.array(ids, np.int32))[start - 1 : -1].argmax(axis=-1)
        return bool((found == ids[start:]).all())

    return {
        name: float(np.mean([is_right(codec, *trial) for trial in trials]))
        for name, codec in codecs.items()
    }


def measure(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Adds to `result`, variant by variant and seed by seed, and writes it after each."""
    corpus = build_corpus(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    codecs = {name: pages_of(name) for name in ("bfloat16", *options.codecs)}
    mixed = {
        f"{name}, {exception}" for name in options.mixed for exception in EXCEPTIONS if exception
    }
    mixed |= {f"turboquant4, {QJL}"} if options.mixed else set()
    head_dim = Model("plain", 0, options.model).spec.head_dim
    bits = {name: bits_per_value(pages.codec, head_dim) for name, pages in codecs.items()}
    result["bits"] = result.get("bits", {}) | bits
    result.setdefault("variants", {})
    for variant in options.variants:
        seen = result["variants"].setdefault(variant, [{} for _ in range(options.seeds)])
        for seed in range(options.seeds):
            started, rng, model = (
                time.monotonic(),
                random.Random(seed),
                Model(variant, seed, options.model),
            )
            texts = list(windows(corpus, rng, options.windows))
            one: dict[str, Any] = of_text(
                model, codecs | {name: pages_of(name) for name in sorted(mixed)}, texts
            )
            for distance in DISTANCES:
                trials = [recall_trial(rng, corpus, distance) for _ in range(options.trials)]
                trials = [
                    (ids[-LENGTH:], start - max(0, len(ids) - LENGTH)) for ids, start in trials
                ]
                for name, share in of_recall(model, codecs, trials).items():
                    one[name][f"recall_{distance}"] = share
            seen[seed] |= one
            print(
                f"{variant}, seed {seed}: {time.monotonic() - started:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95% interval (nan of a single value)."""
    half = (
        T95[len(values)] * np.std(values, ddof=1) / len(values) ** 0.5
        if len(values) in T95
        else float("nan")
    )
    return float(np.mean(values)), float(half)


def table(result: dict[str, Any]) -> str:
    names = [
        "nll_change",
        "kl",
        "top1",
        "logits",
        "attention",
        *(f"recall_{distance}" for distance in DISTANCES),
    ]
    rows = []

    def add(row: str, seen: list[dict[str, Any]], columns: list[str]) -> None:
        cells = (interval([one[row][name] for one in seen]) for name in columns)
        bits = f"{result['bits'][row]:7.3f}" if row in result["bits"] else " " * 7
        rows.append(
            f"  {row:38s}{bits}" + "".join(f"{mean:10.4f} ±{half:6.4f}" for mean, half in cells)
        )

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
        axes.errorbar(
            x, y, yerr=np.minimum(half, np.array(y) * 0.99), fmt="o", capsize=3, label=variant
        )
        if variant == "plain":
            for at, of, name in zip(x, y, labels, strict=True):
                axes.annotate(
                    name, (at, of), textcoords="offset points", xytext=(5, -10), fontsize=8
                )
    axes.set(
        xlabel="bits per value, scales included",
        ylabel="KL from bfloat16 pages, nats per token",
        yscale="log",
    )
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    quantised = [name for name in CODECS if name not in ("bfloat16", "float32")]
    unfitted = [f"{name} unfitted" for name in ("int8", "int4", "turboquant4")]
    parser.add_argument(
        "--model", type=Path, default=DEMO, help="one that train_demo.py has made (the demo model)"
    )
    parser.add_argument("--codecs", default=",".join([*quantised, *unfitted]))
    parser.add_argument(
        "--mixed", default="int4,turboquant3,turboquant2.5", help="codecs with some keys exact"
    )
    parser.add_argument("--variants", default="plain,outliers")
    parser.add_argument("--windows", type=int, default=8, help="of each seed")
    parser.add_argument("--trials", type=int, default=48, help="of each seed and distance")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="rows of the same texts that it has stay")
    parser.add_argument("--plot", type=Path, help="an SVG or PNG; needs matplotlib")
    options = parser.parse_args()
    lists = ("codecs", "mixed", "variants")
    options.codecs, options.mixed, options.variants = (
        [x for x in getattr(options, name).split(",") if x] for name in lists
    )
    result: dict[str, Any] = environment()
    if options.json and options.json.is_file():
        known = json.loads(options.json.read_text())
        if known["versions"] != result["versions"]:
            parser.error(f"--json: its rows are of {known['versions']}: name a new file")
        result |= known
    for seen in result.get("variants", {}).values():
        if len(seen) != options.seeds:
            parser.error(f"--seeds: expected {len(seen)} as in --json, got {options.seeds}")
    result.setdefault("commands", []).append(" ".join(sys.argv))
    measure(options, result)
    print(table(result))
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
