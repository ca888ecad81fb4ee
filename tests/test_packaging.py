"""The wheel holds the package and nothing else, and works in an environment that has only it.

The empty environment borrows the dependencies of this one by path, so that nothing is downloaded;
the package itself comes from the wheel, which comes from the source archive.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "composite_losses"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SOURCES = sorted(PACKAGE.rglob("*.py"))
MINORS = [
    match[1]
    for text in PROJECT["classifiers"]
    if (match := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", text))
]
# no PYTHONPATH: the working tree must not be found
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; fails with its output where it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that ``python -m build`` makes of a clean copy, through the source archive."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(
        PACKAGE, source / "composite_losses", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # what setuptools would take along if it were told to
    for other in ("tests", "examples"):
        (source / other).mkdir()
        (source / other / "__init__.py").touch()
    run(sys.executable, "-m", "build", "--no-isolation", ".", cwd=source)
    (found,) = (source / "dist").glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every module, ``py.typed`` and the licence."""
    names = zipfile.ZipFile(wheel).namelist()
    info = {name for name in names if ".dist-info/" in name}
    expected = {path.relative_to(ROOT).as_posix() for path in SOURCES}
    assert set(names) - info == expected | {"composite_losses/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in info)


@pytest.mark.slow
def test_the_metadata_say_what_pyproject_says(wheel: Path) -> None:
    """Version, Python versions, dependencies and extras."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    data = message_from_string(archive.read(name).decode())
    version = re.search(r'__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text("utf-8"))
    assert version is not None
    assert data["Version"] == version[1]
    assert data["Requires-Python"] == PROJECT["requires-python"]
    assert set(data.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    needed = [r for r in map(Requirement, data.get_all("Requires-Dist", [])) if r.marker is None]
    assert {r.name for r in needed} == {Requirement(text).name for text in PROJECT["dependencies"]}


@pytest.mark.slow
def test_a_fresh_installation_works(wheel: Path, tmp_path: Path) -> None:
    """Installed alone, run from elsewhere: examples/smoke.py, with the package of the wheel."""
    fresh = tmp_path / "venv"
    run(sys.executable, "-m", "venv", fresh, cwd=tmp_path)
    python = fresh / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    site = Path(
        run(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))", cwd=fresh).strip()
    )
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    printed = run(python, ROOT / "examples" / "smoke.py", cwd=tmp_path)
    assert f"works, from {site.resolve() / 'composite_losses'}" in printed


def test_the_python_versions_are_stated_once() -> None:
    """The oldest classifier is the lower bound of ``requires-python``; there is no upper bound."""
    assert MINORS
    assert PROJECT["requires-python"] == f">={MINORS[0]}"
    assert list(map(Version, MINORS)) == sorted(map(Version, MINORS))
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in MINORS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_oldest_python_can_read_every_module(path: Path) -> None:
    """Its grammar, and no module of the standard library that came later."""
    _, _, minor = MINORS[0].partition(".")
    tree = ast.parse(path.read_text("utf-8"), feature_version=(3, int(minor)))
    imported = {
        name.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
    }
    assert not imported & {"tomllib", "wsgiref.types", "asyncio.taskgroups"}


GROUPS = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
DIRECT = sorted({text for group in GROUPS for text in group if "composite_losses" not in text})


@pytest.mark.parametrize("text", DIRECT)
def test_every_direct_dependency_is_pinned_within_its_range(text: str) -> None:
    """constraints.txt is what ``make`` installs, on every supported Python."""
    wanted = Requirement(text)
    pins = [Requirement(line) for line in pins_of(ROOT / "constraints.txt")]
    found = [pin for pin in pins if pin.name.lower() == wanted.name.lower()]
    for minor in MINORS:
        python = {"python_version": minor, "python_full_version": f"{minor}.0"}
        here = [p for p in found if p.marker is None or p.marker.evaluate(python)]
        assert len(here) == 1, (minor, here)
        (pin,) = here[0].specifier
        assert pin.operator == "=="
        assert SpecifierSet(str(wanted.specifier)).contains(pin.version)


def pins_of(file: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in file.read_text("utf-8").splitlines())
    return [line for line in lines if line]
