"""A lesson as a page of the documentation, with what its code printed on a CPU and on a GPU."""

import re
import textwrap
from collections.abc import Sequence

from hotloop.apps.learn.exercise import exercise
from hotloop.apps.learn.lesson import Lesson, Step
from hotloop.apps.learn.recording import Recording
from hotloop.printing.text import plural

_SIMULATED = re.compile(r"^\(on a simulated .*\)\n?", re.MULTILINE)
WIDEST_OUTPUT = 96  # columns of an output
MADE = "<!-- made by `python -m hotloop.apps.learn build` from src/hotloop/apps/learn/lessons and lessons/recorded -->"


def page(lesson: Lesson, cpu: Recording, gpu: Recording) -> str:
    """The page, with the outputs of the steps as far as they were recorded."""
    head = f"{lesson.minutes} minutes. Needs: {lesson.needs}. Run it: `hotloop learn {lesson.number}`."
    parts = [MADE, f"# {lesson.number}. {lesson.title}", head]
    if any(gpu.output(lesson, step) for step in lesson.steps):
        seconds = f"The steps took {cpu.seconds(lesson):.1f} s and {gpu.seconds(lesson):.1f} s."
        parts.append(f"Under each step is its output {_machines(cpu, gpu)}. {seconds}")
    for step in lesson.steps:
        parts += [step.text] if step.text else []
        if step.code:
            parts += [f"```python\n{step.code}```", *_outputs(lesson, step, cpu, gpu)]
    parts.append(
        f"## Exercise\n\n{exercise(lesson.number).task}\n\n`hotloop learn start {lesson.number}` gives you the file, "
        f"`hotloop learn check {lesson.number}` runs and checks it. The file runs with your rights, in a process "
        "group and a temporary folder of its own, with a time limit and a limit on its memory."
    )
    return "\n\n".join(parts) + "\n"


def _outputs(lesson: Lesson, step: Step, cpu: Recording, gpu: Recording) -> list[str]:
    """Blocks of output: one where both machines printed the same."""
    here, there = cpu.output(lesson, step) or "", gpu.output(lesson, step)
    if there is None or here == there:
        found = {"Output": here}
    elif _SIMULATED.sub("", here) == there:
        found = {f"Output on a simulated and on a real {gpu.gpu}": there}
    else:
        found = {f"Output on {cpu.machine}": here, f"Output on {gpu.machine}": there}
    return [f'```text title="{title}"\n{_wrapped(output)}\n```' for title, output in found.items() if output]


def _wrapped(output: str) -> str:
    """Sentences that are longer than a page is wide, in lines; nobody likes to scroll sideways.

    >>> print(_wrapped("  fix: " + 24 * "word "))
      fix: word word word word word word word word word word word word word word word word word
        word word word word word word word
    """
    lines = []
    for line in output.splitlines():
        indent = line[: len(line) - len(line.lstrip())] + "  "
        lines += textwrap.wrap(
            line, WIDEST_OUTPUT, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
        )
        lines += [] if line.strip() else [""]
    return "\n".join(lines)


def _machines(cpu: Recording, gpu: Recording) -> str:
    """Where the outputs were printed, in words."""
    first = f"on {cpu.machine} ({plural(cpu.threads, 'thread')}, torch {cpu.torch})"
    return f"{first} and, where it differs, on {gpu.machine} (torch {gpu.torch}, {gpu.date})" if gpu.steps else first


def index(all_lessons: Sequence[Lesson], cpu: Recording, gpu: Recording) -> str:
    """The page that lists the lessons."""
    rows = [
        f"| {each.number} | [{each.title}]({each.name}.md) | {each.minutes} min | `{exercise(each.number).file.name}` |"
        for each in all_lessons
    ]
    about = INDEX.replace("{outputs}", f"These pages show what each step printed {_machines(cpu, gpu)}.")
    return "\n".join([MADE, "", about, "", "| | lesson | | exercise |", "|---|---|---|---|", *rows, "", TUTORIAL, ""])


INDEX = """# Lessons

From the first `torch.cuda.is_available()` to several GPUs. Everything runs on a laptop without a GPU: what only a GPU
shows is run on a [simulated one](../simulate.md), and says so.

```sh
hotloop learn            # the lessons, and how far you are
hotloop learn 3          # run lesson 3: Enter runs the next step
hotloop learn start 3    # get its exercise, a script to repair
hotloop learn check 3    # run your repair: what is right, what is not, and a hint
hotloop learn solution 3 # print a right version of it
hotloop learn quiz       # questions with explanations
hotloop learn --notebook # the lessons as notebooks, in JupyterLab
```

The same lessons are notebooks. `--notebook` opens [copies of your own](../commands/learn.md#as-notebooks); those in
`lessons/` show what a GPU printed. {outputs}

An exercise runs your file with your rights, in a process group and a temporary folder of its own, with a time limit and
a limit on its memory. Progress is kept in `~/.local/share/hotloop/learn.json`; `HOTLOOP_DATA` names another folder."""

TUTORIAL = """## From a tutorial's scripts

Tutorials on GPU training with PyTorch often come as a row of scripts. What they teach is here:

| a tutorial's script | lesson |
|---|---|
| `01_checking_device.py` | [1. The device](01-device.md) |
| `02_moving_model_to_device.py` | [2. Tensors on the device](02-tensors.md), [4. A model on the device](04-model.md) |
| `03_modifying_training_loop_gpu.py` | [5. The training loop](05-training.md), [7. Transfers](07-transfers.md) |
| `04_modifying_evaluation_loop_gpu.py` | [6. The evaluation loop](06-evaluation.md) |
| `05_device_mismatch.py` | [3. The golden rule](03-golden-rule.md) |
| `06_timing_cpu_vs_gpu.py` | [15. Timing done right](15-timing.md), [8. Vectorise](08-vectorise.md) |
| `07_mixed_precision.py` | [10. Mixed precision](10-precision.md) |
| `08_memory_tips.py` | [9. Memory](09-memory.md) |
| `09_profiler.py` | [11. The profiler](11-profiler.md) |
| `10_data_parallel.py` | [14. Several GPUs](14-several.md) |
| `gpu_and_cuda_example.py` | [16. From the tutorial's loop to a hot loop](16-whole.md) |"""
