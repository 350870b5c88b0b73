"""Runs the lines of a batch that have no row yet."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.api.batch_files import sources
from jaxkv.api.batch_files.forms import Defaults, Form, Job, LineId, changed, hashed
from jaxkv.api.batch_files.journal import Rows, message_of
from jaxkv.api.batch_files.sources import Lines, is_blank, numbered_lines
from jaxkv.api.batch_files.unanswered import Line, Unanswered, is_of
from jaxkv.api.lora_modules import check_name
from jaxkv.api.response_parts import parser_of
from jaxkv.config import SamplingParams, is_int
from jaxkv.lora.request import LoRARequest
from jaxkv.requests.outputs import RequestOutput
from jaxkv.requests.pooling import EmbeddingRequestOutput

if TYPE_CHECKING:
    from jaxkv.api.llm import LLM
    from jaxkv.pictures import ChromeTrace

WINDOW_LINES = 1024
"""Lines of a file that are sorted, so that prompts with one beginning follow each other."""

WINDOW_BYTES = 2**26
"""Bounds the lines of a window, which are held in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCounts:
    """Counts what one run did: rows it wrote, lines it skipped because they had one, error rows in
    the whole output, tokens of prompts, those of them that came out of the prefix cache, tokens
    generated, and seconds that took without compilation.
    """

    num_written: int
    num_skipped: int
    num_errors: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    run_s: float


def run_batch(
    llm: LLM,
    source: Lines,
    rows: Rows,
    params: SamplingParams | Mapping[str, Any] | None = None,
    *,
    shard: tuple[int, int] = (0, 1),
    max_errors: int | None = None,
    served_model_name: str | None = None,
    lora_requests: Sequence[LoRARequest] = (),
    response_template: str | None = None,
    use_tqdm: bool = True,
    trace: ChromeTrace | None = None,
) -> BatchCounts:
    """Gives every line of `source` (opened in binary mode) that has no row yet one in `rows`.

        with open("in.jsonl", "rb") as source, open_output("out.jsonl", source) as rows:
            run_batch(LLM(), source, rows, SamplingParams(temperature=0, max_tokens=64))

    params: of lines that say nothing else; of a mapping of some fields the others are
    `LLM.get_default_sampling_params`', and where it has no max_tokens, lines for OpenAI's chats go
    on as long as the context allows. params.seed is the run's seed.
    shard: (i, n) takes the lines whose number (from 1) modulo n is i. max_errors: the run ends with
    a ValueError at one error row more. served_model_name: what "model" is in OpenAI's lines (by
    default the model's name or path as the LLM got it, or the name of its directory).
    lora_requests: adapters, whose names lines may have as their "model". response_template: takes
    answers to OpenAI's chats apart, as `jaxkv serve --response-template` does. trace: is told of
    each request when it has ended, by the id of its line.
    Memory: about 150 bytes per line for its id, a window of lines that are sorted, and the requests
    that `LLM.as_completed` takes at once.
    Raises: ValueError for arguments out of range, params that ask for logprobs or several samples,
    and rows of another model or other parameters; OSError; never for what a line holds.
    """
    from tqdm import tqdm

    _check_arguments(shard, max_errors)
    if trace is not None and llm.pools:
        raise ValueError("trace: expected a model that generates; vectors have no times")
    defaults = defaults_of(llm, params, served_model_name, lora_requests, response_template)
    rows.require(facts_of(llm, defaults))
    # The next line of a pipe may take long.
    is_file = source.seekable()
    total = _count_lines(source, shard) if is_file else None
    lines = Unanswered(source, rows, shard)
    requests = _Requests(lines, rows, defaults, windowed=is_file, max_errors=max_errors)
    num_before, tally = rows.num_rows, _Tally(llm)
    with (
        tqdm(
            total=total,
            initial=num_before,
            desc="Processed prompts",
            disable=not use_tqdm,
        ) as bar,
        closing(completed_by(llm, requests)) as completed,
    ):
        for index, result in completed:
            job = requests.taken.pop(index)
            if isinstance(result, ValueError):
                requests.refuse(job.form, job.line_id, 0, message_of(result))
            else:
                rows.append(job.form.row(job, result, defaults))
                tally.add(result)
                if trace is not None and isinstance(result, RequestOutput):
                    trace.add(result, f"line {job.line_id}")
                bar.set_postfix_str(tally.rates(), refresh=False)
            bar.update(rows.num_rows - bar.n)
        bar.update(rows.num_rows - bar.n)
    return BatchCounts(
        num_written=rows.num_rows - num_before,
        num_skipped=lines.num_skipped,
        num_errors=rows.num_errors,
        num_prompt_tokens=tally.num_prompt_tokens,
        num_cached_tokens=tally.num_cached_tokens,
        num_output_tokens=tally.num_output_tokens,
        run_s=tally.run_s,
    )


