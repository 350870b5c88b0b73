"""The front door: a request as it was meant, or one ValueError that names every bad index, and
nothing else changed.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from jaxkv.build.model import Model
from jaxkv.build.tokenizer import load_tokenizer
from jaxkv.config import EngineConfig, SamplingParams
from jaxkv.errors import CheckpointError
from jaxkv.models.families import ConfigReader, read_family
from jaxkv.ops.sampling import NUM_BIASES, NUM_STOP_TOKENS
from jaxkv.requests import reading
from jaxkv.requests.intake import Intake
from jaxkv.requests.masks import encode_words
from jaxkv.requests.pooling import PoolingParams
from jaxkv.requests.prompts import Pair
from jaxkv.requests.request import Request, Submission
from jaxkv.requests.text import longest_token
from tiny import tiny_config
from tokenizers_ import BOS, CHAT_TEMPLATE, EOS, KINDS, save_tokenizer

VOCAB = 420
MAX_LEN, PAGE = 64, 8
PARAMS = SamplingParams(max_tokens=5)
USER = {"role": "user", "content": "The end"}
ENDLESS = (
    "{{% set r = range(99999) %}}{{% for a in r %}}{{% for b in r %}}{{% for c in r %}}{}"
    "{{% endfor %}}{{% endfor %}}{{% endfor %}}"
)
"""A template of 10**15 iterations at least."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory, chat_template=CHAT_TEMPLATE)
    return load_tokenizer(directory)


@pytest.fixture
def intake(tokenizer) -> Intake:
    return intake_with(tokenizer)


def intake_with(
    tokenizer,
    *,
    num_pages: int = 16,
    eos_ids: tuple[int, ...] = (EOS,),
    seed: int = 0,
    share_prefixes: bool = True,
) -> Intake:
    spec, layout = read_family(ConfigReader(tiny_config("llama", vocab_size=VOCAB), "config.json"))
    model = Model(
        directory=Path(),
        spec=spec,
        layout=layout,
        stored_dtype=None,
        weights={},
        tokenizer=tokenizer,
        generation={},
        eos_ids=frozenset(eos_ids),
        eos_id=eos_ids[0],
    )
    config = EngineConfig(
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=PAGE,
        num_pages=num_pages,
        decode_steps=8,
        seed=seed,
    )
    return Intake(model, config, cache_root=lambda: b"root", share_prefixes=share_prefixes)


def submitted(intake: Intake, prompt: object, params: SamplingParams = PARAMS) -> Submission:
    (submission,) = intake.accept([prompt], [params])
    return submission


def one(intake: Intake, prompt: object, params: SamplingParams = PARAMS) -> Request:
    (request,) = submitted(intake, prompt, params).samples
    return request


def refused(intake: Intake, prompt: object, params: SamplingParams = PARAMS) -> str:
    """The message; a request made right after has the number that it would have had."""
    number = intake._num_submitted
    with pytest.raises(ValueError, match=r"^prompt 0: ") as caught:
        one(intake, prompt, params)
    assert one(intake, "The end").id == str(number)
    return str(caught.value).removeprefix("prompt 0: ")


# --- what is taken
# ----------------------------------------------------------------------------------------------------


def test_a_text_is_encoded_with_the_tokenizer_s_own_special_tokens(intake, tokenizer):
    for prompt in (
        "The end",
        {"prompt": "The end"},
        {"prompt": "The end", "prompt_token_ids": None},
    ):
        submission = submitted(intake, prompt)
        (request,) = submission.samples
        assert submission.prompt == "The end"
        assert request.tokens.tolist() == tokenizer.encode("The end")
        assert request.tokens[0] == BOS
        assert request.prompt_len == len(request.tokens)


@pytest.mark.parametrize(
    "ids",
    [
        [3, 4, 5],
        (3, 4, 5),
        np.array([3, 4, 5]),
        np.array([3, 4, 5], np.uint8),
        list(np.array([3, 4, 5])),
        range(3, 6),
    ],
)
def test_token_ids_are_taken_as_they_are(intake, ids):
    assert submitted(intake, {"prompt_token_ids": ids}).prompt is None
    request = one(intake, {"prompt_token_ids": ids})
    assert request.tokens.tolist() == [3, 4, 5]
    assert submitted(intake, {"prompt": "shown", "prompt_token_ids": ids}).prompt == "shown"


