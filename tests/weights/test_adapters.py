"""Files of adapters: what PEFT writes is read whole, anything else is a CheckpointError that says
what was expected and what came, for every family's names.
"""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapters import PREFIX, make_adapter, merged
from jaxkv.errors import CheckpointError
from jaxkv.models.families import read_config, read_family
from jaxkv.placement import Placement
from jaxkv.weights import adapters
from jaxkv.weights.adapters import CONFIG, TENSORS, Adapter, adapted_leaves, read_adapter
from jaxkv.weights.load import Kept, load_weights
from jaxkv.weights.tree import ADAPTER_DOWN, ADAPTER_UP
from tiny import make_checkpoint, tiny_config

Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
B0 = Q0.replace("lora_A", "lora_B")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model", tiny_config("llama"))


def read(directory: Path, base: Path, **options: object) -> Adapter:
    spec, layout = read_family(read_config(base))
    placement = Placement((jax.devices()[0],))
    options = {"rank": 8, "dtype": "float32"} | options
    return read_adapter(directory, spec, layout, placement, **options)


def change(directory: Path, **config: object) -> None:
    file = directory / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def tensors(directory: Path, changes: dict[str, np.ndarray | None]) -> None:
    own = load_file(directory / TENSORS) | changes
    save_file({name: x for name, x in own.items() if x is not None}, directory / TENSORS)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


