"""Every link and path in the documents, and every section that they link to, exists."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/results/*.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "kernels/emulator/README.md",
    )
)
FOLDERS = ("benchmarks", "docs", "examples", "fa4_jax", "ffi", "kernels", "tests")
BUILT = ("fa4_jax/_cubins", "fa4_jax/libfa4_jax.so")
"""The paths that the build makes; a fresh checkout lacks them."""

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./*<>-]*[\w/*>]")
_SOURCES = (".py", ".cc", ".h", ".bazel", ".bzl", ".md")


def anchors(text: str) -> set[str]:
    """Returns the names of a document's sections, as GitHub makes them from the headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def missing_links(document: pathlib.Path) -> list[str]:
    """Returns the relative links of a document that lead nowhere."""
    wrong = []
    for link in _LINK.findall(document.read_text()):
        path, _, section = link.partition("#")
        if "://" in path:
            continue
        target = document.parent / path if path else document
        if not target.exists() or (section and section not in anchors(target.read_text())):
            wrong.append(link)
    return wrong


def missing_paths(text: str) -> list[str]:
    """Returns the paths from the root that a text mentions and that do not exist; they may have
    stars.
    """
    wrong = []
    for path in _PATH.findall(text):
        if path.startswith(BUILT) or list(ROOT.glob(path.replace("<arch>", "*"))):
            continue
        if not (ROOT / path).exists():
            wrong.append(path)
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str):
    assert missing_links(ROOT / document) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_mentioned_paths_exist(document: str):
    assert missing_paths((ROOT / document).read_text()) == []


def test_documents_that_sources_mention_exist():
    wrong = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in _SOURCES and path != pathlib.Path(__file__):
                mentioned = re.findall(r"docs/[\w/-]+\.md", path.read_text())
                if absent := [x for x in mentioned if not (ROOT / x).exists()]:
                    wrong[str(path.relative_to(ROOT))] = absent
    assert wrong == {}


def test_what_is_missing_is_found(tmp_path: pathlib.Path):
    (tmp_path / "there.md").write_text("# A section, with `code`\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-section-with-code) [b](absent.md) [c](there.md#other)")
    assert missing_links(page) == ["absent.md", "there.md#other"]
    text = "`docs/absent.md`, kernels/*/tiles.py, kernels/<arch>/*.py, fa4_jax/key.py and tests/no/"
    assert missing_paths(text) == ["docs/absent.md", "tests/no/"]
