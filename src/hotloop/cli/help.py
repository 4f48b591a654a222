"""How the help of a verb is set: paragraphs flow with the terminal, examples keep their lines, flags take no value."""

import inspect
from typing import Any

from typer.core import TyperCommand, TyperGroup


def flowing(text: str) -> str:
    """A docstring as help: its line breaks are those of the source file, so only indented lines keep theirs.

    >>> print(flowing("It runs on the device\\nthat is here."))
    It runs on the device that is here.
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    # typer takes away an indentation that all lines share; markup before it keeps it
    return "\n\n".join(
        words.replace("\n  ", "\n[dim]  [/dim]") if "\n  " in words else words.replace("\n", " ")
        for words in paragraphs
    )


def _valueless(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""  # else typer writes `--json <bool>`, as if a value had to follow
    return params


class Verb(TyperCommand):
    """A command of hotloop."""

    def __init__(self, name: str | None, *, help: str | None = None, **settings: Any) -> None:  # noqa: A002
        super().__init__(name, help=flowing(help or ""), **settings)

    def get_params(self, ctx: Any) -> Any:
        return _valueless(super().get_params(ctx))


class Verbs(TyperGroup):
    """Commands of hotloop under one name."""

    def get_params(self, ctx: Any) -> Any:
        return _valueless(super().get_params(ctx))
