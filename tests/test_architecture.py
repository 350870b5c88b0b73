"""The floors and house rules of the package, held by reading its source. Each rule is also seen to
fail.
"""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    file
    for folder in ("jaxkv", "kernels_pallas", "scripts")
    for file in (ROOT / folder).rglob("*.py")
)
SOURCES = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in FILES}
FLOORS = [
    "axes errors config files lora processes pytree structured version",
    "kv",
    "ops",
    "models weights placement",
    "programs",
    "holding",
    "build",
]
FLOORS += [
    "requests pictures",
    "engine",
    "api tools functional",
    "testing inputs metrics outputs ray sampling_params __init__ __main__",
]
FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units.split()}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def imports(path: str, node: ast.AST) -> set[str]:
    """Imported names in absolute form: `from a import b` gives a.b, `from . import b` in a/c.py
    gives a.b.
    """
    if isinstance(node, ast.ImportFrom):
        folder = path.split("/")[:-1]
        base = folder[: len(folder) + 1 - node.level] if node.level else []
        return {".".join(filter(None, [*base, node.module, alias.name])) for alias in node.names}
    return {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()


def run_at_import(node: ast.AST) -> list[ast.AST]:
    children = [] if isinstance(node, FUNCTION) else ast.iter_child_nodes(node)
    return [node, *(inner for child in children for inner in run_at_import(child))]


def lower_floors_only(path: str, node: ast.AST) -> bool:
    unit = path.removesuffix(".py").split("/")[1]
    targets = [
        name.split(".")[1:2] for name in imports(path, node) if name.split(".")[0] == "jaxkv"
    ]
    floors = [FLOOR_OF.get("".join(target), FLOOR_OF["__init__"]) for target in targets]
    return unit in FLOOR_OF and max(floors, default=0) <= FLOOR_OF[unit]


def jax_only(path: str, node: ast.AST) -> bool:
    return {name.split(".")[0] for name in imports(path, node)} <= {
        "jax",
        "kernels_pallas",
        *sys.stdlib_module_names,
    }


def jit_place(path: str, node: ast.AST) -> bool:
    names = (
        {node.attr}
        if isinstance(node, ast.Attribute)
        else {name.split(".")[-1] for name in imports(path, node)}
    )
    return path.startswith("jaxkv/programs/") or not names & {"jit", "pjit"}


def function_85_lines(path: str, node: ast.AST) -> bool:
    return not isinstance(node, FUNCTION) or node.end_lineno - node.lineno < 85


def no_assert_blind_except_torch_pickle(path: str, node: ast.AST) -> bool:
    if isinstance(node, ast.ExceptHandler):
        caught = {ast.unparse(leaf) for leaf in ast.walk(node.type)} if node.type else {"Exception"}
        return not caught & {"Exception", "BaseException"}
    if isinstance(node, (ast.Attribute, ast.keyword)):
        return ast.unparse(node) not in ("torch.load", "allow_pickle=True")
    unsafe = {name.split(".")[0] for name in imports(path, node)} & {"torch", "pickle"}
    return not unsafe and not isinstance(node, ast.Assert)


def no_jax_numpy(path: str, node: ast.AST) -> bool:
    names = {ast.unparse(node)} if isinstance(node, ast.Attribute) else imports(path, node)
    return not any(f"{name}.".startswith("jax.numpy.") for name in names)


def no_keyword_dict_of_any(path: str, node: ast.AST) -> bool:
    """Keywords that go through such a dict are seen by no type checker."""
    return not (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.Dict)
        and ast.unparse(node.annotation) == "Any"
    )


def at_most_20_fields(path: str, node: ast.AST) -> bool:
    """But for what callers set, whose fields are vLLM's."""
    if not isinstance(node, ast.ClassDef) or node.name in ("SamplingParams", "EngineOptions"):
        return True
    return sum(isinstance(one, ast.AnnAssign) for one in node.body) <= 20


def kernel_operands_by_name(path: str, node: ast.AST) -> bool:
    if not isinstance(node, FUNCTION):
        return not (isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Store))
    vararg = node.args.vararg.arg if node.args.vararg else None
    cut = {
        leaf.value.id
        for leaf in ast.walk(node)
        if isinstance(leaf, ast.Subscript) and isinstance(leaf.value, ast.Name)
    }
    return vararg not in cut


@cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(text)))


def breaches(rule, sources: dict[str, str]) -> list[str]:
    walks = {path: nodes_of(text) for path, text in sources.items() if path.startswith(SCOPE[rule])}
    broken = [(path, node) for path, walk in walks.items() for node in walk if not rule(path, node)]
    return [f"{path}:{getattr(node, 'lineno', 1)}: {rule.__name__}" for path, node in broken]


