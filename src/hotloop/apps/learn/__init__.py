"""`hotloop learn`: lessons that run, exercises that are checked, a quiz.

A lesson is one Markdown file, `lessons/NN-name.md`: front matter, then text and fenced `python` blocks, which run one
after another in one namespace (`python raises` is a block that ends in an error, on purpose). Made from it:

- `lesson.py` reads it into steps, `lesson_run.py` runs a step and keeps what it prints;
- `lesson_terminal.py` shows it step by step; `notebook.py` and `lesson_page.py` write it as a notebook and as a page
  of the docs, and `python -m hotloop.apps.learn build` writes all of them;
- `recording.py` keeps what the steps print on a machine:
  `python -m hotloop.apps.learn record lessons/recorded/cpu.json`, or `gpu.json` on one with a GPU. Pages show both,
  notebooks what the GPU printed;
- `lab.py` is what lessons import: `gpu()`, a real GPU or a simulated one that says so, and `beside()`, a table of what
  was measured here beside the same rows on a named GPU (`reference.json`, which `build` takes from `gpu.json`).

An exercise is a script in `exercises/`: `NN_name.py` to repair, `NN_name_solution.py`, and `NN_name_check.py`, whose
`check(ran)` yields verdicts. `checking.py` starts `child.py` on the learner's file, in a process group and a temporary
folder of its own, with a time limit and a watchdog on its memory; `judging.py` holds what the checks share.

`quiz.toml` are the questions; `quiz.py` judges choices and code. `learner_progress.py` keeps what was done, for the
list of lessons.
"""