def test_the_caller_s_list_is_not_the_request_s(intake):
    ids = [3, 4, 5]
    one(intake, {"prompt_token_ids": ids}).tokens.append(6)
    assert ids == [3, 4, 5]


def test_the_edges_of_the_vocabulary_and_the_length_are_inside(intake):
    assert one(intake, {"prompt_token_ids": [0, VOCAB - 1]}).tokens.tolist() == [0, VOCAB - 1]
    request = one(intake, {"prompt_token_ids": [3] * (MAX_LEN - 1)})
    assert (request.max_len, request.num_left) == (MAX_LEN, 1)
    assert one(
        intake, {"prompt_token_ids": [3]}, SamplingParams(stop_token_ids=[0, VOCAB - 1])
    ).ends.stop_ids >= {
        0,
        VOCAB - 1,
    }


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(1, 4), (10, 13), (61, MAX_LEN), (1000, MAX_LEN), (None, MAX_LEN)]
)
def test_the_length_is_bounded_by_the_request_and_the_engine(intake, max_tokens, expected):
    assert (
        one(intake, {"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=max_tokens)).max_len
        == expected
    )


def test_a_small_pool_bounds_the_length_too(tokenizer):
    intake = intake_with(tokenizer, num_pages=3)
    assert (
        one(intake, {"prompt_token_ids": [3] * 23}, SamplingParams(max_tokens=None)).max_len == 24
    )


def test_the_model_s_end_tokens_are_among_the_stop_tokens_unless_ignored(tokenizer):
    intake = intake_with(tokenizer, eos_ids=(2, 9))
    request = one(intake, "The end", SamplingParams(stop_token_ids=[5, 9, 5]))
    assert (request.ends.stop_ids, request.ends.eos_id) == ({2, 5, 9}, 2)
    request = one(intake, "The end", SamplingParams(stop_token_ids=[5], ignore_eos=True))
    assert (request.ends.stop_ids, request.ends.eos_id) == ({5}, None)


def test_stop_tokens_may_be_as_many_as_the_device_knows(intake):
    own = list(range(10, 10 + NUM_STOP_TOKENS))
    assert (
        len(one(intake, "The end", SamplingParams(stop_token_ids=own[1:])).ends.stop_ids)
        == NUM_STOP_TOKENS
    )
    assert (
        len(
            one(
                intake, "The end", SamplingParams(stop_token_ids=own, ignore_eos=True)
            ).ends.stop_ids
        )
        == NUM_STOP_TOKENS
    )
    assert "stop_token_ids: expected at most 64 with the model's own, got 65" in refused(
        intake, "The end", SamplingParams(stop_token_ids=own)
    )


def test_text_is_made_unless_nobody_wants_it(intake):
    assert one(intake, "The end").output.text is not None
    assert one(intake, "The end", SamplingParams(detokenize=False)).output.text is None
    assert one(intake, "The end").output.logprobs is None
    assert one(intake, "The end", SamplingParams(logprobs=0)).output.logprobs == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_goes_on_where_the_prompt_ends(tmp_path, kind):
    save_tokenizer(tmp_path, kind)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("The end of the story")
    request = one(intake_with(tokenizer), {"prompt_token_ids": ids[:-3]})
    request.output.text.push(ids[-3:])
    before = tokenizer.decode(ids[:-3], skip_special_tokens=True)
    assert before + request.output.text.text == "The end of the story"


def test_special_tokens_are_skipped_in_the_text_unless_wanted(intake):
    for skip, shown in ((True, ""), (False, "</s>")):
        request = one(intake, "The end", SamplingParams(skip_special_tokens=skip))
        request.output.text.push([EOS])
        assert request.output.text.text == shown


# --- seeds and numbers
# ------------------------------------------------------------------------------------------------


def test_a_request_s_own_seed_is_used_and_negative_ones_wrap(intake):
    seeds = [
        one(intake, "The end", SamplingParams(seed=seed)).draw.seed
        for seed in (0, 7, 2**64 - 1, -2, -(2**63))
    ]
    assert seeds == [0, 7, 2**64 - 1, 2**64 - 2, 2**63]


def test_without_a_seed_engine_and_submission_number_give_one(tokenizer):
    def seeds(engine_seed: int, count: int, params: SamplingParams = PARAMS) -> list[int]:
        intake = intake_with(tokenizer, seed=engine_seed)
        return [
            submission.samples[0].draw.seed
            for submission in intake.accept(["The end"] * count, [params] * count)
        ]

    assert len(set(seeds(0, 50))) == 50
    assert (
        seeds(0, 5) == seeds(0, 50)[:5] == seeds(0, 5, SamplingParams(seed=-1))
    )  # -1 is none, as in vLLM
    assert not set(seeds(0, 50)) & set(seeds(1, 50))
    assert all(0 <= seed < 2**64 for seed in seeds(3, 50))


def test_requests_are_numbered_in_order_and_refused_ones_not(intake):
    assert [request.id for request in intake.accept(["The end"] * 3, [PARAMS] * 3)] == [
        "0",
        "1",
        "2",
    ]
    with pytest.raises(ValueError, match="prompt 1"):
        intake.accept(["The end", ""], [PARAMS] * 2)
    assert one(intake, "The end").id == "3"
    assert intake.accept([], []) == []


# --- what is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty; expected at least one token"),
        ({"prompt": ""}, "the prompt is empty; expected at least one token"),
        ({"prompt_token_ids": []}, "the prompt is empty; expected at least one token"),
        (
            {"prompt_token_ids": np.array([], np.int32)},
            "the prompt is empty; expected at least one token",
        ),
        ({}, 'expected "prompt" or "prompt_token_ids", got neither'),
        (
            {"role": "user", "content": "x"},
            "got keys unknown here: content, role; messages are for chat",
        ),
        ({"prompt": None}, 'expected "prompt" or "prompt_token_ids", got neither'),
        (
            {"prompt_token_ids": [3, -1]},
            f"prompt: expected token ids from 0 to {VOCAB - 1}, got [-1]",
        ),
        (
            {"prompt_token_ids": [3, VOCAB]},
            f"prompt: expected token ids from 0 to {VOCAB - 1}, got [{VOCAB}]",
        ),
        ({"prompt_token_ids": [2**40]}, f"got [{2**40}]"),
        ({"prompt_token_ids": [True, 3]}, "got [True]"),
        ({"prompt_token_ids": [3.0]}, "got [3.0]"),
        ({"prompt_token_ids": [None]}, "got [None]"),
        ({"prompt_token_ids": ["3"]}, "got ['3']"),
        ({"prompt_token_ids": [[3, 4]]}, "got [[3, 4]]"),
        (
            {"prompt_token_ids": np.array([[3, 4]])},
            "prompt: expected token ids from 0 to 419, got [[3, 4]]",
        ),
        (
            {"prompt_token_ids": np.array([3.0])},
            "prompt: expected token ids from 0 to 419, got [3.0]",
        ),
        (
            {"prompt_token_ids": np.array([True])},
            "prompt: expected token ids from 0 to 419, got [True]",
        ),
        ({"prompt_token_ids": [-1] * 9}, "got [-1, -1, -1, -1, -1]"),
        ({"prompt_token_ids": "345"}, "prompt_token_ids: expected a list of token ids, got str"),
        ({"prompt_token_ids": b"345"}, "prompt_token_ids: expected a list of token ids, got bytes"),
        ({"prompt_token_ids": 3}, "prompt_token_ids: expected a list of token ids, got int"),
        ({"prompt_token_ids": {3: 4}}, "prompt_token_ids: expected a list of token ids, got dict"),
        (
            {"prompt_token_ids": jnp.arange(3)},
            "prompt_token_ids: expected a list of token ids, got ArrayImpl",
        ),
        ({"prompt": 3}, "prompt: expected a text, got int"),
        ({"prompt": b"The end"}, "prompt: expected a text, got bytes"),
        ({"prompt": ["The end"]}, "prompt: expected a text, got list"),
        (
            {"prompt": "The end", "prompt_ids": [1]},
            "got keys unknown here: prompt_ids",
        ),
        (
            {"prompt": "x", "multi_modal_data": 1, 3: 4},
            "got keys unknown here: 3, multi_modal_data",
        ),
        (
            {"input_ids": [[1]], "attention_mask": [[1]]},
            "expected a prompt with prompt or prompt_token_ids, and cache_salt, got keys unknown "
            "here: attention_mask, input_ids; what a tokenizer returns as input_ids is a prompt by "
            "itself",
        ),
        ("half a pair: \ud83d", "the prompt is not valid Unicode: "),
        ({"prompt": "\udc80"}, "the prompt is not valid Unicode: "),
        (
            {"prompt_token_ids": [3], "cache_salt": "\ud800"},
            "cache_salt: expected valid Unicode, got '\\ud800'",
        ),
        (
            None,
            'expected a text, token ids, {"prompt": text} or {"prompt_token_ids": [...]}, got NoneType',
        ),
        (3, "got int"),
        (b"The end", "got bytes"),
        (
            [3, "4"],
            'expected a text, token ids, {"prompt": text} or {"prompt_token_ids": [...]}, got list '
            "with '4'",
        ),
        ([3, 4.0], "got list with 4.0"),
        ([3, True], "got list with True"),
        ([3, VOCAB], "prompt: expected token ids from 0 to 419, got [420]"),
        (["The end"], "got list"),
        (
            {"prompt_token_ids": [3] * MAX_LEN},
            f"the prompt has {MAX_LEN} tokens; expected at most {MAX_LEN - 1}, ",
        ),
        ({"prompt_token_ids": [-1] * 1000}, "the prompt has 1000 tokens"),
    ],
)
def test_a_bad_prompt_is_one_value_error(intake, prompt, message):
    assert message in refused(intake, prompt)


