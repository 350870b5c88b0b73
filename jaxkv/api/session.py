"""`Session`: a conversation, or any sequence of tokens, as an immutable value over an engine.

A session is its tokens, and a claim on their pages. Full pages are found by what they hold
(`holding.prefix`), so sessions that begin alike share them wherever they come from, and nothing is
ever copied; tokens behind the last full page are computed again with what follows them. The claim
keeps pages in the prefix cache longer than those that nobody claims. Under pressure they go too,
and are computed anew when the session is used.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import numpy as np

from jaxkv.build.options import IS_BOOL, IS_LIST, IS_TEXT_OR_NONE
from jaxkv.config import PREFILL, RequestOutputKind, SamplingParams, is_int
from jaxkv.engine.engine import Engine
from jaxkv.engine.places import converted
from jaxkv.engine.saving import extract, form_of, insert, saved_len
from jaxkv.errors import CapacityError, EngineDeadError, SavedFileError
from jaxkv.kv.saved import Origin, SavedPages
from jaxkv.lora.request import LoRARequest
from jaxkv.requests.intake import Intake
from jaxkv.requests.outputs import CompletionOutput, RequestOutput
from jaxkv.requests.prompts import Prompt, is_conversation
from jaxkv.weights.adapters import Adapter

T = TypeVar("T")

Messages = tuple[Mapping[str, Any], ...]

Piece = str | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A text or token ids; of a chat, a message or several."""

NO_CHAT = {"tools": None, "chat_template": None, "chat_template_kwargs": None}


class Claim:
    """Keeps pages of these keys in the prefix cache longer than others, while anybody has it.

    secret: with which the engine made keys before these were made.
    """

    def __init__(self, engine: Engine, keys: Sequence[bytes], secret: bytes = b"") -> None:
        self.keys, self.secret = keys, secret
        engine.pins.add(self, keys)


@dataclass(frozen=True, slots=True)
class Home:
    """Holds what all sessions that come from one another have in common. llm: the `LLM` or
    `AsyncLLM` that made them. origin: of what the engine stores in some form.
    """

    llm: Any
    intake: Intake
    engine: Engine
    origin: Callable[[str], Origin]
    chat: Mapping[str, Any]
    """Holds what the chat template gets beside the messages."""
    lora_request: LoRARequest | None
    salt: str = ""

    @property
    def adapter(self) -> Adapter | None:
        """Returns the adapter as its files are now. Raises: ValueError."""
        return self.intake.adapter_of(self.lora_request)

    def claim(self, tokens: Sequence[int], adapter: Adapter | None) -> Claim:
        """Makes a claim on the pages of these tokens."""
        secret = self.engine.secret  # first: what weights replace meanwhile is claimed anew
        return Claim(self.engine, self.intake.page_keys(tokens, self.salt, adapter), secret)

    def own_origin(self) -> Origin:
        """Returns what the engine's keys and values are of."""
        return self.origin(form_of(self.engine.kv))


def chat_options(
    tools: list[dict[str, Any]] | None,
    chat_template: str | None,
    chat_template_kwargs: dict[str, Any] | None,
) -> dict[str, Any]:
    """Returns those that were given. Raises: ValueError naming one that is something else."""
    IS_LIST("tools", tools)
    IS_TEXT_OR_NONE("chat_template", chat_template)
    given: dict[str, Any] = {"tools": tools, "chat_template": chat_template}
    given["chat_template_kwargs"] = chat_template_kwargs
    return {name: value for name, value in given.items() if value is not None}


