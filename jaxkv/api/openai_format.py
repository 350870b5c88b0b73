"""Reads the bodies of OpenAI's requests: the one map between its keys and `SamplingParams`, for the
server and for batch files.

A key that is not known here, and a value that is not possible, is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxkv.api.response_parts import Forced, Parser
from jaxkv.config import SamplingParams, is_int, nearest_parameter
from jaxkv.ops.sampling import NUM_BIASES, NUM_STOP_TOKENS
from jaxkv.requests.reading import MAX_CONTEXT
from jaxkv.structured import StructuredOutputsParams, read_structured

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

SAME = (
    *("frequency_penalty", "logit_bias", "max_tokens", "n", "presence_penalty", "seed"),
    *("stop", "temperature", "top_p"),
    *("allowed_token_ids", "bad_words", "ignore_eos", "include_stop_str_in_output"),
    *("kv_budget", "kv_policy", "kv_protect", "min_p", "min_tokens", "repetition_penalty"),
    *("skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids"),
    *("thinking_token_budget", "top_k"),
)
"""Keys that mean what the field of `SamplingParams` does: OpenAI's, then more, as in vLLM."""

LABELS = {
    **dict.fromkeys(("client_metadata", "metadata"), dict),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "user"), str),
}
"""Keys that say for whom a request is: they are taken, and change nothing."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""Keys with the values that ask for nothing that is not done anyway."""

NEAREST = {
    "add_special_tokens": "token ids in place of a text",
    "chat_template": "jaxkv serve --chat-template",
    "functions": "tools",
    "prompt_logprobs": "echo with logprobs, of a completion",
}
"""Names what is nearest to keys of OpenAI's and vLLM's that are not here."""

MOST = {
    "stop": 64,
    "bad_words": 64,
    "stop_token_ids": NUM_STOP_TOKENS,
    "logit_bias": NUM_BIASES,
    "kv_protect": 1024,
    "allowed_token_ids": 2**19,
}
"""The most entries of a request's lists: a stop string or bad word costs time for every token, and
to check a million of anything takes a second in which no step is planned.
"""


class BodyError(ValueError):
    """A request's body is refused; `key` is the one that is wrong, None where it is the whole."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Holds what a body asks for.

    `keys`: those of the body. `inputs`: prompts, or the messages of one chat with what is for their
    template, each as `AsyncLLM.generate` and `LLM.as_completed` take it. `top`: how many of the
    likeliest tokens an answer lists, None: no log-probabilities. `has_output`: False where
    max_tokens is 0, so that only the echo is wanted (`params` then ask for one token).
    `tools`: what a chat may call, `forced` which of them it has to, and with `is_single` an answer
    shows its first call only. `with_reasoning`: an answer shows what the model reasons, where that
    is known, and `with_token_ids` tokens.
    `include_usage`: a stream ends with its usage, and with `usage_in_chunks` each chunk says what
    it is so far.
    """

    url: str
    keys: Collection[str]
    model: str | None
    inputs: list[dict[str, Any]]
    params: SamplingParams
    top: int | None
    echo: bool = False
    has_output: bool = True
    tools: Sequence[Mapping[str, Any]] = ()
    forced: Forced | None = None
    is_single: bool = False
    with_reasoning: bool = True
    with_token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    usage_in_chunks: bool = False

    @property
    def num_sequences(self) -> int:
        return len(self.inputs) * self.params.n


