"""Every public function and class says its shapes, units, errors and source where they apply.

What applies is read from the code: a Tensor in the signature wants a shape, a ``raise`` wants a
``Raises`` section, a log-prob, entropy or divergence wants its unit, a coefficient its range or
unit, a function of the functional layer its formula or source. The checker itself is tested on
docstrings with one deliberate gap each.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import composite_losses as cl
from composite_losses import errors, export, functional, heads, nets

LAYERS = {"": cl, "errors": errors, "export": export, "functional": functional}
LAYERS |= {"heads": heads, "nets": nets}

# a shape, such as [*S, H], [B, 1], [...], [] or in words; "in [0, 1]" is a range
SHAPE = re.compile(
    r"(?<!\bin )(?<!\bin ``)\[(?:\*?\w+|\.\.\.)?(?:, ?(?:\*?\w+(?: ?[-+*/·] ?\w+)?|\.\.\.|…))*\]"
    r"|\b0-dim\b|\b(?:any|same|equal|one) shape\b|\bshape of\b|\b\w+'s shape\b"
)
CODE = re.compile(r"``([^`]+)``")
OPERATOR = re.compile(r"[-+*/^=≤<Σ]|\b(?:sum|prod|log|exp|min|max|mean|std)(?:\b|_)")
REFERENCE = re.compile(r":func:`(\w+)`")
SOURCE = re.compile(r"^Sources?: \S", re.M)
CITATION = re.compile(r"\b[A-Z]\w+(?: et al\.| and [A-Z]\w+)?,? \(?(?:19|20)\d\d\b")
MATHS = re.compile(r"[-−+·/=Σ‖|]")
UNIT = re.compile(r"\bnats?\b")
IN_NATS = re.compile(r"log_prob|log_ratio|entropy|(?:^|_)kl(?:_|$)|^k[123]$")
RANGE = re.compile(
    r"\bin \[|\bin \(|[<>≤≥] ?[-\d]|\bpositive\b|\bnon-negative\b|\bfraction\b|\bnats?\b|\bunits?\b"
    r"|\bsteps?\b|\bdimensionless\b|\bprobability\b|\bfactor\b|\bany real\b"
)
OWN = {name for name, value in vars(errors).items() if inspect.isclass(value)}


def section(doc: str, name: str) -> str:
    """The text of a section: what is indented below its heading."""
    match = re.search(rf"^{name}:\n((?:[ ]+.*\n?|\n)+)", doc, re.M)
    return "" if match is None else match[1]


def described(doc: str) -> dict[str, str]:
    """Parameter → text in the ``Args`` section."""
    found: dict[str, str] = {}
    last = ""
    for line in textwrap.dedent(section(doc, "Args")).splitlines():
        match = re.match(r"([*\w, ]+?):(?: (.*)|$)", line)
        if match and not line.startswith(" "):
            last = match[1]
            found[last] = match[2] or ""
        elif last:
            found[last] += " " + line.strip()
    return {
        name.strip().lstrip("*"): text for names, text in found.items() for name in names.split(",")
    }


def has_formula(doc: str) -> bool:
    """Whether some ``code`` that is no shape has an operator or a function in it.

    A reference to another function of the functional layer is one where that function has it.
    """
    linked = [getattr(functional, name, None) for name in REFERENCE.findall(doc)]
    docs = [doc, *(function.__doc__ or "" for function in linked if function is not None)]
    codes = (code for text in docs for code in CODE.findall(text))
    return any(OPERATOR.search(code) for code in codes if not SHAPE.fullmatch(code))


def raised(function: Callable[..., Any]) -> set[str]:
    """Names of our exceptions that the body raises, or that the shape checks it calls raise."""
    try:
        source = inspect.getsource(function)
    except OSError:  # a dataclass makes its own
        return set()
    names: set[str] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            callee = node.exc.func
            names.add(callee.attr if isinstance(callee, ast.Attribute) else ast.unparse(callee))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("require_"):
            names.add("ShapeError")
    return names & OWN


def ancestors(name: str) -> set[str]:
    """An exception of ours by its own name and the names of what it derives from."""
    return {base.__name__ for base in getattr(errors, name).__mro__} - {"Exception", "object"}


def parameters(function: Callable[..., Any]) -> dict[str, str]:
    """Parameter → annotation as text, without ``self``."""
    found = inspect.signature(function).parameters.values()
    return {p.name: str(p.annotation) for p in found if p.name not in ("self", "cls")}


def takes_tensors(function: Callable[..., Any]) -> bool:
    return any(re.search(r"\bTensor\b", text) for text in parameters(function).values())


def gaps(
    name: str,
    function: Callable[..., Any],
    doc: str | None = None,
    *,
    formula: bool = False,
    owner: str = "",
) -> list[str]:
    """What the docstring of a function lacks.

    ``formula``: it must give one, or a source; ``owner``: docstring of the class whose
    ``forward`` it is, which may say what is raised.
    """
    doc = inspect.cleandoc(function.__doc__ or "") if doc is None else doc
    if not doc.strip():
        return ["no docstring"]
    found = []
    if takes_tensors(function) and not SHAPE.search(doc):
        found.append("takes a Tensor, states no shape")
    if formula and not (has_formula(doc) or SOURCE.search(doc)):
        found.append("no formula and no source")
    if formula and IN_NATS.search(name) and not UNIT.search(doc):
        found.append("no unit (nats)")
    listed = section(doc, "Raises") + section(owner, "Raises")
    for error in sorted(raised(function)):
        if not any(re.search(rf"\b{base}\b", listed) for base in ancestors(error)):
            found.append(f"raises {error}, not under Raises")
    found += unknown(doc, set(parameters(function)))
    return found


def unknown(doc: str, known: set[str]) -> list[str]:
    """Names that are described but do not exist: parameters and exceptions."""
    found = [f"describes {n!r}, which is no parameter" for n in described(doc) if n not in known]
    for line in textwrap.dedent(section(doc, "Raises")).splitlines():
        for name in re.findall(r"\b\w+Error\b", line.partition(":")[0]):
            if name not in OWN and not hasattr(builtins, name):
                found.append(f"Raises names {name!r}, which does not exist")
    return found


def class_gaps(cls: type, doc: str | None = None, *, coefficients: bool = False) -> list[str]:
    """What the docstring of a class lacks; ``coefficients``: every number needs a range or unit."""
    doc = inspect.cleandoc(cls.__doc__ or "") if doc is None else doc
    if not doc.strip():
        return ["no docstring"]
    options = set(getattr(cls, "options", ()))
    init = cls.__dict__.get("__init__")
    if issubclass(cls, Exception):
        return []
    found = unknown(doc, set(inspect.signature(cls).parameters) | options)
    if init is not None:
        both = section(doc, "Raises") + section(inspect.cleandoc(init.__doc__ or ""), "Raises")
        for error in sorted(raised(init)):
            if not any(re.search(rf"\b{base}\b", both) for base in ancestors(error)):
                found.append(f"raises {error}, not under Raises")
    if coefficients:
        texts = described(doc)
        for name, annotation in parameters(cls).items():
            if re.search(r"\bfloat\b|\bEps\b", annotation) and not RANGE.search(
                texts.get(name, "")
            ):
                found.append(f"{name}: a number without range or unit")
        if not (MATHS.search(doc) or CITATION.search(doc)):
            found.append("no formula and no source")
    return found


def own_methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods that the class itself defines."""
    for name, member in vars(cls).items():
        if not name.startswith("_") and inspect.isfunction(inspect.unwrap(member)):
            yield name, inspect.unwrap(member)


