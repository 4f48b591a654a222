"""What is made from the lessons: notebooks here, pages in docs/lessons, rows of src/hotloop/apps/learn/reference.json.

python lessons/make.py build                             # writes them, with what steps have printed
python lessons/make.py record lessons/recorded/cpu.json  # runs the lessons and keeps what their steps print
python lessons/make.py record lessons/recorded/gpu.json 3 17    # of some; the others stay
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hotloop.apps.learn import lab
from hotloop.apps.learn.exercise import exercise
from hotloop.apps.learn.lesson import Lesson, Step, lesson, lessons, wrapped
from hotloop.apps.learn.lesson_run import Session
from hotloop.apps.learn.notebook import notebook
from hotloop.printing.text import plural

ROOT = Path(__file__).resolve().parents[1]
TIME = 1200.0  # seconds of a lesson
WIDEST_OUTPUT = 96  # columns of an output on a page
MADE = "<!-- made by `python lessons/make.py build` from src/hotloop/apps/learn/lessons and lessons/recorded -->"
SIMULATED = re.compile(r"^\(on a simulated .*\)\n?", re.MULTILINE)
EMPTY: dict[str, Any] = {"gpu": "", "threads": 0, "torch": "", "date": "", "rows": {}, "steps": []}


def main() -> None:
    verb, *words = sys.argv[1:] or ["help"]
    if verb == "build":
        for file, text in files(read("cpu"), read("gpu")).items():
            file.write_text(text, encoding="utf-8")
    elif verb == "record" and words:
        record(Path(words[0]), [int(word) for word in words[1:]] or [each.number for each in lessons()])
    elif verb == "run":
        Path(words[1]).write_text(json.dumps(run(lesson(int(words[0])))), encoding="utf-8")
    else:
        sys.exit(__doc__)


# What is made


def read(name: str) -> dict[str, Any]:
    """What the lessons have printed on a machine."""
    file = ROOT / "lessons" / "recorded" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else EMPTY


def files(cpu: dict[str, Any], gpu: dict[str, Any]) -> dict[Path, str]:
    """Every file that is made from the lessons and their recordings, with its text."""
    made = {}
    for each in lessons():
        made[ROOT / "lessons" / f"{each.name}.ipynb"] = printed_notebook(each, gpu)
        made[ROOT / "docs" / "lessons" / f"{each.name}.md"] = page(each, cpu, gpu)
    if gpu["gpu"]:
        made[lab.REFERENCE] = as_text({name: gpu[name] for name in ("gpu", "torch", "date", "rows")})
    return made


def as_text(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def digest(step: Step) -> str:
    """Of its code: what other code printed is not shown."""
    return hashlib.sha256(step.code.encode()).hexdigest()[:12]


def output(recorded: dict[str, Any], of: Lesson, step: Step) -> str | None:
    """What the step printed; None where that is not known."""
    for each in recorded["steps"]:
        if (each["lesson"], each["step"], each["code"]) == (of.number, step.number, digest(step)):
            return "\n".join(each["output"])
    return None


def printed_notebook(of: Lesson, gpu: dict[str, Any]) -> str:
    """The notebook, with what its cells printed on a GPU."""
    book = json.loads(notebook(of))
    if any(output(gpu, of, step) for step in of.steps):
        told = f"\n\nThe outputs were recorded on an {gpu['gpu']} with torch {gpu['torch']}, {gpu['date']}."
        title = "".join(book["cells"][0]["source"]) + told
        book["cells"][0]["source"] = title.splitlines(keepends=True)
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    for step, cell in zip((step for step in of.steps if step.code), cells, strict=True):
        said = output(gpu, of, step)
        cell["execution_count"] = None if said is None else step.number
        if said:
            lines = f"{said}\n".splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}]
    return as_text(book)


def page(of: Lesson, cpu: dict[str, Any], gpu: dict[str, Any]) -> str:
    """The page, with the outputs of the steps as far as they were recorded."""
    head = f"{of.minutes} minutes. Needs: {of.needs}. Run it: `hotloop learn {of.number}`."
    parts = [MADE, f"# {of.number}. {of.title}", head]
    if any(output(gpu, of, step) for step in of.steps):
        where = f"on a CPU ({plural(cpu['threads'], 'thread')}, torch {cpu['torch']}) and, where it differs, "
        where += f"on an {gpu['gpu']} (torch {gpu['torch']}, {gpu['date']})"
        took = [sum(s["seconds"] for s in made["steps"] if s["lesson"] == of.number) for made in (cpu, gpu)]
        parts.append(f"Under each step is its output {where}. The steps took {took[0]:.1f} s and {took[1]:.1f} s.")
    for step in of.steps:
        parts += [step.text] if step.text else []
        if step.code:
            parts += [f"```python\n{step.code}```", *blocks(of, step, cpu, gpu)]
    parts.append(
        f"## Exercise\n\n{exercise(of.number).task}\n\n`hotloop learn start {of.number}` gives you the file, "
        f"`hotloop learn check {of.number}` runs and checks it. The file runs with your rights, in a process "
        "group and a temporary folder of its own, with a time limit and a limit on its memory."
    )
    return "\n\n".join(parts) + "\n"


def blocks(of: Lesson, step: Step, cpu: dict[str, Any], gpu: dict[str, Any]) -> list[str]:
    """Blocks of output: one where both machines printed the same."""
    here, there = output(cpu, of, step) or "", output(gpu, of, step)
    if there is None or here == there:
        found = {"Output": here}
    elif SIMULATED.sub("", here) == there:
        found = {f"Output on a simulated and on a real {gpu['gpu']}": there}
    else:
        found = {"Output on a CPU": here, f"Output on an {gpu['gpu']}": there}
    texts = {
        title: "\n".join(line for long in said.splitlines() for line in wrapped(long, WIDEST_OUTPUT))
        for title, said in found.items()
    }
    return [f'```text title="{title}"\n{text}\n```' for title, text in texts.items() if text]


# What is recorded


def record(file: Path, numbers: list[int]) -> None:
    """Run lessons, each in a process of its own, and keep what they print; one that fails ends it with the step."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else EMPTY
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="hotloop-learn-", ignore_cleanup_errors=True) as folder:
            told, out, work = Path(folder, "told.json"), Path(folder, "output"), Path(folder, "work")
            work.mkdir()
            command = [sys.executable, __file__, "run", str(number), str(told)]
            with out.open("w+b") as stream:
                subprocess.run(
                    command, cwd=work, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, timeout=TIME, check=False
                )
            if not told.exists():
                sys.exit(f"lesson {number} failed: {out.read_text(errors='replace').strip().rpartition(chr(10))[2]}")
            made = json.loads(told.read_text(encoding="utf-8"))
        before = kept if (kept["gpu"], kept["torch"]) == (made["gpu"], made["torch"]) else EMPTY
        steps = [*(each for each in before["steps"] if each["lesson"] != number), *made["steps"]]
        steps.sort(key=lambda each: (each["lesson"], each["step"]))
        kept = {**made, "rows": before["rows"] | made["rows"], "steps": steps}
        print(f"lesson {number}: {plural(len(made['steps']), 'step')}", flush=True)
        file.write_text(as_text(kept), encoding="utf-8")


