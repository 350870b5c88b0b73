"""The second start takes its programs from the cache: it loads what the first one compiled, and
says the same tokens.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxkv.build import compile_cache
from jaxkv.build.compile_cache import open_program_files, use_compile_cache
from tiny import make_checkpoint, tiny_config

START = """
import json, sys, warnings
from jaxkv import LLM, SamplingParams
from jaxkv.testing import budget_of, engine_of
warnings.simplefilter("error")
limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 8, "max_model_len": 64, "dtype": "float32"}
llm = LLM(sys.argv[1], skip_tokenizer_init=True, **limits)
llm.wait_until_compiled()
params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)
outputs = llm.generate([{"prompt_token_ids": [3, 1, 4]}, {"prompt_token_ids": [9] * 20}], params, use_tqdm=False)
every = engine_of(llm).programs
programs = [every.step(16), every.loop(2)]
print(json.dumps({
    "said": [str(output.outputs[0]) for output in outputs],
    "loaded": every.num_loaded,
    "compiled": next(one.value for one in llm.get_metrics() if one.name == "jaxkv:programs_compiled"),
    "all": every.num_programs,
    "memory": [str(one) for one in sorted(every.memory)],
    "aliased": [program.memory_analysis().alias_size_in_bytes for program in programs],
    "pool": budget_of(llm).pool_bytes,
    "cache": next(line for line in llm.describe().splitlines() if line.startswith("cache ")),
}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cache") / "model", tiny_config("llama"))


@pytest.fixture
def start(checkpoint, tmp_path):
    """Starts an engine in a fresh process, with a cache folder of its own; nothing may come on
    standard error.
    """

    def run() -> dict:
        env = {
            name: value
            for name, value in os.environ.items()
            if name != "JAX_ENABLE_COMPILATION_CACHE"
        }
        env["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
        arguments = [sys.executable, "-c", START, str(checkpoint)]
        done = subprocess.run(
            arguments, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return run


@pytest.fixture
def configured(monkeypatch):
    """Records what would be configured, beside what is: the cache itself stays off in this
    process.
    """

    class Config:
        jax_enable_compilation_cache = True
        jax_compilation_cache_dir = None

        def update(self, name: str, value: object) -> None:
            setattr(self, name, value)

    config = Config()
    monkeypatch.setattr(compile_cache.jax, "config", config)
    return config


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_a_second_start_compiles_nothing_and_says_the_same(start, checkpoint, tmp_path):
    beside = files(checkpoint)
    first, second = start(), start()
    assert (first["loaded"], first["compiled"]) == (0, first["all"])
    assert (second["loaded"], second["compiled"]) == (first["all"], 0)
    assert second["said"] == first["said"]
    assert second["memory"] == first["memory"]
    assert second["aliased"] == first["aliased"]
    assert min(second["aliased"]) >= second["pool"]
    folder = Path(second["cache"].rpartition(" ")[2])
    assert folder.parent == tmp_path / "xdg" / "jaxkv"
    kept = files(folder / "programs")
    assert len(kept) == first["all"]
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    assert files(checkpoint) == beside


def test_the_users_own_settings_are_left_alone(configured, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    configured.jax_compilation_cache_dir = "/own"
    assert use_compile_cache(jax.devices()[0]) == "/own (jax_compilation_cache_dir)"
    configured.jax_enable_compilation_cache = False
    assert use_compile_cache(jax.devices()[0]) == "off: jax_enable_compilation_cache is False"
    assert vars(configured) == {
        "jax_compilation_cache_dir": "/own",
        "jax_enable_compilation_cache": False,
    }
    assert open_program_files(jax.devices()) is None
    configured.jax_enable_compilation_cache = True
    assert open_program_files(jax.devices()) is None
    assert not (tmp_path / "xdg").exists()


def test_a_second_engine_of_a_process_keeps_the_folder(configured, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    where = use_compile_cache(jax.devices()[0])
    assert where == configured.jax_compilation_cache_dir
    assert use_compile_cache(jax.devices()[0]) == where
    for folder in (Path(where).parent, Path(where), Path(where) / "programs"):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert open_program_files(jax.devices()[:1]).folder == Path(where) / "programs"


def test_without_an_absolute_xdg_cache_home_it_is_the_home_directorys(
    configured, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert Path(use_compile_cache(jax.devices()[0])).parent == tmp_path / ".cache" / "jaxkv"


def test_another_cpu_has_another_folder(configured, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = []
    for cpu in ("one", "other", "one"):
        configured.jax_compilation_cache_dir = None
        monkeypatch.setattr(compile_cache, "_cpu", lambda cpu=cpu: cpu)
        names.append(use_compile_cache(jax.devices()[0]))
    assert names[0] == names[2] != names[1]


def test_a_folder_that_cannot_be_used_is_a_reason_and_no_error(configured, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert use_compile_cache(jax.devices()[0]).startswith("off: [Errno 20] Not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compile_cache._folder(jax.devices()[0])
    (folder / "programs").mkdir(parents=True)
    for one in (folder.parent, folder, folder / "programs"):
        one.chmod(0o700)
    for one in (folder.parent, folder, folder / "programs"):
        one.chmod(0o720)
        assert (
            use_compile_cache(jax.devices()[0])
            == f"off: {one} can be written by others than this user"
        )
        one.chmod(0o700)
        assert configured.jax_compilation_cache_dir is None
        assert open_program_files(jax.devices()) is None


def test_a_jax_that_nobody_has_tried_has_its_own_cache_only(configured, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_compile_cache(jax.devices()[0])
    assert open_program_files(jax.devices()) is not None
    monkeypatch.setattr(compile_cache, "UNKNOWN_JAX", jax.__version_info__)
    assert open_program_files(jax.devices()) is None


SHARED = """
import json, sys
from jaxkv import LLM, SamplingParams
from jaxkv.testing import engine_of
limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 8, "max_model_len": 64, "dtype": "float32"}
path, rank, port = sys.argv[1], *map(int, sys.argv[2:])
where = {"nnodes": 2, "node_rank": rank, "master_addr": "localhost", "master_port": port}
llm = LLM(path, skip_tokenizer_init=True, tensor_parallel_size=2, **limits, **where)
every = engine_of(llm).programs
if llm.is_follower:
    llm.follow()
else:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=1)
    (output,) = llm.generate({"prompt_token_ids": [3, 1, 4]}, params, use_tqdm=False)
    llm.shutdown()
    print(">", output.outputs[0].token_ids)
print(">", every.num_loaded, every.num_compiled)
"""


@pytest.mark.slow
def test_of_two_processes_both_load_what_both_have(checkpoint, tmp_path):
    """Each has a folder of its own, as on two hosts."""

    def start() -> list[list[str]]:
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        env = {k: v for k, v in os.environ.items() if k != "JAX_ENABLE_COMPILATION_CACHE"}
        flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SHARED, str(checkpoint), str(rank), str(port)],
                env=env | {"XLA_FLAGS": flags, "XDG_CACHE_HOME": str(tmp_path / str(rank))},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [one.communicate(timeout=200)[0].splitlines() for one in processes]
        finally:
            for one in processes:
                one.kill()
        assert [one.returncode for one in processes] == [0, 0]
        return [[line[2:] for line in lines if line[:2] == "> "] for lines in said]

    (tokens, counts), (others,) = start()
    count = int(counts.split()[1])
    assert counts == others == f"0 {count}"
    kept = [set((tmp_path / str(rank)).rglob("*.program")) for rank in range(2)]
    assert [len(one) for one in kept] == [count, count]
    assert start() == [[tokens, f"{count} {count}"], [f"{count} {count}"]]
    min(kept[1]).unlink()
    few = f"{count - 1} {count}"
    assert start() == [[tokens, few], [few]]
