"""Options that several verbs of sprites share."""

from pathlib import Path
from typing import Annotated

import typer

Classes = Annotated[
    list[str] | None, typer.Option("--class", "-c", metavar="NAME", help="Only this class; may be given several times.")
]
Data = Annotated[
    Path | None,
    typer.Argument(metavar="DATA", help="A set of sprites; without one, hotloop makes sprites.", show_default=False),
]
Scale = Annotated[int, typer.Option(metavar="N", help="Size of a sprite's pixel, in pixels.")]