# --- what is public -------------------------------------------------------------------------------


def members(layer: str) -> dict[str, Any]:
    module = LAYERS[layer]
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    return {name: getattr(module, name) for name in names if name != "__version__"}


def public(kind: Callable[[Any], bool]) -> dict[str, Any]:
    found = {}
    for layer in LAYERS:
        for name, value in members(layer).items():
            if kind(value) and value not in found.values():
                found[f"{layer}.{name}".lstrip(".")] = value
    return found


FUNCTIONS, CLASSES = public(inspect.isfunction), public(inspect.isclass)
PARTS = (cl.Clip, cl.Ratio, cl.Score, cl.KLPenalty, cl.ValueTerm, cl.EntropyTerm, cl.AdvantageNorm)
METHODS = {
    f"{name}.{method}": function
    for name, cls in CLASSES.items()
    for method, function in own_methods(cls)
}


def test_every_public_name_is_checked() -> None:
    """Nothing is public that is neither a function, a class, a table nor a module."""
    checked = [*FUNCTIONS.values(), *CLASSES.values()]
    for layer in LAYERS:
        for name, value in members(layer).items():
            assert value in checked or inspect.ismodule(value) or isinstance(value, dict), name
    assert len(FUNCTIONS) > 50
    assert len(CLASSES) > 30


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions(name: str) -> None:
    """Shapes, errors; in the functional layer units and formula or source as well."""
    layer, _, short = name.rpartition(".")
    function = FUNCTIONS[name]
    # selecting and counting entries is no formula
    formula = layer == "functional" and not function.__module__.endswith(".masking")
    assert not gaps(short, function, formula=formula)


@pytest.mark.parametrize("name", list(CLASSES))
def test_classes(name: str) -> None:
    """Options that exist, errors of the constructor; parts: ranges or units, formula or source."""
    assert not class_gaps(CLASSES[name], coefficients=CLASSES[name] in PARTS)


