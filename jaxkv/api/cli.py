"""The `jaxkv` command."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import textwrap
import time
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from jaxkv.build.options import ABOUT, flag_name, flags
from jaxkv.build.vllm_arguments import about_flag
from jaxkv.version import VERSION

if TYPE_CHECKING:
    from jaxkv.api.llm import LLM
    from jaxkv.config import SamplingParams
    from jaxkv.lora.request import LoRARequest
    from jaxkv.pictures import ChromeTrace
    from jaxkv.requests.prompts import Prompt
    from jaxkv.tools.deployment import Deployment

MAX_TOKENS = 128
"""Tokens that `generate` makes where neither a flag nor the model says how many."""


SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    "ignore_eos",
)
"""Fields of SamplingParams that have a flag."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, 1 for a check that found something, or 2 for
    what the caller can mend (the message is on stderr).
    """
    parser = _parser()
    args, unknown = parser.parse_known_args(_with_dashes(sys.argv[1:] if argv is None else argv))
    if unknown:
        parser.error(_about_unknown(unknown))
    try:
        with _interruptible():
            return _run(args)
    except KeyboardInterrupt:
        return 130


def _with_dashes(given: Sequence[str]) -> list[str]:
    """Returns the arguments with flags such as --max_model_len, as vLLM takes them too, by their
    names. Behind "--" there are none, and what has a space is a text.
    """
    found, is_over = [], False
    for one in given:
        is_over = is_over or one == "--"
        name, equals, value = one.partition("=")
        is_flag = name.startswith("--") and " " not in name and not is_over
        found.append(f"{name.replace('_', '-')}{equals}{value}" if is_flag else one)
    return found


def _about_unknown(given: Sequence[str]) -> str:
    """Returns what is wrong with arguments that a command does not have. Values of flags that are
    not known are among them.
    """
    if foreign := [one for one in given if one.startswith("-") and one.strip("-")]:
        return "\n".join(about_flag(one, ABOUT) for one in foreign)
    return f"unrecognized arguments: {' '.join(given)}"


def _run(args: argparse.Namespace) -> int:
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Nobody reads any more (`jaxkv generate ... | head`): nor may Python write at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, RuntimeError) as error:
        print(f"jaxkv: {error}", file=sys.stderr)
        return 2


@contextmanager
def _interruptible() -> Iterator[None]:
    """Has Ctrl-C come again where Python has ignored it: in what the garbage collector calls, as it
    calls JAX. At the start one of seven comes there.
    """
    before = sys.unraisablehook

    def hook(ignored: sys.UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            is_term = signal.getsignal(signal.SIGTERM) is signal.default_int_handler
            again = signal.SIGTERM if is_term else signal.SIGINT
            Timer(0.01, os.kill, (os.getpid(), again)).start()
        else:
            before(ignored)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxkv",
        description="Language-model inference in JAX.",
        epilog="`jaxkv COMMAND --help` has examples. `python -m jaxkv` is the same command.",
    )
    parser.add_argument("--version", action="version", version=f"jaxkv {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_batch(commands)
    _add_serve(commands)
    _add_convert(commands)
    _add_plan(commands)
    _add_check(commands)
    _add_selftest(commands)
    return parser


def _add_command(
    commands: Any, name: str, *, help: str, description: str = "", examples: str
) -> argparse.ArgumentParser:
    """Adds a command whose help ends with examples, one a line."""
    return commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description or f"{help[0].upper()}{help[1:]}.", 78),
        epilog=f"examples:\n{textwrap.indent(examples, '  ')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_generate(commands: Any) -> None:
    generate = _add_command(
        commands,
        "generate",
        help="complete a prompt, or answer a message",
        examples='jaxkv generate "def fibonacci(n):"\n'
        'jaxkv generate --model org/name --chat "What is a page table?" --max-tokens 200\n'
        "jaxkv generate --temperature 0 < prompt.txt",
    )
    generate.set_defaults(run=_generate)
    generate.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text to complete; without it, standard input"
    )
    generate.add_argument("--lora", metavar="DIR", help="a LoRA adapter to complete it with")
    generate.add_argument(
        "--chat",
        action="store_true",
        help="PROMPT is a user's message, of which the model's chat template makes the prompt",
    )
    _add_engine_options(generate, "generate")
    _add_sampling_options(generate, max_tokens=MAX_TOKENS)
    generate.add_argument("--quiet", action="store_true", help="no figures at the end")


def _add_batch(commands: Any) -> None:
    batch = _add_command(
        commands,
        "batch",
        help="complete a file of prompts, and go on where a run was cut off",
        description='Completes every line of a file, such as {"id": 1, "prompt": "..."} or '
        '{"id": "a", "messages": [...], "params": {"max_tokens": 9}}, or one of OpenAI\'s batches: '
        '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}. The '
        "same command again does what is missing in the output (docs/batch.md).",
        examples="jaxkv batch -i prompts.jsonl -o results.jsonl --model org/name --temperature 0\n"
        "jaxkv batch -i openai_batch.jsonl.gz -o - --shard 0/8 > part_0.jsonl",
    )
    batch.set_defaults(run=_batch)
    batch.add_argument(
        "-i",
        "--input",
        required=True,
        metavar="IN",
        help="one request per line of JSON; also *.jsonl.gz, *.parquet, and - for standard input",
    )
    batch.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT.jsonl",
        help="one row per line is appended here; - for standard output, which cannot be resumed",
    )
    batch.add_argument(
        "--shard",
        type=_shard,
        metavar="I/N",
        default=(0, 1),
        help="take the lines whose number modulo N is I, for N runs with an output each",
    )
    batch.add_argument(
        "--retry-errors", action="store_true", help="do the lines again that have error rows"
    )
    batch.add_argument(
        "--max-errors", type=int, metavar="N", help="stop when more than N lines were refused"
    )
    batch.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what model is in OpenAI's lines, if neither MODEL nor its last part",
    )
    batch.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=PATH",
        default=[],
        help="adapters that lines may name as their model, with --enable-lora (docs/lora.md)",
    )
    batch.add_argument(
        "--response-template",
        metavar="T",
        help="takes answers to OpenAI's chats apart, as jaxkv serve does with this flag",
    )
    batch.add_argument(
        "--trace",
        metavar="FILE.json",
        help="when each request of this run waited and ran, for chrome://tracing and Perfetto",
    )
    _add_engine_options(batch, "batch")
    _add_sampling_options(batch, max_tokens=16)
    batch.add_argument(
        "--quiet", action="store_true", help="no progress bar, no summary (JSON) at the end"
    )


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected I/N, such as 0/8, got {text!r:.80}")
    return int(index), int(count)


def _add_serve(commands: Any) -> None:
    from jaxkv.api.server.options import ServeOptions

    serve = _add_command(
        commands,
        "serve",
        help="answer OpenAI's HTTP interface",
        description="Serves a model as OpenAI's API does: /v1/chat/completions, /v1/completions "
        'and more (docs/server.md). Needs pip install "jaxkv[serve]".',
        examples="jaxkv serve --model org/name --port 8000",
    )
    serve.add_argument(
        "first", nargs="?", metavar="MODEL", default=SUPPRESS, help="the same as --model"
    )
    serve.set_defaults(run=_serve)
    _add_engine_options(serve, "serve")
    for names, settings in flags(None, ServeOptions).values():
        serve.add_argument(*names, default=SUPPRESS, **settings)


def _add_convert(commands: Any) -> None:
    convert = _add_command(
        commands,
        "convert",
        help="store a model in the form that starts fastest",
        description="Makes a directory for LLM(OUT) or --model OUT, and keeps the compiled "
        "programs of an engine with default limits in this user's cache.",
        examples="jaxkv convert org/name converted/ && jaxkv generate --model converted/ Hello",
    )
    convert.set_defaults(run=_convert)
    convert.add_argument("model", metavar="DIR", help="local directory or hub id")
    convert.add_argument(
        "out", metavar="OUT", type=Path, help="directory to make; nothing may be there yet"
    )
    convert.add_argument("--dtype", default="auto", help="auto (default), bfloat16 or float32")
    convert.add_argument(
        "--no-compile", action="store_true", help="leave the compiled programs to the first start"
    )


def _add_plan(commands: Any) -> None:
    plan = _add_command(
        commands,
        "plan",
        help="what a model takes on TPUs, and how much context fits beside it",
        description="Divides the memory of devices that need not be here between weights, "
        "programs and KV cache. Needs the model's config.json only. GiB are 2**30 bytes.",
        examples="jaxkv plan org/name --target v6e:2x4 --context 8192 --kv-dtype int8",
    )
    plan.set_defaults(run=_plan)
    plan.add_argument(
        "model", metavar="MODEL", help="config.json, a directory that has one, or a hub id"
    )
    _add_target_options(plan, "plan")
    plan.add_argument(
        "--context",
        type=int,
        nargs="+",
        metavar="N",
        help="tokens of a sequence (default: the longest)",
    )
    plan.add_argument("--sequences", type=int, default=0, metavar="N", help="whether so many fit")
    plan.add_argument(
        "--compile", action="store_true", help="ask the compiler too (minutes; jaxkv[tpu] on Linux)"
    )
    plan.add_argument("--svg", type=Path, metavar="FILE", help="a stacked bar for each plan")
    plan.add_argument("--json", action="store_true", help="JSON, sizes in bytes")


def _add_engine_options(parser: argparse.ArgumentParser, command: str, **help_texts: str) -> None:
    """Adds a flag for each option of the engine that the command takes. help_texts: of options
    that mean something else there.
    """
    for name, (names, settings) in flags(command).items():
        text = help_texts.get(name, settings.pop("help"))
        parser.add_argument(*names, default=SUPPRESS, help=text, **settings)


def _add_target_options(parser: argparse.ArgumentParser, command: str) -> None:
    chips = "v6e is one chip, v6e:2x4 are eight (default: v5e v6e tpu7x)"
    parser.add_argument(
        "--target", nargs="+", metavar="T", default=["v5e", "v6e", "tpu7x"], help=chips
    )
    _add_engine_options(
        parser,
        command,
        dtype="of the weights: bfloat16 (default) or float32",
        tensor_parallel_size="devices that divide the model (default: all)",
    )


def _add_check(commands: Any) -> None:
    check = _add_command(
        commands,
        "check",
        help="compile for TPUs that are not here, and say what is wrong",
        description="Compiles the attention kernels, and with MODEL the engine's programs, for "
        "each target; nothing is run. Exit status 1 if anything failed. Needs pip install "
        '"jaxkv[tpu]" on Linux, but no TPU.',
        examples="jaxkv check --target v5e v6e\n"
        "jaxkv check org/name --target v6e:2x4 --max-model-len 8192",
    )
    check.set_defaults(run=_check)
    check.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="config.json, a directory that has one, or a hub id",
    )
    _add_target_options(check, "check")
    check.add_argument(
        "--all",
        action="store_true",
        help="every program, not only the largest of each kind; kernels at every named shape, "
        "which takes half an hour",
    )
    check.add_argument(
        "--shape",
        nargs="+",
        metavar="S",
        help="kernels at these named shapes (default: a few, or MODEL's)",
    )
    check.add_argument("--kernel", choices=("decode", "prefill"), help="only this one")
    check.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of a row that a kernel attends (default: budgeted)",
    )
    check.add_argument("--json", action="store_true", help="JSON instead of the table")


def _add_selftest(commands: Any) -> None:
    selftest = _add_command(
        commands,
        "selftest",
        help="try the attention kernels on this machine's device, beside XLA",
        description="Attends small ragged batches by the kernels and by XLA, on the same device, "
        "and compares outputs and pages; on a CPU in the kernels' interpreters. What comes out is "
        "remembered for engines. Exit status 1 if anything failed.",
        examples="jaxkv selftest\njaxkv selftest --all --kernel pallas_tpu --json",
    )
    selftest.set_defaults(run=_selftest)
    selftest.add_argument("--kernel", choices=("pallas_tpu", "mosaic_gpu"), help="only this one")
    selftest.add_argument("--all", action="store_true", help="all shapes, not only the usual ones")
    selftest.add_argument(
        "--limit", type=float, metavar="S", help="seconds until a case counts as hung (default 300)"
    )
    selftest.add_argument(
        "--checks", action="store_true", help="on a TPU with Mosaic's checks of bounds, semaphores"
    )
    selftest.add_argument("--json", action="store_true", help="JSON instead of the table")


def _add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group(
        "sampling", "What is not given is as the model's generation_config.json has it."
    )
    for name, kind, text in (
        ("max_tokens", int, f"tokens to generate (default: its max_new_tokens, else {max_tokens})"),
        ("min_tokens", int, "tokens before an end is allowed"),
        ("temperature", float, "0 is greedy"),
        ("top_k", int, "0 is off"),
        ("top_p", float, "1 is off"),
        ("min_p", float, "0 is off"),
        ("seed", int, "of the sampling; without it, the same every time"),
    ):
        group.add_argument(flag_name(name), type=kind, metavar="N", default=SUPPRESS, help=text)
    group.add_argument(
        "--stop",
        action="append",
        default=SUPPRESS,
        help="text that ends the output; may be given several times",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=SUPPRESS,
        help="go on after the model's end token",
    )


def _engine_options(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Returns the options of the engine that were given; lists as tuples, since `check` knows its
    work by its options.
    """
    known = flags(command)
    given = {name: value for name, value in vars(args).items() if name in known}
    return {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}


