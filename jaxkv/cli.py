"""The `jaxkv` command."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from jaxkv.version import VERSION


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
    parser.add_argument("--version", action="version", version=f"jaxkv {VERSION}")
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
    loaded = time.perf_counter()
    print(prompt, end="", flush=True)
    # (seconds without compilation, tokens so far) after each piece
    marks = []
    num_prompt = num_new = 0
    for output in stream:
        num_prompt = len(output.prompt_token_ids)
        num_new += len(output.outputs[0].token_ids)
        marks.append((time.perf_counter() - loaded - llm.compile_s, num_new))
        print(output.outputs[0].text, end="", flush=True)
    print()
    if not args.quiet:
        (first_s, first), (last_s, last) = marks[0], marks[-1]
        rate = f"{(last - first) / (last_s - first_s):.1f} tokens/s after it" if last > first else "no tokens after it"
        print(
            f"[{num_prompt} prompt + {num_new} new tokens; time to first token {first_s:.3f} s, {rate}, without the "
            f"{llm.compile_s:.1f} s of compilation and {loaded - started:.1f} s of loading; KV cache: "
            f"{num_prompt + num_new - 1} of {llm.num_kv_tokens} tokens]",
            file=sys.stderr,
        )
    return 0
