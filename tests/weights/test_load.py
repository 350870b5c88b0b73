"""Every tensor of a checkpoint reaches its leaf with the right values, and memory holds it once."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import families
from jaxkv import LLM
from jaxkv.errors import CheckpointError
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import read_config, read_family
from jaxkv.programs.rounding import quantise
from jaxkv.weights.arrays import take_weights
from jaxkv.weights.load import Kept, is_finite, load_weights
from jaxkv.weights.safetensors import Checkpoint
from jaxkv.weights.tree import tree_leaves
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
GATE = "model.layers.1.mlp.gate_proj.weight"


def loaded(directory: Path, dtype: str = "float32", **options: bool) -> dict:
    spec, layout = read_family(read_config(directory))
    return load_weights(directory, spec, layout, Kept(dtype=dtype, **options))


def expected(directory: Path) -> dict[str, np.ndarray]:
    """Leaf path -> the file's own tensors, those of layers stacked; read by the official package."""
    spec, layout = read_family(read_config(directory))
    tensors = {
        name: x for file in directory.glob("*.safetensors") for name, x in load_file(file).items()
    }
    tree = {
        f"['{name}']": tensors[leaf.source]
        for name, leaf in layout.top.items()
        if leaf.source in tensors
    }
    for name, leaf in layout.layers[0].items():
        layers = [tensors[leaf.source.format(layer=layer)] for layer in range(spec.num_layers)]
        tree[f"['layers']['{name}']"] = np.stack(layers)
    return tree


def flat(weights: dict) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(weights)
    }


def rewrite(directory: Path, changes: dict[str, np.ndarray | None]) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file) | changes
    save_file(
        {name: x for name, x in tensors.items() if x is not None}, file, metadata={"format": "pt"}
    )
    return directory


def align(file: Path) -> None:
    """Pads the header so that the data starts at a multiple of 64 bytes, from where a CPU device
    could alias it.
    """
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end] + b" " * (-end % 64)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


def awkward(dtype: np.dtype) -> np.ndarray:
    """Ties, the largest and smallest, infinities and NaN among 80 x 48 values."""
    values = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1.0,
        1 + 2**-8,
        1 + 3 * 2**-8,
        1 + 2**-7,
        -1 - 2**-8,
        1 + 2**-8 + 2**-20,
    ]
    if dtype.itemsize >= 4:
        values += [2**-126, 2**-133, 3.3895e38, 1e-40, 65520.0]
    x = np.random.default_rng(1).normal(size=80 * 48)
    x[: len(values)] = values
    return x.reshape(80, 48).astype(dtype)


