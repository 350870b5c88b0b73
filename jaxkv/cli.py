"""The `jaxkv` command."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, or 2 for what the caller can mend (the message is on stderr)."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"jaxkv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxkv", description="Language-model inference in JAX.")
    parser.add_argument("--version", action="version", version=f"jaxkv {version('jaxkv')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate", help="complete a prompt", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    generate.set_defaults(run=_generate)
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to complete; without it, standard input")
    generate.add_argument("--model", help="local directory or hub id; without it, the built-in demo model")
    generate.add_argument("--tokenizer", help="directory or hub id of the tokenizer, if not the model's")
    generate.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    generate.add_argument("--kv-cache-dtype", default="auto", help="auto, bfloat16 or float32")
    generate.add_argument("--max-model-len", type=int, help="longest prompt and output together, in tokens")
    generate.add_argument("--block-size", type=int, help="tokens per page")
    generate.add_argument("--backend", default="auto", help="auto, xla, pallas_tpu or mosaic_gpu")
    generate.add_argument("--max-tokens", type=int, default=128, help="tokens to generate")
    generate.add_argument("--min-tokens", type=int, default=0, help="tokens before an end is allowed")
    generate.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    generate.add_argument("--top-k", type=int, default=0, help="0 is off")
    generate.add_argument("--top-p", type=float, default=1.0, help="1 is off")
    generate.add_argument("--min-p", type=float, default=0.05, help="0 is off")
    generate.add_argument("--seed", type=int, help="of the sampling; without it, the same every time")
    generate.add_argument("--stop", action="append", help="text that ends the output; may be given several times")
    generate.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    generate.add_argument("--quiet", action="store_true", help="no figures at the end")
    return parser


def _generate(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    from jaxkv.config import SamplingParams
    from jaxkv.llm import LLM

    params = SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    # One prompt needs one row and two or three of the programs: compile those when they are met.
    llm = LLM(
        args.model,
        tokenizer=args.tokenizer,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        backend=args.backend,
        max_num_seqs=1,
        lazy_compile=True,
    )
    stream = llm.stream(prompt, params)
    ready = first = time.perf_counter()
    num_prompt = num_new = 0
    print(prompt, end="", flush=True)
    for output in stream:
        if not num_new:
            first = time.perf_counter()
            num_prompt = len(output.prompt_token_ids)
        num_new += len(output.outputs[0].token_ids)
        print(output.outputs[0].text, end="", flush=True)
    ended = time.perf_counter()
    print()
    if not args.quiet:
        rate = f"{(num_new - 1) / (ended - first):.1f} tokens/s" if num_new > 1 else "one token"
        held = num_prompt + num_new - 1
        print(
            f"[{num_prompt} prompt + {num_new} new tokens; {rate} after the first; time to first token "
            f"{first - ready:.2f} s with compilation, after {ready - started:.2f} s of loading; KV cache: {held} of "
            f"{llm.num_kv_tokens} tokens]",
            file=sys.stderr,
        )
    return 0
