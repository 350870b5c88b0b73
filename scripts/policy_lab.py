r"""What a model loses by a policy of its KV cache, at the same number of bytes.

    python scripts/policy_lab.py --json docs/benchmarks/policy_lab.json \
        --plot docs/benchmarks/policy_lab.svg
    # a quick look
    python scripts/policy_lab.py --policies streaming,entropy --windows 2 --trials 8 --seeds 2

The demo model in the engine itself, weights in float32 and pages in bfloat16. A prompt is read in
chunks, and whenever its cache has reached the budget the policy says what stays: that is before the
rest of the prompt, and with it the question, is known. Compared with the same engine without a
policy:

share    bytes of pages that the last step of a prompt holds, as part of all of its tokens' bytes
nll      nats per token of held-out library text, in windows of 1,024, and the change in percent
kl       KL divergence of the next token's distribution, over the 64 likeliest tokens and the rest
         together
top1     share of tokens whose likeliest successor stays the same
recall   share of values that are recalled whole, greedily, at a distance in tokens

"random" keeps a random choice of pages, the same first and recent ones as all; "streaming" is
recency. "guarded" is streaming where the caller protects the beginning, in which the definitions
are. Each seed draws its own texts and questions; intervals are 95% of Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_generate import environment
from demo_data import build_corpus, recall_trial
from kv_lab import DISTANCES, WINDOW, interval, windows
from tokenizers import Tokenizer

from jaxkv import LLM, SamplingParams
from jaxkv.build.model import DEMO
from jaxkv.kv.policies import POLICIES, Held, Policy, Room, keep_best
from jaxkv.testing import engine_of

LIKELIEST = 64
PAGE = 16
GUARDED = (0, 128)
"""Where definitions are, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Random(Policy):
    """Draws by lot what stays, from the pages and their number alone: the baseline."""

    name: str = "random"

    def select(self, held: Held, room: Room) -> np.ndarray:
        lots = np.random.default_rng([len(held.first_W), *held.first_W.tolist()])
        return keep_best(lots.random(len(held.first_W)), held, room)


POLICIES["random"] = Random()

RUNS = (
    "streaming",
    "random",
    "page_norm",
    "h2o_page",
    "snapkv_page",
    "guarded",
    "random:int4",
    "streaming:int4",
    "entropy",
    "entropy:int8",
)


class Runner:
    """One engine, and what share of its prompts' bytes it holds at their end."""

    def __init__(self, policy: str, budget: int | None) -> None:
        name = "streaming" if policy == "guarded" else policy
        self.llm = LLM(
            dtype="float32",
            kv_cache_dtype="bfloat16",
            kv_policy=name,
            kv_budget=budget,
            block_size=PAGE,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
            max_logprobs=LIKELIEST,
            lazy_compile=True,
        )
        self.protect = [GUARDED] if policy == "guarded" else None
        self.shares: list[float] = []
        self._watch()

    def _watch(self) -> None:
        engine = engine_of(self.llm)
        step, (store,) = engine.step, engine.kv.stores
        low = 0.0 if store.low is None else store.low.pages.nbytes / store.low.num_pages
        ratio = low / (store.pages.nbytes / store.num_pages)

        def watched() -> Any:
            got = step()
            for request in engine.scheduler.running:
                hold = request.hold
                if hold.num_stored >= request.prompt_len - 1 > WINDOW // 2:
                    num_low = 0 if hold.kept is None else len(hold.kept.low)
                    pages = hold.handle().length + num_low * PAGE * ratio
                    self.shares.append(pages / hold.num_stored)
            return got

        engine.step = watched  # type: ignore[method-assign]

    def run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        asked = [replace(one, kv_protect=self.protect) for one in params]
        return self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False
        )

    def logprobs(self, texts: list[list[int]]) -> list[list[dict[int, float]]]:
        """Of each token but the first its own log-probability, and those of the likeliest."""
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=LIKELIEST, detokenize=False
        )
        found = self.run(texts, [params] * len(texts))
        return [
            [{t: x.logprob for t, x in entry.items()} for entry in one.prompt_logprobs[1:]]
            for one in found
        ]

    def recall(self, trials: list[tuple[list[int], int]]) -> float:
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=len(ids) - start, ignore_eos=True, detokenize=False
            )
            for ids, start in trials
        ]
        found = self.run([ids[:start] for ids, start in trials], params)
        right = [
            list(one.outputs[0].token_ids) == ids[s:]
            for one, (ids, s) in zip(found, trials, strict=True)
        ]
        return float(np.mean(right))


