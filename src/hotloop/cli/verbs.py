"""Which verbs there are: the core's own, and those that applications bring through entry points of one group."""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from hotloop.cli.help import Verb, Verbs
from hotloop.errors import MissingApplication

ENTRY_POINTS = "hotloop.verbs"  # an entry point: the name of a verb, and the typer.Typer that holds its command
# Each in the file of its name beside this one, in the order in which people meet them.
CORE = ("device", "train", "evaluate", "tune", "profile", "bench", "launch", "export", "report")
APPLICATIONS = "Applications"  # the heading of the others in the help


class AllVerbs(Verbs):
    """The verbs by name; the file of one is imported when somebody asks for it, or for the help."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*CORE, *sorted(_brought())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            if cmd_name in CORE:
                self.add_command(_command(import_module(f"hotloop.cli.{cmd_name}").app, cmd_name), cmd_name)
            elif entry := _brought().get(cmd_name):
                self.add_command(_from(entry), cmd_name)
        return super().get_command(ctx, cmd_name)


def _brought() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _command(app: typer.Typer, name: str) -> Any:
    command = typer.main.get_command(app)
    command.name = name
    return command


def _from(entry: EntryPoint) -> Any:
    """The command of an application; where that is not installed, one that says so when it is called."""
    try:
        command = _command(entry.load(), entry.name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{entry.module}.".startswith(f"{error.name}."):
            raise
        command = _missing(entry, error.name)
    command.rich_help_panel = APPLICATIONS
    return command


def _missing(entry: EntryPoint, module: str) -> Verb:
    package = entry.dist.name if entry.dist else "hotloop"

    def tell(*_: Any, **__: Any) -> None:
        raise MissingApplication(f"`hotloop {entry.name}`", module, package=package)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return Verb(entry.name, callback=tell, hidden=True, context_settings=settings)