class Keys:
    """Gives the keys of a body one after the other; None is as absent, and 5.0 as 5."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.all = tuple(body)
        self._left = {key: _whole(value) for key, value in body.items() if value is not None}

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """Returns the value, or `default` where there is none. Raises: BodyError for another
        kind.
        """
        if key not in self._left:
            return default
        value = self._left.pop(key)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise BodyError(
                f"{key}: expected {_JSON_NAMES[kind]}, got {json.dumps(value):.80}", key
            )
        return value

    def take_count(self, key: str) -> int | None:
        """Returns the number, None where there is none. Raises: BodyError for less than 0."""
        count: int | None = self.take(key, int)
        if count is not None and count < 0:
            raise BodyError(f"{key}: expected a number >= 0, got {count}", key)
        return count

    def take_only(self, key: str, possible: bool) -> None:
        """Takes the key. Raises: BodyError for another value than the possible one."""
        if self.take(key, bool, possible) is not possible:
            raise BodyError(
                f"{key}: expected {json.dumps(possible)} (nothing else is supported here)", key
            )

    def take_any(self, key: str) -> Any:
        return self._left.pop(key, None)

    def end(self) -> None:
        """Raises BodyError for what has not been taken and is not without effect."""
        for key, kind in LABELS.items():
            self.take(key, kind)
        for key, value in self._left.items():
            if key not in HARMLESS:
                near = NEAREST.get(key) or nearest_parameter(key)
                hint = f" (nearest: {near})" if near else ""
                raise BodyError(f"{key:.200}: unknown, or not supported{hint}", key[:200])
            if not any(value == one and type(value) is type(one) for one in HARMLESS[key]):
                expected = " or ".join(json.dumps(one) for one in HARMLESS[key])
                raise BodyError(
                    f"{key}: expected {expected} (nothing else is supported), got "
                    f"{json.dumps(value):.80}",
                    key,
                )


def _whole(value: Any) -> Any:
    """Returns a whole number as an int: languages without ints write 5 as 5.0."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value


_JSON_NAMES = {
    str: "a text",
    dict: "an object",
    list: "a list",
    bool: "true or false",
    int: "a whole number",
}


def read_body(
    url: str, body: Mapping[str, Any], defaults: SamplingParams, *, parser: Parser | None = None
) -> Asked:
    """Reads the body of a request to CHAT or COMPLETIONS. defaults: of what it does not say.
    parser: that of the `Answer` to a chat, which looks for special tokens.

    Raises: BodyError.
    """
    keys = Keys(body)
    try:
        if url == CHAT:
            return _read_chat(keys, defaults, parser)
        return _read_completion(keys, defaults)
    except BodyError:
        raise
    except ValueError as error:
        raise BodyError(str(error), key_of(error, body.keys())) from error


def key_of(error: ValueError, keys: Collection[str]) -> str | None:
    """Returns which of the keys of a body a message of jaxkv begins with."""
    name = str(error).partition(":")[0]
    if name == "logprobs" and "top_logprobs" in keys:
        return "top_logprobs"
    if name == "max_tokens" and name not in keys:
        name = "max_completion_tokens"
    if name == "structured_outputs" and name not in keys:
        name = "response_format" if "response_format" in keys else "tools"
    return name if name in keys else None


def code_of(error: ValueError) -> str | None:
    """Returns OpenAI's code of an error, which clients look for; None where there is none."""
    return "context_length_exceeded" if MAX_CONTEXT in str(error) else None


def _read_completion(keys: Keys, defaults: SamplingParams) -> Asked:
    prompts = prompts_of(keys.take_any("prompt"))
    keys.take_only("add_special_tokens", True)
    echo, top = keys.take("echo", bool, False), keys.take_count("logprobs")
    changes = _sampling(keys)
    has_output = changes.get("max_tokens") != 0 or not echo
    if not has_output:
        # Whatever the one token is, it is not an end that anybody sees.
        changes |= {"max_tokens": 1, "min_tokens": 0, "ignore_eos": True}
        changes |= {"stop": None, "stop_token_ids": None}
    changes |= {"logprobs": top, "prompt_logprobs": top if echo else None}
    if keys.take("best_of", int, n := changes.get("n", 1)) != n:
        raise BodyError(f"best_of: expected the same as n ({n}): nothing is ranked", "best_of")
    return _asked(
        keys,
        url=COMPLETIONS,
        inputs=prompts,
        params=replace(defaults, **changes),
        top=top,
        echo=echo,
        has_output=has_output,
    )


