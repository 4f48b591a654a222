"""`hotloop top`: the hardware as it works, with advice, in the terminal, as data, or as a page."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.output import print_json
from hotloop.errors import INTERRUPTED, BadArgument
from hotloop.printing.text import printable

if TYPE_CHECKING:
    from hotloop.monitor.reading import Reading

    Read = Callable[[], Reading]

SHORTEST, LONGEST = 0.1, 3600  # seconds from a sample to the next


app = typer.Typer(add_completion=False)


@app.command("top", cls=Verb)
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one sample and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; with --interval, a line for each sample.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option("--interval", "-i", metavar="SECONDS", help="Time between samples.", show_default="1"),
    ] = None,
    web: Annotated[
        bool,
        typer.Option("--web", help="Serve a page for a browser; needs `pip install 'hotloop\\[web]'`."),
    ] = False,
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port of the page; 0 for any free one.")
    ] = 8080,
    bind: Annotated[
        str,
        typer.Option(
            "--bind", "--host", metavar="ADDRESS", help="Address the page listens on; by default this machine only."
        ),
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            envvar="HOTLOOP_TOKEN",
            help="Access token of the page; always required beyond this machine.",
            show_default="none, or generated",
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Show a made-up machine with two GPUs, labelled as a demo all the time.")
    ] = False,
) -> None:
    """Watch GPUs, their processes and the host, with advice on what to change.

    In a terminal it is drawn again each second until Ctrl-C; pipes and dumb terminals get text.
    A value that the driver does not report is shown as –, never as 0.

    [bold]Examples[/bold]
      hotloop top                        [dim]look; Ctrl-C ends it[/dim]
      hotloop top --once                 [dim]one sample, as text[/dim]
      hotloop top --json                 [dim]one sample, for a script[/dim]
      hotloop top --json --interval 5    [dim]a line every 5 s, until Ctrl-C[/dim]
      hotloop top --demo                 [dim]how it looks, without a GPU[/dim]
      hotloop top --web                  [dim]a page for the browser here[/dim]
      hotloop top --web --bind 0.0.0.0   [dim]for others too, behind a token[/dim]
    """
    every = 1.0 if interval is None else interval
    if not SHORTEST <= every <= LONGEST:
        raise BadArgument(f"--interval {interval}", fix=f"give seconds, from {SHORTEST} to {LONGEST:,}")
    if web and (once or as_json):
        raise BadArgument("--web shows a page until Ctrl-C, and prints nothing", fix="leave out --once and --json")
    with _machine(demo) as read:
        try:
            if web:
                _serve(read, bind, port, token, every)
            else:
                _look(read, every, once=once or (as_json and interval is None), as_json=as_json)
        except KeyboardInterrupt:  # how samples without end are ended: nothing is said about it
            raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _machine(demo: bool) -> "Iterator[Read]":
    """Where readings come from: the hardware, or one that is made up."""
    if demo:
        from hotloop.apps.top.example import DEMO, machine

        yield machine(2, name=DEMO)
        return
    from hotloop.apps.top.ranks import with_runs
    from hotloop.monitor.sampler import Sampler

    with Sampler() as sampler:
        yield with_runs(sampler.read)


def _look(read: "Read", every: float, *, once: bool, as_json: bool) -> None:
    from hotloop.apps.top import live

    taken = live.samples(read, every, once=once)
    if not as_json:
        live.show(taken, once=once)
    elif once:
        print_json(live.as_data(*next(taken)))
    else:
        live.write_lines(taken)


def _serve(read: "Read", bind: str, port: int, token: str | None, every: float) -> None:
    """The page, until Ctrl-C."""
    from hotloop.apps.top.web import serve

    def ready(address: str) -> None:
        how = "Ctrl-C ends it"
        if token is not None and token == os.environ.get("HOTLOOP_TOKEN"):  # kept there so that no log shows it
            address = f"{address.partition('?')[0]}?token=$HOTLOOP_TOKEN"
            how = f"in a browser, put the token itself there; {how}"
        print(f"The page is at {printable(address)} ({how})", flush=True)

    serve(read, host=bind, port=port, token=token, every=every, ready=ready)
