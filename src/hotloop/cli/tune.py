"""`hotloop tune`: try every lever on a training loop, and write the plan that was found."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.cli.options import Device, Json, Report
from hotloop.cli.output import command_line, console, keep, must_be_writable, print_json, say
from hotloop.errors import BadArgument
from hotloop.text import an, printable, shorten

if TYPE_CHECKING:
    from hotloop.plan import Tuning
    from hotloop.training import Loop


def tune(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="FILE.py:FUNCTION that returns (loop, loader); or mlp, cnn, resnet18, sprites, gpt, gpt2.",
        ),
    ],
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of the run to plan for.", show_default=False)
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Or its length in plain PyTorch.", show_default="3600"),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write the plan, for Loop(plan=FILE).")
    ] = Path("plan.json"),
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also plot the gain of each lever, as a PNG.")
    ] = None,
    device: Device = None,
    report: Report = True,
    as_json: Json = False,
) -> None:
    """Find the fastest plan for a training loop on this machine, by measuring.

    hotloop times each lever (data on the device, CUDA graph, bf16, channels last, fused optimizer, compile, ...)
    against the best plan so far, in turns, with real steps, and restores the state afterwards. It keeps a lever that is
    faster by more than the noise, pays back its cost within the run, and keeps the gradient close to that of fp32. More
    levers pay in a longer run: say how long it will be.

    [bold]Examples[/bold]
      hotloop tune cnn                            [dim]a small network, built in[/dim]
      hotloop tune train.py:build --steps 20000   [dim]build() returns (loop, loader)[/dim]
      hotloop tune gpt --seconds 60 --plot way.png
    """
    if steps is not None and seconds is not None:
        raise BadArgument("both --steps and --seconds were given", fix="give one of them")
    if plot is not None and plot.resolve() == out.resolve():
        raise BadArgument("--out and --plot are the same file", fix="give the plan and the picture different names")
    must_be_writable(out)
    if plot is not None:
        must_be_writable(plot, option="--plot", suffix=".png")
    words = console(stderr=as_json)
    if device is not None:
        from hotloop import pick

        pick(device)  # one that is not here is told as what was asked for
        os.environ["HOTLOOP_DEVICE"] = device  # for a file that builds its own loop
    loop, loader = _built_in(target, device) if ":" not in target else _from_file(target)
    say(words, f"{loop.device}: {loop.choice.reason}")
    tuning = loop.tune(loader, steps=steps, seconds=(3600 if steps is None else None) if seconds is None else seconds)
    _write(tuning, out, plot)
    kept = _kept(tuning) if report else None
    if as_json:
        print_json({"out": str(out), "report": None if kept is None else str(kept), **tuning.to_json()})
        return
    from hotloop.report.tuning import tuning_table, tuning_words

    words.print(tuning_table(tuning))
    say(words, tuning_words(tuning))
    say(words, f'Written: {printable(str(out))}. Use it with `hotloop.Loop(..., plan="{out}")`')
    if kept is not None:
        say(words, f"The page: {kept}")


def _write(tuning: "Tuning", out: Path, plot: Path | None) -> None:
    from hotloop.files import write_json, write_whole
    from hotloop.report.tuning import waterfall

    write_json(out, tuning.to_json())
    if plot is not None:
        write_whole(plot, waterfall(tuning))


def _kept(tuning: "Tuning") -> Path:
    """The page and the data of the tuning; the page."""
    from hotloop.report.pages import tuning_page, tuning_run
    from hotloop.report.runs import PAGE

    page = tuning_page(tuning, command_line())
    return keep(page, tuning_run(tuning), tuning.to_json()) / PAGE


def _built_in(name: str, device: str | None) -> "tuple[Loop, Any]":
    from hotloop import pick
    from hotloop.bench.contestants.hot import loop_of
    from hotloop.bench.workloads import WORKLOADS, workload

    if name.endswith(".py"):
        raise BadArgument(
            f"{printable(name)} names no function that builds the loop",
            fix=f"give FILE.py:FUNCTION, a function that returns (loop, loader), as in {printable(name)}:build",
        )
    if name not in WORKLOADS:
        raise BadArgument(
            f"there is no workload {printable(name)!r}",
            fix=f"choose one of {', '.join(WORKLOADS)}, or FILE.py:FUNCTION",
        )
    choice = pick(device)
    parts = workload(name, choice.device).parts()
    return loop_of(parts, choice), parts.loader


@contextmanager
def _explained(file: str) -> Iterator[None]:
    """Run a person's own file as if by itself; what goes wrong has its line, and none of this program."""
    import traceback

    from hotloop.errors import HotloopError

    before, sys.argv = sys.argv, [file]
    try:
        yield
    except HotloopError:
        raise
    except (Exception, SystemExit) as error:
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == Path(file).resolve()
        ]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        where = f"{printable(file)}, line {line}" if line else printable(file)
        fix = "HOTLOOP_DEBUG=1 shows the whole traceback"
        if isinstance(error, SystemExit):
            fix = 'hotloop imports it without arguments: parse them and exit only under `if __name__ == "__main__"`'
        raise BadArgument(f"{where}: {type(error).__name__}: {printable(str(error))}", fix=fix) from error
    finally:
        sys.argv = before


def _from_file(target: str) -> "tuple[Loop, Any]":
    """What a function in a person's own file returns."""
    import importlib.util

    from hotloop import Loop

    file, _, function = target.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise BadArgument(f"there is no file {printable(file)}", fix="give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise BadArgument(f"{printable(file)} is not a Python file", fix="give FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    with _explained(file):
        spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        functions = shorten([printable(name) for name in own if callable(getattr(module, name))])
        fix = f"name the one that builds, out of: {functions}" if functions else "write one that returns (loop, loader)"
        raise BadArgument(f"{printable(file)} has no function {printable(function)!r}", fix=fix)
    with _explained(file):
        made = build()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Loop)):
        raise BadArgument(
            f"{printable(function)}() returned {an(type(made).__name__)}", fix="return (hotloop.Loop(...), loader)"
        )
    return made
