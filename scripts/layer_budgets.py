"""Whether layers should have budgets of their own when pages are dropped, by how evenly they
attend.

    python scripts/layer_budgets.py --json docs/benchmarks/layer_budgets.json
    python scripts/layer_budgets.py --model DIR        another model that train_demo.py has made

Dense attention of one sequence, without an engine. At position CUT each layer keeps its first page,
the latest RECENT tokens and the pages that got the most attention from the queries before
(`kv_policy="entropy"`), and what comes after sees nothing else. All layers may keep the same number
of pages ("alike"); or, the same number altogether, more the more evenly their queries attend, in
proportion to the mean of entropy / log(keys) ("even more", and with its square and its fourth
power), or the fewer ("even less"). "best" is a bound, not a way: of all divisions in which one
layer has twice the pages of each other one, that with the least nll on these very texts. nll of the
held-out text behind CUT, and recall of values that are defined 1,000 tokens before, the question
behind CUT. Intervals are 95% of Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_generate import environment
from demo_data import build_corpus, recall_trial
from kv_lab import DISTANCES, WINDOW, interval, log_softmax, windows
from kv_lab_model import LENGTH, PAGE, Model, Unpaged, dense
from tokenizers import Tokenizer

from jaxkv.build.model import DEMO
from jaxkv.models.decoder import logits
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Attended, Batch, Place, Terms

CUT = 3 * WINDOW // 4
RECENT = 128
WAYS: dict[str, float] = {
    "alike": 0,
    "even more": 1,
    "square": 2,
    "fourth power": 4,
    "even less": -1,
}
"""Powers of entropy / log(keys) that budgets are in proportion to."""


@dataclass(frozen=True)
class Forgetting(Unpaged):
    """Attention of one sequence in which queries from `cut` on see what `kept_L` pages of each
    layer leave them.

    The "page" of a layer is the mean of entropy / log(keys) of the queries before.
    """

    cut: Any
    kept_L: Any

    def attend(
        self,
        q_TNH: Any,
        k_TKH: Any,
        v_TKH: Any,
        at: Place,
        batch: Batch,
        prepared: Any,
        terms: Terms,
    ) -> Attended:
        num_tokens, kv_heads = k_TKH.shape[:2]
        position = jnp.arange(num_tokens)
        causal = position[:, None] >= position[None, :]
        q_TKGH = q_TNH.reshape(num_tokens, kv_heads, -1, q_TNH.shape[2])
        s = jnp.einsum("tkgh,skh->kgts", q_TKGH, k_TKH, precision="highest") * terms.scale
        p = jax.nn.softmax(jnp.where(causal, s, -jnp.inf), axis=-1)
        entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.maximum(p, 1e-30)), 0), axis=-1)
        is_before = (position > 0) & (position < self.cut)
        evenness = jnp.where(is_before, entropy / jnp.log(jnp.maximum(position + 1, 2)), 0)
        mass = jnp.einsum("kgts,kgt->s", p, jnp.where(is_before, 1 - evenness, 0))
        page = position // PAGE
        is_free = (page > 0) & ((page + 1) * PAGE <= self.cut - RECENT)
        of_page = jax.ops.segment_sum(
            jnp.where(is_free, mass, -jnp.inf), page, -(-num_tokens // PAGE)
        )
        rank = jnp.argsort(jnp.argsort(-of_page))
        seen = causal & (
            (position[:, None] < self.cut) | ~is_free | (rank[page] < self.kept_L[at.layer])
        )
        p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1)
        out = jnp.einsum("kgts,skh->tkgh", p, v_TKH, precision="highest").reshape(q_TNH.shape)
        found = evenness.mean(axis=(0, 1)).sum() / is_before.sum()
        return Attended(out, at.store.with_arrays(at.store.pages.at[at.layer].set(found)), None)


@cache
def program(spec: ModelSpec) -> Callable[..., Any]:
    """(weights, tokens [LENGTH], cut, kept [L]) -> (logits, evenness [L])"""

    @jax.jit
    def run(weights: Any, token_T: jax.Array, cut: jax.Array, kept_L: jax.Array) -> Any:
        x_TD, evenness_L = dense(weights, token_T, spec, Forgetting(cut, kept_L))
        return logits(weights, x_TD, spec=spec), evenness_L

    return run


def run(model: Model, ids: Any, cut: int, kept_L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(ids)] = ids
    found, evenness_L = program(model.spec)(model.weights, padded, np.int32(cut), kept_L)
    return np.asarray(found)[: len(ids)], np.asarray(evenness_L)


def divided(total: int, evenness_L: np.ndarray, power: float) -> np.ndarray:
    """As many pages for each layer, together about `total`."""
    share = evenness_L**power
    return np.maximum(1, np.round(total * share / share.sum())).astype(np.int32)


def measure(
    model: Model, texts: list[Any], trials: list[Any], share: float
) -> dict[str, dict[str, float]]:
    layers = model.spec.num_layers
    everything = np.full(layers, LENGTH, np.int32)
    evenness_L = np.mean([run(model, ids, CUT, everything)[1] for ids in texts], axis=0)

    def nll(kept_L: np.ndarray) -> float:
        found = [log_softmax(run(model, ids, CUT, kept_L)[0][CUT:-1]) for ids in texts]
        own = [
            np.take_along_axis(x, ids[CUT + 1 :, None], axis=1)
            for x, ids in zip(found, texts, strict=True)
        ]
        return float(-np.mean(own))

    def recall(kept_L: np.ndarray) -> float:
        # The question is in the last 32 tokens before the answer.
        right = [
            (
                run(model, ids, start - 32, kept_L)[0][start - 1 : -1].argmax(axis=1) == ids[start:]
            ).all()
            for ids, start in trials
        ]
        return float(np.mean(right))

    total = round((share * CUT - PAGE - RECENT) / PAGE) * layers
    full = nll(everything)
    rows = {"full": {"nll_change": 0.0, "recall": recall(everything), "pages": float("nan")}}
    for way, power in WAYS.items():
        kept_L = divided(total, evenness_L, power)
        change = 100 * (nll(kept_L) / full - 1)
        rows[way] = {
            "nll_change": change,
            "recall": recall(kept_L),
            "pages": float(kept_L.sum() / layers),
        }
    doubled = [divided(total, 1.0 + (np.arange(layers) == layer), 1) for layer in range(layers)]
    nlls = [nll(kept_L) for kept_L in doubled]
    best = int(np.argmin(nlls))
    change, pages = 100 * (nlls[best] / full - 1), float(doubled[best].sum() / layers)
    rows["best"] = {
        "nll_change": change,
        "recall": recall(doubled[best]),
        "pages": pages,
        "layer": best,
    }
    rows["evenness"] = {str(layer): float(x) for layer, x in enumerate(evenness_L)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument(
        "--shares", default="0.5,0.25", help="of what a layer holds before CUT, on average"
    )
    parser.add_argument("--windows", type=int, default=8, help="of each seed")
    parser.add_argument("--trials", type=int, default=32, help="of each seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, corpus = (
        Model("plain", 0, options.model),
        build_corpus(Tokenizer.from_file(str(DEMO / "tokenizer.json"))),
    )
    result: dict[str, Any] = environment() | {"command": " ".join(sys.argv), "shares": {}}
    drawn = []
    for seed in range(options.seeds):
        rng = random.Random(seed)
        texts = list(windows(corpus, rng, options.windows))
        trials = [recall_trial(rng, corpus, DISTANCES[-1]) for _ in range(options.trials)]
        cut = [
            (np.array(ids[-LENGTH:]), start - max(0, len(ids) - LENGTH)) for ids, start in trials
        ]
        drawn.append((texts, cut))
    for share in map(float, options.shares.split(",")):
        seen = [measure(model, *one, share) for one in drawn]
        result["shares"][str(share)] = seen
        evenness = (
            np.mean([one["evenness"][layer] for one in seen]) for layer in seen[0]["evenness"]
        )
        print(f"{share}: evenness by layer", *(f"{x:.2f}" for x in evenness))
        for way in ("full", *WAYS, "best"):
            cells = [
                interval([one[way][name] for one in seen]) for name in ("nll_change", "recall")
            ]
            figures = "".join(f"{mean:10.4f} ±{half:6.4f}" for mean, half in cells)
            print(f"  {way:14s}{seen[0][way]['pages']:6.1f} pages{figures}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
