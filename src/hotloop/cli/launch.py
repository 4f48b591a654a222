"""`hotloop launch`: one script on several GPUs and machines, through torchrun."""

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Module, Script
from hotloop.cli.output import console, print_json, say
from hotloop.errors import BadArgument
from hotloop.printing.text import printable

JOIN_TIMEOUT = "5min"
PASSED = "hotloop.launch.passed"  # where the parser leaves torchrun's own options


class LaunchVerb(Verb):
    """A verb that also takes the options of torchrun, before the name of the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name: param for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        ours: list[str] = []
        theirs: list[str] = []
        rest = list(args)
        while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
            word = rest.pop(0)
            name, given, _ = word.partition("=")
            into, takes = (
                (ours, not getattr(own[name], "is_flag", False)) if name in own else (theirs, _takes(name, own))
            )
            into.append(word)
            if takes and not given and rest:
                into.append(rest.pop(0))
        ctx.meta[PASSED] = tuple(theirs)
        return super().parse_args(ctx, [*ours, "--", *(rest[1:] if rest[:1] == ["--"] else rest)])


def _takes(name: str, own: Iterable[str]) -> bool:
    from hotloop.scripts.torchrun import takes_value  # torch is loaded only for an option that is not ours

    return takes_value(name, *own)


def number_of_gpus(words: str) -> int | None:
    """A number, or None for `auto`: all of them."""
    if words != "auto" and not words.isdecimal():
        raise BadArgument(f"--gpus {printable(words)!r}", fix="give a number, or auto for all GPUs of this machine")
    return None if words == "auto" else int(words)


app = typer.Typer(add_completion=False)


@app.command("launch", cls=LaunchVerb)
def launch(
    ctx: typer.Context,
    command: Script,
    module: Module = False,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="GPUs of this machine, one process each.", show_default="auto: all"),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Processes on this machine, such as 2 on a CPU.", show_default="one for each GPU"
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Machines; MIN:MAX for an elastic run.", show_default="1"),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            metavar="R", help="This machine's rank, 0 on HOST; for a HOST that is an alias.", show_default=False
        ),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the nodes meet, on one of them.", show_default=False),
    ] = None,
    join_timeout: Annotated[
        str, typer.Option(metavar="TIME", help="How long nodes wait for one another.")
    ] = JOIN_TIMEOUT,
    dry_run: Annotated[bool, typer.Option("--dry-run", "--print", help="Print the torchrun line and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: the line as one JSON object.")] = False,
) -> None:
    """Run a script on several GPUs, one process for each, on one machine or many.

    This runs torchrun and prints its command line. Options of torchrun may stand before the script's name. The script
    needs no change: `hotloop.Loop` detects the process group.

    OMP_NUM_THREADS, unless it is set, is the cores divided by the processes; torchrun alone would set 1. If a rank
    fails, all of them end, and its traceback is printed once. `--max-restarts 3` restarts them up to 3 times instead:
    with `fit(..., save="runs/a", resume=True)` they resume from the last checkpoint. The default is 0, since a script
    without checkpoints would start over.

    [bold]Examples[/bold]
      hotloop launch train.py --epochs 3            [dim]all GPUs of this machine[/dim]
      hotloop launch --gpus 2 -m project.train
      hotloop launch --processes 2 train.py         [dim]two processes on the CPU[/dim]
      hotloop launch --dry-run --gpus 2 train.py    [dim]only the torchrun line[/dim]
      hotloop launch --nodes 2 --node-rank 0 --master node-0:29500 train.py
      hotloop launch --nodes 2 --master node-0:29500 --max-restarts 3 train.py
    """
    from hotloop.scripts.torchrun import Endpoint, LaunchRequest, line_for, run

    if as_json and not dry_run:
        raise BadArgument("--json without --dry-run", fix="give both; in a run, stdout belongs to the script")
    target, *arguments = command
    request = LaunchRequest(
        target,
        tuple(arguments),
        module=module,
        gpus=None if gpus is None else number_of_gpus(gpus),
        processes=processes,
        nodes=nodes,
        node_rank=node_rank,
        master=None if master is None else Endpoint.parse(master),
        join_timeout=_seconds(join_timeout),
        passed=ctx.meta.get(PASSED, ()),
    )
    line = line_for(request)
    words = console(stderr=True)
    for remark in line.remarks:
        say(words, f"hotloop launch: {remark}")
    if as_json:
        print_json(line.to_json())
    elif dry_run:
        typer.echo(str(line))
    else:
        typer.echo(f"hotloop launch: {line}", err=True)
        run(line, lambda told: say(words, f"hotloop launch: {told}"))


def _seconds(words: str) -> float:
    from hotloop.scripts.torchrun import JOIN

    if words == JOIN_TIMEOUT:
        return JOIN  # without the import below, which takes a second
    from hotloop.run.intervals import seconds_in

    return seconds_in(words)