def test_a_prompt_longer_than_the_pool_says_what_to_raise(tokenizer):
    message = refused(intake_with(tokenizer, num_pages=3), {"prompt_token_ids": [3] * 24})
    assert (
        "the prompt has 24 tokens; the KV cache holds 24 of one request in all (3 pages of 8, "
        "kv_policy"
    ) in message
    assert "raise kv_cache_memory_bytes or num_gpu_blocks_override" in message


class Untouched(Sequence):
    """A million token ids that nobody may look at."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: object) -> int:
        raise AssertionError("a prompt that cannot fit was read")


@pytest.mark.parametrize("num_pages", [16, 3])
def test_a_prompt_that_can_never_fit_is_refused_without_looking_at_its_tokens(tokenizer, num_pages):
    intake = intake_with(tokenizer, num_pages=num_pages)
    assert "the prompt has 1000000 tokens; expected at most 63" in refused(
        intake, {"prompt_token_ids": Untouched()}
    )
    for ids in ([3] * 10**6, np.full(10**6, 3)):
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            with pytest.raises(ValueError, match="1000000 tokens"):
                one(intake, {"prompt_token_ids": ids})
            seconds.append(time.perf_counter() - started)
        assert min(seconds) < 0.01


@pytest.mark.parametrize("ids", [[VOCAB], [-1], [3, 2**40]])
def test_a_stop_token_out_of_range_is_refused(intake, ids):
    message = refused(intake, "The end", SamplingParams(stop_token_ids=ids))
    assert message == f"stop_token_ids: expected token ids from 0 to {VOCAB - 1}, got {ids[-1:]}"


@pytest.mark.parametrize("bad", [VOCAB, -1, 2**40])
def test_ids_out_of_the_vocabulary_are_refused_wherever_they_stand(intake, bad):
    expected = f"expected token ids from 0 to {VOCAB - 1}, got [{bad}]"
    message = refused(intake, "The end", SamplingParams(allowed_token_ids=[3, bad]))
    assert message == f"allowed_token_ids: {expected}"
    if bad >= 0:
        assert (
            refused(intake, "The end", SamplingParams(logit_bias={3: 1.0, bad: 1}))
            == f"logit_bias: {expected}"
        )
    edges = SamplingParams(allowed_token_ids=[0, VOCAB - 1], logit_bias={0: 1, str(VOCAB - 1): 1})
    assert one(intake, "The end", edges).params.logit_bias == {0: 1, VOCAB - 1: 1}


def test_more_biases_than_the_device_has_room_for_are_refused(intake):
    most = dict.fromkeys(range(NUM_BIASES), 1)
    assert one(intake, "The end", SamplingParams(logit_bias=most)).params.logit_bias == most
    message = refused(intake, "The end", SamplingParams(logit_bias=most | {NUM_BIASES: 1}))
    assert message == f"logit_bias: expected at most {NUM_BIASES} tokens, got {NUM_BIASES + 1}"


def test_bad_words_become_tokens(intake, tokenizer):
    request = one(intake, "The end", SamplingParams(bad_words=["t", "over the"]))
    assert request.draw.bad_words == encode_words(tokenizer, ["t", "over the"])
    assert request.needs_host
    assert not one(intake, "The end", SamplingParams(bad_words=["t"])).needs_host
    assert one(intake, "The end").draw.bad_words == ()
    with pytest.raises(
        ValueError,
        match="bad_words: expected a tokenizer for bad words, got skip_tokenizer_init=True",
    ):
        one(intake_with(None), {"prompt_token_ids": [3]}, SamplingParams(bad_words=["t"]))


def test_something_must_be_left_to_come(intake, tokenizer):
    (token,) = tokenizer.encode("t", add_special_tokens=False)
    expected = (
        f"expected at least one that ends no bad word and, with min_tokens, no request, got "
        f"[{token}]"
    )
    for params in (
        SamplingParams(allowed_token_ids=[token], bad_words=["t"]),
        SamplingParams(allowed_token_ids=[token], stop_token_ids=[token], min_tokens=1),
    ):
        assert refused(intake, "The end", params) == f"allowed_token_ids: {expected}"
    assert one(intake, "The end", SamplingParams(allowed_token_ids=[token], stop_token_ids=[token]))
    assert one(
        intake, "The end", SamplingParams(allowed_token_ids=[token, token + 1], bad_words=["t"])
    )


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_bounded_by_what_the_engine_was_made_for(intake, name):
    for count in (0, 20, None):
        assert (
            getattr(one(intake, "The end", SamplingParams(**{name: count})).params, name) == count
        )
    for count, got in ((21, "21"), (-1, f"-1 (all {VOCAB} tokens)")):
        message = refused(intake, "The end", SamplingParams(**{name: count}))
        assert (
            message
            == f"{name}: expected at most 20, got {got}; raise max_logprobs of LLM (-1: all)"
        )


@pytest.mark.parametrize("params", [None, 3, {"temperature": 0}, "greedy", SamplingParams])
def test_what_is_no_sampling_params_is_refused(intake, params):
    assert "sampling_params: expected SamplingParams, got " in refused(intake, "The end", params)


def test_without_a_tokenizer_texts_and_stop_strings_are_refused():
    intake = intake_with(None)
    with pytest.raises(
        ValueError, match=r"expected .*prompt_token_ids.* with skip_tokenizer_init=True, got a text"
    ):
        one(intake, "The end")
    with pytest.raises(
        ValueError,
        match="stop: expected a tokenizer for stop strings, got skip_tokenizer_init=True",
    ):
        one(intake, {"prompt_token_ids": [3]}, SamplingParams(stop="x"))
    request = one(intake, {"prompt_token_ids": [3]})
    assert (request.id, request.output.text) == ("0", None)


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_caught(intake):
    intake._model = replace(
        intake._model, tokenizer=SimpleNamespace(encode=lambda text, **_: [1, VOCAB + 3])
    )
    with pytest.raises(
        ValueError, match=rf"prompt: expected token ids from 0 to {VOCAB - 1}, got \[{VOCAB + 3}\]"
    ):
        one(intake, "The end")


def test_every_bad_index_is_named_in_one_error_and_nothing_is_numbered(intake):
    prompts = ["", "The end", {"prompt_token_ids": [-1]}, "The end", 3, "The end"]
    params = [PARAMS, PARAMS, PARAMS, SamplingParams(stop_token_ids=[VOCAB]), PARAMS, None]
    with pytest.raises(ValueError, match="prompt") as caught:
        intake.accept(prompts, params)
    lines = str(caught.value).split("\n")
    assert [line.split(":")[0] for line in lines] == [
        f"prompt {index}" for index in (0, 2, 3, 4, 5)
    ]
    assert one(intake, "The end").id == "0"


# --- chat
# -------------------------------------------------------------------------------------------------------------


def test_conversations_become_the_template_s_tokens_and_no_more(intake, tokenizer):
    other = [USER, {"role": "assistant", "content": "of"}, USER]
    prompts = intake.render([[USER], other], add_generation_prompt=True)
    assert [prompt["prompt"] for prompt in prompts] == [
        "<s><|user|>The end<|end|>\n<|assistant|>",
        "<s><|user|>The end<|end|>\n<|assistant|>of<|end|>\n<|user|>The end<|end|>\n<|assistant|>",
    ]
    for prompt in prompts:  # the template writes <s> itself: it must not come twice
        assert prompt["prompt_token_ids"] == tokenizer.encode(
            prompt["prompt"], add_special_tokens=False
        )
        assert prompt["prompt_token_ids"].count(BOS) == 1
    assert intake.render([], add_generation_prompt=True) == []


def test_a_template_given_with_the_call_is_used(intake):
    (prompt,) = intake.render(
        [[USER]], chat_template="{{ messages[0].content }}{{ mark }}", extra={"mark": "!"}
    )
    assert prompt["prompt"] == "The end!"


def test_what_a_template_never_reads_is_refused(intake):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    plain = "{{ messages[0].content }}"
    for extra, tools, name in (({"mark": 1}, None, "mark"), (None, [tool], "tools")):
        given = {"tools": tools, "chat_template": plain}
        with pytest.raises(
            ValueError, match=f"expected what the chat template reads, got '{name}'"
        ):
            intake.render([[USER]], extra, **given)
        # As Llama 3.1's template begins: it is read before it is set.
        reads = f"{{% if not {name} is defined %}}{{% set {name} = none %}}{{% endif %}}{plain}"
        assert intake.render([[USER]], extra, **given | {"chat_template": reads})
    assert intake.render([[USER]], {}, tools=[], chat_template=plain)


@pytest.mark.parametrize("name", ["reasoning_effort", "enable_thinking", "thinking"])
def test_an_effort_reaches_the_variable_that_a_template_has_for_it(intake, name):
    template = f"{{{{ {name} }}}}"
    for effort, switch in (("none", False), ("low", True), ("max", True)):
        rendered = intake.render([[USER]], effort=effort, chat_template=template)
        said = {name: effort if name == "reasoning_effort" else switch}
        assert rendered == intake.render([[USER]], said, chat_template=template)
    if name != "reasoning_effort":  # what is said of the switch itself counts
        both, own = f"{template}{{{{ reasoning_effort }}}}", {name: "mine"}
        said = own | {"reasoning_effort": "low"}
        rendered = intake.render([[USER]], own, effort="low", chat_template=both)
        assert rendered == intake.render([[USER]], said, chat_template=both)


@pytest.mark.parametrize(
    ("template", "extra", "effort", "message"),
    [
        (
            "{{ messages[0].thinking }}",
            None,
            "low",
            "reasoning_effort: expected what the chat template reads, got 'reasoning_effort' or "
            "'enable_thinking' or 'thinking', which it does not",
        ),
        ("{{ thinking }}", None, "much", "reasoning_effort: expected one of none, .*, got 'much'"),
        ("{{ thinking }}", None, ["low"], r"reasoning_effort: expected one of .*, got \['low'\]"),
        (
            "{{ reasoning_effort }}",
            {"reasoning_effort": "low"},
            "high",
            "chat_template_kwargs: expected no reasoning_effort",
        ),
    ],
)
def test_an_effort_that_nothing_reads_is_refused(intake, template, extra, effort, message):
    with pytest.raises(ValueError, match=message):
        intake.render([[USER]], extra, effort=effort, chat_template=template)


def test_what_a_template_would_take_long_for_never_reaches_it(intake, monkeypatch):
    monkeypatch.setattr(reading, "MOST_VALUES", most := 4 * MAX_LEN)
    given = {"chat_template": "{{ tools }}{{ mark }}{{ messages[0].role }}"}
    fits = [USER] * (most // 3)
    assert intake.render([fits], **given)
    # A template gets them as an object.
    function = {"name": "f", "arguments": json.dumps({"x": [1] * most})}
    calls = USER | {"tool_calls": [{"function": function}]}
    for conversation, tools, extra, name in (
        ([*fits, USER], None, None, "conversation 1: messages"),
        ([calls], None, None, "conversation 1: messages"),
        ([USER], [{"function": {"parameters": [1] * most}}], None, "tools"),
        ([USER], None, {"mark": [[0] * most]}, "chat_template_kwargs"),
    ):
        message = f"^{name}: expected at most {most} objects, .* context length is {MAX_LEN} tokens"
        with pytest.raises(ValueError, match=message):
            intake.render([[USER], conversation], extra, tools=tools, **given)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"tools": []}, "no tools:"),
        ({"tokenize": True, "mark": "!"}, "no tokenize:"),
        ({"add_generation_prompt": False, "tools": 1}, "no add_generation_prompt, tools:"),
        ([1], "a dict, got list"),
    ],
)
def test_what_the_template_is_told_elsewhere_is_refused(intake, extra, expected):
    with pytest.raises(ValueError, match=f"chat_template_kwargs: expected {expected}"):
        intake.render([[USER]], extra, tools=None, add_generation_prompt=True)


def test_without_a_template_or_a_tokenizer_chat_is_refused(tmp_path):
    save_tokenizer(tmp_path)
    plain = load_tokenizer(tmp_path)
    with pytest.raises(
        ValueError, match="chat: this tokenizer has no chat template; pass chat_template="
    ):
        intake_with(plain).render([[USER]])
    assert intake_with(plain).render([[USER]], chat_template="{{ messages[0].content }}")
    with pytest.raises(
        ValueError, match="chat: expected a tokenizer, got skip_tokenizer_init=True"
    ):
        intake_with(None).render([[USER]])


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ '{}'.format() }}", "IndexError"),
        ("{{ 'x' * 10**15 }}", "MemoryError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 10.0**400 }}", "OverflowError"),
        (ENDLESS.format("{% for d in r %}{% endfor %}"), "TemplateTimeoutError"),
        (ENDLESS.format("{{ messages[0].role }}"), "TemplateTimeoutError"),
    ],
)
def test_whatever_a_template_raises_concerns_its_conversation_only(
    intake, monkeypatch, body, error
):
    monkeypatch.setattr("jaxkv.requests.deadline.TEMPLATE_S", 0.5)
    template = "{% if messages[0].content == 'bad' %}" + body + "{% endif %}fine"
    bad = {"role": "user", "content": "bad"}
    with pytest.raises(ValueError, match=f"^conversation 1: {error}: "):
        intake.render([[USER], [bad], [USER]], chat_template=template)
    (prompt,) = intake.render([[USER]], chat_template=template)
    assert prompt["prompt"] == "fine"


def test_every_conversation_that_the_template_refuses_is_named(intake):
    wrong = {"role": "wizard", "content": "x"}
    with pytest.raises(ValueError, match="conversation") as caught:
        intake.render([[USER], [wrong], [USER], [USER, wrong]], add_generation_prompt=True)
    lines = str(caught.value).split("\n")
    assert [line.split(":")[0] for line in lines] == ["conversation 1", "conversation 3"]
    assert all("unknown role wizard" in line for line in lines)


@pytest.mark.parametrize(
    "conversation",
    [None, 3, "The end", [], [None], [3], ["The end"], [USER, "The end"], [[USER]], USER],
)
def test_what_is_no_conversation_is_one_value_error(intake, conversation):
    with pytest.raises(
        ValueError,
        match=r'^conversation 1: expected a list of {"role": ..., "content": ...} messages, got',
    ):
        intake.render([[USER], conversation], add_generation_prompt=True)


@pytest.mark.parametrize("role", [{}, {"role": None}, {"role": 5}, {"role": ["user"]}])
def test_a_message_without_a_role_is_a_value_error(intake, role):
    with pytest.raises(
        ValueError, match=r"^conversation 1: message 1: role: expected a text .*got"
    ):
        intake.render(
            [[USER], [USER, {"content": "x", **role}]], chat_template="{{ messages[0].content }}"
        )


def test_half_a_surrogate_pair_in_a_conversation_is_a_value_error(intake):
    with pytest.raises(ValueError, match=r"^conversation 0: the prompt is not valid Unicode: "):
        intake.render([[{"role": "user", "content": "\ud83d"}]], add_generation_prompt=True)


def test_a_text_that_is_certainly_too_long_is_refused_before_it_is_tokenized(intake, monkeypatch):
    tokenizer = intake._model.tokenizer
    assert longest_token(tokenizer) < math.inf  # it has a token for each byte
    intake._longest_token, most = 10, 10 * MAX_LEN
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens; expected at most"):
        one(intake, "x" * most)
    monkeypatch.setattr(type(tokenizer), "encode", None)
    expected = (
        rf"prompt 0: the prompt has {most + 1} characters, more than {MAX_LEN} tokens can have "
        rf"\({most}\)"
    )
    with pytest.raises(ValueError, match=expected):
        one(intake, "x" * (most + 1))


def test_a_very_long_text_is_refused_by_the_pieces_that_are_too_many(intake, monkeypatch):
    for name, value in (("MOST_AT_ONCE", 1), ("CHARS_PER_TOKEN", 1), ("PIECE_CHARS", 16)):
        monkeypatch.setattr(reading, name, value)
    monkeypatch.setattr(reading, "SPARE_TOKENS", 2)
    monkeypatch.setattr(intake, "_longest_token", 1000)
    tokenizer, seen = intake._model.tokenizer, []
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda x, **own: seen.append(len(x)) or encode(x, **own)
    )
    fits = "The end of the story, one by one " * 3
    assert len(fits) > MAX_LEN > len(encode(fits))
    assert intake.parse(fits)[1] == encode(fits)
    long = "x" * 10 * MAX_LEN
    both = Pair("The end", long), PoolingParams()
    for refused in (partial(one, intake, long), partial(intake.pooled, *both)):
        seen.clear()
        with pytest.raises(
            ValueError, match=rf"has more than \d+ tokens; expected at most {MAX_LEN - 1}"
        ):
            refused()
        assert MAX_LEN < sum(seen) < 2 * MAX_LEN


def test_a_tokenizer_s_own_limit_is_none_of_the_model_s(intake, monkeypatch, caplog):
    tokenizer = intake._model.tokenizer
    monkeypatch.setattr(tokenizer, "model_max_length", 4)
    monkeypatch.setattr(tokenizer, "deprecation_warnings", {})
    one(intake, "The end of it all")
    assert caplog.messages == []


def test_a_text_is_cut_at_the_side_where_its_tokenizer_cuts(intake, monkeypatch):
    tokenizer = intake._model.tokenizer
    monkeypatch.setattr(intake, "_longest_token", 10)
    text = "a" * 100 + "the end"
    for side, kept in (("right", "a" * 20), ("left", "a" * 13 + "the end")):
        monkeypatch.setattr(tokenizer, "truncation_side", side)
        assert intake._cut(text, 2) == kept


def test_no_text_is_certainly_too_long_where_any_unknown_word_is_one_token():
    vocabulary = {"a": 0, "bcd": 1}
    assert longest_token(SimpleNamespace(unk_token="?", get_vocab=lambda: vocabulary)) == math.inf
    assert longest_token(SimpleNamespace(unk_token=None, get_vocab=lambda: vocabulary)) == 4 * 3
    assert (
        longest_token(SimpleNamespace(unk_token="?", get_vocab=lambda: vocabulary | {"<0x00>": 2}))
        == 4 * 6
    )
    # As GPT-2, OLMo and SmolLM have it, who name an unknown token all the same.
    vocabulary |= dict.fromkeys(ByteLevel.alphabet())
    assert longest_token(SimpleNamespace(unk_token="?", get_vocab=lambda: vocabulary)) == 4 * 3


def test_a_chat_template_that_is_none_is_no_conversations_fault(intake, tmp_path):
    with pytest.raises(ValueError, match="chat_template: expected a Jinja template, got an error"):
        intake.render([[USER], [USER]], chat_template="{% for %}")
    save_tokenizer(tmp_path, chat_template="{% if x %}")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: chat template: expected a Jinja"):
        intake_with(load_tokenizer(tmp_path)).render([[USER]])
