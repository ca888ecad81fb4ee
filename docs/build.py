"""Builds the API pages from the docstrings, with pdoc; any warning is an error.

    python docs/build.py [FOLDER]

The first page starts with the texts of ``docs/pages``. Fails where a public name has no entry.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from pathlib import Path

import pdoc
import pdoc.render

HERE = Path(__file__).parent
PACKAGE = "composite_losses"
PAGES = (PACKAGE, *(f"{PACKAGE}.{n}" for n in ("functional", "heads", "nets", "export", "errors")))
# whose public names are on the pages above
HIDDEN = ("losses", "demo", r"\w+\.")


def missing(folder: Path) -> list[str]:
    """Returns the public names without an entry on the page of their module."""
    found = []
    for page in PAGES:
        module = importlib.import_module(page)
        file = folder / (page.replace(".", "/") + ".html")
        anchors = set(re.findall(r'id="([\w.]+)"', file.read_text(encoding="utf-8")))
        names = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
        for name in names:
            # a module has a page of its own
            if f"{page}.{name}" not in PAGES and name != "__version__" and name not in anchors:
                found.append(f"{page}.{name}")
    return found


def build(folder: Path) -> None:
    """Writes the pages, one HTML file a module."""
    package = importlib.import_module(PACKAGE)
    for page in PAGES:
        importlib.import_module(page)
    texts = [path.read_text(encoding="utf-8") for path in sorted((HERE / "pages").glob("*.md"))]
    package.__doc__ = "\n\n".join([package.__doc__ or "", *texts])
    pdoc.render.configure(docformat="google", footer_text=f"{PACKAGE} {package.__version__}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # inherited from TorchRL, whose annotation names a class that is not in its module
        warnings.filterwarnings("ignore", "Error parsing type annotation _AcceptedKeys")
        # what is private is not shown
        warnings.filterwarnings("ignore", r"Error parsing type annotation .* for [\w.]+\._\w+:")
        hidden = [f"!{PACKAGE}\\.{pattern}" for pattern in HIDDEN]
        pdoc.pdoc(PACKAGE, f"{PACKAGE}.heads", *hidden, output_directory=folder)
    lost = missing(folder)
    if lost:
        raise SystemExit(f"public names without an entry: {', '.join(lost)}")


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs"))
