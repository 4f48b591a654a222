"""`hotloop device`: which device would be used, what it can do, and why it is not a better one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Device, Json
from hotloop.cli.output import print_json, say
from hotloop.errors import BadArgument, DeviceUnavailable
from hotloop.printing.text import printable, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel

    from hotloop.device.summary import DeviceSummary

REQUIRABLE = ("cuda", "mps", "xpu", "cpu")


app = typer.Typer(add_completion=False)


@app.command("device", cls=Verb)
def device(
    want: Device = None,
    require: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Exit with code 3 unless the device is of this kind, such as cuda."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the device that hotloop would train on, and why.

    If no GPU can be used, it names the cause and the fix. The order is: the
    device you ask for, HOTLOOP_DEVICE, the CUDA GPU with the most free
    memory, Apple's GPU (mps), Intel's (xpu), the CPU.

    [bold]Examples[/bold]
      hotloop device                  [dim]the best device here[/dim]
      hotloop device -d cuda:1        [dim]could I use the second GPU?[/dim]
      hotloop device --require cuda   [dim]guards a job that must not run on the CPU[/dim]
      hotloop device --json           [dim]the same facts for a script[/dim]
    """
    if require is not None and require not in REQUIRABLE:
        raise BadArgument(
            f"--require {printable(require)!r} is not a kind of device",
            fix=f"choose one of: {', '.join(REQUIRABLE)}; for one GPU, give `--device cuda:1`",
        )
    from hotloop import __version__
    from hotloop.device import probe
    from hotloop.device.choice import pick_from
    from hotloop.device.summary import summarize

    facts = probe()
    seen = summarize(pick_from(facts, want), facts, version=__version__)
    if as_json:
        print_json(seen.to_json())
    else:
        show(seen)
    if require is not None and seen.device.split(":")[0] != require:
        raise DeviceUnavailable(f"--require {require}: the device here is {seen.device}. {seen.reason}")


def show(seen: "DeviceSummary", console: "Console | None" = None) -> None:
    """Print the panel, then the reason and the causes below it, where a command can be copied whole."""
    from rich.console import Console

    console = console or Console(highlight=False)
    console.print(_panel(seen))
    first = f": {seen.causes[0]}" if seen.causes else ""
    say(console, f"{seen.reason.removesuffix(first)}{'.' if first and seen.reason.endswith(first) else ''}")
    for cause in seen.causes:
        console.print()
        say(console, f"{cause.code}: {cause.what}", style="yellow")
        say(console, f"fix: {cause.fix}", indent="  ")


def _panel(seen: "DeviceSummary") -> "Panel":
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _rows(seen):
        table.add_row(label, Text(printable(value), style="bold" if label == "device" else ""))
    return Panel(table, title=f"hotloop {seen.hotloop}", title_align="left", border_style="dim", expand=False)


def _rows(seen: "DeviceSummary") -> Iterator[tuple[str, str]]:
    """The lines of the panel, as label and value."""
    kind = seen.device.split(":")[0]
    yield "device", seen.device
    yield "name", seen.name or "unknown"
    if kind == "cpu":
        yield "cores", _cores(seen)
        yield "RAM", _free(seen.memory.free, seen.memory.total)
    else:
        yield "memory", _free(seen.memory.free, seen.memory.total)
    if kind == "cuda":
        yield from _cuda_rows(seen)
    asked = ', where you ask for it: `precision="fp16"`' if seen.precision == "fp16" else ", which hotloop would use"
    yield "precision", f"{seen.precision}{asked}"
    others = [gpu for gpu in seen.gpus if f"cuda:{gpu.index}" != seen.device]
    for gpu in others:
        state = _free(gpu.memory.free, gpu.memory.total) if gpu.usable else "not usable"
        yield f"cuda:{gpu.index}", f"{gpu.name}, compute capability {gpu.capability}, {state}"
    yield "torch", f"{seen.torch or 'unknown'}, Python {seen.python}"


def _cuda_rows(seen: "DeviceSummary") -> Iterator[tuple[str, str]]:
    yield "compute capability", seen.capability or "unknown"
    yield "driver", seen.driver or "unknown"
    if seen.rocm is not None:
        yield "ROCm", seen.rocm
        return
    yield "CUDA", f"{seen.cuda.build or 'unknown'} in torch, {seen.cuda.driver or 'unknown'} at most with the driver"
    yield "cuDNN", seen.cudnn or "unknown"
    yield "TF32 / bf16 / fp16", " / ".join(_yes(flag) for flag in (seen.tf32, seen.bf16, seen.fp16))


def _cores(seen: "DeviceSummary") -> str:
    cpu = seen.cpu
    physical, logical = (str(count or "unknown") for count in (cpu.physical, cpu.logical))
    bound = f", {cpu.usable} for this process" if cpu.usable is not None and cpu.usable != cpu.logical else ""
    return f"{physical} physical, {logical} logical{bound}"


def _free(free: int | None, total: int | None) -> str:
    """`12.0 GiB free of 80.0 GiB`, and `unknown` where nothing is known."""
    return "unknown" if free is None and total is None else f"{size(free)} free of {size(total)}"


def _yes(flag: bool | None) -> str:
    return "unknown" if flag is None else "yes" if flag else "no"
