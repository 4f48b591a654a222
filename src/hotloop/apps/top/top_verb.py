"""`hotloop top`: the hardware as it works, with advice, in the terminal, as data, or as a page."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import INTERRUPTED
from hotloop.cli.output import print_json
from hotloop.errors import BadArgument
from hotloop.printing.text import printable

if TYPE_CHECKING:
    from hotloop.apps.top.advice import Advice, Advisor
    from hotloop.apps.top.live import Keep, Read
    from hotloop.monitor.reading import Reading

SHORTEST, LONGEST = 0.1, 3600  # seconds from a sample to the next


app = typer.Typer(add_completion=False)


@app.command("top", cls=Verb)
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one sample and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; with --interval or --count, a line for each sample.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option("--interval", "-i", metavar="SECONDS", help="Time between samples.", show_default="1"),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-n", metavar="N", help="End after this many samples.", show_default=False)
    ] = None,
    user: Annotated[
        str, typer.Option("--user", "-u", metavar="NAME", help="Only processes of users with this in their name.")
    ] = "",
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append each sample to this file, a line of JSON each.", show_default=False),
    ] = None,
    web: Annotated[
        bool,
        typer.Option("--web", help="Serve a page for a browser; needs `pip install 'hotloop\\[web]'`."),
    ] = False,
    port: Annotated[int, typer.Option(metavar="N", help="Port of the page; 0 for any free one.")] = 8080,
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
    example: Annotated[
        int | None, typer.Option(metavar="GPUS", hidden=True, help="Show a made-up machine with so many GPUs.")
    ] = None,
) -> None:
    """Watch GPUs, their processes and the host, with advice on what to change.

    In a terminal it is a live view: [bold]?[/bold] lists the keys, [bold]q[/bold] quits.
    Pipes, dumb terminals and NO_COLOR get plain text.
    A value that the driver does not report is shown as –, never as 0.

    [bold]Examples[/bold]
      hotloop top                        [dim]look, and press ? for the keys[/dim]
      hotloop top --once                 [dim]one sample, as text[/dim]
      hotloop top --json                 [dim]one sample, for a script[/dim]
      hotloop top --json --interval 5    [dim]a line every 5 s, until Ctrl-C[/dim]
      hotloop top --log gpu.jsonl        [dim]look, and keep every sample[/dim]
      hotloop top --demo                 [dim]how it looks, without a GPU[/dim]
      hotloop top --web                  [dim]a page for the browser here[/dim]
      hotloop top --web --bind 0.0.0.0   [dim]for others too, behind a token[/dim]
    """
    _must_make_sense(once, as_json, web, interval, count)
    every = 1.0 if interval is None else interval
    many = 1 if once else count
    with _machine(example, demo) as read, _log(log) as keep:
        if web:
            _serve(read, keep, bind, port, token, every)
        elif as_json and interval is None and count is None:
            _print_data(read, keep, every, 1, whole=True)
        elif as_json:
            _print_data(read, keep, every, many, whole=False)
        else:
            _look(read, keep, every, many, user)


def _must_make_sense(once: bool, as_json: bool, web: bool, interval: float | None, count: int | None) -> None:
    if interval is not None and not SHORTEST <= interval <= LONGEST:
        raise BadArgument(f"--interval {interval}", fix=f"give seconds, from {SHORTEST} to {LONGEST:,}")
    if count is not None and count < 1:
        raise BadArgument(f"--count {count}", fix="give a whole number of at least 1")
    if once and (interval is not None or count is not None):
        raise BadArgument("--once is one sample", fix="leave out --interval and --count, or --once")
    if web and (once or as_json or count is not None):
        raise BadArgument(
            "--web shows a page until Ctrl-C, and prints nothing", fix="leave out --once, --json and --count, or --web"
        )


@contextmanager
def _machine(example: int | None, demo: bool = False) -> "Iterator[Read]":
    """Where readings come from: the hardware, or one that is made up."""
    if demo or example is not None:
        from hotloop.apps.top.example import DEMO, machine

        yield machine(2, name=DEMO) if example is None else machine(example)
        return
    from hotloop.apps.top.ranks import with_runs
    from hotloop.monitor.sampler import Sampler

    with Sampler() as sampler:
        yield with_runs(sampler.read)


@contextmanager
def _log(path: Path | None) -> "Iterator[Keep]":
    """What is done with each sample besides showing it: nothing, or a line in a file."""
    if path is None:
        yield lambda reading, advice: None
        return
    from hotloop.apps.top.plain import as_data
    from hotloop.monitor.logs import JsonLines

    with closing(JsonLines(path)) as lines:
        yield lambda reading, advice: lines.append(as_data(reading, advice))


def _adviser() -> "Advisor":
    """Advice for the person who looks."""
    from hotloop.apps.top.advice import Advisor

    return Advisor(user=_me())


def _me() -> str | None:
    """The user, as processes are told by."""
    import psutil

    try:
        return psutil.Process().username()
    except (psutil.Error, OSError, KeyError):  # as in a container whose user has no name
        return None


def _look(read: "Read", keep: "Keep", every: float, count: int | None, user: str) -> None:
    """The live view, or text where there can be none."""
    from hotloop.apps.top.plain import Texts, is_plain
    from hotloop.apps.top.view_options import ViewOptions

    options = ViewOptions(user=user.strip(), me=_me())
    plain = is_plain(sys.stdout)
    if plain or count == 1:
        _print(read, keep, every, count, Texts(sys.stdout, options, every, styled=not plain).show)
        return
    from hotloop.apps.top.live import run

    run(read, _adviser().see, every=every, count=count, keep=keep, options=options)


def _print_data(read: "Read", keep: "Keep", every: float, count: int | None, *, whole: bool) -> None:
    """Samples as lines of JSON, or as a `whole` object for people to read."""
    from hotloop.apps.top.plain import as_data, as_line

    def show(reading: "Reading", advice: "Sequence[Advice]") -> None:
        if whole:
            print_json(as_data(reading, advice))
        else:
            sys.stdout.write(as_line(reading, advice))
            sys.stdout.flush()

    _print(read, keep, every, count, show)


def _print(read: "Read", keep: "Keep", every: float, count: int | None, show: "Keep") -> None:
    from hotloop.apps.top.plain import samples

    advise = _adviser().see
    with _until_stopped():
        for reading in samples(read, every=every, count=count):
            advice = advise(reading)
            keep(reading, advice)
            show(reading, advice)


@contextmanager
def _until_stopped() -> "Iterator[None]":
    """Ctrl-C is how samples without end are ended: nothing is said about it."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _serve(read: "Read", keep: "Keep", bind: str, port: int, token: str | None, every: float) -> None:
    """The page, until Ctrl-C."""
    from hotloop.apps.top.web import serve

    advise = _adviser().see

    def logged() -> "Reading":
        reading = read()
        keep(reading, advise(reading))
        return reading

    def ready(address: str) -> None:
        how = "Ctrl-C ends it"
        if token is not None and token == os.environ.get("HOTLOOP_TOKEN"):  # kept there so that no log shows it
            address = f"{address.partition('?')[0]}?token=$HOTLOOP_TOKEN"
            how = f"in a browser, put the token itself there; {how}"
        print(f"The page is at {printable(address)} ({how})", flush=True)

    serve(logged, host=bind, port=port, token=token, every=every, ready=ready, advisor=_adviser())
