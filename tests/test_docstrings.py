"""Every public function and class says its shapes, units, errors and source where they apply.

What applies is read from the code: a Tensor in the signature wants a shape, a ``raise`` wants a
``Raises`` section, a log-prob, entropy or divergence wants nats, an advantage the unit of return, a
number its range or unit, an argument a description; every public name wants a source. The checker
itself is tested on docstrings with one deliberate gap each.
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
from composite_losses.losses._base import BaseLoss
from composite_losses.losses._groups import Groups

LAYERS = {"": cl, "errors": errors, "export": export, "functional": functional}
LAYERS |= {"heads": heads, "nets": nets}

# a shape, such as [*S, H], [B, 1], [...], [] or in words; "in [0, 1]" is a range
SHAPE = re.compile(
    r"(?<!\bin )(?<!\bin ``)\[(?:\*?\w+|\.\.\.)?(?:, ?(?:\*?\w+(?: ?[-+*/·] ?\w+)?|\.\.\.|…))*\]"
    r"|\b0-dim\b|\b(?:any|same|equal|one) shape\b|\bshape of\b|\b\w+'s shape\b|\bany batch size\b"
)
CODE = re.compile(r"``([^`]+)``")
SOURCE = re.compile(r"^Sources?: \S", re.M)
# modules are not on the pages; "the module" may be an argument
MODULE = re.compile(r"\b(?:the|this) module\b")
# the arguments are those of another class, which is named
KEYWORDS = re.compile(r"^Keywords: .*``|^The other keywords are ``", re.M)
NATS = re.compile(r"\bnats?\b")
IN_NATS = re.compile(r"log_prob|log_ratio|log_correction|entropy|(?:^|_)kl(?:_|$)|^k[123]$")
RETURN = re.compile(r"\bunits? of (?:return|reward)\b")
IN_RETURNS = re.compile(r"^(?:advantage|returns|reward|target|old_value)$")
RANGE = re.compile(
    r"\bin \[|\bin \(|[<>≤≥] ?[-\d]|\bpositive\b|\bnon-negative\b|\bfraction\b|\bnats?\b|\bunits?\b"
    r"|\bsteps?\b|\bdimensionless\b|\bprobability\b|\bfactor\b|\bany real\b"
)
NO_SOURCE = {
    "StackHeads": "moves entries, computes nothing",
    "resolve_log_probs": "finds entries, computes nothing",
    "param_groups": "sorts parameters, computes nothing",
}
LOSS_ERRORS = ("ConfigError", "MissingKeyError", "ShapeError", "GraphError", "NonFiniteError")
OWN = {name for name, value in vars(errors).items() if inspect.isclass(value)}


def section(doc: str, name: str) -> str:
    """The text of a section: what is indented below its heading."""
    match = re.search(rf"^{name}:\n((?:[ ]+.*\n?|\n)+)", doc, re.M)
    return "" if match is None else match[1]


def described(doc: str, *sections: str) -> dict[str, str]:
    """Parameter → text in the sections, by default ``Args``."""
    found: dict[str, str] = {}
    last = ""
    listed = (textwrap.dedent(section(doc, name)) for name in sections or ("Args",))
    for line in "".join(listed).splitlines():
        match = re.match(r"([*\w, ]+?):(?: (.*)|$)", line)
        if match and not line.startswith(" "):
            last = match[1]
            found[last] = match[2] or ""
        elif last:
            found[last] += " " + line.strip()
    return {
        name.strip().lstrip("*"): text for names, text in found.items() for name in names.split(",")
    }


def alone(doc: str, names: dict[str, str], source: bool) -> list[str]:
    """What lacks for a reader of this docstring only: source, arguments, ranges or units."""
    found = [] if SOURCE.search(doc) or not source else ["no source"]
    if MODULE.search(doc) and not any("module" in name for name in names):
        found.append("refers to the module, which is not on the pages")
    if KEYWORDS.search(doc):
        return found
    texts = described(doc, "Args", "Attributes")
    code = " ".join(CODE.findall(doc))  # a formula may name what it is of
    for name, annotation in names.items():
        # args and kwargs of a class without a constructor are nn.Module's
        if name not in (*texts, "args", "kwargs") and not re.search(rf"\b{name}\b", code):
            found.append(f"{name}: not described")
        number = re.search(r"\bfloat\b|\bEps\b", annotation)
        if number and not RANGE.search(texts.get(name, "")):
            found.append(f"{name}: a number without range or unit")
    return found


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


def has_tensors(function: Callable[..., Any], *, full: bool) -> bool:
    """Whether it takes tensors; ``full``: or TensorDicts, or returns either."""
    texts = list(parameters(function).values())
    if full:
        texts.append(str(inspect.signature(function).return_annotation))
    kinds = r"\bTensor(?:Dict(?:Base)?)?\b" if full else r"\bTensor\b"
    return any(re.search(kinds, text) for text in texts)


def gaps(
    name: str,
    function: Callable[..., Any],
    doc: str | None = None,
    *,
    full: bool = False,
    source: bool = True,
    owner: str = "",
) -> list[str]:
    """What the docstring of a function lacks.

    ``full``: it stands for itself, with units, arguments and (``source``) a source; ``owner``:
    docstring of the class it belongs to, which may say the shape, and of a ``forward`` the errors.
    """
    doc = inspect.cleandoc(function.__doc__ or "") if doc is None else doc
    if not doc.strip():
        return ["no docstring"]
    names, found = parameters(function), []
    if has_tensors(function, full=full) and not SHAPE.search(doc + owner):
        found.append("takes or returns a Tensor, states no shape")
    if full:
        words = [name, *names]
        if any(map(IN_NATS.search, words)) and not NATS.search(doc):
            found.append("no unit (nats)")
        if any(map(IN_RETURNS.search, words)) and not RETURN.search(doc):
            found.append("no unit (of return)")
        found += alone(doc, names, source)
    listed = section(doc, "Raises") + (section(owner, "Raises") if name == "forward" else "")
    for error in sorted(raised(function)):
        if not any(re.search(rf"\b{base}\b", listed) for base in ancestors(error)):
            found.append(f"raises {error}, not under Raises")
    found += unknown(doc, set(names))
    return found


def unknown(doc: str, known: set[str]) -> list[str]:
    """Names that are described but do not exist: parameters and exceptions."""
    found = [f"describes {n!r}, which is no parameter" for n in described(doc) if n not in known]
    for line in textwrap.dedent(section(doc, "Raises")).splitlines():
        for name in re.findall(r"\b\w+Error\b", line.partition(":")[0]):
            if name not in OWN and not hasattr(builtins, name):
                found.append(f"Raises names {name!r}, which does not exist")
    return found


def class_gaps(
    cls: type, doc: str | None = None, *, full: bool = False, source: bool = True
) -> list[str]:
    """What the docstring of a class lacks; ``full`` and ``source`` as for functions."""
    doc = inspect.cleandoc(cls.__doc__ or "") if doc is None else doc
    if not doc.strip():
        return ["no docstring"]
    if issubclass(cls, Exception):
        return []
    init, listed = cls.__dict__.get("__init__"), section(doc, "Raises")
    options = set(getattr(cls, "options", ()))
    found = unknown(doc, set(inspect.signature(cls).parameters) | options)
    if init is not None:
        both = listed + section(inspect.cleandoc(init.__doc__ or ""), "Raises")
        for error in sorted(raised(init)):
            if not any(re.search(rf"\b{base}\b", both) for base in ancestors(error)):
                found.append(f"raises {error}, not under Raises")
    if not full:
        return found
    if issubclass(cls, (BaseLoss, Groups)):
        found += [f"a loss, {e} not under Raises" for e in LOSS_ERRORS if e not in listed]
        found += [f"a loss, no {unit.pattern}" for unit in (NATS, RETURN) if not unit.search(doc)]
    if issubclass(cls, BaseLoss) and "TypeError" not in listed:
        found.append("takes keywords, TypeError not under Raises")
    if issubclass(cls, nn.Module) and not SHAPE.search(doc):
        found.append("is called with tensors, states no shape")
    return found + alone(doc, parameters(cls), source)


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
# what stands for itself; the names of the heads are for authors of losses
FULL = ("", "functional", "nets", "export")
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


def wanted(name: str) -> dict[str, bool]:
    """What is wanted of a public name."""
    return {"full": name.rpartition(".")[0] in FULL, "source": name not in NO_SOURCE}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions(name: str) -> None:
    """Shapes, units, arguments, errors, source."""
    assert not gaps(name.rpartition(".")[2], FUNCTIONS[name], **wanted(name))


@pytest.mark.parametrize("name", list(CLASSES))
def test_classes(name: str) -> None:
    """Options that exist, shapes, units, errors of constructor and call, source."""
    assert not class_gaps(CLASSES[name], **wanted(name))


@pytest.mark.parametrize("name", list(METHODS))
def test_methods(name: str) -> None:
    """Shapes, which the class may say, and errors."""
    cls, _, method = name.rpartition(".")
    owner = inspect.cleandoc(CLASSES[cls].__doc__ or "")
    assert not gaps(method, METHODS[name], owner=owner)


def test_every_exemption_is_needed() -> None:
    """What is exempt is public and has no source."""
    for name in NO_SOURCE:
        value = (FUNCTIONS | CLASSES)[name]
        found = class_gaps(value, full=True) if name in CLASSES else gaps(name, value, full=True)
        assert "no source" in found, name


@pytest.mark.parametrize("layer", list(LAYERS))
def test_modules(layer: str) -> None:
    """A module says in one line what it holds."""
    assert inspect.cleandoc(LAYERS[layer].__doc__ or "").splitlines()[0].endswith((".", ":"))


# --- the checker ----------------------------------------------------------------------------------


def example_log_ratio(new: Tensor, old: Tensor, advantage: Tensor, cap: float = 80.0) -> Tensor:
    """The objective ``min(new - old, cap) advantage``, ``[*S]``; the log-ratio is in nats.

    Args:
        new, old: ``[*S]``.
        advantage: ``[*S]``, in units of return.
        cap: at most, in nats.

    Raises:
        ShapeError: if the shapes differ.

    Source: Nobody 2020, eq. 1.
    """
    if new.shape != old.shape:
        raise errors.ShapeError("different")
    return (new - old).clamp(max=cap) * advantage


class Example(nn.Module):
    """The loss c · x, ``[*S]``.

    Args:
        c: coefficient, ≥ 0.

    Raises:
        ConfigError: a negative coefficient.

    Source: Nobody et al. 2020.
    """

    def __init__(self, c: float = 1.0) -> None:
        super().__init__()
        if c < 0:
            raise errors.ConfigError("negative")
        self.c = torch.tensor(c)


GOOD, GOOD_CLASS, LOSS = (
    inspect.cleandoc(str(x.__doc__)) for x in (example_log_ratio, Example, cl.MAPPOLoss)
)
GAPS = {
    "no docstring": (lambda doc: "", "no docstring"),
    "no shape": (lambda doc: doc.replace("[*S]", "a tensor"), "states no shape"),
    "a range is no shape": (lambda doc: doc.replace("[*S]", "in [0, 1]"), "states no shape"),
    "a list is no shape": (lambda doc: doc.replace("[*S]", "[a - b - c; d]"), "states no shape"),
    "no nats": (lambda doc: doc.replace("nats", "natural"), "no unit (nats)"),
    "no unit of return": (lambda doc: doc.replace("units of return", "euros"), "(of return)"),
    "no range": (lambda doc: doc.replace("most, in nats", "most"), "cap: a number without"),
    "no error": (lambda doc: doc.partition("Raises:")[0], "raises ShapeError"),
    "another error": (lambda doc: doc.replace("ShapeError", "GraphError"), "raises ShapeError"),
    "error in the text only": (
        lambda doc: doc.replace("Raises:", "It raises:").replace("    ShapeError", "ShapeError"),
        "raises ShapeError",
    ),
    "an error that is not there": (lambda doc: doc.replace("ShapeError", "SizeError"), "SizeError"),
    "no source": (lambda doc: doc.partition("Source:")[0], "no source"),
    "an empty source": (lambda doc: doc.partition("Source:")[0] + "Source:", "no source"),
    "an argument not described": (lambda doc: doc.replace("old", "b"), "old: not described"),
    "an argument that is gone": (lambda doc: doc.replace("cap: at", "limit: at"), "'limit'"),
    "the module": (lambda doc: doc.replace("in nats.", "in nats, see the module."), "the module"),
}
CLASS_GAPS = {
    "no docstring": (lambda doc: "", "no docstring"),
    "no shape": (lambda doc: doc.replace("[*S]", "a tensor"), "states no shape"),
    "no range": (lambda doc: doc.replace(", ≥ 0", ""), "c: a number without"),
    "not described": (lambda doc: doc.replace("c: coefficient, ≥ 0.", ""), "c: not described"),
    "no error": (lambda doc: doc.partition("Raises:")[0], "raises ConfigError"),
    "no source": (lambda doc: doc.partition("Source:")[0], "no source"),
    "an option that is gone": (lambda doc: doc.replace("c: coeff", "d: coeff"), "'d'"),
}


def test_the_checker_accepts_what_is_complete() -> None:
    """A builtin that an exception of ours derives from names it."""
    for doc in (GOOD, GOOD.replace("ShapeError", "ValueError")):
        assert gaps("log_ratio", example_log_ratio, doc, full=True) == []
    assert class_gaps(Example, full=True) == []


@pytest.mark.parametrize("name", list(GAPS))
def test_the_checker_finds_gaps_of_functions(name: str) -> None:
    change, message = GAPS[name]
    assert change(GOOD) != GOOD
    found = gaps("log_ratio", example_log_ratio, change(GOOD), full=True)
    assert any(message in gap for gap in found), found


@pytest.mark.parametrize("name", list(CLASS_GAPS))
def test_the_checker_finds_gaps_of_classes(name: str) -> None:
    change, message = CLASS_GAPS[name]
    assert change(GOOD_CLASS) != GOOD_CLASS
    found = class_gaps(Example, change(GOOD_CLASS), full=True)
    assert any(message in gap for gap in found), found


@pytest.mark.parametrize("word", [*LOSS_ERRORS, "TypeError", "nats", "units of return", "Source:"])
def test_the_checker_finds_gaps_of_a_loss(word: str) -> None:
    """Each word gone from a real docstring is found."""
    assert word in LOSS
    assert class_gaps(cl.MAPPOLoss, LOSS.replace(word, "what"), full=True)
