"""A converted directory holds the weights that its checkpoint gives, bit by bit, and nothing in it
is believed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1

import jaxkv.weights.orbax
from jaxkv import LLM, SamplingParams
from jaxkv.api import cli
from jaxkv.errors import CheckpointError
from jaxkv.models.families import read_config, read_family
from jaxkv.programs.compiled import Programs
from jaxkv.programs.rounding import quantise
from jaxkv.testing import engine_of
from jaxkv.weights.load import Kept, aligned_empty, load_weights
from jaxkv.weights.orbax import convert, load_converted
from tiers import some
from tiny import make_checkpoint, tiny_config
from tokenizers_ import CHAT_TEMPLATE, save_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compile")

LIMITS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "skip_tokenizer_init": True,
}


def load(directory: Path, reader=load_converted, **options: object) -> dict:
    return reader(directory, *read_family(read_config(directory)), Kept(**options))


def assert_equal_bits(got: dict, want: dict) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


@pytest.fixture
def converted(tmp_path) -> Path:
    make_checkpoint(tmp_path / "llama", tiny_config("llama"))
    convert(tmp_path / "llama", tmp_path / "out", dtype="bfloat16")
    return tmp_path / "out"


@pytest.fixture
def change(converted):
    """Changes a JSON file of the converted directory."""

    def change(name: str, **values: object) -> None:
        file = converted / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


# --- the same weights
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "llama-3",
        "llama-biases",
        "qwen2",
        "qwen3-biases",
        "qwen2-mixed-windows",
        "qwen3-layer-types",
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tree_is_the_checkpoints_bit_by_bit_and_orbax_reads_it_too(tmp_path, variant, dtype):
    from orbax.checkpoint import v1 as ocp

    source = make_checkpoint(tmp_path / "in", tiny_config(variant), shards=2)
    num_bytes = convert(source, tmp_path / "out", dtype=dtype)
    want = load(source, load_weights, dtype=dtype)
    assert num_bytes == sum(x.nbytes for x in jax.tree.leaves(want))
    assert_equal_bits(load(tmp_path / "out", dtype=dtype), want)
    if dtype == "bfloat16":
        bits = {"dtype": dtype, "as_bits": True}
        assert_equal_bits(load(tmp_path / "out", **bits), load(source, load_weights, **bits))
    assert_equal_bits(ocp.load(tmp_path / "out" / "orbax"), jax.tree.map(np.asarray, want))


@pytest.mark.parametrize("variant", ["llama", "qwen2-mixed-windows"])
@pytest.mark.parametrize("source_dtype", ["float32", "float16", "bfloat16"])
def test_another_dtype_than_the_stored_one_is_converted_as_the_loader_would(
    tmp_path, monkeypatch, variant, source_dtype
):
    monkeypatch.setattr(
        jaxkv.weights.orbax, "PIECE", 100
    )  # so that the arrays have many, and a shorter last one
    source = make_checkpoint(tmp_path / "in", tiny_config(variant), dtype=source_dtype)
    convert(source, tmp_path / "wide", dtype="float32")
    bits = {"dtype": "bfloat16", "as_bits": True}
    assert_equal_bits(load(tmp_path / "wide", **bits), load(source, load_weights, **bits))
    convert(source, tmp_path / "narrow", dtype="bfloat16")
    narrow = load(source, load_weights, dtype="bfloat16")
    wide = jax.tree.map(lambda x: np.asarray(x).astype(np.float32), narrow)
    assert_equal_bits(load(tmp_path / "narrow", dtype="float32"), wide)


def test_a_head_that_is_stored_although_tied_is_kept_when_it_differs(tmp_path):
    make_checkpoint(tmp_path / "in", tiny_config("llama"))
    (tmp_path / "in" / "config.json").write_text(
        json.dumps(tiny_config("llama", tie_word_embeddings=True))
    )
    convert(tmp_path / "in", tmp_path / "out", dtype="float32")
    weights = load(tmp_path / "out", dtype="float32")
    assert "head" in weights
    assert_equal_bits(weights, load(tmp_path / "in", load_weights, dtype="float32"))


@pytest.mark.parametrize("variant", some(["qwen3", "qwen2-mixed-windows"], "qwen2-mixed-windows"))
def test_a_converted_model_says_the_same(tmp_path, variant):
    source = make_checkpoint(tmp_path / "in", tiny_config(variant), dtype="bfloat16")
    convert(source, tmp_path / "out", dtype="float32")
    prompts = [{"prompt_token_ids": [3, 1, 4, 1, 5, 9, 2, 6]}, {"prompt_token_ids": [7, 7]}]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    # auto is what is stored, also where this CPU would choose bfloat16.
    limits = LIMITS | {"lazy_compile": True, "num_gpu_blocks_override": 8}
    engines = LLM(source, dtype="float32", **limits), LLM(tmp_path / "out", **limits)
    engine_of(engines[1]).programs.executables = engine_of(
        engines[0]
    ).programs.executables  # they differ in nothing
    want, got = (
        [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)] for llm in engines
    )
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert [o.logprobs for o in got] == [o.logprobs for o in want]


# --- the command
# ------------------------------------------------------------------------------------------------------


def test_the_command_takes_along_what_an_engine_needs_and_no_weights_twice(
    tmp_path, capsys, caplog
):
    source = make_checkpoint(tmp_path / "in", tiny_config("llama", vocab_size=420), shards=2)
    save_tokenizer(source)
    (source / "generation_config.json").write_text('{"temperature": 0.25}')
    (source / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (source / "code.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"no")
    out = tmp_path / "out"
    assert cli.main(["convert", str(source), str(out), "--dtype", "float32", "--no-compile"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{out}: 0.4 MB of float32 in ")
    assert (said.err, caplog.records) == ("", [])
    kept = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert {path.name for path in out.iterdir()} == kept | {"jaxkv.json", "orbax"}
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
    shutil.rmtree(source)
    limits = LIMITS | {"skip_tokenizer_init": False, "lazy_compile": True}
    llm = LLM(out, **limits)
    assert llm.get_default_sampling_params().temperature == 0.25
    assert "<|user|>" in llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )


def test_the_command_compiles_what_a_default_engine_needs(tmp_path, capsys, monkeypatch):
    source = make_checkpoint(tmp_path / "in", tiny_config("llama", max_position_embeddings=64))
    compiled = []
    monkeypatch.setattr(Programs, "_compile_each", lambda _, wanted: compiled.extend(wanted))
    monkeypatch.setattr(Programs, "compile_in_background", lambda _: None)
    assert cli.main(["convert", str(source), str(tmp_path / "out")]) == 0
    assert f"model     {tmp_path / 'out'} (llama, 3 layers" in capsys.readouterr().out
    programs = engine_of(
        LLM(tmp_path / "out", skip_tokenizer_init=True, lazy_compile=True)
    ).programs
    wanted = {("step", size) for size in programs.token_buckets}
    wanted |= {("draw", size) for size in programs.drawn_rows}
    wanted |= {("loop", size) for size in programs.row_buckets}
    assert set(compiled) == wanted | {("copy", programs.config.max_num_seqs)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in", "in"], "in: expected nothing there yet; .*"),
        (["in", "link"], "link: expected nothing there yet; .*"),
        (["in", "new", "--dtype", "int8"], "dtype: expected one of float32, bfloat16, got 'int8'"),
        (["nothing", "new"], "nothing: expected a directory .*"),
        (["in", "no/such/folder"], "no/such/folder: expected a folder .*no/such to make it in; .*"),
        (["empty", "new"], ".*config.json: not found.*"),
        (["made", "new"], "made: expected a checkpoint, got what `jaxkv convert` has made .*"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_the_caller_can_mend_is_status_2_and_leaves_nothing(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "in", tiny_config("llama"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_bytes((tmp_path / "in" / "config.json").read_bytes())
    (tmp_path / "made" / "jaxkv.json").write_text("{}")
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["convert", f"./{arguments[0]}", *arguments[1:], "--no-compile"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"jaxkv: (\./|{re.escape(str(tmp_path))}/)?{message}\n", err), err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_error_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    source = make_checkpoint(tmp_path / "in", tiny_config("llama"))
    save = jaxkv.weights.orbax._save

    def spoil(directory: Path, weights: dict) -> None:
        save(directory, weights)
        with (directory / "orbax" / "weights" / "layers.up" / "0.0.0").open("r+b") as file:
            file.write(b"\x01")

    monkeypatch.setattr(jaxkv.weights.orbax, "_save", spoil)
    with pytest.raises(
        CheckpointError, match=r"layers\.up/0\.0\.0: expected the values that were written"
    ):
        convert(source, tmp_path / "out", dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("free", [1000, 10**9])
def test_a_disk_without_room_is_an_os_error_and_leaves_nothing(tmp_path, monkeypatch, free):
    """Known before, or, where a quota is not, from what tensorstore says, whose threads still write
    then.
    """
    source, threads = make_checkpoint(tmp_path / "in", tiny_config("llama")), []

    def write(file: Path) -> None:
        for _ in range(100):
            with suppress(FileNotFoundError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
            time.sleep(0.002)

    def fail(directory: Path, *_: object, **__: object) -> None:
        threads.append(threading.Thread(target=write, args=(directory / "layers.up" / "0.0.0",)))
        threads[-1].start()
        raise ValueError("OUT_OF_RANGE: No space left on device")

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(v1, "save", fail)
    with pytest.raises(OSError, match="got 1000: make room" if free == 1000 else "No space left"):
        convert(source, tmp_path / "out", dtype="float32")
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_others_make_meanwhile_is_refused_by_name(tmp_path, monkeypatch):
    source, out = make_checkpoint(tmp_path / "in", tiny_config("llama")), tmp_path / "out"
    monkeypatch.setattr(jaxkv.weights.orbax, "_compare", lambda *_: out.mkdir())
    with pytest.raises(FileExistsError, match="out: expected nothing there yet"):
        convert(source, out, dtype="float32")
    assert not any(out.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_conversion_leaves_another_one_alone_that_runs(tmp_path, monkeypatch):
    source, out = make_checkpoint(tmp_path / "in", tiny_config("llama")), tmp_path / "out"
    compare = jaxkv.weights.orbax._compare

    def compare_later(*given: object) -> None:
        monkeypatch.setattr(jaxkv.weights.orbax, "_compare", compare)
        convert(source, out, dtype="float32")
        compare(*given)

    monkeypatch.setattr(jaxkv.weights.orbax, "_compare", compare_later)
    with pytest.raises(FileExistsError, match="out: expected nothing there yet"):
        convert(source, out, dtype="float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_what_a_killed_conversion_leaves_is_removed_by_the_next_one(tmp_path):
    source = make_checkpoint(tmp_path / "in", tiny_config("llama"))
    (tmp_path / ".out-original" / "out").mkdir(parents=True)  # somebody else's
    code = (
        "import os, sys, jaxkv.weights.orbax as o; from pathlib import Path; "
        "o._compare = lambda *_: os.kill(os.getpid(), 9); "
        "o.convert(Path(sys.argv[1]), Path(sys.argv[2]), dtype='float32')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "out")], timeout=300, check=False
    )
    assert run.returncode == -9
    assert len(left := sorted(path.name for path in tmp_path.iterdir())) == 3
    assert "out" not in left
    convert(source, tmp_path / "out", dtype="float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out-original", "in", "out"]
    assert_equal_bits(
        load(tmp_path / "out", dtype="float32"), load(source, load_weights, dtype="float32")
    )


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_what_is_quantised_as_it_is_loaded_is_read_matrix_by_matrix(tmp_path, monkeypatch, method):
    config = tiny_config("llama", hidden_size=64, num_attention_heads=4, num_hidden_layers=4)
    source = make_checkpoint(tmp_path / "in", config)
    convert(source, tmp_path / "out", dtype="float32")
    how, sizes, empty = {"quantization": method, "quantise": quantise}, [], aligned_empty

    def allocate(shape, dtype):
        sizes.append(empty(shape, dtype).size)
        return empty(shape, dtype)

    monkeypatch.setattr(jaxkv.weights.orbax, "aligned_empty", allocate)
    got = load(tmp_path / "out", dtype="float32", **how)
    assert max(sizes) == config["vocab_size"] * config["hidden_size"]  # of no stack of layers
    assert_equal_bits(got, load(source, load_weights, dtype="float32", **how))
    file = tmp_path / "out" / "orbax" / "weights" / "layers.up" / "0.0.0"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"up/0\.0\.0: expected the CRC-32"):
        load(tmp_path / "out", dtype="float32", **how)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_flipped_bit_anywhere_is_refused_unless_unchecked(converted, dtype):
    rng, want = np.random.default_rng(0), load(converted, dtype=dtype)
    for file in (converted / "orbax" / "weights").glob("*/[0-9]*"):
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        name = re.escape(f"{file.parent.name}/{file.name}")
        with pytest.raises(CheckpointError, match=f"{name}: expected the CRC-32 [0-9]+ of .*, got"):
            load(converted, dtype=dtype)
        assert jax.tree.structure(load(converted, dtype=dtype, check=False))
        file.write_bytes(whole)
    assert_equal_bits(load(converted, dtype=dtype), want)
    header = json.loads((converted / "jaxkv.json").read_text())
    (converted / "jaxkv.json").write_text(json.dumps(header | {"crc32": {}}))
    with pytest.raises(CheckpointError, match=r"embed/0\.0: expected the CRC-32 None of .*: crc32"):
        load(converted, dtype=dtype)


# --- what is refused
# --------------------------------------------------------------------------------------------------

UP = "orbax/weights/layers.up"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("jaxkv.json", {"format": 1}, r"format: expected 14 \(convert the model again .*, got 1"),
        ("jaxkv.json", {"format": None}, "format: expected 14 .*, got None"),
        ("jaxkv.json", {"crc32": [1]}, "crc32: expected an object"),
        ("jaxkv.json", {"dtype": "int8"}, "dtype: expected one of float32, bfloat16, got 'int8'"),
        ("jaxkv.json", {"dtype": ["bfloat16"]}, "dtype: expected one of float32, bfloat16, got"),
        (
            "jaxkv.json",
            {"dtype": "float32"},
            "embed: dtype: expected <f4, got bfloat16; embed: 0.0: expected 28992 bytes",
        ),
        ("jaxkv.json", {"spec": []}, "spec: expected an object"),
        (
            "jaxkv.json",
            {"spec": {"num_layers": -3}},
            "spec: expected what config.json says, got another activation, .*",
        ),
        (
            "config.json",
            {"rms_norm_eps": 1e-6},
            "spec: expected what config.json says, got another norm_eps; convert .* hf_overrides",
        ),
        (
            "config.json",
            {"num_hidden_layers": -1},
            "config.json: num_hidden_layers: expected a whole number",
        ),
        (
            "config.json",
            {"intermediate_size": 2**24},
            r"gate: shape: expected \[3, 16777216, 48\], got \[3, 80, 48\]",
        ),
        (
            "config.json",
            {"attention_bias": True},
            r"missing array layers\.q_bias; .*and [2-9] more|missing .*k_bias",
        ),
        (
            f"{UP}/.zarray",
            {"shape": [3, -80, 48]},
            r"layers\.up: shape: expected \[3, 80, 48\], got \[3, -80, 48\]",
        ),
        (f"{UP}/.zarray", {"shape": [2**60, 2**60]}, r"layers\.up: shape: expected"),
        (
            f"{UP}/.zarray",
            {"chunks": [1, 80, 48]},
            r"layers\.up: chunks: expected \[3, 80, 48\], got \[1, 80, 48\]",
        ),
        (f"{UP}/.zarray", {"dtype": "<f8"}, r"layers\.up: dtype: expected bfloat16, got <f8"),
        (f"{UP}/.zarray", {"order": "F"}, r"layers\.up: order: expected C, got F"),
        (
            f"{UP}/.zarray",
            {"compressor": {"id": "zstd"}},
            r"layers\.up: compressor: expected None, got",
        ),
        (
            f"{UP}/.zarray",
            {"filters": [{"id": "pickle"}]},
            r"layers\.up: filters: expected None, got",
        ),
    ],
)
def test_a_claim_that_does_not_hold_is_named_before_anything_is_read(
    converted, change, monkeypatch, name, values, message
):
    change(name, **values)
    monkeypatch.setattr(jaxkv.weights.orbax, "aligned_empty", None)
    with pytest.raises(CheckpointError, match=message):
        load(converted, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=message):
        LLM(converted, **LIMITS)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def leave_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("harm", "name", "message"),
    [
        (truncate, f"{UP}/0.0.0", r"layers\.up: 0\.0\.0: expected 23040 bytes, got 23039"),
        (Path.unlink, f"{UP}/0.0.0", r"layers\.up: expected the files \.zarray and 0\.0\.0"),
        (leave_a_pipe, f"{UP}/0.0.0", r"layers\.up: expected the files \.zarray and 0\.0\.0"),
        (Path.unlink, f"{UP}/.zarray", r"layers\.up: expected the files \.zarray and 0\.0\.0"),
        (lambda path: path.write_text("["), f"{UP}/.zarray", r"\.zarray: expected JSON"),
        (shutil.rmtree, UP, r"missing array layers\.up"),
        (shutil.rmtree, "orbax/weights/head", "missing array head"),
        (shutil.rmtree, "orbax", "missing array embed; missing array norm; .*and 2 more"),
        (
            Path.mkdir,
            "orbax/weights/layers.q_bias",
            r"array that llama does not use: layers\.q_bias",
        ),
        (Path.unlink, "config.json", "config.json: not found"),
        (lambda path: path.write_text("[" * 10**6), "jaxkv.json", "jaxkv.json: expected JSON"),
        (lambda path: path.write_text("1" * 10**5), "jaxkv.json", "jaxkv.json: expected JSON"),
        (lambda path: path.write_text(" " * 10_000_001), "jaxkv.json", "at most 10000000 bytes"),
        (lambda path: path.write_text("[]"), "jaxkv.json", "jaxkv.json: expected a JSON object"),
    ],
)
def test_a_broken_directory_is_refused_by_name_before_anything_is_read(
    converted, monkeypatch, harm, name, message
):
    harm(converted / name)
    monkeypatch.setattr(jaxkv.weights.orbax, "aligned_empty", None)
    with pytest.raises(CheckpointError, match=message):
        load(converted, dtype="bfloat16")


def test_a_directory_without_the_header_is_not_a_converted_one(converted):
    (converted / "jaxkv.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"jaxkv\.json: not found; expected a directory made by `jaxkv convert`",
    ):
        load(converted, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(converted, **LIMITS)


def test_a_file_that_shrinks_after_the_check_is_an_error(converted, monkeypatch):
    locate = jaxkv.weights.orbax._locate

    def then_shrink(*arguments: object) -> object:
        found = locate(*arguments)
        truncate(converted / UP / "0.0.0")
        return found

    monkeypatch.setattr(jaxkv.weights.orbax, "_locate", then_shrink)
    with pytest.raises(
        CheckpointError, match=r"layers\.up/0\.0\.0: expected 23040 more bytes, got its end"
    ):
        load(converted, dtype="bfloat16")


# --- memory
# -----------------------------------------------------------------------------------------------------------

MEASURE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxkv.models.families import read_config, read_family
from jaxkv.weights.load import Kept
from jaxkv.weights.orbax import load_converted

def memory(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

jax.block_until_ready((jnp.array(np.zeros(9), copy=True), jax.device_put(np.zeros(9))))  # what JAX itself takes
spec, layout = read_family(read_config(Path(sys.argv[1])))
before = memory("VmRSS")
weights = load_converted(Path(sys.argv[1]), spec, layout, Kept(dtype=sys.argv[2]))
print(memory("VmHWM") - before, sum(x.nbytes for x in jax.tree.leaves(weights)))
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads the peak of the resident memory from /proc"
)
@pytest.mark.parametrize("dtype", some(["bfloat16", "float32"], "float32"))
def test_peak_memory_is_the_weights_themselves(tmp_path, dtype):
    shape = {
        "hidden_size": 512,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "vocab_size": 16000,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    source = make_checkpoint(
        tmp_path / "in", tiny_config("llama", **shape, **heads), dtype="bfloat16"
    )
    convert(source, tmp_path / "out", dtype="bfloat16")
    arguments = [sys.executable, "-c", MEASURE, str(tmp_path / "out"), dtype]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    peak, num_bytes = map(int, done.stdout.split())
    assert num_bytes > 90e6
    assert peak < 1.35 * num_bytes, (
        f"{peak / num_bytes:.2f} times the weights' {num_bytes / 1e6:.0f} MB"
    )