def rounded_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16, ties to even: written down from the definition, not with
    ml_dtypes.
    """
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, nearest).astype(np.uint16)


# --- values
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant",
    ["llama", "llama-3", "qwen2", "qwen3-biases", "mistral-window", "qwen2-mixed-windows"],
)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_leaf_holds_its_tensor(tmp_path, variant, stored, dtype):
    make_checkpoint(tmp_path, tiny_config(variant), dtype=stored)
    got, want = flat(loaded(tmp_path, dtype)), expected(tmp_path)
    assert got.keys() == want.keys()
    for path, x in got.items():
        assert x.dtype == (dtype if x.ndim - path.startswith("['layers']") == 2 else np.float32)
        np.testing.assert_array_equal(x, want[path].astype(x.dtype), err_msg=path)


def test_what_chooses_experts_is_as_precise_as_the_file_has_it(tmp_path):
    """A published bias differs from expert to expert by less than bfloat16 tells apart."""
    rng = np.random.default_rng(0)
    make_checkpoint(tmp_path, families.text_config("deepseek_v3"), dtype="bfloat16")
    gate = "model.layers.1.mlp.gate."
    bias = (12 + rng.uniform(0, 1e-2, 8)).astype(np.float32)
    weight = rng.normal(size=(8, 48)).astype(np.float32)
    rewrite(tmp_path, {f"{gate}e_score_correction_bias": bias, f"{gate}weight": weight})
    layers = loaded(tmp_path, "bfloat16")["layers_1"]
    np.testing.assert_array_equal(layers["router_bias"][0], bias)
    np.testing.assert_array_equal(layers["router"][0], weight)
    assert layers["q"].dtype == layers["expert_up"].dtype == BFLOAT16


@pytest.mark.parametrize(("variant", "num_groups"), [("llama", 1), ("qwen2-mixed-windows", 2)])
def test_layers_are_stacked_whatever_their_kv_groups(tmp_path, variant, num_groups):
    make_checkpoint(tmp_path, tiny_config(variant))
    spec, _ = read_family(read_config(tmp_path))
    assert len(spec.groups) == num_groups
    layers = loaded(tmp_path)["layers"]
    assert layers["gate"].shape == (3, 80, 48)
    assert {len(leaf) for leaf in layers.values()} == {3}


@pytest.mark.parametrize("variant", ["llama", "qwen2-mixed-windows"])
@pytest.mark.parametrize(
    "stored", [np.float32, BFLOAT16, np.float16, np.float64], ids=lambda dtype: np.dtype(dtype).name
)
def test_every_conversion_is_rounded_to_nearest_even(tmp_path, stored, variant):
    make_checkpoint(tmp_path, tiny_config(variant))
    x = awkward(np.dtype(stored))
    rewrite(tmp_path, {GATE: x, "lm_head.weight": np.resize(x, (151, 48))})

    def pick(weights: dict) -> list[np.ndarray]:
        gate = weights["layers"]["gate"][1]
        return [np.asarray(gate), np.asarray(weights["head"])[:80]]

    for got in pick(loaded(tmp_path, "float32", check=False)):
        np.testing.assert_array_equal(got, x.astype(np.float32))
    whole = loaded(tmp_path, "bfloat16", check=False)
    bits = loaded(tmp_path, "bfloat16", as_bits=True, check=False)
    for got, raw in zip(pick(whole), pick(bits), strict=True):
        assert (got.dtype, raw.dtype) == (BFLOAT16, np.uint16)
        np.testing.assert_array_equal(raw, got.view(np.uint16))
        numbers = ~np.isnan(x)
        np.testing.assert_array_equal(raw[numbers], rounded_to_bfloat16(x)[numbers])
        np.testing.assert_array_equal(raw[numbers], x.astype(BFLOAT16).view(np.uint16)[numbers])
        assert np.isnan(got[~numbers].astype(np.float32)).all()


def test_bits_are_those_of_the_file_where_it_is_bfloat16(tmp_path):
    make_checkpoint(tmp_path, tiny_config("llama"), dtype="bfloat16")
    want = expected(tmp_path)
    for path, x in flat(loaded(tmp_path, "bfloat16", as_bits=True)).items():
        is_short = x.dtype == np.uint16
        kept = want[path].view(np.uint16) if is_short else want[path].astype(np.float32)
        assert is_short or "norm" in path
        np.testing.assert_array_equal(x, kept, err_msg=path)


@pytest.mark.parametrize("variant", ["llama", "qwen2-mixed-windows"])
def test_shards_load_like_a_single_file(tmp_path, variant):
    make_checkpoint(tmp_path / "single", tiny_config(variant))
    want = flat(loaded(tmp_path / "single"))
    for shards in (2, 5):
        make_checkpoint(tmp_path / str(shards), tiny_config(variant), shards=shards)
        got = flat(loaded(tmp_path / str(shards)))
        assert got.keys() == want.keys()
        for path, x in got.items():
            np.testing.assert_array_equal(x, want[path], err_msg=path)


@pytest.mark.parametrize("variant", ["llama", "qwen2-mixed-windows"])
@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_loaded_weights_do_not_change_with_the_file(tmp_path, variant, stored, dtype):
    """A zero-copy view would: the file is overwritten in place, under the mapping that it was read
    through.
    """
    make_checkpoint(tmp_path, tiny_config(variant), dtype=stored)
    align(tmp_path / "model.safetensors")
    weights = [loaded(tmp_path, dtype)] + (
        [loaded(tmp_path, dtype, as_bits=True)] if dtype == "bfloat16" else []
    )
    before = [{path: x.copy() for path, x in flat(tree).items()} for tree in weights]
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    for tree, kept in zip(weights, before, strict=True):
        for path, x in flat(tree).items():
            np.testing.assert_array_equal(x, kept[path], err_msg=path)


# --- tied heads
# -------------------------------------------------------------------------------------------------------


def test_a_tied_head_is_loaded_only_if_it_says_something_else(tmp_path):
    tied = make_checkpoint(tmp_path, tiny_config("llama", tie_word_embeddings=True))
    assert "head" not in loaded(tied)
    embed = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    assert "head" not in loaded(rewrite(tied, {"lm_head.weight": embed}))
    other = embed.copy()
    other[-1, -1] += 1
    np.testing.assert_array_equal(loaded(rewrite(tied, {"lm_head.weight": other}))["head"], other)


def test_a_tied_checkpoint_may_have_its_head_in_the_place_of_its_embeddings(tmp_path):
    """safetensors' `save_model` leaves it so."""
    tied = make_checkpoint(tmp_path, tiny_config("llama", tie_word_embeddings=True))
    embed = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    got = loaded(rewrite(tied, {"lm_head.weight": embed, "model.embed_tokens.weight": None}))
    assert "head" not in got
    np.testing.assert_array_equal(got["embed"], embed)


