"""Decoding piece by piece is decoding at once, whatever the pieces; and stop strings end the text
where they begin.
"""

import re
from array import array
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxkv.build.tokenizer import load_tokenizer
from jaxkv.config import SamplingParams
from jaxkv.errors import CheckpointError
from jaxkv.holding.hold import Hold
from jaxkv.holding.prefix import PageChain
from jaxkv.requests.request import Output, Request, Submission
from jaxkv.requests.text import MAX_PENDING, UNFINISHED, TextStream, whole_suffix
from tokenizers_ import CHAT_TEMPLATE, EOS, KINDS, SPECIALS, save_tokenizer

SCRIPTS = (
    (0x20, 0x7E),
    (0x20, 0x7E),
    (0x20, 0x20),
    (0xA0, 0x24F),
    (0x300, 0x36F),
    (0x400, 0x45F),
    (0x590, 0x5F4),
    (0x600, 0x6FF),
    (0xE01, 0xE3A),
    (0x200B, 0x200F),
    (0x3041, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xFE00, 0xFE0F),
    (0x1F1E6, 0x1F1FF),
    (0x1F300, 0x1F64F),
    (0x1F900, 0x1F9FF),
    (0x20000, 0x2A6DF),
    (0xE0100, 0xE01EF),
)
TEXTS = [
    "The end of the story. One by one.",
    "family 👨\u200d👩\u200d👧\u200d👦, flag 🇩🇪, thumb 👍🏽!",
    "😀" * 30,
    "你好世界" * 12,
    (
        "ह\u093fन\u094dद\u0940 e\u0301a\u0308 \u05e9\u05c1\u05dc\u05d5\u05dd "
        "\u202e\u0639\u0631\u0628\u064a\u202c"
    ),
    "a real \ufffd and two \ufffd\ufffd",
    "   runs    of spaces\n\n\t\n  and lines  ",
]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request) -> Tokenizer:
    return KINDS[request.param]()


