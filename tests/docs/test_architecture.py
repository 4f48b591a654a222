"""The pages about the code name what the code has: files, functions, tests, packages, and one another."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hotloop

ROOT = Path(__file__).parents[2]
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "hotloop"
DECISIONS = sorted((DOCS / "decisions").glob("*.md"))
PAGES = {page.name: page for page in (DOCS / "architecture.md", *DECISIONS, ROOT / "CONTRIBUTING.md")}
EACH = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


def found(name: str) -> Path | None:
    """A file or folder by its path in the repository or in the package."""
    every = (folder / name for folder in (ROOT, SOURCE, SOURCE.parent))
    return next((path for path in every if path.exists()), None)


def quoted(text: str) -> list[str]:
    """What stands in backticks, outside of blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@cache
def names_in(file: Path) -> frozenset[str]:
    """Functions, classes and their methods, and other names that a file defines."""

    def defined(body: list[ast.stmt], within: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield within + node.name
            if isinstance(node, ast.ClassDef):
                yield from defined(node.body, f"{within}{node.name}.")
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            yield from (within + target.id for target in targets if isinstance(target, ast.Name))

    return frozenset(defined(ast.parse(file.read_text(encoding="utf-8")).body))


@cache
def all_tests() -> frozenset[str]:
    files = (file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    return frozenset(name for text in files for name in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE))


@EACH
def test_every_file_that_is_named_is_there(page: Path) -> None:
    named = [each for each in quoted(page.read_text(encoding="utf-8")) if re.fullmatch(r"[\w./-]+(\.\w+|/)", each)]
    files = [each for each in named if each.endswith((".py", ".md", ".toml", ".json", ".yml", "/"))]
    assert [each for each in files if found(each) is None] == []


@EACH
def test_every_name_with_a_file_beside_it_is_defined_there(page: Path) -> None:
    pairs = re.findall(r"`([\w.]+)`\s+\(`([\w/.]+\.py)`\)", page.read_text(encoding="utf-8"))
    missing = [(name, file) for name, file in pairs if (path := found(file)) is None or name not in names_in(path)]
    assert missing == []


@EACH
def test_every_test_that_is_named_is_there(page: Path) -> None:
    named = [each for each in quoted(page.read_text(encoding="utf-8")) if re.fullmatch(r"test_\w+", each)]
    assert [each for each in named if each not in all_tests()] == []


@EACH
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_map_has_every_package_in_its_layer() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"## The map.*?^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    lines = [(int(line[:2]), re.split(r"  +", line[3:])[0]) for line in block[1].splitlines()]
    rows = [(number, name) for number, names in lines for name in names.split()]
    modules = [path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    packages = sorted({name.partition(".")[0] for _, name in rows})
    assert packages == sorted({path.stem for path in modules} - {"__init__", "__main__"})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = project["tool"]["importlinter"]["contracts"][0]
    layers = [
        {name.removeprefix("hotloop.") for name in re.split(r" [|:] ", layer)} for layer in reversed(contract["layers"])
    ]
    assert [{name for row, name in rows if row == number} for number in range(1, len(layers) + 1)] == layers


def test_the_table_of_parts_has_every_part() -> None:
    table = PAGES["architecture.md"].read_text(encoding="utf-8").partition("| part | saved |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in row.split("|")[1].strip().split(", ")]
    assert sorted(listed) == sorted(hotloop.Loop.parts())


def test_decisions_are_numbered_and_listed_in_their_order() -> None:
    listed = re.findall(
        r"^(\d+)\. \[(.+)\]\(decisions/(.+)\)$", (DOCS / "architecture.md").read_text(), flags=re.MULTILINE
    )
    titles = [page.read_text(encoding="utf-8").splitlines()[0] for page in DECISIONS]
    assert [f"# {number}. {title}" for number, title, _ in listed] == titles
    assert [file for _, _, file in listed] == [page.name for page in DECISIONS]
    assert [int(page.name[:2]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_says_why_where_it_ends_and_what_holds_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    places = [text.find(f"**{part}.**") for part in ("Decision", "Why", "Limits", "Tests")]
    assert -1 not in places
    assert places == sorted(places)
    assert "`tests/" in text[places[-1] :]
    assert f": decisions/{page.name}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
