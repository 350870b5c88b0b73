"""Arguments in vLLM's words set what they set there, mean nothing, or are refused by name."""

import argparse
import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxkv import LLM, AsyncLLM, EngineArgs
from jaxkv.build.engine_args import AsyncEngineArgs
from jaxkv.build.model import find_model
from jaxkv.build.options import ABOUT, DEFAULTS, EngineOptions
from jaxkv.build.vllm_arguments import FOREIGN, as_options
from tiny import make_checkpoint, tiny_config

OF_VLLM = json.loads(Path(__file__).parents[1].joinpath("api/vllm_names.json").read_text())


def test_every_argument_of_vllm_is_known_and_none_twice():
    known = ABOUT.keys() | FOREIGN.keys() | {"enforce_eager"}
    assert known >= set(OF_VLLM["engine_args"])
    assert not ABOUT.keys() & FOREIGN.keys()


def test_arguments_left_at_their_defaults_are_the_options_defaults():
    given = dataclasses.asdict(EngineArgs())
    assert set(given) >= set(OF_VLLM["engine_args"])
    assert as_options(given, ABOUT) == DEFAULTS
    for name in FOREIGN:
        assert as_options({name: None}, ABOUT) == {}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"enforce_eager": True, "enable_chunked_prefill": True}, {"lazy_compile": True}),
        ({"enforce_eager": False, "seed": None, "max_num_batched_tokens": None}, {}),
        ({"kv_cache_dtype": "fp8", "dtype": "float"}, {"kv_cache_dtype": "fp8_e4m3", "dtype": "float32"}),
        ({"load_format": "safetensors", "max_num_seqs": None}, {"load_format": "auto", "max_num_seqs": None}),
        ({"swap_space": 16, "disable_log_stats": False, "device": "auto", "lora_dtype": "auto"}, {}),
        ({"tokenizer_mode": "auto", "limit_mm_per_prompt": {}}, {}),
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_taken_and_others_translated(given, options):
    assert as_options(given, ABOUT) == options
    EngineOptions(**options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cpu_offload_gb": 4}, "^cpu_offload_gb: expected 0 or 0.0 .*nearest: quantization.*, got 4$"),
        ({"enable_chunked_prefill": False}, "^enable_chunked_prefill: expected True .*nearest: max_num_b"),
        ({"enable_log_requests": True}, "^enable_log_requests: expected False .a vLLM argument of which"),
        ({"enable_log_requests": 0}, "^enable_log_requests: expected False .*, got 0$"),
        ({"speculative_model": "x"}, "^speculative_model: expected None "),
        ({"device": "cpu"}, "^device: expected 'auto' .*nearest: the environment variable JAX_PLAT"),
        ({"enforce_eager": 1}, "^enforce_eager: expected True or False, got 1$"),
        ({"gpu_memory_utilisation": 0.5}, "unknown argument gpu_memory_utilisation, did you mean gpu_memory_util"),
        ({"kv_dtype": "int8", "tensor_parallel": 2}, "unknown argument kv_dtype, did you mean kv_cache_dtype.\n.* tensor_parallel_size.$"),
        ({"torch_dtype": "auto", "device_map": "auto"}, "unknown argument device_map, did you mean tensor_parallel_size.\n.*, did you mean dtype.$"),
        ({"trust_remote_cod": True, "max_batch_size": 9}, "unknown argument max_batch_size\n.* did you mean trust_remote_code.$"),
        ({"xyzzy": 1, "max_model_length": 2}, "argument max_model_length, did you mean max_model_len.\n.* xyzzy$"),
    ],
)  # fmt: skip
def test_values_that_would_mean_something_are_refused_by_name(given, message):
    for make in (LLM, AsyncLLM, lambda **given: as_options(given, ABOUT)):
        with pytest.raises(ValueError, match=message):
            make(**given)
    if "unknown" not in message and "xyzzy" not in given:
        with pytest.raises(ValueError, match=message):
            EngineArgs(**given)


def test_engine_args_are_assignable_and_checked_when_an_engine_is_made_of_them():
    args = AsyncEngineArgs(model="nowhere/at/all", max_model_len=64)
    assert args.options() == EngineOptions("nowhere/at/all", max_model_len=64)
    args.enforce_eager = True
    assert args.options().lazy_compile
    args.dtype = "float16"
    for make in (LLM.from_engine_args, AsyncLLM.from_engine_args):
        with pytest.raises(ValueError, match="dtype: expected one of"):
            make(args)
    with pytest.raises(TypeError, match="max_model_length"):
        EngineArgs(max_model_length=3)
    assert "s3cret" not in repr(EngineArgs(hf_token="s3cret", prefix_cache_secret=b"s3cret"))


