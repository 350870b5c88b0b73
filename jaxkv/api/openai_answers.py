"""Writes the bodies of answers to OpenAI's requests, for the server and for batch files."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxkv.api.openai_format import CHAT, Asked
from jaxkv.api.response_parts import (
    Arguments,
    Behind,
    Call,
    Listed,
    Parser,
    Plain,
    Reader,
    Said,
    reader_of,
)
from jaxkv.requests.outputs import CompletionOutput, Logprob, RequestOutput
from jaxkv.structured import is_reasoning

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have, as at OpenAI."""

Scores = Mapping[int, Logprob] | None


@dataclass(slots=True)
class _Sent:
    """Counts what a stream has sent of a choice, whose text the reader takes apart."""

    reader: Reader
    num_chars: int = 0
    num_tokens: int = 0
    num_ids: int = 0
    num_calls: int = 0
    offset: int = 0
    is_ended: bool = False


@dataclass(kw_only=True)
class Answer:
    """Writes the answer to one request: whole, or in chunks as its outputs grow. `decode` makes
    text of tokens; `parser` takes that of a chat apart; `created` is a Unix time.
    """

    asked: Asked
    model: str
    decode: Callable[[Sequence[int]], str]
    parser: Parser | None = None
    id: str = ""
    created: int = 0
    _sent: dict[int, _Sent] = field(default_factory=dict)
    _echoed: dict[int, str] = field(default_factory=dict)
    _newest: dict[int, RequestOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = self.id or f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = self.created or int(time.time())

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed; outputs: of each input, finished."""
        choices = [
            choice
            for number, output in enumerate(outputs)
            for choice in self._choices(number, output, "message")
        ]
        prompt = self._prompt_ids(outputs[0]) if self._is_chat else {}
        body = {**self._head(""), "choices": choices, "usage": usage(self.asked, outputs)}
        return {**body, **prompt}

    def chunks(self, number: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Yields what is new in the output of an input, a chunk for each choice that has more."""
        self._newest[number] = output
        first = [number * self.asked.params.n + one.index for one in output.outputs]
        for index in first if self._is_chat else ():
            if index not in self._sent:
                delta = {"role": "assistant", "content": ""}
                chunk = self._chunk([_choice(index, {"delta": delta}, None)])
                yield {**chunk, **self._prompt_ids(output)}
        for choice in self._choices(number, output, "delta"):
            yield self._chunk([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """Returns the last chunk of a stream that includes its usage."""
        return {**self._head(".chunk"), "choices": [], "usage": self._usage_so_far()}

    def _usage_so_far(self) -> dict[str, Any]:
        return usage(self.asked, list(self._newest.values()))

    @property
    def _is_chat(self) -> bool:
        return self.asked.url == CHAT

    def _head(self, chunk: str) -> dict[str, Any]:
        kind = f"chat.completion{chunk}" if self._is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head(".chunk"), "choices": choices}
        if not self.asked.include_usage:
            return chunk
        return {**chunk, "usage": self._usage_so_far() if self.asked.usage_in_chunks else None}

    def _choices(self, number: int, output: RequestOutput, form: str) -> Iterator[dict[str, Any]]:
        """Yields the choices of an output with what has not been sent of them, if there is any."""
        for one in output.outputs:
            index = number * self.asked.params.n + one.index
            if index not in self._sent:
                self._sent[index] = _Sent(self._reader(output))
            sent = self._sent[index]
            text = self._text(number, output, one)[sent.num_chars :]
            tokens = self._scored(output, one, sent.num_tokens)
            reason = _finish_reason(one.finish_reason)
            if sent.is_ended or not (text or tokens or reason):
                continue
            said = sent.reader.feed(text, reason)
            if not self.asked.with_reasoning:
                said.reasoning = ""
            if self.asked.is_single:
                said.calls = [call for call in said.calls if not call.number]
            sent.num_chars += len(text)
            ids = self._token_ids(output, one, sent)
            if not (said or tokens or reason or any(ids.values())):
                continue
            sent.num_calls += len(said.calls)
            scores = None
            if self.asked.top is not None:
                scores = self._chat_scores(tokens) if self._is_chat else self._scores(tokens, sent)
            sent.num_tokens += len(tokens)
            sent.is_ended = reason is not None
            forced = self.asked.forced
            if reason == "stop" and sent.num_calls and (forced is None or forced.name is None):
                reason = "tool_calls"  # of a tool that was asked for by its name it is "stop"
            shown = {**self._said(index, said, form), **ids}
            yield _choice(index, shown, scores, reason, one.stop_reason)

    def _prompt_ids(self, output: RequestOutput) -> dict[str, list[int]]:
        """Returns the tokens of a prompt under their key where they are wanted."""
        wanted = self.asked.with_token_ids
        return {"prompt_token_ids": [*output.prompt_token_ids]} if wanted else {}

    def _token_ids(
        self, output: RequestOutput, one: CompletionOutput, sent: _Sent
    ) -> dict[str, list[int]]:
        """Returns new tokens of a choice, of a completion at first those of the prompt too."""
        if not self.asked.with_token_ids:
            return {}
        is_first = sent.num_ids == 0 and not self._is_chat
        ids = [*one.token_ids[sent.num_ids :]] if self.asked.has_output else []
        sent.num_ids += len(ids)
        return {"token_ids": ids, **(self._prompt_ids(output) if is_first else {})}

    def _reader(self, output: RequestOutput) -> Reader:
        """Returns what takes the text of a choice apart."""
        forced, form = self.asked.forced, self.asked.params.structured_outputs
        reader: Reader = Plain()
        if forced is not None:
            reader = Listed() if forced.name is None else Arguments(forced.name)
        marks = None if form is None else form.reasoning
        if not self._is_chat or self.parser is None or (forced is not None and marks is None):
            return reader
        prompt = output.prompt
        prompt = self.decode(output.prompt_token_ids) if prompt is None else prompt
        as_it_likes = reader_of(self.parser, prompt, self.asked.tools if forced is None else ())
        if marks is None:
            return as_it_likes
        return Behind(marks, is_reasoning(prompt, marks), as_it_likes, reader)

    def _said(self, index: int, said: Said, form: str) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": said.content}
        parts: dict[str, Any] = {}
        if said.reasoning:
            parts["reasoning"] = said.reasoning
        if said.calls:
            parts["tool_calls"] = [self._call(index, call, form) for call in said.calls]
        if form == "delta":
            return {"delta": {"content": said.content, **parts} if said.content else parts}
        content = None if said.calls and not said.content else said.content
        return {"message": {"role": "assistant", "content": content, "refusal": None, **parts}}

    def _call(self, index: int, call: Call, form: str) -> dict[str, Any]:
        """Writes a call of a tool, or in a chunk what is new of it."""
        number = {"index": call.number} if form == "delta" else {}
        if call.name is None:
            return {**number, "function": {"arguments": call.arguments}}
        name = f"call_{self.id.partition('-')[2]}_{index}_{call.number}"
        function = {"name": call.name, "arguments": call.arguments}
        return {**number, "id": name, "type": "function", "function": function}

    def _text(self, number: int, output: RequestOutput, one: CompletionOutput) -> str:
        """Returns the text of a choice: behind the prompt where that is echoed."""
        text = one.text if self.asked.has_output else ""
        if not self.asked.echo:
            return text
        if number not in self._echoed:
            prompt = output.prompt
            self._echoed[number] = (
                self.decode(output.prompt_token_ids) if prompt is None else prompt
            )
        return self._echoed[number] + text

    def _scored(
        self, output: RequestOutput, one: CompletionOutput, start: int
    ) -> list[tuple[int, Scores]]:
        """Returns a choice's tokens from `start` on with their log-probabilities where these are
        wanted: behind those of the prompt where that is echoed.
        """
        asked = self.asked
        tokens: list[tuple[int, Scores]] = []
        if asked.top is None:
            return tokens
        if asked.echo:
            scores = (output.prompt_logprobs or ())[start:]
            tokens += zip(output.prompt_token_ids[start:], scores, strict=True)
            start = max(0, start - len(output.prompt_token_ids))
        if asked.has_output:
            tokens += zip(one.token_ids[start:], (one.logprobs or ())[start:], strict=True)
        return tokens

    def _token(self, token: int, scores: Scores) -> str:
        text = scores[token].decoded_token if scores else None
        return self.decode([token]) if text is None else text

    def _scores(self, tokens: Sequence[tuple[int, Scores]], sent: _Sent) -> dict[str, Any]:
        """Writes log-probabilities as completions have them; those of tokens that look alike are
        the likeliest one's.
        """
        texts, offsets, top = [], [], []
        for token, scores in tokens:
            texts.append(self._token(token, scores))
            offsets.append(sent.offset)
            sent.offset += len(texts[-1])
            by_text: dict[str, float] = {}
            for other, score in _ranked(scores, self.asked.top or 0, token):
                by_text.setdefault(self._token(other, scores), _finite(score))
            top.append(by_text if scores else None)
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(scores[one]) if scores else None for one, scores in tokens],
            "tokens": texts,
            "top_logprobs": top if self.asked.top else None,
        }

    def _chat_scores(self, tokens: Sequence[tuple[int, Scores]]) -> dict[str, Any]:
        """Writes log-probabilities as chats have them."""

        def entry(token: int, scores: Mapping[int, Logprob]) -> dict[str, Any]:
            text = self._token(token, scores)
            # Part of a character: its bytes are not to be had from a text.
            known = None if "\ufffd" in text else list(text.encode(errors="replace"))
            return {"token": text, "logprob": _finite(scores[token]), "bytes": known}

        content = []
        for token, scores in tokens:
            given = scores or {}
            top = [entry(other, given) for other, _ in _ranked(given, self.asked.top or 0)]
            content.append({**entry(token, given), "top_logprobs": top})
        return {"content": content, "refusal": None}


def _finite(score: Logprob) -> float:
    return max(score.logprob, LEAST_LOGPROB)


def _ranked(scores: Scores, top: int, token: int | None = None) -> list[tuple[int, Logprob]]:
    """Returns the `top` likeliest, best first, and behind them `token` if it is none of them."""
    ranked = sorted((scores or {}).items(), key=lambda item: -item[1].logprob)
    return ranked[:top] + [one for one in ranked[top:] if one[0] == token]


def _choice(
    index: int,
    said: dict[str, Any],
    scores: dict[str, Any] | None,
    reason: str | None = None,
    by: str | int | None = None,
) -> dict[str, Any]:
    """Writes a choice. by: the stop string or token that has ended it, which vLLM tells too."""
    ended = {"finish_reason": reason, "stop_reason": by}
    return {"index": index, **said, "logprobs": scores, **ended}


def _finish_reason(reason: str | None) -> str | None:
    """Returns OpenAI's name of a finish_reason: a full KV cache is a limit of length."""
    return "length" if reason == "capacity" else reason


def usage(asked: Asked, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Counts the tokens of an answer; a prompt counts once, however many samples it has."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    num_new = num_new if asked.has_output else 0
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
