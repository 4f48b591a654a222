"""`hotloop learn`: lessons that run, exercises that are checked, a quiz. `README.md` in this folder has the map."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.apps.learn.checking import Result


def check(number: int, file: Path | str | None = None) -> "Result":
    """Check an exercise from a notebook or a prompt: what `hotloop learn check 3` does and shows, and the result.

    `file` is your version of it; without one, the exercise's own name in the current folder.

    >>> from hotloop.apps.learn import check
    >>> check(3)  # doctest: +SKIP
    exercise 3: 4 of 4 right
    """
    from rich.console import Console  # noqa: PLC0415  # the verb's --help needs none of this

    from hotloop.apps.learn import checking  # noqa: PLC0415
    from hotloop.apps.learn.exercise import exercise  # noqa: PLC0415
    from hotloop.apps.learn.learner_progress import LearnerProgress  # noqa: PLC0415
    from hotloop.apps.learn.verdicts import show_verdicts  # noqa: PLC0415

    chosen = exercise(number)
    path = Path(file or chosen.file.name)
    result = checking.check(chosen, path)
    LearnerProgress.load().checked(number, result.right, len(result.verdicts))
    show_verdicts(Console(force_jupyter=False, highlight=False), result, path)  # Jupyter would space its lines out
    return result
