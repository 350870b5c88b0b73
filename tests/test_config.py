"""Every setting is checked once, when it is made, and the error names it."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxkv.config import ELSEWHERE, EngineConfig, RequestOutputKind, SamplingParams

LIMITS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "num_pages": 16,
    "decode_steps": 8,
    "seed": 0,
    "max_logprobs": 20,
}
NAN, INF = math.nan, math.inf


# --- the engine's limits
# ----------------------------------------------------------------------------------------------


def test_limits_are_kept_and_frozen():
    config = EngineConfig(**LIMITS)
    unbounded = {"row_pages": 0, "low_row_pages": 0, "read_pages": 0, "windows": (0,)}
    others = {"kv_policy": "full", "aligned_len": 1, "has_contexts": False}
    others |= {"num_slots": 0, "pooled": "", "speculation": None, "num_adapters": 0}
    assert dataclasses.asdict(config) == LIMITS | unbounded | others
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_pages = 3
    with pytest.raises(TypeError):
        EngineConfig(*LIMITS.values())


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [-1, 1.0, "8", None, True, NAN])
def test_a_limit_that_is_no_positive_whole_number_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {value!r}$"):
        EngineConfig(**LIMITS | {name: value})


@pytest.mark.parametrize("name", LIMITS)
def test_zero_is_refused_but_for_the_seed_and_logprobs(name):
    if name in ("seed", "max_logprobs"):
        assert getattr(EngineConfig(**LIMITS | {name: 0}), name) == 0
        return
    with pytest.raises(ValueError, match=f"^{name}: expected a number >= 1, got 0$"):
        EngineConfig(**LIMITS | {name: 0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 12}, r"block_size: expected one of \(8, 16, 32, 64, 128\), got 12"),
        ({"block_size": 256}, r"block_size: expected one of \(8, 16, 32, 64, 128\), got 256"),
        ({"max_num_batched_tokens": 15}, "max_num_batched_tokens: expected at least 16, got 15"),
        (
            {"max_num_seqs": 33},
            "max_num_seqs: expected at most max_num_batched_tokens = 32, got 33",
        ),
        ({"seed": 2**64}, f"seed: expected a number below 2.*64, got {2**64}"),
        ({"windows": ()}, r"windows: expected at least one number >= 0, got \(\)"),
        ({"windows": (0, -1)}, r"windows: expected at least one number >= 0, got \(0, -1\)"),
    ],
)
def test_limits_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        EngineConfig(**LIMITS | changes)


@pytest.mark.parametrize(
    "changes",
    [{"block_size": size} for size in (8, 16, 32, 64, 128)]
    + [{"max_num_seqs": 32}, {"max_num_batched_tokens": 16}, {"seed": 2**64 - 1}, {"num_pages": 1}],
)
def test_limits_at_their_edges_are_taken(changes):
    EngineConfig(**LIMITS | changes)


# --- sampling parameters
# ----------------------------------------------------------------------------------------------

OF_VLLM = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "bad_words": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "structured_outputs": None,
    "guided_decoding": None,
    "logits_processors": None,
    "skip_reading_prefix_cache": None,
    "extra_args": None,
    "flat_logprobs": None,  # False in vLLM, which is taken too
    "logprob_token_ids": None,
    "prompt_logprob_start": None,
    "prompt_logprob_token_ids": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": None,
    "stream_interval": None,
    "thinking_token_budget": None,
    "trace_decode_token_ids": None,
    "watermarking": None,
    "skip_clone": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "best_of": None,
}


def test_names_and_defaults_are_vllm_s():
    params = SamplingParams()
    ours = dict.fromkeys(("kv_policy", "kv_budget", "kv_protect", "reasoning"))
    ours |= {"prompt_logprobs_start": 0}
    assert {
        field.name: getattr(params, field.name) for field in dataclasses.fields(params)
    } == OF_VLLM | ours


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temperatur", ", did you mean temperature?"),
        ("use_beam_search", ", did you mean LLM.beam_search?"),
        ("max_new_tokens", ", did you mean max_tokens?"),
        ("xyzzy", ""),
    ],
)
def test_an_unknown_field_is_a_type_error_that_names_it(name, hint):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{name: 1})
    assert str(caught.value) == f"SamplingParams: unknown parameter {name!r}{hint}"


def test_what_is_nearest_to_foreign_names_is_a_parameter():
    fields = SamplingParams.__dataclass_fields__
    for name, near in ELSEWHERE.items():
        assert name not in fields
        assert near.partition(",")[0] in [*fields, "LLM.beam_search"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truncate_prompt_tokens", 5),
        ("logits_processors", [len]),
        ("extra_args", {"a": 1}),
    ],
)
def test_a_field_that_is_not_built_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.* is not supported yet; leave it at None"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spaces_between_special_tokens", False),
        ("logits_processors", []),
        ("extra_args", {}),
        ("best_of", 1),
    ],
)
def test_a_field_that_is_not_built_may_be_given_where_it_does_nothing(name, value):
    SamplingParams(**{name: value})


def test_fields_may_be_assigned_and_a_clone_is_checked_and_apart():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    params.temperature = 0.0
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias[2] = 1.0
    assert (params.stop, params.logit_bias) == (["a"], {1: 2.0})
    params.top_p = 2
    with pytest.raises(ValueError, match=r"^top_p: expected a float32 number in \(0, 1\], got 2$"):
        params.clone()


def test_from_optional_takes_none_as_the_default_but_for_max_tokens():
    given = {"temperature": None, "top_k": 5, "stop": None, "max_tokens": None}
    want = SamplingParams(top_k=5, max_tokens=None)
    assert SamplingParams.from_optional(**given) == want


PENALTY = [-2.01, 2.01, NAN, INF, None, "1", True, [1]]
BAD = {
    "best_of": [2, 0, "1"],
    "output_kind": [0, "DELTA", None],
    "spaces_between_special_tokens": [1, None],
    "temperature": [-0.1, NAN, INF, -INF, 1e39, 10**400, "1", None, True],
    "top_p": [0, 0.0, 1e-40, -0.5, 1.0001, NAN, INF, None, "0.5", True],
    "min_p": [-0.1, 1.1, NAN, None, True],
    "top_k": [-2, 2**31, 1.5, NAN, None, "3", True],
    "seed": [2**64, -(2**63) - 1, 1.0, "1", True],
    "max_tokens": [0, -1, 1.5, "3", True],
    "min_tokens": [-1, 1.0, None, True, 17, 2**31],
    "logprobs": [-2, 1.0, True, "2", []],
    "prompt_logprobs": [-2, 1.0, True, False, "2"],
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": [0, -1, 0.0, 1e-40, 1e39, NAN, INF, None, "1", True],
    "logit_bias": [
        [],
        "",
        0,
        [(1, 2.0)],
        {1.0: 1},
        {True: 1},
        {None: 1},
        {"x": 1},
        {"-1": 1},
        {"1.5": 1},
        {"": 1},
        {1: NAN},
        {1: "2"},
        {1: None},
        {1: True},
    ],
    "allowed_token_ids": [[], (), 0, "", "12", {}, {1}, {1: 2}, [1.0], ["1"], [True], [None]],
    "n": [0, -1, 1025, 1.0, True, None, "2"],
    "bad_words": [
        ["\ud800"],
        ["a", "b\udfff"],
        ["a", "b" * 257],
        [""],
        ["a", " "],
        "x",
        "",
        0,
        {},
        {"a"},
        [1],
        [["a"]],
        [None],
    ],
    "stop": ["", [""], ["a", ""], [1], 3, b"x", {"a": 1}, True, 0, False, {}, 0.0, b"", set()],
    "stop_token_ids": [[1.0], ["1"], [True], [None], 3, "12", {1: 2}, 0, False, {}, "", 0.0, set()],
    "ignore_eos": [0, 1, None, "no"],
    "include_stop_str_in_output": [1],
    "skip_special_tokens": [None],
    "detokenize": [0],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "stop", "logprob_token_ids"])
def test_a_refusal_quotes_the_beginning_of_a_long_value(name):
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: {"a": "b" * 10**6}})
    assert len(str(caught.value)) < 400


GOOD = {
    "temperature": [0, 0.0, 1, 1e-9, 100.0, 3e38],
    "top_p": [1, 1.0, 1e-6, 1.2e-38],
    "min_p": [0, 1, 0.5],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "seed": [None, 0, -1, 2**64 - 1, -(2**63)],
    "max_tokens": [None, 1, 10**9],
    "min_tokens": [0, 16],
    "logprobs": [None, -1, 0, 20, 21, 10**6],
    "prompt_logprobs": [None, -1, 0, 5],
    "presence_penalty": [0, -2, 2, -2.0, 2.0, 0.3],
    "frequency_penalty": [0, -2, 2, -2.0, 2.0, 0.3],
    "repetition_penalty": [1, 1.0, 0.1, 5.0, 1.2e-38, 3e38],
    "logit_bias": [None, {}, {3: 1.5, 4: -100}],
    "allowed_token_ids": [None, [3], (4, 5), [3, 3]],
    "bad_words": [None, [], (), ["x"], ("a b", " c"), ["x" * 256]],
    "stop": [None, [], (), "x", ["x", "y"], ("x",)],
    "stop_token_ids": [None, [], (), [5, 6], (7,)],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in GOOD.items() for value in values]
)
def test_a_value_in_range_is_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_stop_strings_need_the_text():
    with pytest.raises(
        ValueError, match=r"^stop: expected no stop strings with detokenize=False, got 'x'$"
    ):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(stop=[], detokenize=False).stop_strings == ()


def test_min_tokens_may_be_anything_when_max_tokens_is_open():
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000
    with pytest.raises(
        ValueError, match=r"^min_tokens: expected a number from 0 to 2\*\*31 - 1, got 2147483648$"
    ):
        SamplingParams(max_tokens=None, min_tokens=2**31)  # would overflow on the way to the device
    with pytest.raises(ValueError, match=r"^min_tokens: expected at most max_tokens=3, got 4$"):
        SamplingParams(max_tokens=3, min_tokens=4)


@pytest.mark.parametrize(
    ("stop", "listed"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), ([], ())]
)
def test_stop_strings_are_a_tuple_however_they_were_given(stop, listed):
    assert SamplingParams(stop=stop).stop_strings == listed


def test_a_bias_is_taken_as_vllm_takes_it():
    """Ids through int(), values held within [-100, 100]; later changes to the caller's dict are not
    seen.
    """
    given = {"7": 3, 8: -1000, " 9": 1e30, 10: math.inf, "11": -math.inf, 12: -0.5}
    params = SamplingParams(logit_bias=given)
    given[7] = NAN
    assert params.logit_bias == {7: 3.0, 8: -100.0, 9: 100.0, 10: 100.0, 11: -100.0, 12: -0.5}
    assert dataclasses.replace(params).logit_bias == params.logit_bias


@pytest.mark.parametrize(
    ("field", "penalises"),
    [
        ({}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -2}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"repetition_penalty": 1, "presence_penalty": 0}, False),
    ],
)
def test_only_a_penalty_that_does_something_penalises(field, penalises):
    assert SamplingParams(**field).penalises is penalises


def test_several_samples_need_a_temperature():
    assert SamplingParams(n=2).n == 2
    with pytest.raises(ValueError, match=r"^n: expected 1 with greedy sampling"):
        SamplingParams(n=2, temperature=0.0)


def test_numbers_of_numpy_are_as_good_as_python_s():
    of_numpy = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        max_tokens=np.int32(7),
        stop_token_ids=[np.int64(4)],
        logit_bias={np.int64(3): np.float32(2)},
    )
    plain = SamplingParams(
        temperature=0.5, top_k=5, max_tokens=7, stop_token_ids=[4], logit_bias={3: 2}
    )
    assert of_numpy == plain
    assert json.dumps(dataclasses.asdict(of_numpy)) == json.dumps(dataclasses.asdict(plain))


def test_a_list_that_its_giver_changes_later_changes_nothing():
    stop, protected = ["a"], [[0, 4]]
    params = SamplingParams(stop=stop, kv_protect=protected)
    stop.append("b")
    protected[0][1] = 9
    assert (params.stop, params.kv_protect) == (["a"], [[0, 4]])
