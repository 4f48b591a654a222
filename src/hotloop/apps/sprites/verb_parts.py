"""What the verbs of sprites share: a seed, and a bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from hotloop.cli.output import console
from hotloop.errors import BadArgument


def _seed(given: int) -> int:
    if not 0 <= given <= 2**62:
        raise BadArgument(f"seed {given} is out of range", fix="choose one from 0 to 2**62")
    return given


Seed = Annotated[
    int,
    typer.Option(metavar="N", callback=_seed, help="The same seed gives the same result."),
]


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for work that reports `(done, total)`; only a terminal shows it."""
    from rich.progress import Progress  # noqa: PLC0415  # a command that shows no bar does without

    where = console(stderr=True)
    with Progress(console=where, transient=True, disable=not where.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