def _read_chat(keys: Keys, defaults: SamplingParams, parser: Parser | None) -> Asked:
    messages = read_messages(keys.take("messages", list))
    wanted, top = keys.take("logprobs", bool, False), keys.take_count("top_logprobs")
    keys.take_only("add_special_tokens", False)  # the template writes them
    if top and not wanted:
        raise BodyError("top_logprobs: expected logprobs to be true with it", "top_logprobs")
    top = (top or 0) if wanted else None
    changes = {"max_tokens": None, **_sampling(keys), "logprobs": top}
    longest = keys.take("max_completion_tokens", int, changes["max_tokens"])
    if changes["max_tokens"] not in (None, longest):
        raise BodyError(
            "max_completion_tokens: expected the same as max_tokens, or only one",
            "max_completion_tokens",
        )
    template = _template(keys)
    forced = _forced(keys, template)
    is_single = forced is None and not keys.take("parallel_tool_calls", bool, True)
    if forced is not None:
        if changes.get("structured_outputs") is not None:
            raise BodyError("tool_choice: expected no other form of the answer", "tool_choice")
        # One blank at most between parts: small models may write blanks for ever.
        schema = forced.schema(template["tools"])
        changes["structured_outputs"] = StructuredOutputsParams(
            json=schema, whitespace_pattern=" ?"
        )
    if parser is not None:
        form = changes.get("structured_outputs")
        if form is not None:
            form.reasoning = form.reasoning or parser.marks
        if defaults.reasoning is None:
            changes["reasoning"] = parser.marks
        if forced is None or parser.marks is not None:
            changes["skip_special_tokens"] = False
    return _asked(
        keys,
        url=CHAT,
        inputs=[{"messages": messages, **template}],
        params=replace(defaults, **{**changes, "max_tokens": longest}),
        top=top,
        tools=template.get("tools", ()),
        forced=forced,
        is_single=is_single,
        with_reasoning=parser is None or keys.take("include_reasoning", bool, True),
    )


def _forced(keys: Keys, template: dict[str, Any]) -> Forced | None:
    """Returns what tools a chat has to call, None where it may as it likes. `tool_choice: "none"`
    takes the tools out of what is for the template. Raises: BodyError.
    """
    choice = keys.take_any("tool_choice")
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    is_named = isinstance(name, str) and choice == {"type": "function", "function": {"name": name}}
    if choice not in (None, "auto", "none", "required") and not is_named:
        raise BodyError(
            'tool_choice: expected "auto", "none", "required" or '
            f'{{"type": "function", "function": {{"name": ...}}}}, got {json.dumps(choice):.80}',
            "tool_choice",
        )
    if choice == "none":
        template.pop("tools", None)
    if choice != "required" and not is_named:
        return None
    template.setdefault("tools", [])
    return Forced(name, is_single=not keys.take("parallel_tool_calls", bool, True))


def _template(keys: Keys) -> dict[str, Any]:
    """Returns what the body has for the template of a chat."""
    kinds: dict[str, type] = {"tools": list, "chat_template_kwargs": dict, "reasoning_effort": str}
    kinds |= {"add_generation_prompt": bool, "continue_final_message": bool}
    given = {name: keys.take(name, kind) for name, kind in kinds.items()}
    if other := [one for one in given["tools"] or () if not isinstance(one, dict)]:
        raise BodyError(f"tools: expected objects, got {json.dumps(other[0]):.80}", "tools")
    return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedTokens:
    """Holds what a body asks to be made tokens or text of: `key` of it, as `AsyncLLM.tokens_of`
    takes it. `strings`: whether each token's name is wanted too.
    """

    model: str | None
    key: str
    prompt: dict[str, Any]
    add_special_tokens: bool = True
    strings: bool = False


def read_text(body: Mapping[str, Any]) -> AskedTokens:
    """Reads vLLM's request for the tokens of a text or a chat. Raises: BodyError."""
    keys = Keys(body)
    model, text, template = keys.take("model", str), keys.take("prompt", str), _template(keys)
    messages, special = keys.take("messages", list), keys.take("add_special_tokens", bool)
    strings = keys.take("return_token_strs", bool, False)
    keys.end()
    if (text is None) is (messages is None):
        raise BodyError("prompt, messages: expected one of them", "prompt")
    if text is None:
        if special:
            raise BodyError(
                "add_special_tokens: expected false with messages, whose template writes them",
                "add_special_tokens",
            )
        prompt = {"messages": read_messages(messages), **template}
        return AskedTokens(model=model, key="messages", prompt=prompt, strings=strings)
    if template:
        raise BodyError(f"{', '.join(template)}: expected messages with them", "prompt")
    return AskedTokens(
        model=model,
        key="prompt",
        prompt={"prompt": text},
        add_special_tokens=special is not False,
        strings=strings,
    )


def read_tokens(body: Mapping[str, Any]) -> AskedTokens:
    """Reads vLLM's request for the text of tokens. Raises: BodyError."""
    keys = Keys(body)
    model, tokens = keys.take("model", str), keys.take("tokens", list)
    keys.end()
    if tokens is None:
        raise BodyError("tokens: expected a list of token ids", "tokens")
    return AskedTokens(model=model, key="tokens", prompt={"prompt_token_ids": tokens})


