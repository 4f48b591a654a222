"""Options that several verbs share, so that they are called and explained the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[
    str | None,
    typer.Option(
        "--device", "-d", metavar="NAME", help="auto, cuda, cuda:1, mps, xpu or cpu.", show_default="the best here"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object; progress goes to stderr.")]
Report = Annotated[
    bool,
    typer.Option(
        "--report/--no-report", help="Also write report.html and .json, to runs/TIME or the folder of --save, if any."
    ),
]
Script = Annotated[
    list[str],
    typer.Argument(metavar="SCRIPT.py [ARGUMENTS]...", help="What you would write after `python`.", show_default=False),
]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")]
NewFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write here, to a new or empty folder.", show_default="runs/TIME"),
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function in your own file that returns (loop, loader), or (loop, loader, arguments of Loop.fit).",
    ),
]
Save = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write checkpoints here, so that the run can resume.", show_default=False),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint, or begin if there is none.")]
Gpus = Annotated[
    str,
    typer.Option(metavar="N|auto", help="GPUs of this machine; more than 1 use `hotloop launch`."),
]
TimeLimit = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Save and end after this long, such as 2h.", show_default=False),
]
