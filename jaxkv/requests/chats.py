"""Renders conversations by a chat template, which is a program that somebody else has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxkv.errors import CheckpointError
from jaxkv.requests.contents import (
    FORMATS,
    RefusedChatError,
    check_rendered,
    form_of,
    formed,
    names_read,
    with_known_roles,
)
from jaxkv.requests.deadline import TemplateTimeoutError, within_time

if TYPE_CHECKING:
    from jinja2 import TemplateSyntaxError

OF_TEMPLATES = (
    *(ValueError, TypeError, ArithmeticError, LookupError, AttributeError),
    *(RecursionError, MemoryError, TemplateTimeoutError),
)
"""Lists what a template may raise beside jinja2's own errors."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""OpenAI's words for how much a model reasons, and DeepSeek's "max"."""
SWITCHES = ("enable_thinking", "thinking")
"""What templates call the variable that says whether a model reasons at all."""


class Chats:
    """Renders conversations by a tokenizer's template, which gets `extra` as well as `options`.
    effort: one of EFFORTS, for a template that reads `reasoning_effort` or has one of the SWITCHES,
    which "none" turns off and any other turns on.

    Raises: ValueError where there is no template, for another effort, or for what `extra` says that
    is said elsewhere.
    """

    def __init__(
        self,
        tokenizer: Any,
        extra: Any,
        options: Mapping[str, Any],
        content_format: str = "auto",
        effort: str | None = None,
    ) -> None:
        extra = {} if extra is None else extra
        if not isinstance(extra, Mapping):
            raise ValueError(f"chat_template_kwargs: expected a dict, got {type(extra).__name__}")
        for_effort = {} if effort is None else _of_effort(effort, extra)
        if taken := sorted(map(str, extra.keys() & {*options, *for_effort, "tokenize"})):
            raise ValueError(
                f"chat_template_kwargs: expected no {', '.join(taken)}: chat has arguments for it"
            )
        if tokenizer is None:
            raise ValueError("chat: expected a tokenizer, got skip_tokenizer_init=True")
        if not tokenizer.chat_template and options.get("chat_template") is None:
            raise ValueError(
                "chat: this tokenizer has no chat template; pass chat_template=, or use generate()"
            )
        self._tokenizer = tokenizer
        self._options = {**options, **extra, **for_effort}
        self._asked: list[tuple[str, AbstractSet[str]]]
        self._asked = [("chat_template_kwargs", {name}) for name in extra]
        if options.get("tools"):
            self._asked.append(("tools", {"tools"}))
        if for_effort:
            self._asked.append(("reasoning_effort", for_effort.keys()))
        self._form = FORMATS[content_format]

    def render(
        self, messages: Sequence[Mapping[str, Any]], encode: Callable[[str], list[int]]
    ) -> dict[str, str | list[int]]:
        """Returns the prompt of a conversation, as `contents.read_messages` gives it: its text and
        what `encode` makes of that. Contents reach the template as texts or parts, whichever it
        reads (`requests.contents`).

        Raises: RefusedChatError for this conversation, ValueError for a template that is none.
        """
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils import chat_template_utils as of_tools

        try:
            text = within_time(partial(self._apply, messages))
        except TemplateSyntaxError as error:
            raise self._broken(error) from error
        except RefusedChatError:
            raise
        except (of_tools.DocstringParsingException, of_tools.TypeHintParsingException) as error:
            raise RefusedChatError(f"tools: {error}") from error
        except (TemplateError, *OF_TEMPLATES) as error:
            raise RefusedChatError(f"{type(error).__name__}: {error}") from error
        try:
            return {"prompt": text, "prompt_token_ids": encode(text)}
        except ValueError as error:  # in the words of whoever knows what there is room for
            raise RefusedChatError(str(error)) from error

    def _apply(self, messages: Sequence[Mapping[str, Any]]) -> str:
        chosen = self._options.get("chat_template"), self._options.get("tools")
        template = self._tokenizer.get_chat_template(*chosen)
        self._check_read(template)
        given = formed(with_known_roles(messages, template), self._form or form_of(template))
        text = self._tokenizer.apply_chat_template(given, tokenize=False, **self._options)
        check_rendered(text, given)
        return text

    def _check_read(self, template: str) -> None:
        """Raises: RefusedChatError for what the template would not look at."""
        read = names_read(template)
        for argument, names in self._asked:
            if not names & read:
                raise RefusedChatError(
                    f"{argument}: expected what the chat template reads, got "
                    f"{' or '.join(map(repr, names))}, which it does not: leave it out, or pass a "
                    f"chat_template= that reads it"
                )

    def _broken(self, error: TemplateSyntaxError) -> ValueError:
        """Returns the error of a template that is none, whatever the conversation: one that was
        given, or the tokenizer's.
        """
        what = f"expected a Jinja template, got an error in line {error.lineno}: {error.message}"
        if self._options.get("chat_template") is not None:
            return ValueError(f"chat_template: {what}")
        directory = self._tokenizer.name_or_path
        return CheckpointError(f"{directory}: chat template: {what}; pass chat_template=")


def _of_effort(effort: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables that say it, but for switches that `extra` has set."""
    if effort not in EFFORTS:
        raise ValueError(
            f"reasoning_effort: expected one of {', '.join(EFFORTS)}, got {effort!r:.80}"
        )
    switches = {name: effort != "none" for name in SWITCHES if name not in extra}
    return {"reasoning_effort": effort, **switches}