def _asked(keys: Keys, inputs: list[dict[str, Any]], **read: Any) -> Asked:
    """Adds what both kinds of requests have."""
    if (salt := keys.take("cache_salt", str)) is not None:
        inputs = [{**one, "cache_salt": salt} for one in inputs]
    stream = keys.take("stream", bool, False)
    options = keys.take("stream_options", dict, {})
    if options and not stream:
        raise BodyError("stream_options: expected stream to be true with it", "stream_options")
    include_usage, usage_in_chunks = _usage_options(options)
    asked = Asked(
        **read,
        inputs=inputs,
        keys=keys.all,
        stream=stream,
        include_usage=include_usage,
        usage_in_chunks=usage_in_chunks,
        with_token_ids=keys.take("return_token_ids", bool, False),
        model=keys.take("model", str),
    )
    keys.end()
    return asked


def _usage_options(options: Mapping[str, Any]) -> tuple[bool, bool]:
    """Returns whether a stream ends with its usage, and whether each chunk has it. Raises:
    BodyError.
    """
    given = {key: value for key, value in options.items() if value is not None}
    in_chunks = given.get("continuous_usage_stats", False)
    at_end = given.get("include_usage", in_chunks)  # vLLM's default beside it
    known = given.keys() <= {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    is_off = given.get("include_obfuscation", False) is False
    are_bools = isinstance(at_end, bool) and isinstance(in_chunks, bool)
    if not (known and is_off and are_bools) or (in_chunks and not at_end):
        raise BodyError(
            f'stream_options: expected {{"include_usage": true or false}}, with true maybe '
            f'"continuous_usage_stats", got {json.dumps(options):.80}',
            "stream_options",
        )
    return at_end, in_chunks


def _sampling(keys: Keys) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that the body sets under their own names."""
    given = {name: keys.take_any(name) for name in SAME if name in keys}
    for name, most in MOST.items():
        value = given.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise BodyError(f"{name}: expected at most {most}, got {len(value)}", name)
    if (structured := _structured(keys)) is not None:
        given["structured_outputs"] = structured
    return given


def _structured(keys: Keys) -> StructuredOutputsParams | None:
    """Returns what OpenAI's response_format asks for, or vLLM's structured_outputs."""
    form, own = keys.take("response_format", dict), keys.take("structured_outputs", dict)
    if form is None or form == {"type": "text"}:
        return None if own is None else read_structured(own)
    if own is not None:
        message = "response_format: expected none with structured_outputs"
        raise BodyError(message, "response_format")
    if form == {"type": "json_object"}:
        return StructuredOutputsParams(json_object=True)
    asked = form.get("json_schema")
    is_known = form.keys() == {"type", "json_schema"} and form["type"] == "json_schema"
    if not is_known or not isinstance(asked, dict) or not isinstance(asked.get("schema"), dict):
        raise BodyError(
            f'response_format: expected {{"type": "text"}}, {{"type": "json_object"}} or '
            f'{{"type": "json_schema", "json_schema": {{"name": ..., "schema": {{...}}}}}}, got '
            f"{json.dumps(form):.80}",
            "response_format",
        )
    if unknown := sorted(asked.keys() - {"name", "description", "schema", "strict"}):
        message = f"response_format: json_schema: unknown keys: {', '.join(unknown)}"
        raise BodyError(message[:300], "response_format")
    return StructuredOutputsParams(json=asked["schema"])


def prompts_of(given: Any, key: str = "prompt") -> list[dict[str, Any]]:
    """Returns the prompts of one text, one list of token ids, or a list of either."""
    one = isinstance(given, str) or (isinstance(given, list) and given and is_int(given[0]))
    prompts = [given] if one else given
    is_list = isinstance(prompts, list) and len(prompts) > 0
    if not is_list or not all(isinstance(one, str | list) for one in prompts):
        raise BodyError(
            f"{key}: expected a text, a list of token ids, or a list of either, got "
            f"{json.dumps(given):.80}",
            key,
        )
    return [{"prompt_token_ids" if isinstance(one, list) else "prompt": one} for one in prompts]


def read_messages(given: list[Any] | None) -> list[Any]:
    """Returns the messages as they are. Raises: BodyError."""
    if not given or not all(isinstance(message, dict) for message in given):
        raise BodyError("messages: expected a list of objects, at least one", "messages")
    return given
