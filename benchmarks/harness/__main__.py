"""`python -m harness`: training loops beside one another on this machine, with pictures of the result."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli import main
from hotloop.cli.help import Verb
from hotloop.cli.options import Json
from hotloop.cli.output import command_line, console, print_json, say
from hotloop.errors import BadArgument, OutputError
from hotloop.printing.text import printable

if TYPE_CHECKING:
    import torch

    from harness.end_to_end import WholeRuns
    from harness.records import Benchmark
    from harness.running import Setup


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command("bench", cls=Verb, context_settings={"help_option_names": ["-h", "--help"]})
def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD",
            help="mlp, cnn, resnet18, sprites, gpt, gpt2; dcgan, lstm, llama, unet, bert, jpeg, airbench.",
            show_default="the first six; with --end-to-end mlp, cnn, resnet18 and the last seven; with --scaling gpt",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Where to run, such as cpu,cuda.", show_default="the best here"),
    ] = None,
    contestants: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Loops to run: tutorial, careful, accelerate, fabric, lightning, trainer, hotloop, expert.",
            show_default="all",
        ),
    ] = None,
    end_to_end: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="Time whole runs of fit with default settings that take the tutorial's loop so long: 10,45.",
            show_default=False,
        ),
    ] = None,
    plans: Annotated[
        bool, typer.Option("--plans", help="End to end: also plans written by hand for each workload.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compiled/--no-compiled", help="With --plans: also those that compile, which takes long.")
    ] = True,
    tutorial: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="End to end: measure the rate of the tutorial's loop for at most so long.",
            show_default="20",
        ),
    ] = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="End to end: repeat each run with the disk caches it left.")
    ] = False,
    unseen: Annotated[
        bool, typer.Option("--unseen", help="The models of timm, torchvision and transformers, with random data.")
    ] = False,
    expert: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where the expert's loops are, a file for each workload.", show_default=False
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="Measurements of each; more show the spread better.")] = 3,
    plan_for: Annotated[
        float, typer.Option(metavar="SECONDS", help="Length of the run, in plain PyTorch, that hotloop plans for.")
    ] = 3600,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes, to see that it works: no figures to quote.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Write here, into a folder for this hardware.")] = Path(
        "results"
    ),
    curves: Annotated[
        bool | None,
        typer.Option(
            "--curves/--no-curves",
            help="Also compare the losses step by step.",
            show_default="curves; no-curves with --end-to-end",
        ),
    ] = None,
    curve_steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of the loss comparison.")] = 120,
    as_json: Json = False,
) -> None:
    """Compare the speed of training loops: the tutorial's, four libraries', hotloop's, an expert's.

    All train the same model on the same batches from the same weights. Each is set up and warmed up separately; then
    they take turns, so that disturbances of the machine affect all alike. The result is the median and the spread.
    [bold]start[/bold] is the time until a loop runs, tuning and compilation included.

    The folder gets the figures as JSON with hardware, command, date and commit, and three kinds of picture: speed,
    distance from the limits of the hardware, and losses. A contestant that cannot run here, or whose package is
    missing, is named with the reason; the others continue.

    [bold]--end-to-end[/bold] times the default settings: the wall clock of
    [bold]Loop(…).fit(loader, epochs=N)[/bold], with all its trials, captures and compilation, against the tutorial's
    loop over as many items. N is such that the tutorial's loop takes the seconds you give; its rate is measured for up
    to 20 s ([bold]--tutorial[/bold]). Caches on disk are empty. Beside it run a careful person's loop and Hugging
    Face's Trainer. A line before each workload says how long it may take.

    [bold]Examples[/bold]
      python -m harness mlp --quick                   [dim]seconds: does it work here?[/dim]
      python -m harness cnn gpt                       [dim]two workloads on the best device[/dim]
      python -m harness --devices cpu,cuda            [dim]all of them on both[/dim]
      python -m harness --contestants tutorial,hotloop --no-curves
      python -m harness --expert benchmarks/expert    [dim]beside hand-tuned loops[/dim]
      python -m harness --end-to-end 10,45            [dim]ten workloads, default settings[/dim]
      python -m harness --end-to-end 45 --plans cnn   [dim]beside plans by hand[/dim]
    """
    from harness.about import hardware, slug
    from harness.end_to_end import TUTORIAL, run_end_to_end
    from harness.running import run

    command = command_line()
    if not compiled and not plans:
        raise BadArgument("--no-compiled without --plans", fix="add --plans, or leave it out")
    names = _workloads(workloads, unseen=unseen, whole=end_to_end is not None)
    words = console(stderr=True)

    def tell(what: str) -> None:
        say(words, what)

    def keep(so_far: "Benchmark") -> None:
        _write_figures(so_far, folder)

    if end_to_end is not None:
        steps = (8 if quick else curve_steps) if curves else 0
        if expert is not None:
            raise BadArgument("--expert with --end-to-end", fix="leave one out: experts have no end-to-end loop")
        whole = replace(
            _whole_runs(names, devices, contestants, end_to_end, quick, steps),
            tutorial=TUTORIAL if tutorial is None else tutorial,
            plans=plans,
            compiled=compiled,
            warm=warm,
        )
        folder = out / slug(hardware(whole.devices))
        _must_be_a_place_for(folder)
        benchmark = run_end_to_end(whole, command=command, tell=tell, keep=keep)
    else:
        given = {"--plans": plans, "--warm": warm, "--tutorial": tutorial is not None}
        if name := next((name for name, is_given in given.items() if is_given), None):
            raise BadArgument(f"{name} without --end-to-end", fix="add --end-to-end 10,45")
        setup = _setup(names, devices, contestants, expert, repeats, plan_for, quick, curves is not False, curve_steps)
        folder = out / slug(hardware(setup.devices))
        _must_be_a_place_for(folder)
        benchmark = run(setup, command=command, tell=tell, keep=keep)
    written = _write(benchmark, folder)
    if as_json:
        print_json({"files": [str(path) for path in written], **benchmark.to_json()})
    else:
        _show(benchmark, written)
    if not benchmark.scores and not any(row.runs for row in benchmark.end_to_end):
        raise typer.Exit(1)


def _workloads(given: list[str] | None, *, unseen: bool, whole: bool) -> tuple[str, ...]:
    """The names to run."""
    from harness.workloads import END_TO_END, RACED, UNSEEN, WORKLOADS

    for name in given or ():
        if name not in WORKLOADS:
            raise BadArgument(f"there is no workload {printable(name)!r}", fix=f"choose one of: {', '.join(WORKLOADS)}")
    if not given and not unseen:
        return tuple(END_TO_END if whole else RACED)
    return tuple(dict.fromkeys([*(given or ()), *(UNSEEN if unseen else ())]))


def _whole_runs(
    workloads: tuple[str, ...],
    devices: str | None,
    contestants: str | None,
    lengths: str,
    quick: bool,
    curve_steps: int,
) -> "WholeRuns":
    """What to run end to end; what cannot be meant is told before the work begins."""
    from harness import contestants as racing
    from harness.end_to_end import PEERS, WholeRuns

    try:
        seconds = tuple(map(float, _names(lengths, "--end-to-end")))
    except ValueError:
        shown = printable(lengths)
        raise BadArgument(f"--end-to-end {shown}", fix="give seconds with commas between them: 10,45") from None
    names = PEERS if contestants is None else _names(contestants, "--contestants")
    peers = [name for name in names if name not in ("tutorial", "hotloop")]  # who are always there
    racing.contestants(peers)
    return WholeRuns(
        workloads=workloads,
        devices=_places(devices),
        lengths=seconds,
        peers=tuple(peers),
        curve_steps=curve_steps,
        quick=quick,
    )


def _places(devices: str | None) -> "tuple[torch.device, ...]":
    from hotloop import pick

    places = [None] if devices is None else _names(devices, "--devices")
    return tuple(dict.fromkeys(pick(place).device for place in places))


def _setup(
    workloads: tuple[str, ...],
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
    from harness import contestants as racing
    from harness.running import Setup

    if expert is not None and not expert.is_dir():
        raise BadArgument(f"there is no folder {printable(str(expert))}", fix="choose the folder of the expert's loops")
    names = None if contestants is None else _names(contestants, "--contestants")
    return Setup(
        workloads=workloads,
        devices=_places(devices),
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
        raise OutputError(f"{printable(str(there))} is not writable", fix="choose another folder for --out")


def _write(benchmark: "Benchmark", folder: Path) -> list[Path]:
    """The figures and the pictures, each file whole or not at all."""
    from harness.about import slug
    from harness.charts import bars, curves
    from harness.pages import benchmark_page, benchmark_run
    from harness.roofline import roofline
    from hotloop.records.files import write_json, write_whole
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
    from hotloop.records.files import write_json

    path = folder / f"{benchmark.date.split('+')[0].replace(':', '-')}.json"
    write_json(path, benchmark.to_json())
    return path


def _show(benchmark: "Benchmark", written: list[Path]) -> None:
    from harness.charts import end_to_end_table, scores_table

    words = console()
    words.print(end_to_end_table(benchmark) if benchmark.end_to_end else scores_table(benchmark))
    _show_written(written)


def _show_written(written: list[Path]) -> None:
    words = console()
    say(words, "Written:")
    for path in written:
        words.print(f"  {printable(str(path))}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    main(app)