def random_text(rng: np.random.Generator, length: int) -> str:
    ranges = [SCRIPTS[i] for i in rng.integers(0, len(SCRIPTS), size=max(1, length // 6))]
    return "".join(chr(rng.integers(low, high + 1)) for low, high in ranges for _ in range(6))[
        :length
    ]


def decoder(tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def text_at_once(
    tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """Without a last character that is not whole."""
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens).rstrip(UNFINISHED)


def chunked(ids: Sequence[int], rng: np.random.Generator, largest: int) -> list[list[int]]:
    cuts = (
        np.cumsum(rng.integers(1, largest + 1, size=len(ids) + 1))
        if largest > 1
        else np.arange(1, len(ids) + 1)
    )
    edges = [0, *(int(cut) for cut in cuts if cut < len(ids)), len(ids)]
    return [list(ids[start:end]) for start, end in pairwise(edges)]


def streamed(
    stream: TextStream, chunks: Sequence[Sequence[int]], **options
) -> tuple[list[str], str | None]:
    """The deltas of every push and of the end, and the stop string that was found."""
    deltas = []
    for chunk in chunks:
        found = stream.push(chunk, **options)
        deltas.append(stream.take())
        if found is not None:
            return deltas, found
    stream.end()
    return [*deltas, stream.take()], None


def plain(
    tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
) -> str:
    """The final text, after checking that every delta is a piece of it in whole characters."""
    decode = decoder(tokenizer, skip_special_tokens=skip_special_tokens)
    stream = TextStream(decode, (), include_stop=False)
    deltas, found = streamed(stream, chunks)
    assert "".join(deltas) == stream.text
    assert found is None
    return stream.text


# --- pieces and the whole
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 40])
def test_any_chunking_of_a_text_gives_the_text_decoded_at_once(tokenizer, largest):
    rng = np.random.default_rng(largest)
    for text in [*TEXTS, *(random_text(rng, 60) for _ in range(60))]:
        ids = encode(tokenizer, text)
        assert plain(tokenizer, chunked(ids, rng, largest)) == text_at_once(tokenizer, ids)
        ids = ids[rng.integers(0, len(ids)) :]  # a generated text may begin with half a character
        assert re.fullmatch(
            expected_pattern(tokenizer, ids),
            plain(tokenizer, chunked(ids, rng, largest)),
            re.DOTALL,
        )


def test_aligned_chunks_that_never_end_with_a_character_lose_nothing(tokenizer):
    text = "a" + "😀" * 200  # four byte tokens each: chunks of 8 always end inside one
    ids = encode(tokenizer, text)
    chunks = [ids[i : i + 8] for i in range(0, len(ids), 8)]
    assert plain(tokenizer, chunks) == text


@pytest.mark.parametrize("largest", [1, 2, 8, 40])
def test_random_token_ids_give_the_same_text_in_any_chunking(tokenizer, largest):
    """Invalid UTF-8 all over."""
    rng = np.random.default_rng(10 + largest)
    for _ in range(150):
        ids = rng.integers(0, tokenizer.get_vocab_size(), size=60).tolist()
        text = plain(tokenizer, chunked(ids, rng, largest))
        assert text == plain(tokenizer, chunked(ids, rng, 1))
        assert re.fullmatch(expected_pattern(tokenizer, ids), text, re.DOTALL)


def expected_pattern(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of these ids when it comes in pieces: of a byte-level tokenizer exactly the text
    decoded at once.

    A sentencepiece-like decoder turns a run of byte tokens with one invalid byte into nothing but
    U+FFFD, also the characters before that byte, which a stream has given out by then. Such a run
    is any text of at most one character per byte; all else is exact.
    """
    if tokenizer.token_to_id("<0x00>") is None:
        return re.escape(text_at_once(tokenizer, ids))
    pieces = [piece for i in ids if (piece := tokenizer.id_to_token(i)) not in SPECIALS]
    pattern = ""
    for is_run, group in groupby(pieces, lambda piece: piece.startswith("<0x")):
        if not is_run:
            pattern += re.escape("".join(group).replace("\u2581", " "))
            continue
        raw = bytes(int(piece[3:5], 16) for piece in group)
        try:
            pattern += re.escape(raw.decode())
        except UnicodeDecodeError:
            pattern += f".{{0,{len(raw)}}}"
    return pattern.removeprefix(re.escape(" ")).rstrip(UNFINISHED)


def test_no_delta_has_half_a_character(tokenizer):
    rng = np.random.default_rng(3)
    for text in [*TEXTS, *(random_text(rng, 50) for _ in range(30))]:
        for largest in (1, 4):
            stream = TextStream(decoder(tokenizer), (), include_stop=False)
            deltas, _ = streamed(stream, chunked(encode(tokenizer, text), rng, largest))
            at = 0
            for delta in deltas:
                assert (
                    stream.text[at : at + len(delta)] == delta
                )  # so a U+FFFD is one of the final text
                at += len(delta)
            assert at == len(stream.text)
            assert UNFINISHED not in stream.text or UNFINISHED in text


def test_text_comes_as_soon_as_it_is_whole(tokenizer):
    for text in ("The end of the story", "你好😀😀\u05e9"):
        stream = TextStream(decoder(tokenizer), (), include_stop=False)
        ids = encode(tokenizer, text)
        for count, token in enumerate(ids, start=1):
            stream.push([token])
            whole = tokenizer.decode(ids[:count])
            assert stream.text == whole.rstrip(UNFINISHED) or whole.endswith(UNFINISHED)
            assert not whole.endswith(UNFINISHED) or text.startswith(stream.text)
        assert stream.text == text  # before the end


def test_special_tokens_are_skipped_or_shown_as_asked(tokenizer):
    end = tokenizer.token_to_id("<|end|>")
    ids = [end, *encode(tokenizer, "One by"), end, end, *encode(tokenizer, "你"), EOS]
    for largest in (1, 3, 20):
        chunks = chunked(ids, np.random.default_rng(0), largest)
        assert plain(tokenizer, chunks) == text_at_once(tokenizer, ids)
        shown = plain(tokenizer, chunks, skip_special_tokens=False)
        assert shown == text_at_once(tokenizer, ids, skip_special_tokens=False)
        assert shown.count("<|end|>") == 3
        assert shown.endswith("</s>")


def test_a_special_token_inside_a_character_does_not_break_it(tokenizer):
    first, *rest = tokenizer.encode("😀", add_special_tokens=False).ids[-4:]
    assert plain(tokenizer, [[first], [EOS], [EOS], *([token] for token in rest)]) == "😀"


# --- cost
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "piece",
    ["One by one, ", "😀", " ", "\n", "</s>", "\xff", "The end</s></s></s></s>", "</s> "],
    ids=[
        "words",
        "emoji",
        "spaces",
        "lines",
        "specials",
        "invalid bytes",
        "text and specials",
        "specials and spaces",
    ],
)
def test_the_cost_of_a_token_does_not_grow_with_the_length(tokenizer, piece):
    count = 600
    if piece == "\xff":  # an invalid byte in either vocabulary
        ids = [tokenizer.token_to_id("ÿ") or tokenizer.token_to_id("<0xFF>")] * count
    else:
        ids = [token for _ in range(count) for token in encode(tokenizer, piece)][:count]
    lengths: list[int] = []

    def decode(window):
        lengths.append(len(window))
        return tokenizer.decode(window)

    for largest in (1, 8):
        lengths.clear()
        stream = TextStream(decode, (), include_stop=False)
        streamed(stream, [ids[i : i + largest] for i in range(0, count, largest)])
        bound = MAX_PENDING + 2 * largest if piece == "\xff" else 24 + 2 * largest
        assert max(lengths) <= bound
        assert sum(lengths[len(lengths) // 2 :]) <= 1.5 * sum(lengths[: len(lengths) // 2]) + 64
        if piece == "\xff":  # given out when there are too many, the last ones never
            assert count - MAX_PENDING - largest <= len(stream.text) <= count
            assert set(stream.text) == {UNFINISHED}
        else:
            assert stream.text == text_at_once(tokenizer, ids)


# --- the prompt's last tokens are the left neighbours of the first
# ----------------------------------------------------


def test_text_continues_the_prompt(tokenizer):
    """decode(prompt) + text = decode(prompt and output): a space mark at the border is a space, as
    in vLLM.
    """
    rng = np.random.default_rng(5)
    for text in ["Once upon a time there was", *TEXTS, *(random_text(rng, 40) for _ in range(40))]:
        ids = encode(tokenizer, text)
        for cut in {1, 2, len(ids) // 2, len(ids) - 1}:
            before = tokenizer.decode(ids[:cut])
            if UNFINISHED in before or not before:
                continue
            stream = TextStream(decoder(tokenizer), (), include_stop=False, prompt=ids[:cut])
            streamed(stream, chunked(ids[cut:], rng, 3))
            assert before + stream.text == text_at_once(tokenizer, ids)


def test_a_prompt_that_ends_inside_a_character_or_shows_nothing_is_no_neighbour(tokenizer):
    ids = encode(tokenizer, "😀😀")
    stream = TextStream(decoder(tokenizer), (), include_stop=False, prompt=ids[:-2])
    streamed(stream, [ids[-2:], encode(tokenizer, "One")])
    assert stream.text.endswith("One")
    for prompt in ([], [1], [1] * 100):
        stream = TextStream(decoder(tokenizer), (), include_stop=False, prompt=prompt)
        streamed(stream, [encode(tokenizer, " One")])
        assert stream.text == tokenizer.decode(encode(tokenizer, " One"))


def test_whole_suffix_is_the_fewest_last_tokens_with_whole_text(tokenizer):
    decode = decoder(tokenizer)
    ids = encode(tokenizer, "One by 😀")
    kept = whole_suffix(decode, ids)
    assert decode(kept).endswith("😀")
    assert decode(kept) in ("😀", " 😀")
    assert whole_suffix(decode, ids[:-1]) == []
    assert whole_suffix(decode, [EOS, EOS]) == []
    assert whole_suffix(decode, []) == []


# --- stop strings
# -----------------------------------------------------------------------------------------------------


def stopped(
    tokenizer, text: str, stops: Sequence[str], *, largest: int = 1, include_stop: bool = False
):
    """(text, stop string, deltas); as in the engine, tokens come one by one, or in chunks to see
    more at once.
    """
    stream = TextStream(decoder(tokenizer), stops, include_stop=include_stop)
    deltas, found = streamed(
        stream, chunked(encode(tokenizer, text), np.random.default_rng(0), largest)
    )
    assert "".join(deltas) == stream.text
    return stream.text, found, deltas


@pytest.mark.parametrize("largest", [1, 3, 50])
@pytest.mark.parametrize(
    ("text", "stops", "expected", "found"),
    [
        ("The end of the story", ["of"], "The end ", "of"),
        ("The end of the story", ["d of t"], "The en", "d of t"),  # across token borders
        ("The beginning", ["ginn"], "The be", "ginn"),  # in the middle of a token
        ("The end of the story", ["The"], "", "The"),
        ("The end of the story", ["story"], "The end of the ", "story"),
        ("The end of the story", ["storyx", "nothing"], "The end of the story", None),
        ("a😀b你c", ["😀"], "a", "😀"),
        ("a😀b你c", ["b你"], "a😀", "b你"),
        ("你你好", ["好"], "你你", "好"),
        ("xe\u0301y", ["\u0301"], "xe", "\u0301"),
        ("one by one by one", ["by one by"], "one ", "by one by"),
        ("aaab", ["aab"], "a", "aab"),  # a false start
        ("The end", ["Th", "The"], "", "Th"),
        ("line\n\nline", ["\n\n"], "line", "\n\n"),
        ("spaces   here", ["   "], "spaces", "   "),
    ],
)
def test_a_stop_string_ends_the_text_where_it_begins(
    tokenizer, text, stops, expected, found, largest
):
    got, stop, deltas = stopped(tokenizer, text, stops, largest=largest)
    assert (got, stop) == (expected, found)
    got, stop, _ = stopped(tokenizer, text, stops, largest=largest, include_stop=True)
    assert (got, stop) == (expected + (found or ""), found)
    held = "".join(deltas[:-1])
    assert not any(stop in held for stop in stops)


def test_the_earliest_of_several_stop_strings_wins(tokenizer):
    text = "one two three"
    for stops in (["three", "two", "one"], ["one", "three"], ["three", "ne"]):
        got, found, _ = stopped(tokenizer, text, stops, largest=50)
        first = min(stops, key=text.find)
        assert (got, found) == (text[: text.find(first)], first)


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_decided(tokenizer):
    text, stop = "aaaa END but not the ENDING, this: END.", "END."
    stream = TextStream(decoder(tokenizer), [stop], include_stop=False)
    given = ""
    for token in encode(tokenizer, text):
        stream.push([token])
        given += stream.take()
        assert not any(
            given.endswith(stop[:n]) for n in range(1, len(stop)) if len(given) >= text.index(stop)
        ) or (given == text[: text.index(stop)])
        assert text[: text.index(stop)].startswith(given)
    assert given == "aaaa END but not the ENDING, this: "


def test_what_was_held_back_comes_when_the_sequence_ends_without_the_stop_string(tokenizer):
    got, found, deltas = stopped(tokenizer, "The end of the sto", ["story, at last"])
    assert (got, found) == ("The end of the sto", None)
    assert deltas[-1]


def test_before_min_tokens_the_text_is_not_searched(tokenizer):
    ids = encode(tokenizer, "one two one two one")
    half = encode(tokenizer, "one two on")
    stream = TextStream(decoder(tokenizer), ["two"], include_stop=False)
    for token in half:
        assert stream.push([token], search=False) is None
    found = None
    for token in ids[len(encode(tokenizer, "one two one")) :]:
        found = found or stream.push([token])
    assert found == "two"
    assert stream.text.count("two") == 1  # the first one, before min_tokens, stayed
    stream = TextStream(decoder(tokenizer), ["two"], include_stop=False)
    deltas, found = streamed(stream, [[token] for token in ids], search=False)
    assert (stream.text, found) == ("one two one two one", None)
    assert "".join(deltas) == stream.text


def test_a_stop_string_that_min_tokens_cuts_through_is_found(tokenizer):
    ids = encode(tokenizer, "one STOP two")
    border = next(
        n for n in range(len(ids)) if tokenizer.decode(ids[:n]).endswith(("ST", "STO", "S"))
    )
    stream = TextStream(decoder(tokenizer), ["STOP"], include_stop=False)
    assert [stream.push([token], search=False) for token in ids[:border]] == [None] * border
    _, found = streamed(stream, [[token] for token in ids[border:]])
    assert (stream.text, found) == ("one ", "STOP")


def test_a_last_character_that_is_not_whole_is_left_out(tokenizer):
    for text in ("ab😀", "😀😀", "你"):
        ids = encode(tokenizer, text)
        for cut in (1, 2):
            assert plain(tokenizer, [ids[:-cut]]) == text[:-1]
            assert plain(tokenizer, [[token] for token in ids[:-cut]]) == text[:-1]


# --- loading
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_s_tokenizer_is_loaded_as_it_was_saved(tmp_path, kind):
    raw = save_tokenizer(tmp_path, kind, chat_template=CHAT_TEMPLATE)
    loaded = load_tokenizer(tmp_path)
    assert loaded.eos_token_id == EOS
    assert loaded.chat_template == CHAT_TEMPLATE
    for text in TEXTS:
        assert loaded.encode(text) == raw.encode(text).ids
        assert loaded.decode(raw.encode(text).ids, skip_special_tokens=True) == raw.decode(
            raw.encode(text).ids
        )


def test_a_directory_without_a_tokenizer_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json.*got neither; pass tokenizer=DIR, or skip_"
    ):
        load_tokenizer(tmp_path)


def test_what_may_begin_a_stop_string_is_given_out_when_the_request_is_ended():
    text = TextStream(lambda ids: "".join(map(chr, ids)), ["never"], include_stop=False)
    request = Request(
        id="0",
        tokens=array("i", [ord("a")]),
        prompt_len=1,
        params=SamplingParams(stop="never"),
        hold=Hold(PageChain(b""), 1),
        max_len=9,
        output=Output(text=text),
    )
    submission = Submission("0", None, (request,))
    request.tokens.extend(map(ord, "so nev"))
    text.push([*map(ord, "so nev")])
    assert submission.new_output().outputs[0].text == "so"
    request.finish_reason = "abort"
    assert submission.new_output().outputs[0].text == " nev"
    assert submission.output().outputs[0].text == "so nev"