def check_no_cycle(sources: dict[str, str]) -> None:
    module_of = {
        path: path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in sources
    }
    known, graph = set(module_of.values()), {}
    for path, module in module_of.items():
        names = {
            name for node in run_at_import(ast.parse(sources[path])) for name in imports(path, node)
        }
        graph[module] = {
            name if name in known else name.rpartition(".")[0] for name in names
        } & known - {module}
    TopologicalSorter(graph).prepare()


GOOD = {
    "jaxkv/__init__.py": "from jaxkv.api.llm import LLM",
    "jaxkv/api/llm.py": "from jaxkv.engine.engine import Engine\nfrom jaxkv.api.batch_files import run",
    "jaxkv/api/batch_files.py": "def run():\n    from jaxkv.api import llm\n    try: f()\n    except OSError: raise",
    "jaxkv/engine/engine.py": "import numpy as np, jax\nfrom . import request\nfrom jaxkv.programs.loop import decode",
    "jaxkv/programs/loop.py": "import jax\nfrom jaxkv.programs.step import step\ndecode = jax.jit(step)",
    "kernels_pallas/tpu/a.py": "import jax.numpy as jnp, math\nfrom kernels_pallas import reference",
}
SCOPE = {
    lower_floors_only: "jaxkv/",
    jax_only: "kernels_pallas/",
    jit_place: "jaxkv/",
    no_jax_numpy: ("jaxkv/engine/", "jaxkv/holding/", "jaxkv/requests/"),
    no_assert_blind_except_torch_pickle: "jaxkv/",
    function_85_lines: ("jaxkv/", "scripts/"),
    no_keyword_dict_of_any: ("jaxkv/", "kernels_pallas/"),
    at_most_20_fields: ("jaxkv/", "kernels_pallas/"),
    kernel_operands_by_name: "kernels_pallas/",
}
BREACHES = {
    lower_floors_only: [
        ("jaxkv/kv/state.py", "def f():\n    from jaxkv.ops import layers"),
        ("jaxkv/api/cli.py", "from jaxkv import LLM"),
        ("jaxkv/kv/codecs/a.py", "from ...models.spec import ModelSpec"),
        ("jaxkv/utils.py", "import os"),
    ],
    jax_only: [("kernels_pallas/tpu/a.py", "import jaxkv.axes")],
    jit_place: [
        ("jaxkv/ops/a.py", "@jax.jit\ndef f(): 0"),
        ("jaxkv/api/llm.py", "from jax import jit as c"),
    ],
    no_jax_numpy: [
        ("jaxkv/engine/a.py", text)
        for text in ("from jax import numpy as jnp", "x = jax.numpy.zeros(3)")
    ],
    no_assert_blind_except_torch_pickle: [
        ("jaxkv/api/llm.py", text)
        for text in (
            "assert x",
            "try: f()\nexcept: pass",
            "try: f()\nexcept (KeyError, Exception): pass",
            "def f(): import torch.nn",
            "from pickle import loads",
            "np.load(path, allow_pickle=True)",
        )
    ],
    function_85_lines: [
        ("scripts/a.py", "def f():\n" + " 1\n" * 85),
    ],
    no_keyword_dict_of_any: [("jaxkv/ops/a.py", "known: Any = {'layer': 0}\nf(**known)")],
    at_most_20_fields: [
        ("jaxkv/config.py", "class A:\n" + "".join(f" x{i}: int\n" for i in range(21)))
    ],
    kernel_operands_by_name: [
        ("kernels_pallas/tpu/a.py", "def kernel(*refs):\n" + text)
        for text in (
            " num, *rest = refs",
            " q, rest = refs[0], 1",
            " def inner(): return refs[2:]",
            " for a, *b in refs: 0",
        )
    ],
}


@pytest.mark.parametrize("rule", SCOPE)
def test_the_source_keeps_the_rule_and_a_breach_is_seen(rule):
    assert breaches(rule, SOURCES) + breaches(rule, GOOD) == []
    assert all(breaches(rule, GOOD | {path: text}) for path, text in BREACHES[rule])


def test_there_is_no_import_cycle():
    check_no_cycle(SOURCES)
    check_no_cycle(GOOD)
    for path, text in [
        ("jaxkv/programs/step.py", "from jaxkv.programs import loop"),
        ("jaxkv/api/llm.py", "import jaxkv"),
    ]:
        with pytest.raises(CycleError):
            check_no_cycle(GOOD | {path: text})
