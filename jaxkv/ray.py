"""Answers the lines of Ray Data's datasets (`pip install "jaxkv[ray]"`): `Generate` is a callable
class for `Dataset.map_batches`, with one engine for each of its actors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.api.batch_files.forms import Job
from jaxkv.api.batch_files.journal import message_of
from jaxkv.api.batch_files.run import ask, completed_by, defaults_of, facts_of
from jaxkv.api.batch_files.sources import MAX_LINE_BYTES
from jaxkv.api.batch_files.unanswered import Line, read_line
from jaxkv.config import SamplingParams
from jaxkv.lora.request import LoRARequest

if TYPE_CHECKING:
    from jaxkv.api.llm import LLM

LINE, NUMBER, ROW, ENGINE = "line", "number", "row", "engine"


class Generate:
    """Answers lines of a batch file with an engine of its own.

        answers = dataset.map_batches(
            Generate,
            fn_constructor_kwargs={"model": "org/name", "params": {"temperature": 0}},
            batch_size=64,
            compute=ray.data.ActorPoolStrategy(
                size=4, max_concurrent_calls_per_actor=2, enable_true_multi_threading=True
            ),
            num_gpus=1,
        )

    With two calls at once, the requests of the next batch run in the same steps as the last ones of
    this batch. docs/batch.md tells more, and `scripts/batch_ray.py` is a whole program.

    model: a directory, a hub id or an `LLM`; options: what else `LLM` takes. params,
    served_model_name and lora_requests: as for `run_batch`.
    Raises: what `LLM` raises, and ValueError for params that rows have no place for.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LLM | None = None,
        *,
        params: SamplingParams | Mapping[str, Any] | None = None,
        served_model_name: str | None = None,
        lora_requests: Sequence[LoRARequest] = (),
        **options: Any,
    ) -> None:
        from jaxkv.api.llm import LLM

        if isinstance(model, LLM):
            if options:
                raise ValueError(f"{', '.join(options)}: expected nothing beside an LLM")
            self.llm = model
        else:
            self.llm = LLM(model, **options)
        self._defaults = defaults_of(self.llm, params, served_model_name, lora_requests)
        self._facts = json.dumps(facts_of(self.llm, self._defaults))

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the batch with two more columns, both JSON texts: "row" is what `jaxkv batch`
        writes for a line (an error row for one that is refused), and "engine" what its manifest
        says, by which rows of other weights or parameters are told apart.

        batch: a column "line" of JSON texts, and where wanted "number", which a row without an id
        has as its line. Several threads may call at once.
        Raises: ValueError for other columns of these names, and what a step of the engine raises.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(
                f'batch: expected columns as arrays (batch_format="numpy"), got '
                f"{type(batch).__name__}"
            )
        if LINE not in batch or {ROW, ENGINE} & batch.keys():
            raise ValueError(
                f"batch: expected a column {LINE!r} and none called {ROW!r} or {ENGINE!r}, got "
                f"{', '.join(map(repr, batch)) or 'none'}"
            )
        numbers = batch.get(NUMBER, np.zeros(len(batch[LINE]), int))
        if numbers.dtype.kind not in "iu":
            raise ValueError(f"{NUMBER}: expected whole numbers, got {numbers.dtype}")
        lines = [_line(*of) for of in zip(batch[LINE], numbers, strict=True)]
        rows = np.array([json.dumps(row) for row in self._rows(lines)], object)
        engine = np.full(len(rows), self._facts, object)
        return {**batch, ROW: rows, ENGINE: engine}

    def _rows(self, lines: list[Line]) -> list[dict[str, Any]]:
        """Returns the row of each line."""
        rows: list[dict[str, Any]] = [{}] * len(lines)
        jobs: list[tuple[int, Job]] = []
        for place, line in enumerate(lines):
            try:
                jobs.append((place, ask(line, self._defaults)))
            except ValueError as error:
                message = f"line {line.number}: {message_of(error)}"
                rows[place] = line.form.refusal(line.line_id, line.number, message)
        requests = [job.asking.request for _, job in jobs]
        with closing(completed_by(self.llm, requests)) as completed:
            for index, result in completed:
                place, job = jobs[index]
                if isinstance(result, ValueError):
                    rows[place] = job.form.refusal(job.line_id, 0, message_of(result))
                else:
                    rows[place] = job.form.row(job, result, self._defaults)
        return rows


def _line(text: Any, number: Any) -> Line:
    """Reads a line. One that is no text, as a null is, is refused as no object."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else b"null"
    return read_line(int(number), raw if len(raw) <= MAX_LINE_BYTES else None)
