"""`import jaxkv` is quick and light: what is heavy is imported where it is used, and torch
never.
"""

import os
import subprocess
import sys
from pathlib import Path

import jaxkv

HEAVY = ("torch", "transformers", "orbax")


def heavy_modules_after(statement: str) -> list[str]:
    """Runs the statement in a fresh interpreter, on the same copy of jaxkv, and lists the heavy
    modules it loaded.
    """
    code = (
        f"import sys; {statement}; print(*sorted(m for m in sys.modules if m.partition('.')[0] "
        f"in {HEAVY}))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(jaxkv.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_import_of_the_public_names_is_light() -> None:
    assert heavy_modules_after("from jaxkv import AsyncLLM, LLM, SamplingParams, functional") == []


def test_an_engine_starts_without_torch() -> None:
    start = "llm = LLM(max_num_seqs=2, max_model_len=64, lazy_compile=True)"
    chat = "llm.get_tokenizer().apply_chat_template([{'role': 'user'}], chat_template='x')"
    heavy = heavy_modules_after(f"from jaxkv import LLM; {start}; {chat}")
    assert "transformers" in heavy  # so what is heavy would be seen above
    assert "torch" not in heavy
