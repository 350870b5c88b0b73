"""The command: text on standard output, figures and errors on standard error, and a status that
scripts can use.
"""

import gc
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import jaxkv
from adapters import make_adapter
from jaxkv.api import cli
from jaxkv.api.llm import LLM
from jaxkv.build.memory import Budget
from jaxkv.config import SamplingParams
from jaxkv.lora.request import LoRARequest
from jaxkv.programs.compiled import Programs
from tiny import make_checkpoint, tiny_config
from tokenizers_ import save_tokenizer

COMMANDS = ("generate", "batch", "serve", "convert", "plan", "check")
PROMPT = "Once upon a time"
pytestmark = pytest.mark.usefixtures("quick_compile", "compile_once")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("cli") / "model", tiny_config("llama", vocab_size=420)
    )
    save_tokenizer(directory)
    return directory


@pytest.fixture
def generate(checkpoint, capsys):
    """Runs `jaxkv generate` with the tiny model; returns (status, standard output, standard
    error).
    """

    def run(*arguments: str, model: Path | str = checkpoint) -> tuple[int, str, str]:
        common = [
            "--model",
            str(model),
            "--dtype",
            "float32",
            "--max-model-len",
            "64",
            "--ignore-eos",
        ]
        status = cli.main(["generate", *common, "--max-tokens", "12", *arguments])
        return status, *capsys.readouterr()

    return run