def _follows(engine: dict[str, Any]) -> bool:
    """Joins the other processes of an engine of several. In all but the first one it is made here,
    and follows that one to its end.
    """
    if engine.get("nnodes", 1) == 1:
        return False
    from jaxkv.api.llm import LLM
    from jaxkv.build.joining import is_first
    from jaxkv.build.options import EngineOptions

    if is_first(EngineOptions(**engine)):
        return False
    # All hosts of a job are told to stop at once: this one goes on as long as the first one does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with LLM(**engine) as llm:
        llm.follow()
    return True


def _sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that were given. Raises: ValueError for a bad one."""
    from jaxkv.config import SamplingParams

    given = {name: value for name, value in vars(args).items() if name in SAMPLING}
    SamplingParams(**{"max_tokens": None, **given})  # says what is wrong before anything is read
    return given


def _sampling_params(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """Returns the model's defaults with what was given in their place."""
    params = llm.get_default_sampling_params()
    if "max_new_tokens" not in llm._model.generation:
        given = {"max_tokens": MAX_TOKENS, **given}
    return replace(params, **given)


def _chat_prompt(llm: LLM, text: str) -> Prompt:
    message = {"role": "user", "content": text}
    (prompt,) = llm._intake.render([[message]], add_generation_prompt=True)
    return prompt


