"""A saved session goes on elsewhere as it would have gone on; a file that is not what it says, or of
another model, inserts nothing.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxkv
from families import text_config
from jaxkv.api.llm import LLM
from jaxkv.config import SamplingParams
from jaxkv.engine import pages, saving
from jaxkv.errors import CapacityError, SavedFileError
from jaxkv.kv.saved import SavedPages
from jaxkv.testing import engine_of
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
IDS = np.random.default_rng(3).integers(3, 150, 70).tolist()


FAMILIES = ("gemma3_text", "lfm2", "qwen3_next", "phi3-longrope")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("saved")

    def find(variant: str) -> Path:
        if not (folder / variant).exists():
            config = text_config(variant) if variant in FAMILIES else tiny_config(variant)
            make_checkpoint(folder / variant, config)
        return folder / variant

    return find


def cached_of(llm: LLM, session: jaxkv.Session) -> tuple[int, list[int], list[float]]:
    """Returns (tokens that were not computed, what comes next, its logprobs)."""
    (output,) = llm.generate(session.prompt, GREEDY, use_tqdm=False)
    one = output.outputs[0]
    scores = [entry[t].logprob for t, entry in zip(one.token_ids, one.logprobs, strict=True)]
    return output.num_cached_tokens, one.token_ids, scores


@pytest.mark.parametrize(
    ("variant", "options", "block_size", "num_cached"),
    [
        pytest.param("llama", {}, 32, 64, marks=pytest.mark.slow),
        pytest.param("llama", {"kv_cache_dtype": "int8"}, 8, 64, marks=pytest.mark.slow),
        ("qwen2-mixed-windows", {}, 32, 64),
        pytest.param("lfm2", {}, 32, 64, marks=pytest.mark.slow),
        pytest.param("gemma3_text", {"block_size": 64}, 8, 64, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"block_size": 32}, 64, 64, marks=pytest.mark.slow),
        pytest.param("lfm2", {"kv_cache_dtype": "int8"}, 8, 64, marks=pytest.mark.slow),
    ],
    ids=["other page size", "int8", "windows", "states", "gemma3", "qwen3_next", "states in int8"],
)
def test_a_restored_session_goes_on_as_the_saved_one(
    models, compile_once, tmp_path, variant, options, block_size, num_cached
):
    options = SMALL | options
    llm = LLM(models(variant), **options)
    session = llm.session({"prompt_token_ids": IDS, "cache_salt": "mine"})
    _, want, scores = cached_of(llm, session)
    session.save(tmp_path / "session")
    other = LLM(models(variant), **options | {"block_size": block_size})
    restored = other.restore(tmp_path / "session")
    assert restored.tokens == session.tokens
    found, got, got_scores = cached_of(other, restored)
    assert (found, got) == (num_cached, want)
    np.testing.assert_allclose(got_scores, scores, rtol=0, atol=1e-5)
    engine_of(other).check()
    assert engine_of(other).scheduler.allocator.num_used == 0
    # What is there already is not written again, and a session whose pages have gone is computed.
    again = other.restore(tmp_path / "session")
    assert again.pages == restored.pages
    llm.reset_prefix_cache()
    session.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "session").read_bytes()


def test_only_so_many_restored_pages_are_on_their_way_to_the_device(
    models, compile_once, tmp_path, monkeypatch
):
    llm = LLM(models("llama"), **SMALL, kv_cache_dtype="int8")
    session = llm.session({"prompt_token_ids": IDS})
    want = cached_of(llm, session)
    session.save(tmp_path / "session")
    llm.reset_prefix_cache()
    most = 2 * pages.page_nbytes(engine_of(llm).kv)[0]
    monkeypatch.setattr(pages, "IN_FLIGHT_BYTES", most)
    in_flight, write, wait = [0], saving.write_pages, jax.block_until_ready

    def written(kv, page_C, arrays, n, *, s):
        in_flight[-1] += sum(array.nbytes for array in arrays)
        return write(kv, page_C, arrays, n, s=s)

    def waited(arrays):
        in_flight.append(0)
        return wait(arrays)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_pages", written)
        patch.setattr(jax, "block_until_ready", waited)
        restored = llm.restore(tmp_path / "session")
    assert in_flight == [most] * 4
    assert cached_of(llm, restored) == want


def test_keys_that_depend_on_how_long_a_request_may_get_are_found_by_such_requests(
    models, compile_once, tmp_path
):
    """Up to 64 tokens phi3 rotates by other factors than beyond."""
    llm = LLM(models("phi3-longrope"), **SMALL)
    ids = [one % 90 + 3 for one in IDS[:40]]
    llm.session({"prompt_token_ids": ids}).save(tmp_path / "short")
    for params, num_cached in [(replace(GREEDY, max_tokens=40), 0), (GREEDY, 32)]:
        llm.reset_prefix_cache()
        (fresh,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        llm.reset_prefix_cache()
        session = llm.restore(tmp_path / "short")
        (found,) = llm.generate(session.prompt, params, use_tqdm=False)
        assert found.num_cached_tokens == num_cached
        assert found.outputs[0].token_ids == fresh.outputs[0].token_ids
    session.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "short").read_bytes()


@pytest.mark.parametrize("variant", some(["qwen2-mixed-windows", "lfm2"], "lfm2"))
def test_a_session_ends_for_a_file_where_pages_of_any_size_end(
    models, compile_once, tmp_path, variant
):
    """Its state is computed there, and what larger pages have in front of a window is saved too."""
    llm = LLM(models(variant), **SMALL)
    session = llm.session({"prompt_token_ids": IDS[:60]})
    _, want, _ = cached_of(llm, session)
    session.save(tmp_path / "session")
    assert SavedPages.load(tmp_path / "session").tokens == tuple(IDS[:32])
    for block_size, num_cached in ((8, 32), (32, 32)):
        other = LLM(models(variant), **SMALL | {"block_size": block_size})
        restored = other.restore(tmp_path / "session")
        assert cached_of(other, restored)[:2] == (num_cached, want)
        engine_of(other).check()


def layers_of(path: Path) -> dict[int, tuple[np.ndarray, ...]]:
    return {
        layer: tuple(x.astype(np.float64) for x in arrays)
        for layer, arrays in SavedPages.load(path).layers.items()
    }


@pytest.mark.parametrize(
    ("source", "target", "block_size", "error"),
    some(
        [
            ("int8", "float32", 8, 1 / 127),
            ("float32", "int8", 8, 1 / 127),
            ("int4", "bfloat16", 16, 1 / 7),
            ("turboquant4", "int8", 16, 1 / 4),
        ],
        ("int8", "float32", 8, 1 / 127),
    ),
)
def test_pages_of_another_codec_are_stored_anew_when_asked(
    models, compile_once, tmp_path, source, target, block_size, error
):
    """What comes out in float32 is what is computed in float32, but for what codecs round. In the
    first layer: keys and values of others follow from attention over what was rounded.
    """
    engines = {
        name: LLM(models("llama"), **SMALL | {"kv_cache_dtype": name, "block_size": size})
        for name, size in ((source, 8), ("float32", 8), (target, block_size))
    }
    for name, llm in engines.items():
        llm.session({"prompt_token_ids": IDS[:64]}).save(tmp_path / name)
    with pytest.raises(SavedFileError, match=r"codec: expected .*convert=True"):
        engines[target].restore(tmp_path / source)
    engines[target].reset_prefix_cache()
    restored = engines[target].restore(tmp_path / source, convert=True)
    found, _, scores = cached_of(engines[target], restored)
    assert found == 63 // block_size * block_size  # one token at least is computed
    restored.save(tmp_path / "between")
    engines["float32"].reset_prefix_cache()
    engines["float32"].restore(tmp_path / "between", convert=True).save(tmp_path / "out")
    want, got = (layers_of(tmp_path / name)[0] for name in ("float32", "out"))
    for exact, stored in zip(want, got, strict=True):
        largest = np.abs(exact).max(-1, keepdims=True)
        assert (np.abs(stored - exact) <= error * largest).all()
    _, _, own = cached_of(engines[source], engines[source].session({"prompt_token_ids": IDS[:64]}))
    np.testing.assert_allclose(scores[0], own[0], rtol=0, atol=4 * error)


def test_a_file_that_is_not_what_it_says_inserts_nothing(models, compile_once, tmp_path):
    llm = LLM(models("llama"), **SMALL)
    session = llm.session({"prompt_token_ids": IDS})
    session.save(tmp_path / "session")
    with pytest.raises(FileExistsError):
        session.save(tmp_path / "session")
    with pytest.raises(FileNotFoundError, match="expected a folder"):
        session.save(tmp_path / "none" / "session")
    whole = (tmp_path / "session").read_bytes()
    other = LLM(models("llama"), **SMALL)
    rng = np.random.default_rng(0)
    broken = {"cut": whole[:-100], "begun": whole[:5], "empty": b""}
    for i in (*rng.integers(0, len(whole), 12).tolist(), 20, len(whole) - 1):
        broken[f"byte {i}"] = whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :]
    for name, content in broken.items():
        path = tmp_path / name.replace(" ", "")
        path.write_bytes(content)
        with pytest.raises(SavedFileError):
            other.restore(path)
    with pytest.raises(SavedFileError, match="got none"):
        other.restore(tmp_path / "missing")
    for reason, variant, options in (
        ("model: expected", "llama-no-gqa", {}),
        ("codec: expected", "llama", {"kv_cache_dtype": "int8"}),
        ("dtype: expected", "llama", {"dtype": "bfloat16"}),
    ):
        with pytest.raises(SavedFileError, match=reason):
            LLM(models(variant), **SMALL | options).restore(tmp_path / "session")
    assert engine_of(other).scheduler.allocator.num_used == 0
    assert other.restore(tmp_path / "session").pages
    small = LLM(models("llama"), **SMALL | {"num_gpu_blocks_override": 6, "max_model_len": 80})
    (before,) = small.generate({"prompt_token_ids": IDS[:20]}, GREEDY, use_tqdm=False)
    with pytest.raises(CapacityError):
        small.restore(tmp_path / "session")
    engine_of(small).check()
    (again,) = small.generate({"prompt_token_ids": IDS[:20]}, GREEDY, use_tqdm=False)
    assert before.num_cached_tokens == 0
    assert again.num_cached_tokens == 16  # the cache is as it was


def test_a_file_made_up_with_its_hashes_disturbs_nobody(models, compile_once, tmp_path):
    """It is refused before anything of the engine changes, with a request under way."""
    llm = LLM(models("llama"), **SMALL)
    llm.session({"prompt_token_ids": IDS}).save(tmp_path / "session")
    true = SavedPages.load(tmp_path / "session")
    layers = dict(true.layers)
    narrow = {layer: (k[..., :4], v) for layer, (k, v) in layers.items()}
    longer = {"tokens": [5] * 70}
    made_up = {
        "a layer less": replace(true, layers={0: layers[0]}, firsts={0: 0}),
        "another layer": replace(
            true, layers=layers | {9: layers[0]}, firsts={**true.firsts, 9: 0}
        ),
        "narrow": replace(true, layers=narrow),
        "float64": replace(
            true, layers={i: tuple(x.astype(np.float64) for x in one) for i, one in layers.items()}
        ),
        "later": replace(true, firsts=dict.fromkeys(layers, 8)),
        "other tokens": replace(true, extra={**true.extra, **longer}),
        "no tokens": replace(true, extra={**true.extra, "tokens": [10**9]}),
        "no salt": replace(true, extra={}),
        "salt": replace(true, extra={**true.extra, "salt": 5}),
        "half a salt": replace(true, extra={**true.extra, "salt": "\ud800"}),
        "messages": replace(true, extra={**true.extra, "messages": [5]}),
        "part of a page": replace(true, tokens=true.tokens[:-1]),
        "no page size": replace(true, origin=replace(true.origin, page_size=0)),
        "states": replace(true, states=((np.zeros((2, 3), np.float32),),)),
    }
    int8 = {"type": "ScaledCodec", "kind": "int8", "dtype": "float32"}
    heads = {"num_kv_heads": 2, "head_dim": 8, "page_size": 8, "latent_dim": None}
    pages = replace(true, origin=replace(true.origin, form="pages"))
    for number, layout in enumerate(
        [
            {"type": "HeadMajorLayout", "codec": int8, **heads},
            {"type": "HeadMajorLayout", "codec": int8, **heads, "num_kv_heads": 0},
            {"type": "HeadMajorLayout", "codec": int8, **heads, "head_dim": "8"},
            {"type": "LaneLayout", "codec": {**int8, "kind": "int7"}, **heads},
            {"type": "HeadMajorLayout", "codec": {**int8, "type": ["ScaledCodec"]}, **heads},
            {"type": "HeadMajorLayout", "codec": {**int8, "more": 1}, **heads},
            {"type": "PageLayout", "codec": int8, **heads},
            {"type": "HeadMajorLayout", "codec": int8},
            {},
        ]
    ):
        made_up[f"layout {number}"] = replace(pages, layouts=dict.fromkeys(layers, layout))
    fitted = replace(true, origin=replace(true.origin, keys="fitted"))
    for number, shape in enumerate(((2, 2, 8), (3, 2, 8), (2, 3, 8), (2,))):
        zeros = np.zeros(shape, np.float32)
        made_up[f"keys {number}"] = replace(fitted, keys=dict.fromkeys(layers, zeros))
    stream = llm.stream({"prompt_token_ids": [7] * 9}, GREEDY)
    given = list(next(stream).outputs[0].token_ids)
    for number, one in enumerate(made_up.values()):
        path = tmp_path / f"made-up-{number}"
        with suppress(ArithmeticError, LookupError):  # some cannot even be written
            one.save(path)
        for convert in (False, True):
            with pytest.raises(SavedFileError):
                llm.restore(path, convert=convert)
    given += [token for output in stream for token in output.outputs[0].token_ids]
    want = llm.generate(
        {"prompt_token_ids": [7] * 9, "cache_salt": "alone"}, GREEDY, use_tqdm=False
    )
    assert given == want[0].outputs[0].token_ids
    engine_of(llm).check()


def test_what_the_cache_does_not_keep_is_not_saved_and_short_sessions_are(
    models, compile_once, tmp_path
):
    bounded = LLM(models("llama"), **SMALL, kv_policy="streaming", kv_budget=40)
    session = bounded.session({"prompt_token_ids": IDS})
    with pytest.raises(CapacityError):
        session.save(tmp_path / "bounded")
    assert not (tmp_path / "bounded").exists()
    llm = LLM(models("llama"), **SMALL)
    llm.session({"prompt_token_ids": IDS[:5]}).save(tmp_path / "short")
    assert llm.restore(tmp_path / "short").tokens == tuple(IDS[:5])
    last = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    full, _ = llm.session(
        {"prompt_token_ids": [*IDS, *IDS][: SMALL["max_model_len"] - 1]}
    ).generate(last)
    assert len(full) == SMALL["max_model_len"]
    llm.reset_prefix_cache()
    full.save(tmp_path / "full")
    assert llm.restore(tmp_path / "full").tokens == full.tokens


@pytest.mark.parametrize(
    ("name", "place"),
    some(WEIGHTS := [("layers.1.input_layernorm", 7), ("embed_tokens", (IDS[3], 0))], WEIGHTS[0]),
)
def test_one_weight_that_differs_makes_another_model(models, compile_once, tmp_path, name, place):
    llm = LLM(models("llama"), **SMALL)
    llm.session({"prompt_token_ids": IDS}).save(tmp_path / "session")
    shutil.copytree(models("llama"), tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.{name}.weight"][place] *= 1.01
    save_file(tensors, file)
    other = LLM(tmp_path / "other", **SMALL)
    with pytest.raises(SavedFileError, match="weights"):
        other.restore(tmp_path / "session")
    other.update_weights(load_file(models("llama") / "model.safetensors"))
    assert other.restore(tmp_path / "session").tokens == tuple(IDS)


RUN = """
import json, sys
from jaxkv import LLM, SamplingParams
path, saved, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
options = dict(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128, dtype="float32",
    num_gpu_blocks_override=60, skip_tokenizer_init=True, lazy_compile=True)
greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
found = []
for size, block_size in ((2, 8), (1, 16), (4, 8)):
    llm = LLM(path, tensor_parallel_size=size, block_size=block_size, **options)
    session = llm.restore(saved) if found else llm.session({"prompt_token_ids": ids})
    if not found:
        session.save(saved)
    (output,) = llm.generate(session.prompt, greedy, use_tqdm=False)
    found.append([output.num_cached_tokens, output.outputs[0].token_ids])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_session_goes_on_on_another_number_of_devices(tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
    model = make_checkpoint(tmp_path / "model", tiny_config("llama", **heads))
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(Path(jaxkv.__file__).parents[1]),
    }
    args = [sys.executable, "-c", RUN, str(model), str(tmp_path / "session"), json.dumps(IDS)]
    done = subprocess.run(args, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, *others = json.loads(done.stdout.splitlines()[-1])
    assert others == [[64, first[1]], [64, first[1]]]
