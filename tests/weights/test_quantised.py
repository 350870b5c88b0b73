"""A quantised checkpoint loads as the one whose weights are the values that its bits stand for."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv import LLM
from jaxkv.errors import CheckpointError
from jaxkv.models.decoder import head_of, logits
from jaxkv.models.families import ConfigReader, read_config, read_family
from jaxkv.models.quantisation import Quantisation, read_quantisation
from jaxkv.models.stream import normed
from jaxkv.programs.rounding import AT_ONCE, quantise
from jaxkv.testing import blueprint_of, model_of
from jaxkv.weights.formats import AWQ_ORDER, FORMS
from jaxkv.weights.orbax import convert, load_converted
from jaxkv.weights.packing import DYNAMIC, METHODS, SCALES, from_pairs, packing_for
from quantised import (
    BITSANDBYTES,
    CASES,
    CONFIG,
    SIZES,
    check_equal,
    check_planned,
    compressed,
    kept_bytes,
    loaded,
    logprobs,
    make,
    meant,
    packed_names,
    quantised,
    stored_bytes,
    tensors_of,
    words,
)
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

MATRICES = {"q", "k", "v", "o", "gate", "up", "down"}
STAY = {"fp8": {"down"}, "gptq-act-order": set()}
STAY |= dict.fromkeys(("nf4", "nf4-simple"), MATRICES - {"down"})
"""Which matrices stay packed where not all do: 64 columns are no whole blocks of 24, 96 none of
64.
"""


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_stored_bits_stand_for(tmp_path, case):
    small, plain = quantised(tmp_path, case)
    check_equal(loaded(small), loaded(plain))
    assert packed_names(small) == STAY.get(case, MATRICES)
    if case != "gptq-act-order":
        check_planned(small)
    convert(small, tmp_path / "converted", dtype="float32")
    check_equal(loaded(tmp_path / "converted", load_converted), loaded(plain))


@pytest.mark.parametrize("case", some(CASES, "awq", "int8", "nvfp4"))
def test_a_model_computes_what_its_dequantised_weights_do(tmp_path, case):
    small, plain = quantised(tmp_path, case)
    llm = make(small)
    want = logprobs(make(plain))
    np.testing.assert_allclose(logprobs(llm), want, rtol=0, atol=2e-4 * want.std())
    if case in ("awq", "int8", "nvfp4", "mxfp4", "modelopt"):
        assert kept_bytes(llm) == pytest.approx(stored_bytes(small), rel=0.05)


@pytest.mark.parametrize("method", some(METHODS, "int4", "int8_dynamic"))
def test_weights_are_quantised_as_asked(tmp_path, method):
    """The model computes with the values that are nearest to its own among those it may have."""
    config = tiny_config("qwen2", **SIZES)
    source = make_checkpoint(tmp_path / "model", config)
    llm = make(source, quantization=method)
    weights, own = meant(model_of(llm).weights["layers"]), loaded(source)["layers"]
    tensors = load_file(source / "model.safetensors")
    modules = {name: f"self_attn.{name}_proj" for name in "qkvo"}
    modules |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for name, module in modules.items():
        most = {"int4": 0.3, "fp8": 1 / 16}.get(method, 0.51 / 127)  # 4 bits may cut off 0.3
        bound = most * np.abs(own[name]).max(axis=2, keepdims=True)
        assert (np.abs(weights[name] - own[name]) <= bound).all(), name
        assert (weights[name] != own[name]).any()
        for layer, x in enumerate(weights[name]):
            tensors[f"model.layers.{layer}.{module}.weight"] = np.ascontiguousarray(x)
    save_file(tensors, source / "model.safetensors")
    want, got = logprobs(make(source)), logprobs(llm)
    if method == "int8_dynamic":  # activations are quantised too
        assert 1e-3 < np.abs(got - want).mean() / want.std() < 0.1
    else:
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * want.std())


@pytest.mark.parametrize("tied", [True, False])
def test_int8_dynamic_quantises_the_head_and_not_the_embeddings(tmp_path, tied):
    config = tiny_config("qwen2", **SIZES | {"tie_word_embeddings": tied})
    source = make_checkpoint(tmp_path / "model", config)
    own = loaded(source)
    llm = make(source, quantization="int8_dynamic")
    model = model_of(llm)
    np.testing.assert_array_equal(model.weights["embed"], own["embed"])
    head_VD = np.asarray(own["embed" if tied else "head"])
    q_VD, scales_V = (np.asarray(model.weights[name][0, 0]) for name in ("head", "head" + DYNAMIC))
    np.testing.assert_allclose(scales_V, np.abs(head_VD).max(axis=1) / 127, rtol=1e-6)
    np.testing.assert_array_equal(q_VD, np.rint(head_VD / scales_V[:, None]))
    assert "head in int8" in llm.describe()

    x_TD = np.random.default_rng(0).standard_normal((5, head_VD.shape[1]), np.float32)
    got_TV = logits(head_of(model.weights), jnp.asarray(x_TD), spec=model.spec)
    norm = {"norm": model.weights["norm"]}
    normed_TD = np.asarray(normed(jnp.asarray(x_TD), norm, "norm", model.spec))
    scale_T1 = np.abs(normed_TD).max(axis=1, keepdims=True) / 127
    sums_TV = np.rint(normed_TD / scale_T1) @ q_VD.T.astype(np.float64)
    np.testing.assert_allclose(got_TV, sums_TV * scale_T1 * scales_V, rtol=1e-5, atol=1e-6)

    drawn = make(source, quantization="int8_dynamic", load_format="dummy")
    forms = [
        jax.tree.map(lambda x: f"{x.dtype.name}{x.shape}", model_of(one).weights)
        for one in (llm, drawn)
    ]
    assert forms[0] == forms[1]  # as planned
    assert blueprint_of(llm).weight_bytes == model.weight_bytes


def test_four_bits_cut_off_what_costs_less_than_it_spares():
    num_rows = 3 * AT_ONCE // 512 + 8  # more than one piece, the last one not full
    w = np.random.default_rng(0).standard_t(3, size=(num_rows, 256)).astype(np.float32)
    made = quantise(w, packing_for("int4", 256))
    got = from_pairs(made[""]).astype(np.float32) * made[SCALES][..., None]
    groups = w.reshape(num_rows, 2, 128).swapaxes(0, 1)
    scale = np.abs(groups).max(axis=2, keepdims=True) / 7
    plain = np.rint(groups / scale) * scale
    error, before = (np.square(x - groups).sum(axis=2) for x in (got, plain))
    assert (error <= before * (1 + 1e-6)).all()
    assert error.sum() < 0.9 * before.sum()


def test_a_matrix_that_four_bits_have_no_groups_for_is_refused(tmp_path):
    config = tiny_config("qwen2", **SIZES | {"intermediate_size": 84})
    with pytest.raises(ValueError, match="multiple of 8 for int4, got 84 columns on 1 devices"):
        make(make_checkpoint(tmp_path / "model", config), quantization="int4")


def test_what_is_stored_quantised_is_not_quantised_again(tmp_path):
    small, _ = quantised(tmp_path, "awq")
    with pytest.raises(ValueError, match=r"quantization: expected None .*\(awq\), got 'int8'"):
        make(small, quantization="int8")
    assert "stored as awq" in make(small, quantization="awq").describe()
    with pytest.raises(ValueError, match=r"one of int8, int4, int8_dynamic, fp8 .*, got 'awq'"):
        make(tmp_path / "plain", quantization="awq")


@pytest.mark.parametrize(
    "state",
    [b"[" * 9999, b"[]", b"{", b'{"shape": [0, 64]}', b'{"shape": [96, 64], "blocksize": 128}'],
)
def test_a_state_of_bitsandbytes_that_is_none_is_named(tmp_path, state):
    small, _ = quantised(tmp_path, "nf4")
    tensors = tensors_of(small)
    name = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"
    save_file(tensors | {name: np.frombuffer(state, np.uint8)}, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: .*(quant_state|Expecting)"):
        loaded(small)


@pytest.mark.parametrize("size", [[64.0, 96.0], [64], [-64, 96], [[96, 64]]])
def test_a_shape_that_is_none_is_named(tmp_path, size):
    small, _ = quantised(tmp_path, "packed")
    tensors = tensors_of(small)
    name = "model.layers.0.mlp.up_proj.weight_shape"
    save_file(tensors | {name: np.array(size)}, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: weight_shape: expected two whole"):
        loaded(small)


@pytest.mark.parametrize("case", ["packed", "gptq", "awq"])
def test_values_in_words_take_no_more_memory_than_they_do_in_bytes(case):
    about, quantise = CASES[case]
    parts, want = quantise(np.random.default_rng(0), (512, 1024))
    how = read_quantisation(ConfigReader({"quantization_config": about}, "config.json"))
    form = FORMS[how.kind]
    tracemalloc.start()
    (stored,) = form.matrices(parts, how, None)
    arrays = stored.packed(form.packing(parts, how, None, 1, "float32"), None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * want.size + 2**18  # what zero points take
    assert arrays[""].nbytes == want.size / 2
    np.testing.assert_allclose(stored.weight(), want, rtol=1e-6)


def test_odd_numbers_of_columns_are_cut_as_even_ones():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 16, (16, 8))
    for count in (7, 6):
        scale = np.full((16, 1), 0.5, np.float32)
        want = (values[:, :count] - 8) * np.float32(0.5)
        shape = np.array([16, count])
        own = {"weight_packed": words(values, 4), "weight_scale": scale, "weight_shape": shape}
        how = Quantisation(method="compressed-tensors", kind="packed", bits=4)
        (stored,) = FORMS["packed"].matrices(own, how, None)
        np.testing.assert_array_equal(stored.weight(), want)
        own = {"qweight": words(values[:, :count].T, 4, AWQ_ORDER), "scales": scale.T}
        own["qzeros"] = words(np.full((1, 16), 8), 4)
        (stored,) = FORMS["awq"].matrices(own, replace(how, method="awq", kind="awq"), None)
        np.testing.assert_array_equal(stored.weight(), want)


def test_biases_of_zeros_that_the_model_has_not_are_left_out(tmp_path):
    """Older GPTQ files have one for every layer."""
    small, plain = quantised(tmp_path, "gptq")
    tensors, name = tensors_of(small), "model.layers.1.mlp.down_proj.bias"
    save_file(tensors | {name: np.zeros(64, np.float16)}, small / "model.safetensors")
    check_equal(loaded(small), loaded(plain))
    save_file(tensors | {name: np.ones(64, np.float16)}, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"does not use: {name}"):
        loaded(small)


def test_scales_of_activations_and_of_a_cache_are_left_out(tmp_path):
    small, plain = quantised(tmp_path, "int8")
    tensors, layer = tensors_of(small), "model.layers.1.self_attn."
    for name in ("k_scale", "kv_scale", "q_proj.input_scale", "q_proj.activation_scale"):
        tensors[layer + name] = np.ones(1, np.float32)
    save_file(tensors, small / "model.safetensors")
    check_equal(loaded(small), loaded(plain))


def move_beside(directory: Path, **changes: object) -> None:
    """Moves what config.json says of modelopt's weights to the file that older versions wrote."""
    config = json.loads((directory / "config.json").read_text())
    about = config.pop("quantization_config")
    about = {"quant_algo": about["quant_algo"], "kv_cache_quant_algo": "FP8", "group_size": 16}
    about = {"exclude_modules": ["lm_head"], **about, **changes}
    beside = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": about}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "hf_quant_config.json").write_text(json.dumps(beside))


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_the_file_of_older_versions_of_modelopt_is_read(tmp_path, algorithm):
    small, plain = quantised(tmp_path, "modelopt")
    written = (small / "config.json").read_text()
    move_beside(small, quant_algo=algorithm)
    check_equal(loaded(small), loaded(plain))
    convert(small, tmp_path / "converted", dtype="float32")
    check_equal(loaded(tmp_path / "converted", load_converted), loaded(plain))
    (small / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: producer: name: expected"):
        read_config(small)
    (small / "config.json").write_text(written)  # which counts where both say it
    check_equal(loaded(small), loaded(plain))


def test_a_file_of_modelopt_that_asks_for_what_is_not_built_is_named(tmp_path):
    small, _ = quantised(tmp_path, "modelopt")
    written = (small / "config.json").read_text()
    move_beside(small, quant_algo="W4A8_AWQ")
    with pytest.raises(CheckpointError, match=r"with hf_quant_config\.json: .*quant_algo: expec"):
        read_family(read_config(small))
    (small / "config.json").write_text(written)
    move_beside(small, quant_algo=None)  # a quantised cache, and weights as they are
    assert read_family(read_config(small))[1].quantisation is None


@pytest.mark.parametrize(
    "about",
    [CASES["int8"][0], {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}],
)
def test_scales_of_rows_may_be_a_vector(tmp_path, about):
    small, plain = quantised(tmp_path, "int8")
    tensors = tensors_of(small)
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[name] = tensors[name][:, 0].copy()
    save_file(tensors, small / "model.safetensors")
    config = json.loads((small / "config.json").read_text()) | {"quantization_config": about}
    (small / "config.json").write_text(json.dumps(config))
    check_equal(loaded(small), loaded(plain))
    assert packed_names(small) == MATRICES


def fp8_as_modelopt(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[dict, np.ndarray]:
    values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.01, 0.1, [-(-size // 128) for size in shape]).astype(np.float32)
    whole = scale.repeat(128, axis=0).repeat(128, axis=1)[: shape[0], : shape[1]]
    parts = {"weight": values, "weight_scale": scale[:, None, :, None]}
    return parts, values.astype(np.float32) * whole


def test_blocks_of_modelopt_have_scales_of_four_axes(tmp_path, monkeypatch):
    about = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    monkeypatch.setitem(CASES, "blocks", (about, fp8_as_modelopt))
    sizes = {"hidden_size": 160, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 40}
    small, plain = quantised(tmp_path, "blocks", tiny_config("qwen2", **SIZES | sizes))
    check_equal(loaded(small), loaded(plain))
    assert packed_names(small) == {"down"}  # 160 columns are no whole blocks
    check_planned(small)


def test_modules_of_modelopt_may_be_stored_unlike(tmp_path, monkeypatch):
    """Attention is in fp8 here, but for queries, which are not quantised, and MLPs in fp4."""
    listed, order = {}, iter("dgukoqv" * 2)  # modules by the alphabet, as `quantised` goes on

    def store(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[dict, np.ndarray]:
        name = next(order)
        if name in "dgu":
            return CASES["modelopt"][1](rng, shape)
        values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
        if name in "kov":
            scale = np.float32(rng.uniform(0.01, 0.1))
            return {"weight": values, "weight_scale": scale}, values.astype(np.float32) * scale
        want = values.astype(np.float32)
        return {"weight": want}, want

    for layer in range(2):
        prefix = f"model.language_model.layers.{layer}."
        for name in ("down", "gate", "up"):
            listed[f"{prefix}mlp.{name}_proj"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        for name in "kov":
            listed[f"{prefix}self_attn.{name}_proj"] = {"quant_algo": "FP8"}
    listed["mtp.layers.0.self_attn.q_proj"] = {"quant_algo": "FP8"}
    monkeypatch.setitem(CASES, "mixed", (MIXED | {"quantized_layers": listed}, store))
    sizes = {"hidden_size": 160, "intermediate_size": 256, "head_dim": 40}
    small, plain = quantised(tmp_path, "mixed", tiny_config("qwen2", **SIZES | sizes))
    check_equal(loaded(small), loaded(plain))
    assert packed_names(small) == MATRICES - {"q"}
    check_planned(small)


def test_an_engine_says_what_stays_quantised(tmp_path):
    small, _ = quantised(tmp_path, "gptq")
    text = LLM(small, **SMALL).describe()
    assert "MiB of them quantised: q, k, v, o, gate, up, down in int4 by 16; stored as gptq" in text


AT_WEIGHTS = {"location": "weight_output"}
OFFLINE = {"config_groups": {"R2": {"type": "hadamard", "apply": [AT_WEIGHTS]}}}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
ONLINE = {"config_groups": {"R3": {"apply": [AT_WEIGHTS, {"location": "output"}]}}}


@pytest.mark.parametrize("packing", ["gptq", "awq"])
def test_auto_round_packs_as_gptq_or_awq(packing):
    """transformers and vLLM compute with its weights by the code for those."""
    theirs = {"bits": 4, "group_size": 128, "quant_method": packing}
    about = theirs | {"quant_method": "auto-round", "packing_format": f"auto_round:auto_{packing}"}
    about |= {"autoround_version": "0.8.0", "data_type": "int", "sym": True}
    one, other = (
        read_family(ConfigReader(CONFIG | {"quantization_config": said}, "c"))[1].quantisation
        for said in (about, theirs)
    )
    assert one.method == f"auto-round, {packing}"
    assert replace(one, method=packing) == other


def test_transforms_of_weights_are_in_what_is_stored(tmp_path):
    about = compressed("int-quantized", num_bits=8) | {"transform_config": OFFLINE}
    config = tiny_config("qwen2") | {"quantization_config": about}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, layout = read_family(read_config(tmp_path))
    assert layout.quantisation.method == "compressed-tensors, int-quantized"


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method: expected one of auto-round, awq"),
        ({"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type: expected one of int"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_4bit: expected true"),
        (BITSANDBYTES | {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type: expected one of"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo: expected one of"),
        (MIXED, "quantized_layers: expected modules"),
        (MIXED | {"quantized_layers": {"lm_head": {"quant_algo": "X"}}}, "lm_head: quant_algo: ex"),
        ({"quant_method": "gptq", "bits": 3}, "bits: expected 4 or 8, got 3"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "version: expected one of"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "expected two whole numbers"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
        (compressed("marlin-24", num_bits=4), "format: expected one of"),
        (compressed("nvfp4-pack-quantized", num_bits=4), "group_size: expected 16"),
        (compressed("float-quantized", num_bits=4), "num_bits: expected 8"),
        (
            compressed("float-quantized", num_bits=8)
            | {"sparsity_config": {"format": "sparse-24-bitmask", "targets": ["Linear"]}},
            "sparsity_config: format: expected one of dense, got 'sparse-24-bitmask'",
        ),
        (
            compressed("int-quantized", num_bits=8) | {"transform_config": ONLINE},
            "transforms at weight_input and weight_output only",
        ),
        ("fp8", "quantization_config: expected an object"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path, about, message):
    (tmp_path / "config.json").write_text(
        json.dumps(tiny_config("qwen2") | {"quantization_config": about})
    )
    with pytest.raises(CheckpointError, match=message):
        read_family(read_config(tmp_path))


@pytest.mark.parametrize(
    ("case", "last", "change"),
    [
        ("fp8", "weight_scale_inv", lambda x: x[:-1]),
        ("fp8", "weight_scale_inv", lambda x: x[:1]),
        ("fp8", "weight_scale_inv", lambda x: x[:, :1]),
        ("int8", "weight_scale", lambda x: x[:-1]),
        ("packed", "weight_scale", lambda x: x[:, :-1]),
        ("packed", "weight_scale", lambda x: x[0, 0]),
        ("packed", "weight_packed", lambda x: x[:, :-1]),
        ("packed-asymmetric", "weight_zero_point", lambda x: x[:, :-1]),
        ("packed-asymmetric", "weight_zero_point", None),
        ("gptq", "qzeros", lambda x: x[:-1]),
        ("gptq-act-order", "g_idx", None),
        ("gptq", "g_idx", lambda x: x + 99),
        ("gptq", "g_idx", lambda x: x[0]),
        ("gptq", "qweight", lambda x: x.astype(np.int16)),
        ("awq", "scales", lambda x: x[:, :-1]),
        ("awq", "qzeros", None),
        ("nvfp4", "weight_scale", lambda x: x[:, :-1]),
        ("nvfp4", "weight_scale", None),
        ("nvfp4", "weight_scale", lambda x: x.astype(np.float32)),
        ("nvfp4", "weight_global_scale", None),
        ("nvfp4", "weight_global_scale", lambda x: x.repeat(2)),
        ("mxfp4", "weight_scale", lambda x: x[:-1]),
        ("mxfp4", "weight_scale", lambda x: x[:, :1]),
        ("modelopt", "weight_scale_2", None),
        ("gptq", "scales", lambda x: x.astype(np.int32)),
        ("nf4-simple", "weight.absmax", lambda x: x.astype(np.uint8)),
        ("nf4", "weight.absmax", lambda x: x[:-1]),
        ("nf4", "weight.quant_map", lambda x: x[:-1]),
        ("nf4", "weight.absmax", lambda x: x[0]),
        ("nf4", "weight.nested_absmax", lambda x: x[:0]),
        ("nf4", "weight.nested_absmax", None),
        ("nf4", "weight.nested_quant_map", lambda x: x[:9]),
        ("nf4", "weight.nested_quant_map", None),
    ],
)
def test_parts_that_do_not_fit_together_are_named(tmp_path, case, last, change):
    small, _ = quantised(tmp_path, case)
    tensors = tensors_of(small)
    name = f"model.layers.0.mlp.up_proj.{last}"
    part = tensors.pop(name)
    if change is not None:
        tensors[name] = np.array(change(part), order="C")  # of one number too
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: expected"):
        loaded(small)


@pytest.mark.parametrize(("case", "value"), [("gptq-act-order", 1e38), ("gptq", np.nan)])
def test_what_makes_no_finite_weight_is_named_without_a_warning(tmp_path, case, value):
    small, _ = quantised(tmp_path, case)
    tensors = tensors_of(small)
    name = "model.layers.0.mlp.up_proj.scales"
    tensors[name] = np.full_like(tensors[name], value)
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: expected finite values"):
        loaded(small)