def _generate(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    from jaxkv.api.llm import LLM
    from jaxkv.lora.request import LoRARequest

    given = _sampling_options(args)
    lora = None if args.lora is None else LoRARequest("lora", 1, args.lora)
    # One prompt needs one row and two or three of the programs: compile those when they are met.
    engine = {"lazy_compile": True, **_engine_options(args, "generate")}
    engine |= {"max_num_seqs": 1, "enable_lora": lora is not None}
    if _follows(engine):
        return 0
    text = sys.stdin.read() if args.prompt is None else args.prompt
    llm = LLM(**engine)
    prompt = _chat_prompt(llm, text) if args.chat else text
    stream = llm.stream(prompt, _sampling_params(llm, given), lora_request=lora)
    loaded, compiled_s = time.perf_counter(), llm.compile_s
    if not args.chat:
        print(text, end="", flush=True)
    # (seconds without compilation, tokens so far) after each piece
    marks = []
    num_prompt, num_new, compiling_s = 0, 0, 0.0
    for output in stream:
        num_prompt = len(output.prompt_token_ids)
        num_new += len(output.outputs[0].token_ids)
        compiling_s = llm.compile_s - compiled_s
        marks.append((time.perf_counter() - loaded - compiling_s, num_new))
        print(output.outputs[0].text, end="", flush=True)
    print()
    if not args.quiet:
        (first_s, first), (last_s, last) = marks[0], marks[-1]
        rate = (
            f"{(last - first) / (last_s - first_s):.1f} tokens/s after it"
            if last > first
            else "no tokens after it"
        )
        print(
            f"[{num_prompt} prompt + {num_new} new tokens; time to first token {first_s:.3f} s, "
            f"{rate}, without the {compiling_s:.1f} s of compilation and "
            f"{loaded - started:.1f} s of loading; KV cache: "
            f"{num_prompt + num_new - 1} of {llm.num_kv_tokens} tokens]",
            file=sys.stderr,
        )
    return 0


@contextmanager
def _ends_on_term() -> Iterator[None]:
    """Has what a system sends before it kills end the block as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@_ends_on_term()
def _batch(args: argparse.Namespace) -> int:
    from jaxkv.api.batch_files import open_lines, open_output, run_batch
    from jaxkv.api.response_parts import read_template

    given = _sampling_options(args)
    name = args.served_model_name or _model_name(args)
    adapters = _lora_modules(args, args.lora_modules, [name])
    if args.response_template is not None:
        read_template(args.response_template)
    engine = {"lazy_compile": True, **_engine_options(args, "batch")}
    if _follows(engine):
        return 0
    try:
        with (
            open_lines(args.input) as source,
            open_output(args.output, source, retry_errors=args.retry_errors) as rows,
            _opened_trace(args.trace, (args.input, args.output)) as trace,
        ):
            # Imports and weights take seconds to minutes: only when the files are known to be good.
            from jaxkv.api.llm import LLM

            llm = LLM(**engine)
            counts = run_batch(
                llm,
                source,
                rows,
                given,
                shard=args.shard,
                max_errors=args.max_errors,
                served_model_name=args.served_model_name,
                lora_requests=adapters,
                response_template=args.response_template,
                use_tqdm=not args.quiet,
                trace=trace,
            )
    except KeyboardInterrupt:
        print("jaxkv: stopped; the same command goes on where this one ended", file=sys.stderr)
        return 130
    if not args.quiet:
        rate = {"tokens_per_s": counts.num_output_tokens / counts.run_s, "compile_s": llm.compile_s}
        print(json.dumps(asdict(counts) | rate), file=sys.stderr)
    return 0


def _lora_modules(
    args: argparse.Namespace, given: Sequence[str], models: Sequence[str]
) -> list[LoRARequest]:
    """Returns the adapters of --lora-modules. models: the model's names. Raises: ValueError."""
    from jaxkv.api.lora_modules import read_lora_modules

    if given and not getattr(args, "enable_lora", False):
        raise ValueError("lora_modules: expected --enable-lora with it")
    return list(read_lora_modules(given, models).values())


def _model_name(args: argparse.Namespace) -> str:
    """Returns what the model is called where no flag says it."""
    return str(getattr(args, "model", "demo"))


@contextmanager
def _opened_trace(path: str | None, others: tuple[str, str]) -> Iterator[ChromeTrace | None]:
    """Opens the file of --trace, which is written anew. Raises: ValueError if it is one of the
    other files.
    """
    if path is None:
        yield None
        return
    from jaxkv.pictures import ChromeTrace

    if Path(path).resolve() in [Path(other).resolve() for other in others]:
        raise ValueError(f"trace: expected a file of its own, got {path}")
    with open(path, "w", encoding="utf-8") as file, ChromeTrace(file) as trace:
        yield trace


def _serve(args: argparse.Namespace) -> int:
    from jaxkv.api.server.options import ServeOptions

    if "first" in args:  # as vLLM's command has it
        if "model" in args:
            raise ValueError(
                f"model: expected it once, got {args.first!r} and --model {args.model!r}"
            )
        args.model = args.first
    given = {name: getattr(args, name) for name in flags(None, ServeOptions) if name in args}
    options = ServeOptions(**given)
    names = options.served_model_name or [_model_name(args)]
    _lora_modules(args, options.lora_modules or (), names)  # says what is wrong before weights load
    if options.lora_dir is not None and not getattr(args, "enable_lora", False):
        raise ValueError("lora_dir: expected --enable-lora with it")
    try:
        from jaxkv.api.server.run import listen, serve
    except ModuleNotFoundError as error:
        raise ValueError(f'serve: {error}: pip install "jaxkv[serve]"') from error
    engine = _engine_options(args, "serve")
    if _follows(engine):
        return 0
    with listen(options) as at:  # before weights are loaded, which takes long
        from jaxkv.api.async_llm import AsyncLLM

        return serve(AsyncLLM(**engine), at, options, names[0])


@_ends_on_term()
def _convert(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    import jax

    from jaxkv.build.limits import auto_dtype
    from jaxkv.build.pooling import says_that_it_pools
    from jaxkv.models.families import read_config
    from jaxkv.weights.hub import resolve_model
    from jaxkv.weights.orbax import convert

    dtype = auto_dtype(jax.devices()[0].platform) if args.dtype == "auto" else args.dtype
    directory = resolve_model(args.model)
    if says_that_it_pools(directory, read_config(directory)):
        raise ValueError(f"{directory}: expected a model that generates, got one that pools")
    num_bytes = convert(directory, args.out, dtype=dtype)
    print(
        f"{args.out}: {num_bytes / 1e6:.1f} MB of {dtype} in {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    if not args.no_compile:
        from jaxkv.api.llm import LLM

        llm = LLM(args.out, skip_tokenizer_init=True)
        llm.wait_until_compiled()
        print(llm.describe())
    return 0


def _deployments(args: argparse.Namespace) -> list[Deployment]:
    from jaxkv.tools.chips import ENVIRONMENT, parse_target

    os.environ.update(ENVIRONMENT)
    from jaxkv.tools.deployment import deploy

    found = []
    for target in [parse_target(text) for text in args.target]:
        try:
            found.append(deploy(args.model, target, **_engine_options(args, "plan")))
        except ValueError as error:  # devices that nobody counted may not divide the model
            raise ValueError(f"{target}: {error}") from error
    return found


def _check_plan(args: argparse.Namespace) -> None:
    """Raises ValueError or OSError for what can be known to be wrong before any work."""
    if min([args.sequences + 1, *(args.context or ())]) < 1:
        raise ValueError(
            "expected --context above 0 and --sequences from 0, "
            f"got {args.context} and {args.sequences}"
        )
    if args.svg is not None:
        folder = args.svg.absolute().parent
        if args.svg.is_dir() or not folder.is_dir():
            raise ValueError(f"--svg: expected a file in a directory that is there, got {args.svg}")
        if not os.access(args.svg if args.svg.exists() else folder, os.W_OK):
            raise PermissionError(f"--svg: expected a file that may be written, got {args.svg}")


def _plan(args: argparse.Namespace) -> int:
    _check_plan(args)
    deployments = _deployments(args)
    from jaxkv.tools import plan

    longest = deployments[0].blueprint.limits.max_model_len
    contexts = args.context or [longest]
    if max(contexts) > longest:
        raise ValueError(f"--context: expected at most max_model_len={longest}, got {contexts}")
    if not args.json:
        print(
            plan.describe_model(deployments[0], contexts=contexts, sequences=args.sequences),
            flush=True,
        )
    planned = []
    for deployment in deployments:
        planned.append(plan.make_plans(deployment, compile_too=args.compile))
        if not args.json:
            print(
                plan.describe(planned[-1], contexts=contexts, sequences=args.sequences), flush=True
            )
    if args.json:
        print(json.dumps([plan.as_json(one, contexts=contexts) for one in planned], indent=1))
    if args.svg:
        args.svg.write_text(plan.picture(planned))
    return int(all(one.refusal is not None for one in planned))


def _check(args: argparse.Namespace) -> int:
    from jaxkv.tools.check import run

    return run(
        args.model,
        targets=args.target,
        options=_engine_options(args, "check"),
        every=args.all,
        shapes=args.shape or (),
        kernels=[args.kernel] if args.kernel else None,
        context=args.context,
        as_json=args.json,
    )


def _selftest(args: argparse.Namespace) -> int:
    from jaxkv.tools.selftest import run

    if args.checks:
        os.environ["JAXKV_KERNEL_CHECKS"] = "1"
    return run(kernel=args.kernel, every=args.all, as_json=args.json, limit_s=args.limit)
