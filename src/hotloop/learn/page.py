"""A lesson as a page of the documentation, with what its code printed."""

import re
from collections.abc import Sequence

from hotloop.learn.exercise import exercises
from hotloop.learn.lesson import Lesson

_OUTPUT = re.compile(r'^```text title="Output"\n(.*?)^```\n', re.MULTILINE | re.DOTALL)
MADE = "<!-- made by `python -m hotloop.learn build` from src/hotloop/learn/lessons -->"


def page(lesson: Lesson, outputs: Sequence[str]) -> str:
    """The page; `outputs` are those of the steps that have code."""
    told = iter(outputs)
    parts = [
        MADE,
        f"# {lesson.number}. {lesson.title}",
        f"{lesson.minutes} minutes. Needs: {lesson.needs}. Run it: `hotloop learn {lesson.number}`.",
    ]
    for step in lesson.steps:
        parts += [step.text] if step.text else []
        if step.code:
            parts.append(f"```python\n{step.code}```")
            output = next(told, "").rstrip()
            parts += [f'```text title="Output"\n{output}\n```'] if output else []
    for exercise in (each for each in exercises() if each.lesson == lesson.number):
        parts.append(
            f"## Exercise\n\n{exercise.task}\n\n`hotloop learn start {lesson.number}` gives you the file, "
            f"`hotloop learn check {lesson.number}` runs and checks it. The file runs with your rights, in a process "
            "group and a temporary folder of its own, with a time limit and a limit on its memory."
        )
    return "\n\n".join(parts) + "\n"


def without_outputs(text: str) -> str:
    """A page as its source alone determines it."""
    return re.sub(r"\n{3,}", "\n\n", _OUTPUT.sub("", text))


def outputs_in(text: str, lesson: Lesson) -> list[str]:
    """The outputs that a page holds, one for each step with code; empty where it has none."""
    found = []
    for step in lesson.steps:
        if step.code:
            block = f"```python\n{step.code}```\n\n"
            after = text.partition(block)[2]
            output = _OUTPUT.match(after)
            found.append(output[1] if output else "")
    return found


def index(all_lessons: Sequence[Lesson]) -> str:
    """The page that lists the lessons."""
    tasks = {each.lesson: each for each in exercises()}
    rows = [
        f"| {each.number} | [{each.title}]({each.name}.md) | {each.minutes} min | "
        f"{f'`{tasks[each.number].file.name}`' if each.number in tasks else ''} |"
        for each in all_lessons
    ]
    return "\n".join([MADE, "", INDEX, "", "| | lesson | | exercise |", "|---|---|---|---|", *rows, "", TUTORIAL, ""])


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
hotloop learn --web      # all of this in your browser
```

![Lesson 3 in a browser: text, code that was run, and its output](../pictures/learn-web.png)

`--web` needs `pip install 'hotloop[web]'`. It listens on this machine alone, and its address holds a token: what you
run there runs with your rights.

The same lessons are notebooks in `lessons/`. The outputs on these pages are those of a machine with two slow CPU cores
and no GPU; where a table has a column for a named GPU, that was measured there.

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