def test_an_untied_head_may_not_be_missing(tmp_path):
    make_checkpoint(tmp_path, tiny_config("llama"))
    with pytest.raises(CheckpointError, match=r"missing tensor lm_head\.weight"):
        loaded(rewrite(tmp_path, {"lm_head.weight": None}))


# --- what is refused
# --------------------------------------------------------------------------------------------------


def test_every_wrong_tensor_is_named_before_anything_is_allocated(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, tiny_config("llama"))
    rewrite(
        tmp_path,
        {
            GATE: np.zeros((80, 47), np.float32),
            "model.norm.weight": None,
            "model.layers.3.mlp.gate_proj.weight": np.zeros((80, 48), np.float32),
            "model.layers.0.self_attn.q_proj.bias": np.zeros(48, np.float32),
            "model.layers.2.mlp.up_proj.weight": np.zeros((80, 48), np.int8),
        },
    )
    monkeypatch.setattr(Checkpoint, "read", None)
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: ")
    for part in (
        "missing tensor model.norm.weight",
        "tensor that llama does not use: model.layers.3.mlp.gate_proj.weight",
        "tensor that llama does not use: model.layers.0.self_attn.q_proj.bias",
        f"{GATE}: expected shape (80, 48) from config.json, got (80, 47)",
        (
            "model.layers.2.mlp.up_proj.weight: expected one of float32, bfloat16, float16, "
            "float64, "
            "got int8"
        ),
    ):
        assert part in message


def test_many_wrong_tensors_are_counted(tmp_path):
    make_checkpoint(tmp_path, tiny_config("llama"))
    config = tiny_config("llama", num_hidden_layers=5)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"missing tensor model\.layers\.3\..*; and 8 more; take all"
    ):
        loaded(tmp_path)


