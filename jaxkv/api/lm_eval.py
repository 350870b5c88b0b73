"""Makes jaxkv a model of the lm-evaluation-harness (`pip install "jaxkv[eval]"`).

    python -m jaxkv.api.lm_eval run --model jaxkv --model_args pretrained=DIR --tasks arc_easy

takes the arguments of the `lm_eval` command, which cannot find models of other packages by itself.
In Python: `lm_eval.simple_evaluate(JaxKV("DIR"), tasks=[...])`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxkv.api.llm import LLM
from jaxkv.config import SamplingParams, is_int
from jaxkv.requests.outputs import RequestOutput

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks have for the tokens to generate; the first one that is given counts."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
"""Lists what else tasks may ask of generation: fields of SamplingParams."""


@register_model("jaxkv")
class JaxKV(TemplateLM):
    """Scores and generates for the harness with an `LLM`.

    Continuations are scored from their first token on, in the order of their contexts, so that
    contexts with one beginning, such as few-shot examples or the question of several answers, are
    computed once and then come from the prefix cache.

    pretrained: a directory, a hub id or an `LLM`; options: what else `LLM` takes. max_gen_toks:
    tokens to generate where a task does not say how many. add_bos_token: whether texts begin with
    the special tokens of the tokenizer (None: as it does by itself). prefix_token_id: what an empty
    context is (default: the beginning of a sequence, or its end). chat_template_args: what the chat
    template gets. batch_size and max_batch_size are always given by the harness, and taken: an
    engine makes its own batches, of max_num_seqs rows.
    Raises: ValueError for a device (JAX_PLATFORMS chooses it), and what `LLM` raises.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | LLM | None = None,
        *,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if device is not None:
            raise ValueError(f"device: expected none (set JAX_PLATFORMS instead), got {device!r}")
        if not is_int(max_gen_toks) or max_gen_toks < 1:
            raise ValueError(f"max_gen_toks: expected a number >= 1, got {max_gen_toks!r}")
        if isinstance(pretrained, LLM):
            if options:
                raise ValueError(f"{', '.join(options)}: expected nothing beside an LLM")
            self.llm = pretrained
        else:
            self.llm = LLM(pretrained, **options)
        self.tokenizer = self.llm.get_tokenizer()
        if self.tokenizer is None:
            raise ValueError("tokenizer: expected one, got skip_tokenizer_init=True")
        self.max_gen_toks = max_gen_toks
        # A prompt leaves room for one token, and the first token of a sequence is not scored.
        self.max_length = self.llm.max_model_len - 2
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._chat_template_args = dict(chat_template_args or {})
        if not is_int(self.prefix_token_id):
            raise ValueError(
                f"prefix_token_id: expected a token (this tokenizer has neither a first nor an end "
                f"token), got {self.prefix_token_id!r:.80}"
            )

    @property
    def eot_token_id(self) -> int:
        """Returns the end token of the tokenizer."""
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """Returns the context of a text that has none."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        first: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        """Returns what the harness keeps rendered requests by."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the tokens of a text. One that begins with the prefix token gets no other one."""
        add = self._add_bos_token if add_special_tokens is None else add_special_tokens
        prefix = self.tokenizer.decode([self.prefix_token_id])
        if add_special_tokens is None and prefix and string.startswith(prefix):
            add = False
        if add is not None:
            kwargs["add_special_tokens"] = add
        tokens: list[int] = self.tokenizer.encode(string, **kwargs)
        return tokens

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a chat as the model's template writes it."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._chat_template_args,
        )
        return text

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, in windows of max_length tokens as the harness
        cuts them.
        """
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for number, (score, _) in zip(owners, scores, strict=True):
            totals[number] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Returns of each (key, context, continuation) the log-probability of the continuation, and
        whether greedy decoding gives it. A context that is too long loses its beginning.

        Raises: ValueError for a continuation that is empty or longer than max_length.
        """
        if kwargs:
            raise ValueError(f"expected no other arguments, got {', '.join(kwargs)}")

        def ask(index: int) -> tuple[list[int], SamplingParams]:
            _, context, continuation = requests[index]
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"request {index}: expected a context and a continuation of 1 to "
                    f"{self.max_length} tokens, got {len(context)} and {len(continuation)}"
                )
            tokens = (context + continuation)[-(self.max_length + 1) :]
            start = len(tokens) - len(continuation)
            return tokens, _scoring(start)

        order = sorted(range(len(requests)), key=lambda index: requests[index][1:])
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for index, output in self._run(map(ask, order), order, "loglikelihood", disable_tqdm):
            key, _, continuation = requests[index]
            results[index] = _score(output, len(continuation))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, results[index])
        return results

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Returns what follows each context, up to a stop string of the task.

        Raises: ValueError naming what a task asks for that is not supported.
        """

        def ask(index: int) -> tuple[list[int], SamplingParams]:
            context, given = requests[index].args
            params = self._generation(given)
            room = self.max_length + 2 - (params.max_tokens or 0)
            if room < 1:
                raise ValueError(
                    f"max_gen_toks: expected less than max_model_len={self.max_length + 2}, got "
                    f"{params.max_tokens}"
                )
            return self.tok_encode(context)[-room:], params

        order = sorted(range(len(requests)), key=lambda index: requests[index].args[0])
        results = [""] * len(requests)
        for index, output in self._run(map(ask, order), order, "generate_until", disable_tqdm):
            results[index] = output.outputs[0].text
            self.cache_hook.add_partial("generate_until", requests[index].args, results[index])
        return results

    def _generation(self, given: Mapping[str, Any]) -> SamplingParams:
        """Returns the parameters that a task's `generation_kwargs` ask for; greedy without
        do_sample or a temperature.
        """
        left = {name: value for name, value in given.items() if value is not None}
        until = left.pop("until", [])
        lengths = [left.pop(name) for name in _LENGTHS if name in left]
        sampling = {name: left.pop(name) for name in _SAMPLING if name in left}
        draws = left.pop("do_sample", None)
        if left:
            raise ValueError(f"generation_kwargs: not supported: {', '.join(map(str, left))}")
        if not isinstance(draws, bool | None):
            raise ValueError(f"do_sample: expected True or False, got {draws!r:.80}")
        listed = [until] if isinstance(until, str) else until
        if not isinstance(listed, list | tuple):
            raise ValueError(f"until: expected a text or a list of texts, got {until!r:.80}")
        asked = SamplingParams(
            stop=[one for one in listed if one != ""] or None,
            max_tokens=lengths[0] if lengths else self.max_gen_toks,
            **{"temperature": 1.0 if draws else 0.0, **sampling},
        )
        return replace(asked, temperature=0.0) if draws is False else asked

    def _run(
        self,
        asked: Iterator[tuple[list[int], SamplingParams]],
        order: Sequence[int],
        what: str,
        disable_tqdm: bool,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yields (index, output) of what is asked in this order. Raises: the ValueError of one that
        is refused.
        """
        from tqdm import tqdm

        prompts = (({"prompt_token_ids": tokens}, params) for tokens, params in asked)
        with (
            tqdm(total=len(order), desc=f"Running {what} requests", disable=disable_tqdm) as bar,
            closing(self.llm.as_completed(prompts)) as completed,
        ):
            for place, output in completed:
                if isinstance(output, ValueError):
                    raise ValueError(f"request {order[place]}: {output}") from output
                yield order[place], output
                bar.update()


def _scoring(start: int) -> SamplingParams:
    """Returns the parameters that score a prompt's tokens from a position on."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        prompt_logprobs=0,
        prompt_logprobs_start=start,
    )


def _score(output: RequestOutput, count: int) -> tuple[float, bool]:
    """Returns the log-probability of the last tokens of a prompt, and whether each is the
    likeliest.
    """
    scored = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    entries = [entry[token] for token, entry in scored if entry is not None]
    if len(entries) != count:
        raise RuntimeError(f"expected {count} scored tokens, got {len(entries)}")
    return sum(one.logprob for one in entries), all(one.rank == 1 for one in entries)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(cli_evaluate())
