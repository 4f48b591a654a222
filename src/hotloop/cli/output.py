"""What the verbs print: words for people, or one JSON object for programs."""

import json
import re
import textwrap
from typing import TYPE_CHECKING, Any

import typer

from hotloop.text import printable

if TYPE_CHECKING:
    from rich.console import Console

COMMAND = re.compile(r"`[^`]+`")


def console(*, stderr: bool = False) -> "Console":
    """Where words go: stdout, or stderr where stdout is kept for JSON."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def say(where: "Console", words: str, *, indent: str = "", style: str = "") -> None:
    """A paragraph, wrapped between words but never inside a `command`."""
    from rich.text import Text

    for line in wrap(printable(words), where.width, indent):
        said = Text(line, style=style)
        said.highlight_regex(COMMAND, "bold cyan")
        where.print(said, soft_wrap=True)


def print_json(data: dict[str, Any]) -> None:
    """Exactly one object of strict JSON on stdout."""
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of at most `width`, except where one command or address is longer.

    >>> wrap("fix: run `unset CUDA_VISIBLE_DEVICES`", 24)
    ['fix: run', '`unset CUDA_VISIBLE_DEVICES`']
    """
    held = COMMAND.sub(lambda match: match[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        held,
        max(width, 20),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]
