"""Makes prompts of tokens of what people write: texts, and conversations with what there is for
their template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxkv.build.options import IS_BOOL, IS_LIST
from jaxkv.requests.intake import Intake
from jaxkv.requests.prompts import is_conversation

OF_CHAT = {"tools": None, "add_generation_prompt": True, "continue_final_message": False}
"""Holds what a chat among other prompts may say of its template, each with what holds else."""


def without_messages(intake: Intake, prompt: Any, *, any_length: bool = False) -> Any:
    """Returns the prompt, that of a conversation as tokens: a list of messages, or one in a mapping
    with what is for its template. Raises: ValueError for other keys, and for what is no
    conversation.
    """
    chat = {"messages": prompt} if is_conversation(prompt) else prompt
    if not isinstance(chat, Mapping) or "messages" not in chat:
        return prompt
    given = {"cache_salt": "", "chat_template_kwargs": None, "reasoning_effort": None, **chat}
    messages, salt, effort = map(given.pop, ("messages", "cache_salt", "reasoning_effort"))
    extra, options = given.pop("chat_template_kwargs"), {**OF_CHAT, **given}
    if unknown := options.keys() - OF_CHAT.keys():
        unknown_keys = ", ".join(sorted(map(str, unknown)))
        raise ValueError(f"prompt: unknown keys beside messages: {unknown_keys}")
    IS_LIST("tools", options["tools"])
    for name in ("add_generation_prompt", "continue_final_message"):
        IS_BOOL(name, options[name])
    # A template is the engine's owner's choice: none may come in `extra`.
    try:
        (rendered,) = intake.render(
            [messages],
            extra,
            effort=effort,
            any_length=any_length,
            chat_template=None,
            **options,
        )
    except ValueError as error:
        # Its index in a list of one says nothing here.
        raise ValueError(str(error).removeprefix("conversation 0: ")) from error
    return {**rendered, "cache_salt": salt}


def rendered(intake: Intake, prompt: Any) -> dict[str, Any]:
    """Returns the tokens of what `LLM.as_completed` takes, as a prompt. Raises: ValueError."""
    text, tokens, salt = intake.parse(without_messages(intake, prompt))
    return {"prompt": text, "prompt_token_ids": tokens, "cache_salt": salt}


def tokens_of(intake: Intake, prompt: Any, *, add_special_tokens: bool) -> list[int]:
    """Returns the tokens of what `LLM.as_completed` takes, also of what is empty or too long.
    Raises: ValueError.
    """
    prompt = without_messages(intake, prompt, any_length=True)
    return intake.tokens_of(prompt, add_special_tokens=add_special_tokens)
