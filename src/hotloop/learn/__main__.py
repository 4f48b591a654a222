"""`python -m hotloop.learn build` writes notebooks and pages; `reference` measures the machine it is on."""

import argparse
import json
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from hotloop.learn import lab
from hotloop.learn.lesson import Lesson, lessons
from hotloop.learn.notebook import notebook
from hotloop.learn.page import index, outputs_in, page
from hotloop.learn.running import Session


def outputs_of(lesson: Lesson) -> list[str]:
    """What the steps of a lesson print on this machine."""
    session = Session(lesson)
    told = []
    for step in lesson.steps:
        if step.code:
            outcome = session.run(step)
            if (outcome.error is not None) != step.raises:
                sys.exit(f"lesson {lesson.number}, step {step.number}: {outcome.output}")
            told.append(outcome.output)
    return told


def files(root: Path, chosen: set[int] = frozenset()) -> dict[Path, str]:  # type: ignore[assignment]
    """Every file that is made from the lessons, with its text; the outputs of the chosen ones are made anew."""
    made = {root / "docs" / "lessons" / "index.md": index(lessons())}
    for lesson in lessons():
        made[root / "lessons" / f"{lesson.name}.ipynb"] = notebook(lesson)
        file = root / "docs" / "lessons" / f"{lesson.name}.md"
        old = file.read_text(encoding="utf-8") if file.is_file() else ""
        made[file] = page(lesson, outputs_of(lesson) if lesson.number in chosen else outputs_in(old, lesson))
    menu = root / "mkdocs.yml"
    made[menu] = with_menu(menu.read_text(encoding="utf-8"))
    return made


def with_menu(text: str) -> str:
    """The menu of the documentation, with the lessons in it."""
    entries = [f"      - {each.number}. {each.title}: lessons/{each.name}.md\n" for each in lessons()]
    block = "".join(["  - Lessons:\n", "      - Overview: lessons/index.md\n", *entries])
    without = re.sub(r"  - Lessons:\n(?:      - .*\n)+", "", text)
    return without.replace("  - Concepts: concepts.md\n", f"  - Concepts: concepts.md\n{block}")


def measure(out: Path) -> None:
    """Run all lessons and write the rows that `beside` has shown, as the reference of this machine."""
    for lesson in lessons():
        outputs_of(lesson)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    date = datetime.now(UTC).date().isoformat()
    data = {"gpu": name, "torch": torch.__version__, "date": date, "rows": lab.recorded}
    out.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hotloop.learn", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build", help="write notebooks and pages")
    build.add_argument("root", type=Path, nargs="?", default=Path(), help="a clone of the project")
    build.add_argument("--run", type=int, nargs="*", metavar="N", help="make the outputs of these lessons anew, or all")
    verbs.add_parser("reference", help="measure this machine").add_argument("out", type=Path)
    given = parser.parse_args()
    if given.verb == "reference":
        measure(given.out)
        return
    if not (given.root / "mkdocs.yml").is_file():
        parser.error(f"{given.root} holds no mkdocs.yml; give the folder of a clone")
    chosen = set() if given.run is None else set(given.run) or {each.number for each in lessons()}
    for file, text in files(given.root, chosen).items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
