"""`python -m hotloop.apps.learn build` writes notebooks and pages; `record` runs lessons and keeps what they print."""

import argparse
import json
import re
import sys
from pathlib import Path

from hotloop.apps.learn.lesson import lesson, lessons
from hotloop.apps.learn.lesson_page import index, page
from hotloop.apps.learn.notebook import notebook
from hotloop.apps.learn.recording import Recording, record

RECORDED = Path("lessons", "recorded")


def files(root: Path) -> dict[Path, str]:
    """Every file that is made from the lessons and their recordings, with its text."""
    cpu, gpu = (Recording.read(root / RECORDED / f"{name}.json") for name in ("cpu", "gpu"))
    made = {root / "docs" / "lessons" / "index.md": index(lessons(), cpu, gpu)}
    for each in lessons():
        made[root / "lessons" / f"{each.name}.ipynb"] = notebook(each, gpu)
        made[root / "docs" / "lessons" / f"{each.name}.md"] = page(each, cpu, gpu)
    menu = root / "mkdocs.yml"
    made[menu] = with_menu(menu.read_text(encoding="utf-8"))
    if gpu.gpu:
        about = {"gpu": gpu.gpu, "torch": gpu.torch, "date": gpu.date, "rows": gpu.rows}
        text = json.dumps(about, indent=1, ensure_ascii=False) + "\n"
        made[root / "src" / "hotloop" / "apps" / "learn" / "reference.json"] = text
    return made


def with_menu(text: str) -> str:
    """The menu of the documentation, with the lessons in it."""
    entries = [f"      - {each.number}. {each.title}: lessons/{each.name}.md\n" for each in lessons()]
    block = "".join(["  - Lessons:\n", "      - Overview: lessons/index.md\n", *entries])
    return re.sub(r"  - Lessons:\n(?:      - .*\n)+", lambda _: block, text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hotloop.apps.learn", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build", help="write notebooks and pages")
    build.add_argument("root", type=Path, nargs="?", default=Path(), help="a clone of the project")
    run = verbs.add_parser("record", help="run lessons on this machine and keep what they print")
    run.add_argument("out", type=Path, help=f"the file; {RECORDED}/cpu.json and gpu.json are what `build` reads")
    run.add_argument("lessons", type=int, nargs="*", metavar="N", help="of these lessons alone; the others stay")
    given = parser.parse_args()
    if given.verb == "record":
        chosen = [lesson(number) for number in given.lessons] or lessons()
        made = record(chosen, Recording.read(given.out))
        made.write(given.out)
        failed = sum(bool(step.problem) for step in made.steps)
        print(f"{given.out}: {made.machine}, torch {made.torch}, {len(made.steps)} steps, {failed} failed")
        sys.exit(bool(failed))
    if not (given.root / "mkdocs.yml").is_file():
        parser.error(f"{given.root} holds no mkdocs.yml; give the folder of a clone")
    for file, text in files(given.root).items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