@pytest.mark.parametrize("name", list(METHODS))
def test_methods(name: str) -> None:
    """Shapes and errors, as for functions."""
    cls, _, method = name.rpartition(".")
    owner = inspect.cleandoc(CLASSES[cls].__doc__ or "") if method == "forward" else ""
    assert not gaps(method, METHODS[name], owner=owner)


@pytest.mark.parametrize("layer", list(LAYERS))
def test_modules(layer: str) -> None:
    """A module says in one line what it holds."""
    assert inspect.cleandoc(LAYERS[layer].__doc__ or "").splitlines()[0].endswith((".", ":"))


# --- the checker ----------------------------------------------------------------------------------


def example_log_ratio(new: Tensor, old: Tensor, cap: float = 80.0) -> Tensor:
    """The log-ratio ``min(new - old, cap)``, nats, ``[*S]``.

    Args:
        new, old: ``[*S]``.
        cap: at most, in nats.

    Raises:
        ShapeError: if the shapes differ.

    Source: Nobody 2020, eq. 1.
    """
    if new.shape != old.shape:
        raise errors.ShapeError("different")
    return (new - old).clamp(max=cap)


class Example(nn.Module):
    """The loss c · x (Nobody et al. 2020).

    Args:
        c: coefficient, ≥ 0.

    Raises:
        ConfigError: a negative coefficient.
    """

    def __init__(self, c: float = 1.0) -> None:
        super().__init__()
        if c < 0:
            raise errors.ConfigError("negative")
        self.c = torch.tensor(c)


GOOD, GOOD_CLASS = (inspect.cleandoc(str(x.__doc__)) for x in (example_log_ratio, Example))
GAPS = {
    "no docstring": (lambda doc: "", "no docstring"),
    "no shape": (lambda doc: doc.replace("[*S]", "a tensor"), "states no shape"),
    "a range is no shape": (lambda doc: doc.replace("[*S]", "in [0, 1]"), "states no shape"),
    "a list is no shape": (lambda doc: doc.replace("[*S]", "[a - b - c; d]"), "states no shape"),
    "no unit": (lambda doc: doc.replace("nats", "natural"), "no unit"),
    "no error": (lambda doc: doc.partition("Raises:")[0], "raises ShapeError"),
    "another error": (lambda doc: doc.replace("ShapeError", "GraphError"), "raises ShapeError"),
    "error in the text only": (
        lambda doc: doc.replace("Raises:", "It raises:").replace("    ShapeError", "ShapeError"),
        "raises ShapeError",
    ),
    "an error that is not there": (lambda doc: doc.replace("ShapeError", "SizeError"), "SizeError"),
    "no formula, no source": (
        lambda doc: doc.partition("Source:")[0].replace("min(new - old, cap)", "ratio"),
        "no formula",
    ),
    "an option that is gone": (lambda doc: doc.replace("cap: at", "limit: at"), "'limit'"),
}
CLASS_GAPS = {
    "no docstring": (lambda doc: "", "no docstring"),
    "no range": (lambda doc: doc.replace(", ≥ 0", ""), "c: a number without"),
    "number not described": (lambda doc: doc.replace("c: coefficient, ≥ 0.", ""), "c: a number"),
    "no error": (lambda doc: doc.partition("Raises:")[0], "raises ConfigError"),
    "no formula, no source": (
        lambda doc: doc.replace("c · x (Nobody et al. 2020)", "of x"),
        "no formula",
    ),
    "an option that is gone": (lambda doc: doc.replace("c: coeff", "d: coeff"), "'d'"),
}


def test_the_checker_accepts_what_is_complete() -> None:
    assert gaps("log_ratio", example_log_ratio, formula=True) == []
    assert class_gaps(Example, coefficients=True) == []


def test_a_formula_or_a_source_is_enough() -> None:
    """One of them may be missing; a builtin that an exception of ours derives from names it."""
    for doc in (GOOD.partition("Source:")[0], GOOD.replace("min(new - old, cap)", "ratio")):
        assert gaps("log_ratio", example_log_ratio, doc, formula=True) == []
    general = GOOD.replace("ShapeError", "ValueError")
    assert gaps("log_ratio", example_log_ratio, general, formula=True) == []


@pytest.mark.parametrize("name", list(GAPS))
def test_the_checker_finds_gaps_of_functions(name: str) -> None:
    change, message = GAPS[name]
    assert change(GOOD) != GOOD
    found = gaps("log_ratio", example_log_ratio, change(GOOD), formula=True)
    assert any(message in gap for gap in found), found


@pytest.mark.parametrize("name", list(CLASS_GAPS))
def test_the_checker_finds_gaps_of_classes(name: str) -> None:
    change, message = CLASS_GAPS[name]
    assert change(GOOD_CLASS) != GOOD_CLASS
    found = class_gaps(Example, change(GOOD_CLASS), coefficients=True)
    assert any(message in gap for gap in found), found