def test_tensors_that_only_repeat_the_config_are_left_out(tmp_path):
    make_checkpoint(tmp_path, tiny_config("llama"))
    keys = flat(loaded(tmp_path)).keys()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert flat(loaded(rewrite(tmp_path, {name: np.zeros(4, np.float32)}))).keys() == keys
    with pytest.raises(
        CheckpointError, match=r"does not use: model\.layers\.0\.self_attn\.rotary_emb\.inv_freqs"
    ):
        loaded(rewrite(tmp_path, {name: None, name + "s": np.zeros(4, np.float32)}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("stored", "value"), [(np.float32, np.nan), (BFLOAT16, -np.inf), (np.float64, 1e300)]
)
def test_a_value_that_is_not_finite_is_refused_by_name_unless_unchecked(
    tmp_path, monkeypatch, stored, value, dtype
):
    monkeypatch.setattr("jaxkv.weights.load.CHECKED", 1000)
    make_checkpoint(tmp_path, tiny_config("llama"))
    gate = load_file(tmp_path / "model.safetensors")[GATE].astype(stored)
    gate.reshape(-1)[2345] = value
    rewrite(tmp_path, {GATE: gate})
    got = -np.inf if value == -np.inf else np.inf if value == 1e300 else np.nan
    with pytest.raises(
        CheckpointError,
        match=rf"model\.safetensors: tensor {GATE}: expected finite values as "
        rf"{dtype}, got {got} at index 2345 ",
    ):
        loaded(tmp_path, dtype)
    weights = loaded(tmp_path, dtype, check=False)
    bad = ~np.isfinite(np.asarray(weights["layers"]["gate"]))
    assert np.flatnonzero(bad).tolist() == [gate.size + 2345]
    with pytest.raises(CheckpointError, match="expected finite values"):
        LLM(tmp_path, **SMALL)
    LLM(tmp_path, load_format="unchecked", **SMALL)


def test_the_largest_and_smallest_values_are_finite():
    for dtype in (np.float32, BFLOAT16):
        edges = [jnp.finfo(dtype).max, jnp.finfo(dtype).min, jnp.finfo(dtype).smallest_subnormal]
        assert is_finite(np.array([*edges, 0.0, -0.0], dtype))
        assert is_finite(np.array([], dtype))
        for bad in (np.inf, -np.inf, np.nan, -np.nan):
            assert not is_finite(np.array([1.0, bad], dtype))


# --- memory
# -----------------------------------------------------------------------------------------------------------

LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
MEASURE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import read_config, read_family
from jaxkv.weights.load import Kept, is_finite, load_weights

def memory(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

directory, dtype, as_bits = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "bits"
jax.block_until_ready((jnp.array(np.zeros(9), copy=True), jax.device_put(np.zeros(9))))  # what JAX itself takes
spec, layout = read_family(read_config(directory))
before = memory("VmRSS")
weights = load_weights(directory, spec, layout, Kept(dtype=dtype, as_bits=as_bits))
print(memory("VmHWM") - before, sum(x.nbytes for x in jax.tree.leaves(weights)))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """About 330 MB of bfloat16 in four shards, written without computing 170 million normal
    numbers.
    """
    directory = tmp_path_factory.mktemp("large")
    (directory / "config.json").write_text(json.dumps(tiny_config("llama", **LARGE)))
    spec, layout = read_family(read_config(directory))
    leaves = [(leaf.source, leaf.info.shape) for leaf in layout.top.values()]
    for layer in range(spec.num_layers):
        leaves += [
            (leaf.source.format(layer=layer), leaf.info.shape) for leaf in layout.layers[0].values()
        ]
    weight_map = {}
    for shard in range(4):
        file = f"model-{shard + 1:05d}-of-00004.safetensors"
        tensors = {name: np.full(shape, shard + 1, BFLOAT16) for name, shape in leaves[shard::4]}
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads the peak of the resident memory from /proc"
)
@pytest.mark.parametrize(
    ("dtype", "form"), some(FORMS := [("bfloat16", "bits"), ("float32", "values")], FORMS[0])
)
def test_peak_memory_stays_near_the_weights_themselves(large, dtype, form):
    arguments = [sys.executable, "-c", MEASURE, str(large), dtype, form]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    peak, num_bytes = map(int, done.stdout.split())
    shard = max(file.stat().st_size for file in large.glob("*.safetensors"))
    assert num_bytes > 300e6
    assert peak < 1.35 * num_bytes + shard, (
        f"{peak / num_bytes:.2f} times the parameters' {num_bytes / 1e6:.0f} MB"
    )


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("model.", "lm_head."),
    ],
)
def test_the_text_part_of_a_larger_model_is_found_under_every_name(tmp_path, prefix, head):
    config = tiny_config("qwen2")
    plain = make_checkpoint(tmp_path / "plain", config | {"tie_word_embeddings": False})
    tensors = load_file(plain / "model.safetensors")
    named = {
        name.replace("model.", prefix, 1).replace("lm_head.", head, 1): tensor
        for name, tensor in tensors.items()
    }
    named["visual.blocks.0.attn.qkv.weight"] = np.ones((3, 3), np.float32)
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file(named, whole / "model.safetensors")
    text = config | {"model_type": "qwen2_vl_text", "tie_word_embeddings": None}
    outer = {"model_type": "qwen2_vl", "text_config": text, "tie_word_embeddings": False}
    (whole / "config.json").write_text(json.dumps(outer))
    want, got = (jax.tree.map(np.asarray, loaded(path)) for path in (plain, whole))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    # The same without a section of its own, as older files have it.
    (whole / "config.json").write_text(json.dumps(text | outer | {"text_config": None}))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, loaded(whole)), want)


