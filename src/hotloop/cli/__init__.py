"""The command line: one verb per job, each in a file that parses, calls and renders."""

import os
import shutil
import sys

import typer

from hotloop.cli.verbs import AllVerbs
from hotloop.errors import INTERRUPTED, HotloopError
from hotloop.printing.text import wrap
from hotloop.scripts.rank_worker import is_worker

EPILOG = "Every command has its own --help. HOTLOOP_DEVICE=cuda:1 sets the device for all of them."

app = typer.Typer(
    name="hotloop",
    cls=AllVerbs,
    help="Run your PyTorch training loop as fast as your hardware allows.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from hotloop import __version__

        typer.echo(f"hotloop {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main(commands: typer.Typer = app) -> None:
    """Run a command line; a person's mistake ends in one clear message, never in a traceback."""
    try:
        commands()
    except HotloopError as error:
        if os.environ.get("HOTLOOP_DEBUG") or is_worker():  # a rank, whose error is told once for all of them
            raise
        _tell(f"hotloop: {error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stdout = None  # so that Python does not flush into the closed pipe
        sys.exit(141)
    except OSError as error:
        _tell(f"hotloop: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        _tell("hotloop: stopped")
        sys.exit(INTERRUPTED)


def _tell(words: str) -> None:
    """Words on stderr; a terminal, which would cut them anywhere, gets them in lines of its width."""
    if not sys.stderr.isatty():
        print(words, file=sys.stderr)
        return
    width = shutil.get_terminal_size().columns
    for line in words.splitlines():
        text = line.lstrip()
        print(*wrap(text, width, line.removesuffix(text)), sep="\n", file=sys.stderr)
