"""The README's code runs, prints what the README shows, and its links lead somewhere.

All ```python blocks under one ``##`` heading share a namespace and run in order; each ``##``
heading starts a fresh one. A ```text block right after a ```python block is what that block prints;
``...`` in it stands for anything and the amount of white space is free, as in a doctest. Warnings
are errors, as in every test.
"""

import contextlib
import doctest
import io
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CHECKER = doctest.OutputChecker()
FREE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass
class Block:
    """A fenced block: its language, text, the line of the text, and the ``##`` heading above."""

    language: str
    text: str
    line: int
    heading: str


def blocks(readme: str) -> list[Block]:
    """All fenced blocks of a Markdown text, in order."""
    found: list[Block] = []
    heading, inside = "", None
    for number, line in enumerate(readme.splitlines(), start=1):
        if line.startswith("```"):
            if inside is None:
                inside = Block(line[3:].strip(), "", number + 1, heading)
            else:
                found.append(inside)
                inside = None
        elif inside is not None:
            inside.text += f"{line}\n"
        elif line.startswith("## "):
            heading = line[3:].strip()
    if inside is not None:
        raise ValueError(f"the block that starts at line {inside.line} has no end")
    return found


def run(section: list[Block]) -> None:
    """Executes a section's Python blocks in one namespace and compares what they print."""
    namespace: dict[str, object] = {"__name__": "readme"}
    printed: io.StringIO | None = None
    for block in section:
        if block.language == "python":
            # Empty lines in front make a traceback show the README's line numbers.
            code = compile("\n" * (block.line - 1) + block.text, str(README), "exec")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
        elif block.language == "text" and printed is not None:
            got = printed.getvalue()
            if not CHECKER.check_output(block.text, got, FREE):
                pytest.fail(f"line {block.line}: expected\n{block.text}\nfound\n{got}")
            printed = None
        else:
            printed = None


BLOCKS = blocks(README.read_text(encoding="utf-8"))
SECTIONS = list(dict.fromkeys(b.heading for b in BLOCKS if b.language == "python"))


@pytest.mark.parametrize("heading", SECTIONS)
def test_code_runs_and_prints_what_is_shown(heading: str) -> None:
    run([block for block in BLOCKS if block.heading == heading])


def test_there_is_code_and_every_block_names_its_language() -> None:
    assert SECTIONS
    assert {block.language for block in BLOCKS} <= {"python", "text", "bash"}


def test_links_lead_to_files_and_headings() -> None:
    text = README.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    anchors = {
        re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    assert targets
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    rules = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    named = re.findall(r"(?:^|`)make ([a-z]+)", README.read_text(encoding="utf-8"), re.M)
    assert {"demo", "test"} <= set(named) <= set(rules)


EXAMPLE = """\
## One
```python
x = 1
print("a", x)
```
```text
a ...
```
## Two
```python
{code}
```
"""


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print(x)", NameError),  # a name of another section
        ("import warnings; warnings.warn('careful')", UserWarning),
        ("print(2)\n```\n```text\n3", pytest.fail.Exception),
    ],
)
def test_the_check_itself_finds_faults(code: str, error: type[BaseException]) -> None:
    found = blocks(EXAMPLE.format(code=code))
    run([block for block in found if block.heading == "One"])
    with pytest.raises(error):
        run([block for block in found if block.heading == "Two"])
