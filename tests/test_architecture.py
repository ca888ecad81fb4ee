"""The rules that CONTRIBUTING.md gives for the package's layers, checked on its syntax trees."""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

PACKAGE = "composite_losses"
REPOSITORY = Path(__file__).parents[1]
MAX_LINES = 400
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
BLANKET_IGNORE = re.compile(r"#\s*type:\s*ignore(?!\[)")


class Layer(NamedTuple):
    """What the files of a layer may import besides the standard library and their own layer."""

    own: set[str]
    third_party: set[str]


BASE = {"errors", "functional", "nets", "heads"}
LAYERS = {
    "errors": Layer(set(), set()),
    "functional": Layer({"errors"}, {"torch"}),
    "nets": Layer({"errors"}, {"torch", "einops", "tensordict"}),
    "heads": Layer({"errors", "functional"}, {"torch", "tensordict"}),
    "losses": Layer(BASE, {"torch", "tensordict"}),
    "export": Layer(BASE, {"torch", "tensordict", "onnx", "onnxruntime", "onnxscript"}),
    "__init__": Layer(BASE | {"losses", "export"}, set()),
}
# The demo is an application: it may import anything.
APPLICATION = "demo"
TORCHRL_FILES = {"losses/_torchrl.py", "nets/_torchrl.py"}


class Import(NamedTuple):
    """One imported name, absolute (`None` where a relative import leaves the package)."""

    name: str | None
    line: int
    in_function: bool