def test_the_prompt_and_its_continuation_go_to_standard_output(generate, checkpoint):
    status, out, err = generate(PROMPT, "--temperature", "0", "--lazy-compile")
    llm = LLM(checkpoint, dtype="float32", max_model_len=64, max_num_seqs=1, lazy_compile=True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert (status, out) == (0, PROMPT + output.outputs[0].text + "\n")
    num_prompt = len(output.prompt_token_ids)
    figures = (
        rf"\[{num_prompt} prompt \+ 12 new tokens; time to first token [\d.]+ s, [\d.]+ tokens/s "
        rf"after it, without the "
        rf"[\d.]+ s of compilation and [\d.]+ s of loading; KV cache: {num_prompt + 11} of 64 "
        rf"tokens\]\n"
    )
    assert re.fullmatch(figures, err)


def test_figures_leave_out_what_was_compiled_while_loading(generate, monkeypatch):
    # As on an accelerator, where the size of the pool follows from compiled programs.
    def hand_over(self: Budget, programs: Programs) -> None:
        programs.compile_s += 1000.0

    monkeypatch.setattr(Budget, "hand_over", hand_over)
    _, _, err = generate(PROMPT)
    first_s, compiling_s = re.search(r"first token (\S+) s, .* the (\S+) s of comp", err).groups()
    assert float(first_s) >= 0
    assert float(compiling_s) < 1000


def test_what_no_flag_says_is_as_generation_config_has_it(generate, checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        tmp_path.joinpath(file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"top_k": 1, "max_new_tokens": 5}')
    greedy = generate(PROMPT, "--quiet", "--temperature", "0")
    warm = ("--quiet", "--temperature", "2")
    assert generate(PROMPT, *warm, model=tmp_path) == greedy
    assert generate(PROMPT, *warm, "--top-k", "0", model=tmp_path) == generate(PROMPT, *warm)
    assert generate(PROMPT, *warm, "--generation-config", "vllm", model=tmp_path)[1] != greedy[1]
    common = ["--model", str(tmp_path), "--dtype", "float32", "--max-model-len", "64"]
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": 1, "prompt": PROMPT}))
    out = tmp_path / "out.jsonl"
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(out)]
    assert cli.main(["batch", *common, *files, "--ignore-eos", "--quiet", "--lazy-compile"]) == 0
    row = json.loads(out.read_text())
    assert row["num_output_tokens"] == 5
    assert greedy[1].startswith(PROMPT + row["text"])


def test_a_chat_is_answered_without_repeating_the_message(generate, checkpoint, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("<|user|>{{ messages[0].content }}<|assistant|>")
    arguments = ("--quiet", "--temperature", "0", "--chat-template", str(template))
    status, out, _ = generate(PROMPT, "--chat", *arguments)
    llm = LLM(checkpoint, dtype="float32", max_model_len=64, max_num_seqs=1, lazy_compile=True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    message = [{"role": "user", "content": PROMPT}]
    (want,) = llm.chat(message, params, False, chat_template=template.read_text())
    assert (status, out) == (0, want.outputs[0].text + "\n")
    refused = generate(PROMPT, "--chat")
    assert refused[0] == 2
    assert refused[2].startswith("jaxkv: chat: this tokenizer has no chat template")


@pytest.mark.slow
def test_a_prompt_is_completed_with_an_adapter(generate, checkpoint, tmp_path):
    path = make_adapter(tmp_path / "a", checkpoint)
    llm = LLM(
        checkpoint,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        lazy_compile=True,
        enable_lora=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (want,) = llm.generate(PROMPT, params, False, lora_request=LoRARequest("a", 1, path))
    status, out, _ = generate(PROMPT, "--temperature", "0", "--lora", str(path))
    assert (status, out) == (0, f"{PROMPT}{want.outputs[0].text}\n")
    assert out != generate(PROMPT, "--temperature", "0")[1]
    status, _, err = generate(PROMPT, "--lora", str(path), "--max-lora-rank", "2")
    assert status == 2
    assert "expected a rank of at most max_lora_rank=2 of LLM, got 4" in err


def test_quiet_leaves_standard_error_empty(generate):
    loud, quiet = generate(PROMPT), generate(PROMPT, "--quiet")
    assert quiet == (0, loud[1], "")


def test_a_single_token_has_no_rate(generate):
    assert re.search(
        "1 new tokens; .*, no tokens after it", generate(PROMPT, "--max-tokens", "1")[2]
    )


def test_without_a_prompt_standard_input_is_read(generate, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert generate("--quiet") == generate(PROMPT, "--quiet")


def test_a_stop_string_ends_the_output(generate):
    whole = generate(PROMPT, "--quiet", "--temperature", "0")[1].removeprefix(PROMPT)
    stop = whole[4:6]
    stopped = generate(
        PROMPT, "--quiet", "--temperature", "0", "--stop", "never ever", "--stop", stop
    )
    assert stopped == (0, PROMPT + whole[: whole.index(stop)] + "\n", "")


def test_a_seed_decides_what_is_drawn(generate):
    drawn = [generate(PROMPT, "--quiet", "--temperature", "2", "--seed", seed)[1] for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2]
    unseeded = [generate(PROMPT, "--quiet", "--temperature", "2")[1] for _ in range(2)]
    assert unseeded[0] == unseeded[1]
    narrow = [
        generate(PROMPT, "--quiet", "--temperature", "2", *only)[1]
        for only in (("--top-k", "1"), ("--top-p", "0.000001"), ("--min-p", "1"))
    ]
    assert set(narrow) == {generate(PROMPT, "--quiet", "--temperature", "0")[1]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature: expected .*, got -1.0"),
        (["--temperature", "nan"], "temperature: expected .*, got nan"),
        (["--top-p", "0"], "top_p: expected .*, got 0.0"),
        (["--max-tokens", "0"], "max_tokens: expected .*, got 0"),
        (["--min-tokens", "13"], "min_tokens: expected .*, got 13"),
        (["--stop", ""], "stop: expected .*, got .*"),
        (["--dtype", "int8"], "dtype: expected .*, got 'int8'"),
        (["--kv-cache-dtype", "int2"], "kv_cache_dtype: expected .*, got 'int2'"),
        (["--block-size", "10"], "block_size: expected .*, got 10"),
        (["--max-model-len", "1000"], "max_model_len: expected at most 256 .*, got 1000"),
        (
            ["--tensor-parallel-size", "2"],
            "tensor_parallel_size: expected 1 to 1, the devices here, got 2",
        ),
        (["--gpu-memory-utilization", "90"], "gpu_memory_utilization: expected .*, got 90.0"),
        (["--backend", "cuda"], "backend: expected .*, got 'cuda'"),
        (["--backend", "pallas_tpu"], "backend='pallas_tpu': expected a TPU, got cpu"),
        (["--model", "/nothing/here"], "/nothing/here: expected a directory .*"),
        (
            ["--tokenizer", "/nothing/here"],
            "tokenizer: /nothing/here: expected a directory with tokenizer.json .*, got nothing .*",
        ),
    ],
)
def test_what_the_caller_can_mend_is_status_2_and_one_line(generate, arguments, message):
    status, out, err = generate(PROMPT, *arguments)
    assert (status, out) == (2, "")
    assert re.fullmatch(rf"jaxkv: {message}\n", err), err


def test_a_bad_prompt_is_status_2_and_nothing_on_standard_output(generate, monkeypatch):
    for prompt, message in (
        ("", "the prompt is empty"),
        ("x" * 500, "the prompt has 501 tokens"),
        ("\udcff", "Unicode"),
    ):
        status, out, err = generate(prompt)
        assert (status, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert generate()[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [["--temperature", "warm"], ["--max-tokens", "many"], ["--unknown"], ["two", "prompts"]],
    ids=lambda arguments: arguments[0],
)
def test_arguments_that_cannot_be_read_show_the_usage(generate, capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        generate(*arguments, PROMPT)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: jaxkv" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--hf-overrides", '{"a":'], "expected JSON, got '{\"a\":': Expecting value"),
        (["batch", "-i", "a", "-o", "b", "--shard", "1"], "expected I/N, such as 0/8, got '1'"),
        (["batch", "-i", "a", "-o", "b", "--shard", "a/2"], "expected I/N, such as 0/8, got"),
    ],
)
def test_a_flag_says_what_it_expected(capsys, arguments, message):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_an_interrupt_is_status_130_without_a_traceback(generate, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert generate(PROMPT) == (130, "", "")


def test_an_interrupt_during_a_garbage_collection_is_not_lost(generate, monkeypatch):
    def collecting(*_: object) -> None:
        gc.callbacks.remove(collecting)
        os.kill(os.getpid(), signal.SIGINT)

    def stream(*_: object, **__: object) -> None:
        gc.callbacks.append(collecting)
        gc.collect()
        time.sleep(5)

    monkeypatch.setattr(LLM, "stream", stream)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert generate(PROMPT) == (130, "", "")
    finally:
        signal.signal(signal.SIGINT, before)


def test_version_and_help(capsys):
    for arguments, shown in (
        (["--version"], f"jaxkv {jaxkv.__version__}\n"),
        *(([command, "--help"], f"usage: jaxkv {command}") for command in COMMANDS),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert out.startswith(shown)
        assert ("examples:\n  jaxkv " in out) == ("--help" in arguments)
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2


@pytest.mark.parametrize("size", [10, 10**6])
def test_a_reader_that_has_gone_is_no_error(monkeypatch, capfd, size):
    """`jaxkv ... | head`, both where the pipe breaks at once and where only the end is flushed."""
    read, written = os.pipe()
    os.close(read)
    with open(written, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        monkeypatch.setattr(cli, "_plan", lambda args: print("x" * size) or 0)
        assert cli.main(["plan", "config.json"]) == 141
    assert capfd.readouterr().err == ""


def test_what_a_system_sends_before_it_kills_ends_a_conversion_as_ctrl_c_does(
    checkpoint, tmp_path, monkeypatch
):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        "jaxkv.weights.orbax.convert", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert cli.main(["convert", str(checkpoint), str(tmp_path / "out")]) == 130
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_model_that_pools_is_not_converted(checkpoint, tmp_path, capsys):
    shutil.copytree(checkpoint, tmp_path / "in")
    (tmp_path / "in" / "modules.json").write_text("[]")
    assert cli.main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "expected a model that generates, got one that pools" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["in"]