def divergence(base: dict[int, float], other: dict[int, float]) -> float:
    """KL over the tokens that both list and the rest together."""
    both = [token for token in base if token in other]
    p, q = ([math.exp(x[token]) for token in both] for x in (base, other))
    p, q = ([*x, max(1 - sum(x), 1e-9)] for x in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def likeliest(entry: dict[int, float]) -> int:
    return max(entry, key=lambda token: entry[token])


def compare(texts: list[list[int]], base: list[Any], found: list[Any]) -> dict[str, float]:
    rows = []
    for ids, before, after in zip(texts, base, found, strict=True):
        for token, a, b in zip(ids[1:], before, after, strict=True):
            rows.append((-a[token], -b[token], divergence(a, b), likeliest(a) == likeliest(b)))
    nll, of_policy, kl, top1 = np.mean(np.array(rows, float), axis=0)
    return {
        "nll": float(of_policy),
        "nll_change": float(100 * (of_policy / nll - 1)),
        "kl": float(kl),
        "top1": float(top1),
    }


def measure(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Adds to `result`, policy by policy, and writes it after each."""
    corpus = build_corpus(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    drawn = []
    for seed in range(options.seeds):
        rng = random.Random(seed)
        texts = [ids.tolist() for ids in windows(corpus, rng, options.windows)]
        drawn.append(
            (
                texts,
                {
                    d: [recall_trial(rng, corpus, d) for _ in range(options.trials)]
                    for d in DISTANCES
                },
            )
        )
    full = Runner("full", None)
    bases = [full.logprobs(texts) for texts, _ in drawn]
    rows = result.setdefault("rows", {})
    for share in ["full", *options.shares]:
        for policy in ["full"] if share == "full" else options.policies:
            started = time.monotonic()
            runner = full if share == "full" else Runner(policy, int(share * WINDOW))
            runner.shares.clear()
            seen = []
            for (texts, trials), base in zip(drawn, bases, strict=True):
                one = compare(texts, base, runner.logprobs(texts))
                one |= {
                    f"recall_{distance}": runner.recall(some) for distance, some in trials.items()
                }
                seen.append(one)
            label = "full" if share == "full" else f"{policy} {share}"
            rows[label] = {"share": float(np.mean(runner.shares)), "seeds": seen}
            print(f"{label}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")


def table(result: dict[str, Any]) -> str:
    names = ["nll_change", "kl", "top1", *(f"recall_{distance}" for distance in DISTANCES)]
    lines = [f"{'':24s}{'share':>7s}" + "".join(f"{name:>18s}" for name in names)]
    for label, row in result["rows"].items():
        cells = (interval([one[name] for one in row["seeds"]]) for name in names)
        figures = "".join(f"{mean:10.4f} ±{half:6.4f}" for mean, half in cells)
        lines.append(f"{label:24s}{row['share']:7.3f}" + figures)
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Recall and change of nll over the share of bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    names = {
        f"recall_{DISTANCES[-1]}": f"recall at {DISTANCES[-1]:,} tokens",
        "nll_change": "change of nll, %",
    }
    for axes, (name, title) in zip(panels, names.items(), strict=True):
        by_policy: dict[str, list[tuple[float, float, float]]] = {}
        for label, row in result["rows"].items():
            point = (row["share"], *interval([one[name] for one in row["seeds"]]))
            by_policy.setdefault(label.rpartition(" ")[0] or label, []).append(point)
        for policy, points in by_policy.items():
            x, y, half = zip(*sorted(points), strict=True)
            axes.errorbar(x, y, yerr=half, fmt="o-", capsize=3, label=policy, linewidth=1)
        axes.set(xlabel="part of the bytes that is held", ylabel=title)
    panels[1].set_yscale("symlog", linthresh=0.1)
    panels[1].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default=",".join(RUNS))
    parser.add_argument("--shares", default="0.5,0.25", help="budgets as parts of a window")
    parser.add_argument("--windows", type=int, default=4, help="of each seed")
    parser.add_argument("--trials", type=int, default=32, help="of each seed and distance")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG or PNG; needs matplotlib")
    options = parser.parse_args()
    options.policies = [name for name in options.policies.split(",") if name]
    options.shares = [float(share) for share in options.shares.split(",")]
    result: dict[str, Any] = environment()
    if options.json and options.json.is_file():  # more rows of the same texts and questions
        known = json.loads(options.json.read_text())
        if known["versions"] != result["versions"]:
            parser.error(f"--json: its rows are of {known['versions']}: name a new file")
        result |= known
    for row in result.get("rows", {}).values():
        if (count := len(row["seeds"])) != options.seeds:
            parser.error(f"--seeds: expected {count} as in --json, got {options.seeds}")
    result.setdefault("commands", []).append(" ".join(sys.argv))
    measure(options, result)
    print(table(result))
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
