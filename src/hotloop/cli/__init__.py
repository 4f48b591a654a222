"""The command line: one verb per job, each in a file that parses, calls and renders."""

import os
import shutil
import sys

import typer

from hotloop.cli import bench as bench
from hotloop.cli import demo as demo
from hotloop.cli import device as device
from hotloop.cli import doctor as doctor
from hotloop.cli import evaluate as evaluate
from hotloop.cli import export as export
from hotloop.cli import generate as generate
from hotloop.cli import launch as launch
from hotloop.cli import learn as learn
from hotloop.cli import profile as profile
from hotloop.cli import report as report
from hotloop.cli import simulate as simulate
from hotloop.cli import sprites as sprites
from hotloop.cli import top as top
from hotloop.cli import train as train
from hotloop.cli import tune as tune
from hotloop.cli.help import Verb, Verbs
from hotloop.errors import HotloopError
from hotloop.launch.worker import is_worker
from hotloop.text import wrap

EPILOG = "Every command has its own --help. HOTLOOP_DEVICE=cuda:1 sets the device for all of them."


class InOrder(Verbs):
    """Lists the verbs in the order in which a person meets them."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        order = [
            "demo",
            "learn",
            "device",
            "sprites",
            "train",
            "evaluate",
            "generate",
            "export",
            "launch",
            "tune",
            "doctor",
            "profile",
            "simulate",
            "bench",
            "report",
            "top",
        ]
        return sorted(super().list_commands(ctx), key=order.index)


app = typer.Typer(
    name="hotloop",
    cls=InOrder,
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


app.command("device", cls=Verb)(device.device)
app.command("demo", cls=Verb)(demo.demo)
app.add_typer(learn.app, name="learn")
app.add_typer(sprites.app, name="sprites")
app.add_typer(train.app, name="train")
app.command("evaluate", cls=Verb)(evaluate.evaluate)
app.command("generate", cls=Verb)(generate.generate)
app.command("export", cls=Verb)(export.export)
app.command("launch", cls=launch.LaunchVerb)(launch.launch)
app.command("tune", cls=Verb)(tune.tune)
app.command("bench", cls=Verb)(bench.bench)
app.command("doctor", cls=Verb, context_settings={"allow_interspersed_args": False})(doctor.doctor)
app.command("profile", cls=Verb, context_settings={"allow_interspersed_args": False})(profile.profile)
app.command("simulate", cls=Verb, context_settings={"allow_interspersed_args": False})(simulate.simulate)
app.command("report", cls=Verb)(report.report)
app.command("top", cls=Verb)(top.top)


def main() -> None:
    """Run the command line; a person's mistake ends in one clear message, never in a traceback."""
    try:
        app()
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
        sys.exit(130)


def _tell(words: str) -> None:
    """Words on stderr; a terminal, which would cut them anywhere, gets them in lines of its width."""
    if not sys.stderr.isatty():
        print(words, file=sys.stderr)
        return
    width = shutil.get_terminal_size().columns
    for line in words.splitlines():
        text = line.lstrip()
        print(*wrap(text, width, line.removesuffix(text)), sep="\n", file=sys.stderr)
