"""Makes jaxkv a model provider of Inspect (`pip install "jaxkv[inspect]"`), which finds it by its
entry point:

    inspect eval task.py --model jaxkv/path/to/checkpoint -M max_num_seqs=64
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    Content,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    StopReason,
    modelapi,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolFunction, ToolInfo

from jaxkv.api.openai_answers import Answer
from jaxkv.api.openai_format import CHAT, read_body
from jaxkv.api.response_parts import parser_of
from jaxkv.config import RequestOutputKind

if TYPE_CHECKING:
    from jaxkv.requests.outputs import RequestOutput

KEYS = {"num_choices": "n", "stop_seqs": "stop", "reasoning_tokens": "thinking_token_budget"} | {
    name: name
    for name in (
        *("frequency_penalty", "logit_bias", "logprobs", "max_tokens", "presence_penalty"),
        *("reasoning_effort", "seed", "temperature", "top_k", "top_logprobs", "top_p"),
    )
}
"""Fields of `GenerateConfig` by what a body of OpenAI's calls them."""

OF_INSPECT = {
    *("adaptive_connections", "attempt_timeout", "batch", "cache", "cache_prompt", "extra_body"),
    *("fail_on_refusal", "internal_tools", "max_connections", "max_retries", "max_tool_output"),
    *("parallel_tool_calls", "reasoning_history", "stream_idle_timeout", "system_message"),
    "timeout",
}
"""Fields that Inspect reads itself, or that ask for nothing here."""

STOP_REASONS: dict[str, StopReason] = {
    "stop": "stop",
    "length": "max_tokens",
    "tool_calls": "tool_calls",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""What Inspect says of tools, in OpenAI's words."""


@modelapi(name="jaxkv")
class JaxKV(ModelAPI):
    """Answers Inspect's samples with an `AsyncLLM`, which batches those that run at once.

    model_name: a directory or a hub id. response_template: takes reasoning and tool calls out of
    answers, as of `jaxkv serve`. model_args: what `LLM` takes.
    Raises: ValueError for base_url and api_key, and what `LLM` raises.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        response_template: str | None = None,
        **model_args: Any,
    ) -> None:
        for name, value in (("base_url", base_url), ("api_key", api_key)):
            if value is not None:
                raise ValueError(f"{name}: expected none: the model runs in this process")
        super().__init__(model_name, config=config or GenerateConfig())
        from jaxkv.api.async_llm import AsyncLLM

        self.llm = AsyncLLM(model_name, **model_args)
        tokenizer = self.llm._llm.get_tokenizer()
        if tokenizer is None:
            raise ValueError("tokenizer: expected one, got skip_tokenizer_init=True")
        template = response_template
        self._parser = None if template is None else parser_of(tokenizer, template)

    def close(self) -> None:
        """Ends the engine and gives its memory back."""
        self.llm.shutdown()

    def max_connections(self) -> int:
        """Returns how many samples run at once where nothing is said: enough for every row."""
        return 2 * self.llm._llm._front.num_rows

    async def tokenize(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        tokens: list[int] = (await self.llm.render(text))["prompt_token_ids"]
        return tokens

    async def count_text_tokens(self, text: str) -> int:
        """Counts the tokens of a text."""
        return len(await self.tokenize(text)) if text else 0

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Answers a conversation.

        Raises: ValueError naming what is not supported: tools that may be called as the model likes
        without a response template, contents that are no text, and fields of the config that would
        be ignored.
        """
        if tools and tool_choice == "auto" and self._parser is None:
            raise ValueError(
                "tools: expected -M response_template=... with them, which says how this model "
                "writes calls, or a tool_choice that forces one"
            )
        body = _body(config) | {"messages": _messages(input)} | _tools(tools, tool_choice, config)
        defaults = self.llm.get_default_sampling_params()
        asked = read_body(CHAT, body, defaults, parser=self._parser)
        started = time.perf_counter()
        last: RequestOutput | None = None
        params = replace(asked.params, output_kind=RequestOutputKind.FINAL_ONLY)
        async with aclosing(self.llm.generate(asked.inputs[0], params)) as outputs:
            async for output in outputs:
                last = output
        aborted = [one for one in last.outputs if one.finish_reason == "abort"] if last else []
        if last is None or aborted:
            reason = aborted[0].stop_reason if aborted else None  # a grammar says why
            raise RuntimeError(reason or "the engine has ended")
        tokenizer = await self.llm.get_tokenizer()
        writer = Answer(
            asked=asked, model=self.model_name, decode=tokenizer.decode, parser=self._parser
        )
        answer = writer.whole([last])
        return ModelOutput(
            model=self.model_name,
            choices=[self._choice(choice) for choice in answer["choices"]],
            usage=_usage(answer["usage"]),
            time=time.perf_counter() - started,
        )

    def _choice(self, choice: dict[str, Any]) -> ChatCompletionChoice:
        scores, said = choice["logprobs"], choice["message"]
        content: str | list[Content] = said["content"] or ""
        if "reasoning" in said:
            text = [ContentText(text=content)] if content else []
            content = [ContentReasoning(reasoning=said["reasoning"]), *text]
        return ChatCompletionChoice(
            message=ChatMessageAssistant(
                content=content,
                tool_calls=[_call(call) for call in said.get("tool_calls", ())] or None,
                model=self.model_name,
                source="generate",
            ),
            stop_reason=STOP_REASONS[choice["finish_reason"]],
            logprobs=None if scores is None else Logprobs(content=scores["content"]),
        )


def _body(config: GenerateConfig) -> dict[str, Any]:
    """Returns what a config asks for in OpenAI's words; `extra_body` adds keys of the server's."""
    given = config.model_dump(exclude_none=True)
    if unknown := sorted(given.keys() - KEYS.keys() - OF_INSPECT):
        raise ValueError(f"{', '.join(unknown)}: not supported")
    body = {key: given[name] for name, key in KEYS.items() if name in given}
    more = given.get("extra_body", {})
    if twice := sorted(more.keys() & (body.keys() | {"messages", "stream"})):
        raise ValueError(f"extra_body: expected other keys than {', '.join(twice)}")
    return body | more


def _tools(tools: Sequence[ToolInfo], choice: ToolChoice, config: GenerateConfig) -> dict[str, Any]:
    """Returns OpenAI's form of tools, and which of them have to be called."""
    if not tools:
        return {}
    given = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters.model_dump(exclude_none=True),
            },
        }
        for tool in tools
    ]
    if isinstance(choice, ToolFunction):
        named = {"type": "function", "function": {"name": choice.name}}
        return {"tools": given, "tool_choice": named}
    is_one = choice == "any" and config.parallel_tool_calls is False
    single = {"parallel_tool_calls": False} if is_one else {}
    return {"tools": given, "tool_choice": CHOICES[choice], **single}