def module_name(path: str) -> str:
    """The dotted name of a file given by its path inside the package."""
    parts = [PACKAGE, *PurePosixPath(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(node: ast.AST, package: list[str]) -> list[str | None]:
    """The names that one node imports, for a file in `package`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level > len(package):
            return [None]
        base = package[: len(package) - node.level + 1] if node.level else []
        base = [*base, *([node.module] if node.module else [])]
        return [".".join(base + ([] if a.name == "*" else [a.name])) for a in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = getattr(node.func, "attr", getattr(node.func, "id", None))
        if function in {"import_module", "__import__"}:
            return [str(node.args[0].value)]
    return []


def imports(path: str, tree: ast.AST) -> Iterator[Import]:
    """Every import in a file, wherever it stands."""
    package = module_name(path).split(".")
    if PurePosixPath(path).name != "__init__.py":
        package = package[:-1]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inside = {id(node) for f in ast.walk(tree) if isinstance(f, functions) for node in ast.walk(f)}
    for node in ast.walk(tree):
        for name in imported_names(node, package):
            yield Import(name, getattr(node, "lineno", 0), id(node) in inside)


def layer_of(name: str) -> str:
    """The layer of a dotted name of the package; what is not one belongs to the top level."""
    second = [*name.split("."), "__init__"][1]
    return second if second in LAYERS or second == APPLICATION else "__init__"


def import_fault(path: str, layer: str, found: Import) -> str | None:
    """What is wrong with one import, if anything."""
    if found.name is None:
        return "relative import past the package"
    top = found.name.split(".")[0]
    if top == PACKAGE:
        target = layer_of(found.name)
        if found.in_function:
            return f"function-level import of {found.name}"
        if layer not in (target, APPLICATION) and target not in LAYERS[layer].own:
            return f"{layer} must not import {target} ({found.name})"
    elif layer != APPLICATION and top not in sys.stdlib_module_names:
        allowed = LAYERS[layer].third_party | ({"torchrl"} if path in TORCHRL_FILES else set())
        if top not in allowed:
            return f"{layer} must not import {top}"
    return None


def is_listing(node: ast.stmt) -> bool:
    """Whether a statement may stand in an `__init__.py`."""
    if isinstance(node, ast.Assign):
        return all(isinstance(t, ast.Name) and t.id.startswith("__") for t in node.targets)
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return docstring or isinstance(node, ast.Import | ast.ImportFrom)


def file_faults(path: str, source: str) -> Iterator[str]:
    """What is wrong with one file, imports aside."""
    tree = ast.parse(source)
    pure = PurePosixPath(path)
    if len(source.splitlines()) > MAX_LINES:
        yield f"{path}: more than {MAX_LINES} lines"
    for part in pure.with_suffix("").parts:
        if VAGUE_NAMES & set(part.lower().split("_")):
            yield f"{path}: the name {part} says nothing"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield f"{path}:{node.lineno}: assert"
    for number, line in enumerate(source.splitlines(), start=1):
        if BLANKET_IGNORE.search(line):
            yield f"{path}:{number}: type: ignore without a code"
    if pure.name == "__init__.py":
        for node in tree.body:
            if not is_listing(node):
                yield f"{path}:{node.lineno}: logic in an __init__"


def cycle_fault(sources: Mapping[str, str]) -> Iterator[str]:
    """One cycle of imports between files, if there is any."""
    modules = {module_name(path) for path in sources}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        edges = graph.setdefault(module_name(path), set())
        for found in imports(path, ast.parse(source)):
            name = found.name or ""
            while name and name not in modules:
                name = name.rpartition(".")[0]
            edges |= {name} - {"", PACKAGE}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield "cycle: " + " <- ".join(error.args[1])


def package_faults(sources: Mapping[str, str]) -> list[str]:
    """Every breach of the rules; `sources` maps paths inside the package to their text."""
    faults: list[str] = []
    for path, source in sources.items():
        faults += file_faults(path, source)
        layer = PurePosixPath(path).parts[0].removesuffix(".py")
        if layer not in LAYERS and layer != APPLICATION:
            faults.append(f"{path}: {layer} is no layer")
            continue
        for found in imports(path, ast.parse(source)):
            if fault := import_fault(path, layer, found):
                faults.append(f"{path}:{found.line}: {fault}")
    return [*faults, *cycle_fault(sources)]


def oracle_faults(sources: Mapping[str, str]) -> list[str]:
    """Every import of the package by a reference implementation."""
    return [
        f"{path}:{found.line}: an oracle must not import {found.name}"
        for path, source in sources.items()
        for found in imports(path, ast.parse(source))
        if (found.name or "").split(".")[0] == PACKAGE
    ]


def read(directory: Path) -> dict[str, str]:
    """The Python files below a directory: relative path -> text."""
    return {
        path.relative_to(directory).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(directory.rglob("*.py"))
    }


def test_the_package_keeps_its_rules() -> None:
    sources = read(REPOSITORY / PACKAGE)
    assert {"__init__.py", "errors.py"} <= sources.keys()
    assert package_faults(sources) == []


def test_the_oracles_import_nothing_of_ours() -> None:
    assert oracle_faults(read(REPOSITORY / "tests" / "reference")) == []


CLEAN = {
    "__init__.py": (
        '"""Names."""\n'
        "from composite_losses import errors, functional\n"
        "from composite_losses.losses import Loss\n"
        '__all__ = ["Loss", "errors", "functional"]\n'
    ),
    "errors.py": "class ShapeError(ValueError): ...\n",
    "functional/__init__.py": "from composite_losses.functional.ratios import ratio\n",
    "functional/ratios.py": (
        "import math\nimport torch\nfrom composite_losses.errors import ShapeError\n"
    ),
    "heads/__init__.py": "from composite_losses.heads.plan import Plan\n",
    "heads/plan.py": (
        "from tensordict import TensorDict\nfrom composite_losses.functional import ratios\n"
        "x: int = f()  # type: ignore[assignment]\n"
    ),
    "losses/__init__.py": "from composite_losses.losses._base import Loss\n",
    "losses/_base.py": (
        "from ..heads import Plan\nfrom ._torchrl import LossModule\n"
        "from composite_losses.nets.mlp import MLP\n"
    ),
    "losses/_torchrl.py": "from torchrl.objectives import LossModule\n",
    "nets/__init__.py": "from composite_losses.nets.mlp import MLP\n",
    "nets/mlp.py": "import torch.nn.functional as F\nfrom einops import rearrange\n",
    "nets/_torchrl.py": "def convert():\n    from torchrl.modules import MLP\n",
    "export/__init__.py": "",
    "export/onnx.py": "def save():\n    import onnx\n",
    "demo/__init__.py": "",
    "demo/__main__.py": "import vmas\nimport torchrl\nfrom composite_losses import Loss\n",
}


def test_clean_sources_have_no_fault() -> None:
    assert package_faults(CLEAN) == []


OWN = "composite_losses"


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("errors.py", f"import {OWN}.nets", "errors must not import nets"),
        ("errors.py", "import torch", "errors must not import torch"),
        ("functional/x.py", f"from {OWN}.heads import Plan", "functional must not import heads"),
        ("functional/x.py", "from ..nets import MLP", "functional must not import nets"),
        ("functional/x.py", "from tensordict import TensorDict", "must not import tensordict"),
        ("functional/x.py", "import einops", "functional must not import einops"),
        ("heads/x.py", f"import {OWN}.losses", "heads must not import losses"),
        ("heads/x.py", f"from {OWN} import nets", "heads must not import nets"),
        ("nets/x.py", f"from {OWN}.functional import ratios", "nets must not import functional"),
        ("nets/x.py", "from .. import heads", "nets must not import heads"),
        ("nets/x.py", "import numpy", "nets must not import numpy"),
        ("losses/x.py", f"from {OWN} import export", "losses must not import export"),
        ("losses/x.py", f"from {OWN} import *", "losses must not import __init__"),
        ("losses/x.py", f"import {OWN}", "losses must not import __init__"),
        ("export/x.py", f"from {OWN}.losses import Loss", "export must not import losses"),
        ("export/x.py", f"import {OWN}.demo", "export must not import demo"),
        ("losses/x.py", "from torchrl.objectives import LossModule", "must not import torchrl"),
        ("heads/_torchrl.py", "import torchrl", "heads must not import torchrl"),
        ("nets/x.py", "def f():\n    import torchrl", "x.py:2: nets must not import torchrl"),
        ("nets/x.py", "import importlib\nimportlib.import_module('torchrl')", "import torchrl"),
        ("losses/x.py", f"def f():\n    import {OWN}.heads", "function-level import"),
        ("losses/x.py", "class C:\n    def f(self):\n        from .. import heads", "x.py:3: func"),
        ("demo/x.py", f"async def f():\n    from {OWN} import Loss", "function-level import"),
        ("heads/x.py", "from ... import secrets", "relative import past the package"),
        ("errors.py", "from .. import secrets", "relative import past the package"),
        ("heads/plan.py", "from . import Plan", "cycle: "),
        ("functional/x.py", f"from {OWN}.functional import x", "cycle: "),
        ("functional/x.py", "\n" * (MAX_LINES + 1), "more than 400 lines"),
        ("heads/utils.py", "", "the name utils says nothing"),
        ("heads/_common.py", "", "the name _common says nothing"),
        ("heads/helpers/x.py", "", "the name helpers says nothing"),
        ("heads/key_utils.py", "", "the name key_utils says nothing"),
        ("heads/x.py", "def f(a):\n    assert a", "x.py:2: assert"),
        ("heads/x.py", "a = f()  # type: ignore", "x.py:1: type: ignore without a code"),
        ("heads/x.py", "a = 1\na = f()  #type:ignore # why", "x.py:2: type: ignore without"),
        ("heads/__init__.py", "if True:\n    import torch", "logic in an __init__"),
        ("heads/__init__.py", "a = 1", "logic in an __init__"),
        ("tricks/x.py", "import torch", "tricks is no layer"),
    ],
)
def test_each_fault_is_found(path: str, source: str, message: str) -> None:
    (fault,) = package_faults(CLEAN | {path: source})
    assert fault.startswith(("cycle", path))
    assert message in fault


def test_a_cycle_over_three_files_is_found() -> None:
    ring = {f"heads/{a}.py": f"from .{b} import f" for a, b in ("xy", "yz", "zx")}
    (fault,) = package_faults(CLEAN | ring)
    assert fault.startswith("cycle: ")
    assert fault.count(" <- ") == 3


@pytest.mark.parametrize(
    "source", [f"import {OWN}.functional", f"def f():\n    from {OWN} import Loss"]
)
def test_an_oracle_that_imports_the_package_is_found(source: str) -> None:
    assert oracle_faults({"ratios.py": "import torch"}) == []
    (fault,) = oracle_faults({"ratios.py": source})
    assert "an oracle must not import composite_losses" in fault