def test_flags_are_what_a_script_of_vllm_s_parses():
    parser = argparse.ArgumentParser()
    parser.add_argument("--temperature", type=float)
    assert EngineArgs.add_cli_args(parser) is parser
    parser.set_defaults(model="somewhere")
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs(model="somewhere")
    line = (
        "--temperature 0 --max-model-len 64 --enforce-eager --swap-space 8 --no-trust-remote-code"
    )
    line += (
        ' --hf-overrides {"rope_theta":7.0} --enable-lora --max-cpu-loras 2 --served-model-name me'
    )
    args = EngineArgs.from_cli_args(parser.parse_args(line.split()))
    want = EngineOptions(
        "somewhere",
        max_model_len=64,
        lazy_compile=True,
        hf_overrides={"rope_theta": 7.0},
        enable_lora=True,
        max_cpu_loras=2,
    )
    assert args.options() == want
    assert (args.swap_space, args.served_model_name) == (8, "me")
    assert "--hf-token" not in parser.format_help()


def test_overrides_are_read_as_if_they_stood_in_the_files(checkpoint, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0].content }}!")
    model = find_model(
        EngineOptions(
            checkpoint,
            hf_overrides={"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 5.0}},
            override_generation_config={"temperature": 0.25, "max_new_tokens": 9},
            chat_template=path,
        )
    )
    assert (model.spec.max_len, model.tokenizer.chat_template) == (64, path.read_text())
    plain = find_model(EngineOptions(checkpoint, chat_template="{{ x }}"))
    assert plain.spec != replace(model.spec, max_len=plain.spec.max_len)  # the ropes
    assert plain.tokenizer.chat_template == "{{ x }}"
    params = model.default_params()
    assert (params.temperature, params.max_tokens) == (0.25, 9)
    with pytest.raises(ValueError, match=r"config.json with hf_overrides: num_hidden_layers"):
        find_model(EngineOptions(checkpoint, hf_overrides={"num_hidden_layers": -1}))
    for unread, name in (
        ({"max_position_embedings": 64, "use_cache": False}, "max_position_embedings, use_cache"),
        ({"rope_parameters": {"factr": 2.0}}, "rope_parameters.factr"),
    ):
        with pytest.raises(
            ValueError, match=f"hf_overrides: expected keys of .*, got {name}: leave"
        ):
            find_model(EngineOptions(checkpoint, hf_overrides=unread))
    for bad, message in (({"max_tokens": 9}, "only .*got max_tokens"), ({"top_p": 2}, "top_p: ")):
        with pytest.raises(ValueError, match=f"override_generation_config: .*{message}"):
            find_model(EngineOptions(checkpoint, override_generation_config=bad))
    with pytest.raises(ValueError, match="chat_template: expected a file or the text"):
        find_model(EngineOptions(checkpoint, chat_template="nowhere"))


def test_end_tokens_may_be_said_in_the_text_part_alone(checkpoint, tmp_path):
    text = json.loads((checkpoint / "config.json").read_text()) | {"eos_token_id": [29, 36]}
    whole = {"model_type": "llava", "text_config": text}
    for outer, expected in (({}, {29, 36}), ({"eos_token_id": 38}, {38})):
        (tmp_path / "config.json").write_text(json.dumps(whole | outer))
        model = find_model(EngineOptions(tmp_path, skip_tokenizer_init=True))
        assert model.eos_ids == expected


def test_generation_config_vllm_leaves_the_model_s_defaults_out(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        tmp_path.joinpath(file.name).symlink_to(file)
    tmp_path.joinpath("generation_config.json").write_text('{"top_k": 7, "eos_token_id": 3}')
    auto, vllm = (
        find_model(EngineOptions(tmp_path, generation_config=x)) for x in ("auto", "vllm")
    )
    assert (auto.default_params().top_k, vllm.default_params().top_k) == (7, 0)
    assert auto.eos_ids == vllm.eos_ids
    assert 3 in vllm.eos_ids


def test_an_override_beside_the_part_that_is_read_is_refused(tmp_path):
    whole = {"model_type": "llava", "text_config": tiny_config("llama")}
    (tmp_path / "config.json").write_text(json.dumps(whole))

    def max_len(**changes: object) -> int:
        options = EngineOptions(tmp_path, skip_tokenizer_init=True, hf_overrides=changes)
        return find_model(options).spec.max_len

    assert max_len(text_config={"max_position_embeddings": 32}, tie_word_embeddings=True) == 32
    with pytest.raises(ValueError, match="got max_position_embeddings: "):
        max_len(max_position_embeddings=32)


def test_objects_of_config_are_overridden_key_by_key(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    for name, factor in (("as_it_is", 2.0), ("wanted", 4.0)):
        config = tiny_config("llama", rope_parameters=rope | {"factor": factor})
        make_checkpoint(tmp_path / name, config)
    options = EngineOptions(
        tmp_path / "as_it_is",
        skip_tokenizer_init=True,
        hf_overrides={"rope_parameters": {"factor": 4.0}},
    )
    wanted = EngineOptions(tmp_path / "wanted", skip_tokenizer_init=True)
    assert find_model(options).spec == find_model(wanted).spec
