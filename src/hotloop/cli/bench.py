"""`hotloop bench`: training loops beside one another on this machine, with pictures of the result."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.options import Json
from hotloop.cli.output import console, print_json, say
from hotloop.errors import BadArgument, OutputError
from hotloop.text import printable

if TYPE_CHECKING:
    from hotloop.bench.running import Setup
    from hotloop.records import Benchmark


def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORKLOAD", help="mlp, cnn, resnet18, sprites, gpt, gpt2.", show_default="all"),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Where to run, such as cpu,cuda.", show_default="the best here"),
    ] = None,
    contestants: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Who runs: tutorial, accelerate, fabric, lightning, hotloop, expert.",
            show_default="all",
        ),
    ] = None,
    expert: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where the expert's loops are, a file for each workload.", show_default=False
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="Measurements of each; more show the spread better.")] = 3,
    plan_for: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the plain training would be that hotloop plans for.")
    ] = 3600,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes, to see that it works: no figures to quote.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Write here, into a folder for this hardware.")] = Path(
        "results"
    ),
    curves: Annotated[bool, typer.Option("--curves/--no-curves", help="Also compare the losses step by step.")] = True,
    curve_steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of the losses that are compared.")] = 120,
    as_json: Json = False,
) -> None:
    """Time training loops beside one another: the tutorial's, three libraries', hotloop's, an expert's.

    All train the same model on the same batches from the same weights. Each is set up and warmed up apart, then they
    take turns, so that whatever the machine does meanwhile hits all alike; what is told is the median and the spread.
    [bold]start[/bold] is the time until a loop runs, tuning and compilation included.

    The folder gets the figures as JSON with hardware, command, date and commit, and three kinds of picture: who is
    how fast, how near that is to what the hardware can do, and how the losses compare. A contestant that cannot run
    here, or whose package is missing, is named with the reason, and the others go on.

    [bold]Examples[/bold]
      hotloop bench mlp --quick                   [dim]seconds: does it work here?[/dim]
      hotloop bench cnn gpt                       [dim]two workloads on the best device[/dim]
      hotloop bench --devices cpu,cuda            [dim]all of them on both[/dim]
      hotloop bench --contestants tutorial,hotloop --no-curves
      hotloop bench --expert benchmarks/expert    [dim]beside hand-tuned loops[/dim]
    """
    from hotloop.bench.about import hardware, slug
    from hotloop.bench.running import run

    setup = _setup(workloads, devices, contestants, expert, repeats, plan_for, quick, curves, curve_steps)
    folder = out / slug(hardware(setup.devices))
    _must_be_a_place_for(folder)
    words = console(stderr=True)
    benchmark = run(
        setup,
        command=shlex.join(["hotloop", *sys.argv[1:]]),
        tell=lambda what: say(words, what),
        keep=lambda so_far: _write_figures(so_far, folder),
    )
    written = _write(benchmark, folder)
    if as_json:
        from hotloop.files import finite

        print_json({"files": [str(path) for path in written], **finite(benchmark.to_json())})
    else:
        _show(benchmark, written)
    if not benchmark.scores:
        raise typer.Exit(1)


def _setup(
    workloads: list[str] | None,
    devices: str | None,
    contestants: str | None,
    expert: Path | None,
    repeats: int,
    plan_for: float,
    quick: bool,
    curves: bool,
    curve_steps: int,
) -> "Setup":
    """What to run; what cannot be meant is told before the work begins."""
    from hotloop import pick
    from hotloop.bench import contestants as racing
    from hotloop.bench.running import Setup
    from hotloop.bench.workloads import WORKLOADS

    for name in workloads or ():
        if name not in WORKLOADS:
            raise BadArgument(f"there is no workload {printable(name)!r}", fix=f"choose one of: {', '.join(WORKLOADS)}")
    if expert is not None and not expert.is_dir():
        raise BadArgument(f"there is no folder {printable(str(expert))}", fix="choose the folder of the expert's loops")
    names = None if contestants is None else _names(contestants, "--contestants")
    places = [None] if devices is None else _names(devices, "--devices")
    return Setup(
        workloads=tuple(dict.fromkeys(workloads or WORKLOADS)),
        devices=tuple(dict.fromkeys(pick(place).device for place in places)),
        contestants=racing.contestants(names, experts=expert, plan_for=plan_for),
        repeats=repeats,
        quick=quick,
        curves=curves,
        curve_steps=8 if quick else curve_steps,
    )


def _names(listed: str, option: str) -> list[str]:
    """What a person lists with commas."""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not names:
        raise BadArgument(f"{option} is empty", fix="give names with commas between them, or leave it out")
    return list(dict.fromkeys(names))


def _must_be_a_place_for(folder: Path) -> None:
    """Refuse a folder that could not be written, before the work that would fill it."""
    import os

    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise OutputError(f"{printable(str(there))} is a file", fix="choose the name of a folder for --out")
    if not os.access(there, os.W_OK):
        raise OutputError(f"{printable(str(there))} may not be written to", fix="choose another place for --out")


def _write(benchmark: "Benchmark", folder: Path) -> list[Path]:
    """The figures and the pictures, each file whole or not at all."""
    from hotloop.bench.about import slug
    from hotloop.files import write_json, write_whole
    from hotloop.report.benchmark import bars, curves
    from hotloop.report.pages import benchmark_page, benchmark_run
    from hotloop.report.roofline import roofline
    from hotloop.report.runs import DATA, PAGE

    figures = _write_figures(benchmark, folder)
    files: dict[str, bytes] = {}
    if benchmark.scores:
        files["bars.png"] = bars(benchmark)
    for device in benchmark.ceilings:
        if any(score.device == device and score.flops and score.traffic for score in benchmark.scores):
            files[f"roofline-{slug(device)}.png"] = roofline(benchmark, device)
    several = len({each.device for each in benchmark.curves}) > 1
    for each in benchmark.curves:
        place = f"-{slug(each.device)}" if several else ""
        files[f"curves-{each.workload}{place}.png"] = curves(each)
    files[PAGE] = benchmark_page(benchmark).encode()
    for file, content in files.items():
        write_whole(folder / file, content)
    write_json(folder / DATA, benchmark_run(benchmark).with_data(benchmark.to_json()))
    return [figures, *(folder / file for file in files), folder / DATA]


def _write_figures(benchmark: "Benchmark", folder: Path) -> Path:
    from hotloop.files import write_json

    path = folder / f"{benchmark.date.split('+')[0].replace(':', '-')}.json"
    write_json(path, benchmark.to_json())
    return path


def _show(benchmark: "Benchmark", written: list[Path]) -> None:
    from hotloop.report.benchmark import scores_table

    words = console()
    words.print(scores_table(benchmark))
    say(words, "Written:")
    for path in written:
        words.print(f"  {printable(str(path))}", soft_wrap=True, markup=False)