BROKEN = {
    "no config": (lambda d: (d / CONFIG).unlink(), "adapter_config.json: not found"),
    "no file but a pipe": (
        lambda d: ((d / TENSORS).unlink(), os.mkfifo(d / TENSORS)),
        "expected adapter_model.safetensors, got none",
    ),
    "a link to itself": (
        lambda d: ((d / CONFIG).unlink(), (d / CONFIG).symlink_to(d / CONFIG)),
        "adapter_config.json: not found",
    ),
    "no tensors": (
        lambda d: (d / TENSORS).unlink(),
        "expected adapter_model.safetensors, got none",
    ),
    "no JSON": (lambda d: (d / CONFIG).write_text("{"), "adapter_config.json: expected JSON"),
    "no object": (lambda d: (d / CONFIG).write_text("[1]"), "expected a JSON object"),
    "cut off": (
        lambda d: (d / TENSORS).write_bytes((d / TENSORS).read_bytes()[:-8]),
        "a truncated file",
    ),
    "another method": (
        partial(change, peft_type="IA3"),
        "peft_type: expected one of LORA, got 'IA3'",
    ),
    "another task": (partial(change, task_type="SEQ_CLS"), "task_type: expected one of CAUSAL_LM"),
    "DoRA": (partial(change, use_dora=True), "use_dora: expected none .not built., got True"),
    "biases": (partial(change, bias="all"), "bias: expected none .not built., got 'all'"),
    "trained biases": (partial(change, lora_bias=True), "lora_bias: expected none"),
    "whole modules": (
        partial(change, modules_to_save=["lm_head"]),
        "modules_to_save: expected none",
    ),
    "tensors of experts": (partial(change, target_parameters=["x"]), "target_parameters: expected"),
    "layers twice": (
        partial(change, layer_replication=[[0, 1]]),
        "layer_replication: expected none",
    ),
    "a key of tomorrow": (partial(change, use_magic=True), "use_magic: expected none .not built."),
    "weights that moved": (
        partial(change, init_lora_weights="pissa"),
        "init_lora_weights: expected",
    ),
    "no rank": (partial(change, r=None), "r: expected a whole number"),
    "a rank of 0": (partial(change, r=0), "r: expected a whole number from 1"),
    "a text for alpha": (partial(change, lora_alpha="16"), "lora_alpha: expected a number"),
    "another rank": (
        partial(change, r=3),
        r"lora_A.weight: expected shape \(3, 48\).*got \(4, 48\)",
    ),
    "a rank by regex": (
        partial(change, rank_pattern={"(a+)+$": 2}),
        "rank_pattern: expected names of modules, not other regular expressions",
    ),
    "a huge rank": (
        partial(change, rank_pattern={"q_proj": 9}),
        "q_proj: expected a rank of at most max_lora_rank=8 of LLM, got 9",
    ),
    "no list of layers": (
        partial(change, layers_to_transform="x"),
        "layers_to_transform: expected",
    ),
    "no names": (partial(change, target_modules=[1]), "target_modules: expected a list of module"),
    "names of fewer": (
        partial(change, target_modules=["q_proj"]),
        "model.layers.0.self_attn.k_proj: expected one of target_modules",
    ),
    "half a pair": (partial(tensors, changes={B0: None}), f"missing tensor {B0[len(PREFIX) :]}"),
    "a missing module": (
        partial(tensors, changes={Q0: None, B0: None}),
        f"missing tensor {Q0[len(PREFIX) :]}; missing tensor {B0[len(PREFIX) :]}",
    ),
    "another base": (
        partial(tensors, changes={Q0: zeros(4, 64)}),
        r"q_proj.lora_A.weight: expected shape \(4, 48\) for this model and .*, got \(4, 64\)",
    ),
    "more layers": (
        partial(tensors, changes={Q0.replace("layers.0", "layers.3"): zeros(4, 48)}),
        "expected LoRA of q_proj, k_proj, .*, got tensor 'model.layers.3.self_attn.q_proj.lora_A",
    ),
    "a head": (
        partial(tensors, changes={f"{PREFIX}lm_head.lora_A.weight": zeros(4, 48)}),
        "expected LoRA of q_proj, k_proj, .*, got tensor 'lm_head.lora_A.weight'",
    ),
    "embeddings": (
        partial(tensors, changes={f"{PREFIX}model.embed_tokens.lora_embedding_A": zeros(4, 151)}),
        "got tensor 'model.embed_tokens.lora_embedding_A'",
    ),
    "magnitudes": (
        partial(tensors, changes={Q0.replace("lora_A.weight", "lora_magnitude_vector"): zeros(48)}),
        "got tensor 'model.layers.0.self_attn.q_proj.lora_magnitude_vector'",
    ),
    "integers": (
        partial(tensors, changes={Q0: np.zeros((4, 48), np.int32)}),
        "lora_A.weight: expected one of float32, bfloat16, float16, float64, got int32",
    ),
    "patterns without end": (
        partial(change, rank_pattern={f"a{i}": 1 for i in range(5000)}),
        "rank_pattern: expected at most 4096 names",
    ),
    "a rank that no memory holds": (partial(change, r=2**24), "at most max_lora_rank=8 of LLM, go"),
    "NaN": (
        partial(tensors, changes={Q0: zeros(4, 48) + np.nan}),
        "lora_A.weight: expected finite values as float32",
    ),
    "too large": (
        partial(tensors, changes={B0: zeros(48, 4) + np.float32(3e38)}),
        "lora_B.weight: expected finite values as float32 with its scale",
    ),
    "too large for float32": (
        partial(tensors, changes={Q0: np.full((4, 48), 1e300)}),
        "lora_A.weight: expected finite values as float32",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_and_hostile_files_are_refused_by_name(base, tmp_path, case):
    breaks, message = BROKEN[case]
    directory = make_adapter(tmp_path / "a", base, lora_alpha=8)
    read(directory, base)
    breaks(directory)
    with pytest.raises(CheckpointError, match=message):
        read(directory, base)


def test_a_file_that_is_cut_while_it_is_read_ends_nothing(base, tmp_path, monkeypatch):
    """A mapping of it would end the process."""
    directory = make_adapter(tmp_path / "a", base)
    whole = (directory / TENSORS).read_bytes()
    check = adapters._check

    def checked_and_then_cut(*arguments):
        modules = check(*arguments)
        os.truncate(directory / TENSORS, 100)
        return modules

    monkeypatch.setattr(adapters, "_check", checked_and_then_cut)
    with pytest.raises(CheckpointError, match=f"expected {len(whole)} bytes, got 100, as it chan"):
        read(directory, base)


def test_an_adapter_of_the_model_without_its_head_is_the_same(base, tmp_path):
    """As PEFT writes it where the task is FEATURE_EXTRACTION."""
    want = read(make_adapter(tmp_path / "a", base), base)
    bare = make_adapter(tmp_path / "bare", base, task_type="FEATURE_EXTRACTION")
    own = load_file(bare / TENSORS)
    assert all(f"{PREFIX}model.layers." in name for name in own)
    renamed = {name.replace(f"{PREFIX}model.", PREFIX): x for name, x in own.items()}
    save_file(renamed, bare / TENSORS)
    change(bare, layers_to_transform=[])  # all, as in PEFT
    assert read(bare, base).digest == want.digest
    change(bare, task_type="SEQ_CLS")
    with pytest.raises(CheckpointError, match="task_type: expected one of CAUSAL_LM, FEATURE"):
        read(bare, base)


@pytest.mark.parametrize("start", ["model.language_model.", "language_model.model."])
def test_whole_names_in_a_config_are_those_of_the_model_that_was_trained(base, tmp_path, start):
    """Which calls the layers of its text part otherwise than that part alone does."""
    plain = "model.layers.0.self_attn.q_proj"
    own = plain.replace("model.", start, 1)
    wanted = make_adapter(tmp_path / "a", base, targets=("q_proj",), alpha_pattern={plain: 3.0})
    directory = make_adapter(tmp_path / "b", base, targets=("q_proj",), alpha_pattern={own: 3.0})
    file = directory / TENSORS
    renamed = {x.replace("model.layers", f"{start}layers"): y for x, y in load_file(file).items()}
    save_file(renamed, file)
    layers = range(len(renamed) // 2)
    change(directory, target_modules=[own.replace(".0.", f".{layer}.") for layer in layers])
    spec, layout = read_family(read_config(base))
    layout, placement = replace(layout, part_of="gemma3"), Placement((jax.devices()[0],))
    found = read_adapter(directory, spec, layout, placement, rank=8, dtype="float32")
    assert found.digest == read(wanted, base).digest


def test_modules_that_a_regular_expression_excludes_are_not_missed(base, tmp_path):
    want = read(make_adapter(tmp_path / "few", base, targets=("q_proj",)), base)
    directory = make_adapter(tmp_path / "excluding", base, targets=("q_proj",))
    change(directory, target_modules=["q_proj", "o_proj"], exclude_modules=r".*\.o_proj")
    assert read(directory, base).digest == want.digest


def test_pickle_is_refused_by_name_and_never_read(base, tmp_path):
    directory = make_adapter(tmp_path / "a", base)
    (directory / TENSORS).unlink()
    (directory / "adapter_model.bin").write_bytes(pickle.dumps(Path("/")))
    with pytest.raises(CheckpointError, match=r"adapter_model.bin, which is never loaded because"):
        read(directory, base)
    with pytest.raises(CheckpointError, match=r"expected a directory with adapter_config.json"):
        read(tmp_path / "nowhere", base)


def test_a_digest_stands_for_what_is_computed(base, tmp_path):
    one = read(make_adapter(tmp_path / "1", base), base)
    for rank in (4, 8):
        again = read(make_adapter(tmp_path / f"again{rank}", base), base, rank=rank)
        assert again.digest == one.digest
    assert read(make_adapter(tmp_path / "2", base, seed=1), base).digest != one.digest
    assert read(make_adapter(tmp_path / "3", base, lora_alpha=8), base).digest != one.digest
    same = read(make_adapter(tmp_path / "4", base, alpha_pattern={"proj": 9}), base)
    assert same.digest == one.digest  # no module's name ends in .proj


@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "phi3",
        "gpt2",
        "gpt_neox",
        "diffllama",
        "falcon-new",
        "longcat_flash",
        "gemma4_text",
        "axk2",
        "zamba2",
        "xlstm",
        "zaya",
        "inkling_text",
        "inkling2_loop_text",
        "dory",
        "hrm_text",
    ],
)
def test_arrays_are_what_merged_weights_have_more(tmp_path, variant):
    """Of families whose tensors hold several matrices, are transposed or of unlike layers too."""
    import families

    if variant == "llama":
        config = tiny_config("llama")
    else:
        pytest.importorskip("transformers")
        config = families.hf_config(variant).to_dict()
    base = make_checkpoint(tmp_path / "base", config)
    spec, layout = read_family(read_config(base))
    leaves = adapted_leaves(spec, layout)
    sources = dict.fromkeys(source for leaf in leaves for source in leaf.sources)
    modules = tuple(source.removesuffix(".weight") for source in sources)
    transposed = {
        source.removesuffix(".weight")
        for leaf in leaves
        for source in leaf.sources
        if leaf.one.part is not None and leaf.one.part.transposed
    }
    adapter = make_adapter(tmp_path / "a", base, targets=modules, transposed=transposed)
    own = read(adapter, base).arrays
    with_it = merged(tmp_path / "merged", base, adapter, transposed=transposed)
    before, after = (
        load_weights(directory, spec, layout, Kept(dtype="float32"))
        for directory in (base, with_it)
    )
    assert len(leaves) > 3
    for leaf in leaves:
        down, up = (own[leaf.stack][end + leaf.name] for end in (ADAPTER_DOWN, ADAPTER_UP))
        gained = np.asarray(after[leaf.stack][leaf.name]) - np.asarray(
            before[leaf.stack][leaf.name]
        )
        np.testing.assert_allclose(up @ down, gained, atol=1e-4)
        assert np.abs(gained).max() > 0.01
