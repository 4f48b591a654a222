"""`hotloop device`: which device would be used, what it can do, and why it is not a better one."""

import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Device, Json
from hotloop.cli.output import console, print_json, say
from hotloop.errors import BadArgument, DeviceUnavailable
from hotloop.printing.text import printable, size

if TYPE_CHECKING:
    from hotloop.device import Choice
    from hotloop.device.facts import MachineFacts

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
    from hotloop.device.backend import BACKENDS

    if require is not None and require not in BACKENDS:
        raise BadArgument(
            f"--require {printable(require)!r} is not a kind of device",
            fix=f"choose one of: {', '.join(BACKENDS)}; for one GPU, give `--device cuda:1`",
        )
    from hotloop import __version__
    from hotloop.device.picking import pick_from
    from hotloop.device.probe import probe

    facts = probe()
    choice = pick_from(facts, want)
    if as_json:
        versions = {"hotloop": __version__, "python": platform.python_version()}
        print_json({**choice.to_json(), **versions, "machine": facts.to_json()})
    else:
        _show(choice, facts, __version__)
    if require is not None and choice.device.type != require:
        raise DeviceUnavailable(f"--require {require}: the device here is {choice.device}. {choice.reason}")


def _show(choice: "Choice", facts: "MachineFacts", version: str) -> None:
    """Print the panel, then the reason and the causes below it, where a command can be copied whole."""
    from hotloop.report.document import Fact, panel

    words = console()
    words.print(panel([Fact(label, value) for label, value in _rows(choice, facts)], f"hotloop {version}"))
    first = f": {choice.causes[0]}" if choice.causes else ""
    say(words, f"{choice.reason.removesuffix(first)}{'.' if first and choice.reason.endswith(first) else ''}")
    for cause in choice.causes:
        words.print()
        say(words, f"{cause.code}: {cause.what}", style="yellow")
        say(words, f"fix: {cause.fix}", indent="  ")


def _rows(choice: "Choice", facts: "MachineFacts") -> Iterator[tuple[str, str]]:
    """The lines of the panel, as label and value."""
    from hotloop.device.facts import dotted

    kind, cpu = choice.device.type, facts.cpu
    yield "device", str(choice.device)
    yield "name", choice.name or "unknown"
    if kind == "cpu":
        physical, logical = (str(count or "unknown") for count in (cpu.physical, cpu.logical))
        bound = f", {cpu.usable} for this process" if cpu.usable is not None and cpu.usable != cpu.logical else ""
        yield "cores", f"{physical} physical, {logical} logical{bound}"
    if kind in ("cpu", "mps"):  # a Mac's GPU shares the main memory
        yield "RAM", _free(cpu.free, cpu.total)
    chosen = [gpu for gpu in facts.gpus if kind == "cuda" and gpu.index == choice.device.index]
    for gpu in chosen:
        yield "memory", _free(gpu.free, gpu.total)
        yield "compute capability", dotted(gpu.capability)
        yield "driver", facts.driver or "unknown"
        if facts.torch_hip is not None:
            yield "ROCm", facts.torch_hip
        else:
            most = "unknown" if facts.driver_cuda is None else dotted(facts.driver_cuda)
            yield "CUDA", f"{facts.torch_cuda or 'unknown'} in torch, {most} at most with the driver"
            yield "cuDNN", facts.cudnn or "unknown"
    asked = ', where you ask for it: `precision="fp16"`' if choice.precision == "fp16" else ", which hotloop would use"
    yield "precision", f"{choice.precision}{asked}"
    for gpu in facts.gpus:
        if gpu not in chosen:
            state = _free(gpu.free, gpu.total) if facts.covers(gpu) else "not usable"
            yield f"cuda:{gpu.index}", f"{gpu.name}, compute capability {dotted(gpu.capability)}, {state}"
    yield "torch", f"{facts.torch_version or 'unknown'}, Python {platform.python_version()}"


def _free(free: int | None, total: int | None) -> str:
    """`12.0 GiB free of 80.0 GiB`, and `unknown` where nothing is known."""
    return "unknown" if free is None and total is None else f"{size(free)} free of {size(total)}"