def _call(call: dict[str, Any]) -> ToolCall:
    """Returns a call in Inspect's form, with an error that the model is told where its arguments
    are no object.
    """
    text = call["function"]["arguments"]
    try:
        arguments = json.loads(text)
    except ValueError:  # cut off
        arguments = None
    wrong = None if isinstance(arguments, dict) else f"expected an object of arguments, got {text}"
    return ToolCall(
        id=call["id"],
        function=call["function"]["name"],
        arguments=arguments if wrong is None else {},
        parse_error=wrong,
    )


def _messages(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Returns OpenAI's form of a conversation."""
    messages = []
    for message in given:
        content: Any = message.content
        more: dict[str, Any] = {}
        if message.role == "tool":
            content = content if message.error is None else f"Error: {message.error.message}"
            more = {"tool_call_id": message.tool_call_id, "name": message.function}
        if message.role == "assistant" and message.tool_calls:
            more["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function, "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
        if not isinstance(content, str):
            reasoned = [part.reasoning for part in content if isinstance(part, ContentReasoning)]
            if reasoned and message.role == "assistant":
                more["reasoning"] = "\n".join(reasoned)
                content = [part for part in content if not isinstance(part, ContentReasoning)]
            content = [_part(part) for part in content]
        messages.append({"role": message.role, "content": content, **more})
    return messages


def _part(part: Any) -> dict[str, Any]:
    """Returns a part of a content. One that is no text is refused by its kind where it is read."""
    if isinstance(part, ContentText):
        return {"type": "text", "text": part.text}
    return {"type": part.type}


def _usage(counted: dict[str, Any]) -> ModelUsage:
    """Returns the counts of tokens as Inspect has them: those from the cache apart."""
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return ModelUsage(
        input_tokens=counted["prompt_tokens"] - cached,
        output_tokens=counted["completion_tokens"],
        total_tokens=counted["total_tokens"],
        input_tokens_cache_read=cached,
    )