EXPERTS = "model.layers.{}.mlp.experts."


def fused(tensors: dict[str, np.ndarray], *, transposed: bool) -> dict[str, np.ndarray]:
    """Puts the tensors of all experts of a layer into two, as they are published."""
    found = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in {name.split(".")[2] for name in tensors.keys() - found.keys()}:
        stem, count = EXPERTS.format(layer), 6
        gate, up, down = (
            np.stack([tensors[f"{stem}{i}.{one}_proj.weight"] for i in range(count)])
            for one in ("gate", "up", "down")
        )
        both = np.concatenate([gate, up], axis=1)
        found[f"{stem}gate_up_proj"] = both.swapaxes(1, 2).copy() if transposed else both
        found[f"{stem}down_proj"] = down.swapaxes(1, 2).copy() if transposed else down
    return found


@pytest.mark.parametrize("variant", ["qwen3_5_moe_text", "qwen3_vl_moe_text"])
def test_experts_may_have_tensors_of_their_own_or_two_for_all(tmp_path, variant):
    """Qwen3.5's are published in two, which transformers 5 writes apart; quantised exports of
    Qwen3-VL have them apart, which is published in two.
    """
    config = families.text_config("qwen3_moe") | {"num_experts": 6}
    config |= families.text_config(variant) | {"num_experts": 6, "moe_intermediate_size": 20}
    make_checkpoint(tmp_path / "made", config)
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    if variant == "qwen3_vl_moe_text":
        apart = {name: x for name, x in tensors.items() if ".experts." not in name}
        for name in tensors.keys() - apart.keys():
            stem, _, last = name.rpartition(".")
            parts = {"down_proj": tensors[name]}
            if last == "gate_up_proj":
                gate, up = np.split(tensors[name], 2, axis=1)
                parts = {"gate_proj": gate, "up_proj": up}
            for one, x in parts.items():
                apart |= {f"{stem}.{i}.{one}.weight": x[i].copy() for i in range(6)}
    else:
        apart = tensors
    want = flat(loaded(tmp_path / "made"))
    for number, form in enumerate(
        (apart, fused(apart, transposed=False), fused(apart, transposed=True))
    ):
        other = tmp_path / str(number)
        other.mkdir()
        save_file(form, other / "model.safetensors")
        (other / "config.json").write_text((tmp_path / "made" / "config.json").read_text())
        got = flat(loaded(other))
        assert got.keys() == want.keys()
        for path, x in got.items():
            np.testing.assert_array_equal(x, want[path], err_msg=f"{number}: {path}")


