"""The API pages: built without a warning, with an entry for every public name."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import composite_losses as cl

ROOT = Path(__file__).parents[2]
pytest.importorskip("pdoc")


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    """docs/build.py as a module; it is no part of the package."""
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The built pages; the package's docstring, which the build extends, is put back."""
    folder, doc = tmp_path_factory.mktemp("docs"), cl.__doc__
    try:
        builder.build(folder)
    finally:
        cl.__doc__ = doc
    return folder


@pytest.mark.slow
def test_every_public_name_has_an_entry(builder: ModuleType, pages: Path) -> None:
    """And where an entry is taken out, the check says which."""
    assert builder.missing(pages) == []
    page = pages / "composite_losses.html"
    text = page.read_text(encoding="utf-8")
    for shown in ("ClipPPOLoss", "MultiAgentGRU", "diagnose"):
        page.write_text(text.replace(f'id="{shown}"', ""), encoding="utf-8")
        assert builder.missing(pages) == [f"composite_losses.{shown}"]
    page.write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_the_guides_are_on_the_first_page(pages: Path) -> None:
    """Every heading of docs/pages."""
    text = (pages / "composite_losses.html").read_text(encoding="utf-8")
    guides = sorted((ROOT / "docs" / "pages").glob("*.md"))
    assert guides
    for guide in guides:
        heading = guide.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        assert heading.replace("'", "&#39;") in text or heading in text, heading


def test_a_warning_stops_the_build(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where warnings are otherwise ignored."""
    monkeypatch.setattr(cl, "__doc__", cl.__doc__)
    monkeypatch.setattr(builder.pdoc, "pdoc", lambda *_, **__: warnings.warn("odd", stacklevel=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserWarning, match="odd"):
            builder.build(tmp_path)
