"""`--gpus N` of a verb that trains: the same command once more in each rank, through torchrun."""

import os
import sys

import typer

from hotloop.cli.launch import number_of_gpus
from hotloop.errors import BadArgument


def rank() -> int | None:
    """The number of this process among those of a launched run; None where there is no such run."""
    return int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() and "WORLD_SIZE" in os.environ else None


def ran_on_several(verb: str, gpus: str, device: str | None) -> bool:
    """Run this command in one process for each GPU, where more than one is asked for; whether it did."""
    if gpus == "1" or rank() is not None:
        return False
    from hotloop.launch.torchrun import LaunchRequest, line_for, run

    if device is not None:
        raise BadArgument(
            f"--gpus {gpus} and --device {device}", fix="give one of them: each process takes its own GPU"
        )
    line = line_for(LaunchRequest("hotloop", tuple(sys.argv[1:]), module=True, gpus=number_of_gpus(gpus)))
    if line.processes == 1:
        return False
    typer.echo(f"hotloop {verb}: {line}", err=True)
    run(line, lambda told: typer.echo(f"hotloop {verb}: {told}", err=True))
    return True