class _Tally:
    """Adds up what the results of a run have, and the seconds without waiting for compilation."""

    def __init__(self, llm: LLM) -> None:
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self._llm = llm
        self._started, self._waited_s = time.perf_counter(), llm.compile_wait_s

    def add(self, output: RequestOutput | EmbeddingRequestOutput) -> None:
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.num_cached_tokens
        if isinstance(output, RequestOutput):
            self.num_output_tokens += sum(len(one.token_ids) for one in output.outputs)

    @property
    def run_s(self) -> float:
        waited_s = self._llm.compile_wait_s - self._waited_s
        return time.perf_counter() - self._started - waited_s

    def rates(self) -> str:
        """Returns what the progress bar shows behind it."""
        cached = self.num_cached_tokens / max(1, self.num_prompt_tokens)
        return f"{self.num_output_tokens / self.run_s:.1f} tokens/s, {cached:.0%} cached"


def completed_by(
    llm: LLM, requests: Iterable[tuple[Any, Any, LoRARequest | None]]
) -> Generator[tuple[int, RequestOutput | EmbeddingRequestOutput | ValueError]]:
    """Yields the results of what lines ask for, in order of finishing: texts or vectors, and a
    ValueError for what was refused or has been ended before its time.
    """
    if llm.pools:
        yield from llm.embed_as_completed(requests)
        return
    with closing(llm.as_completed(requests)) as completed:
        for index, result in completed:
            yield index, result if isinstance(result, ValueError) else _whole(result)


def _whole(output: RequestOutput) -> RequestOutput | ValueError:
    for one in output.outputs:
        if one.finish_reason == "abort" and one.stop_reason is not None:
            return ValueError(f"structured_outputs: {one.stop_reason}")
        if one.finish_reason == "abort":
            return ValueError("ended by an error in another call of the same engine: run it again")
    return output


class _Requests:
    """Gives the lines without a row as requests for `LLM.as_completed`; a bad line gets its error
    row on the way.

    `taken` has the job of each request by its index.
    """

    def __init__(
        self,
        lines: Unanswered,
        rows: Rows,
        defaults: Defaults,
        *,
        windowed: bool,
        max_errors: int | None,
    ) -> None:
        self.taken: dict[int, Job] = {}
        self._lines = lines
        self._rows = rows
        self._defaults = defaults
        self._windowed = windowed
        self._max_errors = max_errors
        self._num_refused = 0

    def __iter__(self) -> Iterator[tuple[Any, Any, LoRARequest | None]]:
        index = itertools.count()
        for window in self._windows():
            for job in sorted(window, key=_sort_key) if len(window) > 1 else window:
                self.taken[next(index)] = job
                yield job.asking.request

    def refuse(self, form: Form, line_id: LineId | None, number: int, message: str) -> None:
        """Adds the error row of a line. Raises: ValueError if that is one too many."""
        self._rows.append(form.refusal(line_id, number, message))
        self._num_refused += 1
        if self._max_errors is not None and self._num_refused > self._max_errors:
            raise ValueError(
                f"max_errors: expected at most {self._max_errors} lines that are refused, got one "
                f"more: {message}"
            )

    def _windows(self) -> Iterator[list[Job]]:
        """Yields the jobs by windows; not `windowed`: by windows of one."""
        window: list[Job] = []
        num_bytes = 0
        for line in self._lines:
            try:
                window.append(ask(line, self._defaults))
            except ValueError as error:
                message = f"line {line.number}: {message_of(error)}"
                self.refuse(line.form, line.line_id, line.number, message)
                continue
            num_bytes += len(line.raw or b"")
            if not self._windowed or len(window) >= WINDOW_LINES or num_bytes >= WINDOW_BYTES:
                yield window
                window, num_bytes = [], 0
        yield window


