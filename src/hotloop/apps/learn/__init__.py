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

    from hotloop.apps.learn.checking import check_and_keep  # noqa: PLC0415
    from hotloop.apps.learn.verdicts import show_verdicts  # noqa: PLC0415

    result = check_and_keep(number, None if file is None else Path(file))
    show_verdicts(Console(force_jupyter=False, highlight=False), result)  # Jupyter would space its lines out
    return result