class BaseSession:
    """Holds tokens and a claim on their pages: is what sessions of `LLM` and `AsyncLLM` share.

    Every method returns a new session, or looks.
    """

    __slots__ = ("_claim", "_home", "_messages", "_tokens")

    def __init__(
        self,
        home: Home,
        tokens: tuple[int, ...],
        messages: Messages | None,
        claim: Claim | None = None,
    ) -> None:
        self._home, self._tokens, self._messages = home, tokens, messages
        self._claim: Claim | None = claim or home.claim(tokens, home.adapter)

    @classmethod
    def restored(cls, home: Home, path: Path, saved: SavedPages, *, convert: bool) -> Self:
        """Makes a session of what `save` has written to a file. Raises: SavedFileError,
        CapacityError.
        """
        IS_BOOL("convert", convert)
        own = home.own_origin()
        saved.origin.check(own, str(path), convert=convert)
        try:
            salt, chat, messages = (saved.extra[name] for name in ("salt", "chat", "messages"))
            prompt = {"prompt_token_ids": saved.extra["tokens"], "cache_salt": salt}
            tokens = tuple(home.intake.parse(prompt, room=0)[1])
            home = replace(home, salt=salt, chat=chat_options(**{**NO_CHAT, **chat}))
            messages = None if messages is None else tuple(map(dict, messages))
            context = saved.extra["context"] if home.intake.depends_on_context else 0
            if not is_int(context):
                raise ValueError(f"context {context!r:.80}")
        except (LookupError, TypeError, ValueError) as error:
            raise SavedFileError(f"{path}: expected a session, got {error!r}") from error
        if tokens[: len(saved.tokens)] != saved.tokens:
            raise SavedFileError(f"{path}: expected the pages of the session's tokens, got others")
        if saved.origin.is_stored_otherwise(own):
            saved = converted(home.engine, saved)
        adapter = home.adapter  # once: its files may change
        digest, own_digest = saved.extra.get("adapter", ""), digest_of(adapter)
        if digest != own_digest:
            raise SavedFileError(
                f"{path}: lora_request: expected the adapter that the session was computed with "
                f"(SHA-256 {digest or 'of none'}), got {own_digest or 'none'}"
            )
        insert(home.engine, saved, home.intake.page_root(home.salt, adapter, context))
        return cls(home, tokens, messages, home.claim(tokens, adapter))

    @classmethod
    def begin(cls, home: Home, prompt: Any) -> Self:
        """Makes a session of a prompt or of chat messages. Computes nothing."""
        if not home.intake.shares_prefixes:
            raise ValueError("session: expected enable_prefix_caching=True, got False")
        if is_conversation(prompt):
            if not all(isinstance(message, Mapping) for message in prompt):
                raise ValueError(
                    f"prompt: expected a text, token ids or a list of chat messages, got "
                    f"{prompt!r:.80}"
                )
            messages = copy.deepcopy(tuple(prompt))
            return cls(home, _rendered(home, messages), messages)
        if home.chat:
            raise ValueError(f"{next(iter(home.chat))}: expected chat messages beside it")
        _, ids, salt = home.intake.parse(prompt)
        return cls(replace(home, salt=salt), tuple(ids), None)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Returns the token ids that it holds."""
        return self._tokens

    @property
    def messages(self) -> Messages | None:
        """Returns the messages of a chat, None of any other session."""
        return copy.deepcopy(self._messages)

    def __len__(self) -> int:
        return len(self.tokens)

    def __copy__(self) -> Self:
        return self.fork(1)[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork(1)[0]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session is of its engine: save(path) writes it, restore(path) reads it")

    def __repr__(self) -> str:
        state = "closed" if self._claim is None else f"{len(self.pages)} pages"
        return f"<{type(self).__name__}: {len(self)} tokens, {state}>"

    def _repr_html_(self) -> str | None:
        if self._claim is None:
            return None
        from jaxkv.pictures.tables import TokenPage, sequence_html

        home, keys = self._home, self._open().keys
        with home.engine.lock:
            allocator = home.engine.scheduler.allocator
            where = [next(iter(allocator.listed([key])), None) for key in keys]
            size = allocator.page_size
        starts = range(0, len(self), size)
        where += [None] * (len(starts) - len(where))
        pages = [
            TokenPage(self.tokens[start : start + size], page)
            for start, page in zip(starts, where, strict=True)
        ]
        decode = home.intake.decode if home.intake.has_tokenizer else None
        return sequence_html(repr(self), pages, decode)

    @property
    def prompt(self) -> dict[str, Any]:
        """Returns the session as a prompt of `LLM.generate`, which takes several at once; its
        `lora_request` goes beside it.
        """
        self._open()
        return {"prompt_token_ids": list(self.tokens), "cache_salt": self._home.salt}

    @property
    def lora_request(self) -> LoRARequest | None:
        """Returns the adapter that it was begun with."""
        return self._home.lora_request

    @property
    def text(self) -> str:
        """Returns its tokens as text, without special ones. Raises: ValueError without a
        tokenizer.
        """
        return self._home.intake.decode(self.tokens)

    @property
    def pages(self) -> tuple[int, ...]:
        """Returns the ids of the pages in which its tokens are now, up to the last full one."""
        claim, engine = self._open(), self._home.engine
        with engine.lock:
            return tuple(engine.scheduler.allocator.listed(claim.keys))

    def fork(self, count: int) -> list[Self]:
        """Returns so many sessions of the same tokens. Costs nothing."""
        if not is_int(count) or count < 1:
            raise ValueError(f"count: expected a number >= 1, got {count!r}")
        claim = self._open()
        return [type(self)(self._home, self.tokens, self._messages, claim) for _ in range(count)]

    def rewind(self, *, tokens: int | None = None, to: Self | None = None) -> Self:
        """Returns the session without its last `tokens` tokens, or as it was when it was `to`.

        Raises: ValueError if no token would be left, or if this did not come from `to`.
        """
        self._open()
        if (tokens is None) == (to is None):
            raise ValueError("rewind: expected one of tokens= and to=")
        if to is not None:
            if not isinstance(to, BaseSession) or not to._begins(self):
                raise ValueError(f"to: expected a session that this one began as, got {to!r:.80}")
            return to.fork(1)[0]
        if self._messages is not None:
            raise ValueError("tokens: expected to= in a chat, whose template makes the tokens")
        if tokens is None or not is_int(tokens) or not 0 <= tokens < len(self):
            raise ValueError(f"tokens: expected a number from 0 to {len(self) - 1}, got {tokens!r}")
        return type(self)(self._home, self.tokens[: len(self) - tokens], None)

    def after(self, output: RequestOutput, index: int = 0) -> Self:
        """Returns the session with what was generated from its `prompt`, computing nothing: the
        tokens of this sample, without one that ended it, and in a chat its text as a message.

        Raises: ValueError for an output that is of another prompt, or not finished.
        """
        self._open()
        if not isinstance(output, RequestOutput):
            raise ValueError(f"output: expected a RequestOutput, got {type(output).__name__}")
        if output.prompt_token_ids != list(self.tokens):
            raise ValueError("output: expected one of this session's prompt")
        if not output.finished or output.is_rest:
            raise ValueError("output: expected one that is finished, and all of it")
        if not is_int(index) or not 0 <= index < len(output.outputs):
            raise ValueError(f"index: expected one of {len(output.outputs)} samples, got {index!r}")
        one = output.outputs[index]
        new = one.token_ids[: len(one.token_ids) - self._ends_in_a_token(one)]
        messages = self._messages
        if messages is not None:
            # With detokenize=False no text has been made; a stop string may have left none.
            is_made = one.text or isinstance(one.stop_reason, str)
            text = one.text if is_made else self._home.intake.decode(new)
            messages = (*messages, {"role": "assistant", "content": text})
        return type(self)(self._home, (*self.tokens, *new), messages)

    def _ends_in_a_token(self, one: CompletionOutput) -> bool:
        """Tells whether the last token is one that only ended it: not so where a text or a grammar
        did.
        """
        if one.finish_reason != "stop" or isinstance(one.stop_reason, str):
            return False
        eos_id = self._home.intake.eos_id
        return isinstance(one.stop_reason, int) or one.token_ids[-1:] == [eos_id]

    def close(self) -> None:
        """Gives up the claim on pages, which ends too when nobody has the session any more. Once
        is enough, twice is fine.
        """
        self._claim = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begins(self, other: BaseSession) -> bool:
        own, others = self._home, other._home
        if own.engine is not others.engine or own.salt != others.salt:
            return False
        if own.lora_request != others.lora_request or own.chat != others.chat:
            return False
        if self._messages is None or other._messages is None:
            return other.tokens[: len(self)] == self.tokens
        return other._messages[: len(self._messages)] == self._messages

    def _open(self) -> Claim:
        claim = self._claim
        if claim is None:
            raise ValueError("expected an open session, got one that was closed")
        if claim.secret != self._home.engine.secret:  # the weights were replaced, and so were keys
            claim = self._claim = self._home.claim(self.tokens, self._home.adapter)
        return claim

    def _longer(self, piece: Piece) -> Self:
        """Returns the session with this behind it, computing nothing."""
        self._open()
        if self._messages is not None:
            listed = (piece,) if isinstance(piece, Mapping) else piece
            is_list = isinstance(listed, (list, tuple)) and len(listed) > 0
            if not is_list or not all(isinstance(one, Mapping) for one in listed):
                raise ValueError(f"expected a message or several in a chat, got {piece!r:.80}")
            messages = (*self._messages, *copy.deepcopy(listed))
            return type(self)(self._home, _rendered(self._home, messages), messages)
        return type(self)(self._home, (*self.tokens, *self._ids(piece)), None)

    def _ids(self, piece: Piece) -> list[int]:
        if isinstance(piece, str):
            return self._home.intake.encode(piece)
        if not isinstance(piece, (list, tuple, np.ndarray)) or not len(piece):
            raise ValueError(f"expected a text or token ids, at least one, got {piece!r:.80}")
        return self._home.intake.parse({"prompt_token_ids": piece})[1]

    def _saved(self) -> SavedPages | None:
        """Returns what `save` writes; None if not all of its pages are there: those of requests as
        long as the engine allows, or of the one that `save` makes.
        """
        self._open()
        home, intake = self._home, self._home.intake
        adapter = home.adapter  # once: its files may change
        extra = {
            "tokens": list(self.tokens),
            "messages": self._messages,
            "salt": home.salt,
            "chat": dict(home.chat),
            "adapter": digest_of(adapter),
        }
        origin, tokens = home.own_origin(), self.tokens[: saved_len(home.engine, len(self))]
        lengths = home.engine.scheduler.config.max_model_len, len(self._saved_ids) + 1
        for context in dict.fromkeys(map(intake.context_of, lengths)):
            root = intake.page_root(home.salt, adapter, context)
            saved = extract(home.engine, tokens, root, origin, extra | {"context": context})
            if saved is not None:
                return saved
        return None

    @property
    def _saved_prompt(self) -> dict[str, Any]:
        """Returns the prompt that computes what `save` writes: the state of recurrent layers is
        kept before a prompt's last token.
        """
        return self.prompt | {"prompt_token_ids": self._saved_ids}

    @property
    def _saved_ids(self) -> list[int]:
        return list(self.tokens[: saved_len(self._home.engine, len(self)) + 1])

    def _generation(self, params: SamplingParams | None) -> SamplingParams:
        self._open()
        params = self._home.llm.get_default_sampling_params() if params is None else params
        if isinstance(params, SamplingParams) and params.n != 1:
            raise ValueError(f"n: expected 1, got {params.n}: generate from LLM with .prompt")
        return params

    def _scoring(self, continuations: Sequence[Piece]) -> tuple[list[dict], SamplingParams]:
        """Returns prompts and parameters that score these behind the session."""
        if isinstance(continuations, str) or not isinstance(continuations, Sequence):
            raise ValueError(f"continuations: expected a list, got {continuations!r:.80}")
        prompt = self.prompt
        prompts = [
            prompt | {"prompt_token_ids": [*self.tokens, *self._ids(piece)]}
            for piece in continuations
        ]
        return prompts, replace(PREFILL, prompt_logprobs=0, prompt_logprobs_start=len(self))

    def _scores(self, output: RequestOutput) -> list[float]:
        scored = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
        return [entry[token].logprob for token, entry in scored if entry is not None]


class Session(BaseSession):
    """Is a sequence of tokens over an `LLM` that can go on in many ways: made by `LLM.session`.

        s1 = llm.session("Once upon a time").extend(" there was a")
        s2, out = s1.generate(SamplingParams(max_tokens=20))
        s3, other = s1.generate(SamplingParams(max_tokens=20, seed=2))  # s1 is as it was

    `tokens`, `text` and `len` tell what it holds, `messages` of a chat too; `pages` where. Methods
    return new sessions and leave this one as it was. Computed pages are shared and never copied;
    `close`, leaving a `with` block, or forgetting the session lets go of them.
    Raises: ValueError for what is refused and after `close`, what `LLM.generate` raises, and
    RuntimeError where another thread's failed step or a shutdown has ended the request.
    """

    __slots__ = ()

    def extend(self, piece: Piece) -> Self:
        """Returns the session with this behind it, computed: a text (tokenized by itself, without
        special tokens) or token ids; in a chat a message or several, and the template makes the
        tokens anew of all messages.
        """
        longer = self._longer(piece)
        self._run(longer.prompt, PREFILL)
        return longer

    def generate(self, params: SamplingParams | None = None) -> tuple[Self, CompletionOutput]:
        """Returns the session with a completion behind it (`after`), and the completion. params:
        as in `LLM.generate`, with n=1.
        """
        (output,) = self._run(self.prompt, self._generation(params))
        return self.after(output), output.outputs[0]

    def logprobs(self, continuations: Sequence[Piece]) -> list[list[float]]:
        """Scores texts or token ids behind the session: the natural-log probability of each token.

        They run in one batch, and the session's own pages are read, not computed.
        """
        prompts, params = self._scoring(continuations)
        return [self._scores(one) for one in self._run(prompts, params)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the session into a new file, which `LLM.restore` of the same model reads: in
        another process, on another number of devices, with pages of another size. It appears
        complete or not at all; without hard links an empty file may be there for a moment before.

        Raises: FileExistsError if there is a file, other kinds of OSError if it cannot be written,
        CapacityError where the cache does not keep all of its pages (other requests need them, or a
        kv_policy drops them), NotImplementedError for kv_policy quest and windows of one token,
        ValueError for a model with recurrent states and num_state_snapshots=0.
        """
        where = _new_file(path)
        saved = self._saved()
        if saved is None:  # others have needed its pages meanwhile
            self._run(self._saved_prompt, PREFILL)
            saved = self._saved()
        _there(saved).save(where)

    def _run(self, prompts: Any, params: SamplingParams) -> list[RequestOutput]:
        outputs: list[RequestOutput] = self._home.llm.generate(
            prompts, params, use_tqdm=False, lora_request=self.lora_request
        )
        if any(map(_was_ended, outputs)):
            raise RuntimeError(
                "the request was ended by a step of another thread that failed, or by a shutdown; "
                "unless it was shut down, call again"
            )
        return outputs