def ask(line: Line, defaults: Defaults) -> Job:
    """Returns what a line asks for, with a seed. Raises: ValueError for one that is refused."""
    if line.refusal is not None or line.line_id is None:
        raise ValueError(line.refusal)
    asking = line.form.ask(line.value, defaults)
    if isinstance(asking.params, SamplingParams) and asking.params.seed in (None, -1):
        seed = seed_for(defaults.seed, line.line_id)
        asking = replace(asking, params=replace(asking.params, seed=seed))
    return Job(line.line_id, line.form, asking)


def _check_arguments(shard: Any, max_errors: Any) -> None:
    numbers = isinstance(shard, tuple) and len(shard) == 2 and all(map(is_int, shard))
    if not (numbers and 0 <= shard[0] < shard[1]):
        raise ValueError(f"shard: expected (i, n) with 0 <= i < n, got {shard!r}")
    if max_errors is not None and not (is_int(max_errors) and max_errors >= 0):
        raise ValueError(f"max_errors: expected None or a number >= 0, got {max_errors!r}")


def defaults_of(
    llm: LLM,
    params: SamplingParams | Mapping[str, Any] | None,
    served_model_name: str | None,
    lora_requests: Sequence[LoRARequest],
    response_template: str | None = None,
) -> Defaults:
    """Returns what holds for lines that say nothing else; arguments as in `run_batch`. Raises:
    ValueError for parameters that rows have no place for.
    """
    if isinstance(params, SamplingParams):
        chosen, has_max_tokens = params, True
    else:
        given = {} if params is None else dict(params)
        chosen = changed(llm.get_default_sampling_params(), given)
        has_max_tokens = "max_tokens" in given
    for name in ("logprobs", "prompt_logprobs"):
        if (asked := getattr(chosen, name)) is not None:
            raise ValueError(
                f"{name}: expected None, because a row has no place for them, got {asked}"
            )
    if chosen.n != 1:
        raise ValueError(f"n: expected 1, because a row has place for one sample, got {chosen.n}")
    tokenizer = llm.get_tokenizer()
    models = llm.model_names if served_model_name is None else (served_model_name,)
    adapters = dict[str, LoRARequest]()
    for lora in lora_requests:
        check_name(lora.lora_name, {*models, *adapters}, "lora_requests")
        adapters[lora.lora_name] = lora
    return Defaults(
        params=replace(chosen, seed=None),
        has_max_tokens=has_max_tokens,
        models=models,
        adapters=adapters,
        decode=None if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=False),
        seed=0 if chosen.seed in (None, -1) else chosen.seed % 2**64,
        pools=llm.pools,
        parser=None if response_template is None else parser_of(tokenizer, response_template),
    )


def facts_of(llm: LLM, defaults: Defaults) -> dict[str, Any]:
    """Returns what the manifest of an output says: of which model, parameters and adapters its rows
    are. Raises: CheckpointError for an adapter that cannot be read.
    """
    params = asdict(defaults.params) | {"seed": defaults.seed}
    adapters = {name: llm.lora_digest(lora) for name, lora in defaults.adapters.items()}
    facts: dict[str, Any] = {"engine": llm.identity(), "params": params}
    if defaults.parser is not None:
        facts["response_template"] = defaults.parser.template
    return facts | ({"adapters": adapters} if adapters else {})


def _count_lines(source: Lines, shard: tuple[int, int]) -> int:
    """Counts the lines that the run is of, and goes back to the first one."""
    numbered = numbered_lines(source, sources.MAX_LINE_BYTES)
    total = sum(is_of(shard, number) and not is_blank(raw) for number, raw in numbered)
    source.seek(0)
    return total


def _sort_key(job: Job) -> tuple[str, str]:
    """Returns the name of the adapter, since few are on the device at once, and a text that begins
    like that of another job where their prompts do.
    """
    prompt, lora = job.asking.prompt, job.asking.lora_request
    text = prompt.get("prompt") if isinstance(prompt, dict) else None
    text = text if isinstance(text, str) else json.dumps(prompt)
    return "" if lora is None else lora.lora_name, text


def seed_for(run_seed: int, line_id: LineId) -> int:
    """Draws 64 bits for one line."""
    entropy = [run_seed, int.from_bytes(hashed(line_id, 8), "little")]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
