"""`python -m hotloop.levers docs` writes the pages of the levers, their table and their menu from their classes."""

import argparse
import re
from pathlib import Path

from hotloop.levers import LEVERS


def table() -> str:
    """All levers in the order of trying, as Markdown."""
    rows = [f"| [{each.name}]({Path(each.page).name}) | {each.tier} | {each.cost} | {each.what} |" for each in LEVERS]
    return "\n".join(["| lever | tier | cost to pull | what it does |", "|---|---|---|---|", *rows])


def write(docs: Path) -> None:
    """Write a page for each lever, the table of their index, and what the menu in `mkdocs.yml` lacks."""
    for lever in LEVERS:
        (docs / lever.page).write_text(lever.documentation, encoding="utf-8")
    index = docs / "levers" / "index.md"
    text = re.sub(r"(?m)^\| lever \|.*\n(?:\|.*\n)+", lambda _: table() + "\n", index.read_text(encoding="utf-8"))
    index.write_text(text, encoding="utf-8")
    menu = docs.parent / "mkdocs.yml"
    entries = menu.read_text(encoding="utf-8").splitlines(keepends=True)
    last = max(number for number, line in enumerate(entries, 1) if ": levers/" in line)
    new = [line for lever in LEVERS if (line := f"      - {lever.name}: {lever.page}\n") not in entries]
    menu.write_text("".join([*entries[:last], *new, *entries[last:]]), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m hotloop.levers", description=__doc__)
    parser.add_argument("docs", type=Path, help="the folder of the documentation, with levers/index.md in it")
    folder = parser.parse_args().docs
    if not (folder / "levers" / "index.md").is_file():
        parser.error(f"{folder} holds no levers/index.md; give the docs folder of a clone")
    write(folder)