class AsyncSession(BaseSession):
    """Is a `Session` over an `AsyncLLM`: made by `AsyncLLM.session`; what computes is awaited.

    What is not runs in the caller's thread: `pages`, and so what shows a session, waits for the end
    of a step that is under way, `text` for a prompt that is made tokens of, and `rewind(tokens=)`
    reads an adapter whose files have changed. Where an event loop must not wait so long, they are
    for `asyncio.to_thread`.
    """

    __slots__ = ()

    async def extend(self, piece: Piece) -> Self:
        """Does what `Session.extend` does."""
        longer = await self._tokenized(lambda: self._longer(piece))
        return await longer.computed()

    async def computed(self) -> Self:
        """Returns it once its pages are there, where they are not. Raises: EngineDeadError."""
        await self._last(self.prompt, PREFILL)
        return self

    async def generate(self, params: SamplingParams | None = None) -> tuple[Self, CompletionOutput]:
        """Does what `Session.generate` does."""
        output = await self._last(self.prompt, self._generation(params))
        return await self._tokenized(lambda: self.after(output)), output.outputs[0]

    async def logprobs(self, continuations: Sequence[Piece]) -> list[list[float]]:
        """Does what `Session.logprobs` does."""
        prompts, params = await self._tokenized(lambda: self._scoring(continuations))
        outputs = await asyncio.gather(*(self._last(one, params) for one in prompts))
        return [self._scores(one) for one in outputs]

    async def save(self, path: str | os.PathLike[str]) -> None:
        """Does what `Session.save` does; other requests wait while its pages are read, not while
        they are written.
        """
        where = _new_file(path)
        saved = await self._ask(self._saved)
        if saved is None:
            await self._last(self._saved_prompt, PREFILL)
            saved = await self._ask(self._saved)
        await asyncio.to_thread(_there(saved).save, where)

    async def _last(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """Returns the whole output of a request. Raises: EngineDeadError where it was ended."""
        if isinstance(params, SamplingParams):
            params = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = self._home.llm.generate(prompt, params, lora_request=self.lora_request)
        last = [output async for output in outputs][-1]
        if _was_ended(last):
            raise EngineDeadError("the request was ended by an abort or a shutdown")
        return last

    async def _ask(self, function: Callable[[], T]) -> T:
        """Returns what the function returns in the engine's thread."""
        result: T = await self._home.llm._engine.ask(function)
        return result

    async def _tokenized(self, function: Callable[[], T]) -> T:
        """Returns what the function returns in the tokenizer's thread, while steps go on."""
        result: T = await self._home.llm._apart_from_engine(lambda _: function())
        return result


def _was_ended(output: RequestOutput) -> bool:
    """Tells whether a request was aborted, and not by its grammar, which says why."""
    return any(one.finish_reason == "abort" and one.stop_reason is None for one in output.outputs)


def _new_file(path: str | os.PathLike[str]) -> Path:
    """Returns where to save. Raises: FileExistsError, or FileNotFoundError without a folder for
    it, before anything is computed for that.
    """
    where = Path(path).absolute()
    if os.path.lexists(where):
        raise FileExistsError(f"{where}: expected a new file")
    if not where.parent.is_dir():
        raise FileNotFoundError(
            f"{where}: expected a folder {where.parent} to write it in; make it"
        )
    return where


def _there(saved: SavedPages | None) -> SavedPages:
    """Returns pages that were just computed. Raises: CapacityError if the cache has not kept them
    all.
    """
    if saved is None:
        raise CapacityError("the prefix cache does not keep all pages of the session at once")
    return saved


def digest_of(adapter: Adapter | None) -> str:
    """Returns what an adapter is known by; "" for none."""
    return "" if adapter is None else adapter.digest.hex()


def _rendered(home: Home, messages: Messages) -> tuple[int, ...]:
    """Returns the tokens of a chat, ready for the next answer where it does not end with one."""
    wants_answer = bool(messages) and messages[-1].get("role") != "assistant"
    extra = home.chat.get("chat_template_kwargs")
    (prompt,) = home.intake.render(
        [messages],
        extra,
        add_generation_prompt=wants_answer,
        continue_final_message=False,
        tools=home.chat.get("tools"),
        chat_template=home.chat.get("chat_template"),
    )
    return tuple(prompt["prompt_token_ids"])