def run(of: Lesson) -> dict[str, Any]:
    """Run one lesson; its standard output is a file, to which the processes that its steps start print too."""
    import torch  # not part of the first step's time

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if gpu:
        lab.REFERENCE = Path("none")  # or the figures of another run would stand beside these
    session, steps = Session(of), []
    for step in of.steps:
        if not step.code:
            continue
        printed, begun = os.fstat(1).st_size, time.perf_counter()
        # To the file itself, so that words of Python and of other processes come in their order.
        error = session.run(step, lambda words: os.write(1, words.encode("utf-8", errors="replace"))).error
        seconds = round(time.perf_counter() - begun, 2)
        sys.stdout.flush()
        sys.stderr.flush()
        said = clean(os.pread(1, os.fstat(1).st_size - printed, printed).decode("utf-8", errors="replace")).rstrip()
        lines = [line.rstrip() for line in said.splitlines()]
        if (error is not None) is not step.raises:
            sys.exit(f"step {step.number}: {lines[-1] if error else 'no error, though it is to end in one'}")
        steps.append(
            {"lesson": of.number, "step": step.number, "code": digest(step), "seconds": seconds, "output": lines}
        )
    about = {"gpu": gpu, "threads": torch.get_num_threads(), "torch": torch.__version__}
    return {**about, "date": datetime.now(UTC).date().isoformat(), "rows": lab.recorded, "steps": steps}


def clean(words: str) -> str:
    """Words without the folders of this machine, and without what libraries log with a time."""
    words = re.sub(r"^(?:[A-Z]+:\d{4}-\d\d-\d\d |\[?[IWE]\d{4} \d\d:).*\n", "", words, flags=re.MULTILINE)
    folders = {sys.prefix, sys.base_prefix, str(ROOT), str(Path.cwd()), str(Path.home())}
    for folder in sorted(folders - {"/", "/usr"}, key=len, reverse=True):
        words = words.replace(f"{folder}/", "…/")
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/[\w.-]+(/work)?", "…", words)


if __name__ == "__main__":
    main()