def test_a_tensor_of_a_layer_is_not_taken_for_another_part_of_the_model(tmp_path):
    """Llava around Qwen3, whose norms of queries and keys Llama has not, in an older file without
    a section for text.
    """
    config = tiny_config("llama") | {"model_type": "llava"}
    directory = make_checkpoint(tmp_path, tiny_config("llama"))
    (directory / "config.json").write_text(json.dumps(config))
    loaded(rewrite(directory, {"vision.layers.0.q_norm.weight": np.ones(8, np.float32)}))
    more = {"model.layers.1.self_attn.q_norm.weight": np.ones(8, np.float32)}
    with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.1\.self_attn\.q_norm"):
        loaded(rewrite(directory, more))


def test_what_predicts_later_tokens_is_left_out(tmp_path):
    make_checkpoint(tmp_path, tiny_config("llama"))
    names = ("mtp.fc.weight", "model.mtp_block.0.mlp.up_proj.weight", "model.mtp.layers.0.a.weight")
    loaded(rewrite(tmp_path, {name: np.ones(3, np.float32) for name in names}))


def test_two_tensors_that_are_one_by_name_are_refused(tmp_path):
    config = tiny_config("qwen2") | {"tie_word_embeddings": False}
    plain = make_checkpoint(tmp_path, config)
    tensors = load_file(plain / "model.safetensors")
    twice = tensors | {f"model.language_{name}": one for name, one in tensors.items()}
    save_file(twice, plain / "model.safetensors")
    outer = {"model_type": "qwen2_vl", "text_config": config | {"model_type": "qwen2_vl_text"}}
    (plain / "config.json").write_text(json.dumps(outer))
    with pytest.raises(CheckpointError, match="expected one tensor to be model"):
        loaded(plain)


@pytest.mark.parametrize("method", [None, "int8"])
def test_experts_in_one_tensor_are_not_copied_all_at_once(method):
    """gpt-oss has them [E, in, out], with the rows of two matrices by turns."""
    experts, size = 16, 256
    config = tiny_config("llama", hidden_size=size, intermediate_size=size, num_hidden_layers=1)
    config |= {"model_type": "gpt_oss", "num_local_experts": experts, "num_experts_per_tok": 2}
    spec, layout = read_family(ConfigReader(config, "config.json"))
    arrays = {
        source: np.zeros(leaf.one.stored_shapes[0], BFLOAT16)
        for leaf in tree_leaves(spec, layout)
        for source in leaf.sources
    }
    both = arrays["model.layers.0.mlp.experts.gate_up_proj"]
    both[...] = np.random.default_rng(0).normal(size=both.shape)
    kept = Kept(dtype="bfloat16", quantization=method, quantise=quantise)
    tracemalloc.start()
    weights = load_weights(arrays, spec, layout, kept)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    nbytes = sum(x.nbytes for x in jax.tree_util.tree_leaves(weights))
    assert peak < nbytes + 8 * size * size * 4
    if method is None:
        for turn, name in enumerate(("expert_gate", "expert_up")):
            want = both.swapaxes(1, 2)[None, :, turn::2]
            np.testing.assert_array_equal(weights["layers"][name], want)


@pytest.mark.parametrize("variant", ["gpt_oss", "inkling_text", "llama4_text"])
def test_weights_quantised_as_they_are_read_are_the_floats_quantised(tmp_path, variant):
    make_checkpoint(tmp_path, families.text_config(variant))
    spec, layout = read_family(read_config(tmp_path))
    kept = Kept(dtype="float32", quantization="int8", quantise=quantise)
    want = flat(take_weights(loaded(tmp_path), spec, layout, kept))
    got = flat(load_weights(tmp_path, spec, layout, kept))
    assert got.keys() == want.keys()
    assert any(x.dtype == np.int8 for x in got.values())
    for name, x in got.items():
        np.testing.assert_array_equal(x, want[name], err_msg=name)
