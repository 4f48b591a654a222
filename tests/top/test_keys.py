"""Keys from a real pseudo-terminal, signals among them, and a terminal that is always as it was afterwards."""

import io
import os
import signal
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.top.keys import HANGUP, INTERRUPT, RESIZE, SUSPEND, TERMINATE, Keys, split

LONG = 30.0  # seconds: far more than any of this takes


class Pseudo:
    """A pseudo-terminal: the person's end as a number, the program's end as a file."""

    def __init__(self) -> None:
        self.person, program = os.openpty()
        self.program: TextIO = os.fdopen(program)

    def settings(self) -> list[object]:
        return termios.tcgetattr(self.program.fileno())

    def type(self, keys: str) -> None:
        os.write(self.person, keys.encode())


@pytest.fixture
def pseudo() -> Iterator[Pseudo]:
    made = Pseudo()
    yield made
    made.program.close()
    os.close(made.person)


def test_keys_come_one_by_one_and_without_enter(pseudo: Pseudo) -> None:
    with Keys(pseudo.program) as keys:
        assert keys.heard
        pseudo.type("mé\x1b[A\x1b[6~\r\x7f?")
        assert [keys.wait(LONG) for _ in range(7)] == ["m", "é", "up", "page down", "enter", "backspace", "?"]
        assert keys.wait(0) is None


def test_escape_alone_is_a_key(pseudo: Pseudo) -> None:
    with Keys(pseudo.program) as keys:
        pseudo.type("\x1b")
        assert keys.wait(LONG) == "escape"


def test_a_character_in_two_parts_is_one_key(pseudo: Pseudo) -> None:
    with Keys(pseudo.program) as keys:
        first, second = (bytes([byte]) for byte in "é".encode())
        os.write(pseudo.person, first)
        assert keys.wait(0) is None
        os.write(pseudo.person, second)
        assert keys.wait(LONG) == "é"


def test_the_terminal_is_as_it_was(pseudo: Pseudo) -> None:
    before = pseudo.settings()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH)]
    with Keys(pseudo.program):
        lines = pseudo.settings()[3]
        assert isinstance(lines, int)
        assert not lines & (termios.ECHO | termios.ICANON)
    assert pseudo.settings() == before
    with pytest.raises(ZeroDivisionError), Keys(pseudo.program):
        raise ZeroDivisionError
    assert pseudo.settings() == before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH)] == handlers


@pytest.mark.parametrize(
    ("number", "event"),
    [
        (signal.SIGWINCH, RESIZE),
        (signal.SIGTSTP, SUSPEND),
        (signal.SIGINT, INTERRUPT),
        (signal.SIGTERM, TERMINATE),
        (signal.SIGHUP, HANGUP),
    ],
)
def test_signals_come_like_keys(number: signal.Signals, event: str) -> None:
    with Keys(None) as keys:
        assert not keys.heard
        os.kill(os.getpid(), number)
        assert keys.wait(LONG) == event
        os.kill(os.getpid(), number)
        assert keys.wait(LONG) == event  # one that was seen does not count against the next


def test_a_second_interrupt_that_nobody_saw_does_not_wait(pseudo: Pseudo) -> None:
    before = pseudo.settings()

    def interrupt_twice() -> None:
        with Keys(pseudo.program):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert pseudo.settings() == before


def test_what_someone_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Keys(None) as keys:
            os.kill(os.getpid(), signal.SIGHUP)
            assert keys.wait(0) is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_goes_away_is_an_ending() -> None:
    made = Pseudo()
    with Keys(made.program) as keys:
        os.close(made.person)
        assert keys.wait(LONG) == HANGUP
        assert not keys.heard
        assert keys.wait(0) is None
    made.program.close()


@pytest.mark.parametrize("stream", [None, io.StringIO("qqq"), "closed", "pipe"])
def test_what_is_no_terminal_has_no_keys(stream: object) -> None:
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    if stream == "pipe":
        read, write = os.pipe()
        os.close(write)
        stream = os.fdopen(read)
    with Keys(stream) as keys:  # type: ignore[arg-type]
        assert not keys.heard
        assert keys.wait(0) is None
    if stream is not None and not isinstance(stream, io.StringIO):
        stream.close()  # type: ignore[attr-defined]


def test_in_another_thread_there_are_keys_and_no_signals(pseudo: Pseudo) -> None:
    from threading import Thread

    seen: list[str | None] = []

    def work() -> None:
        with Keys(pseudo.program) as keys:
            seen.append(keys.wait(LONG))

    pseudo.type("x\n")
    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["x"]


@given(st.text(st.sampled_from("\x1b[O]AB~05;mq?\x07 \x80é"), max_size=30))
def test_sequences_are_never_taken_for_letters(sent: str) -> None:
    keys, rest = split(sent)
    assert "\x1b" not in "".join(keys)
    assert all(key.isprintable() for key in keys)
    assert len(keys) + len(rest) <= len(sent)
    assert not rest or rest[0] == "\x1b"


@pytest.mark.parametrize(
    ("sent", "keys", "rest"),
    [
        ("q", ["q"], ""),
        ("\x1b[1;5Cq", ["q"], ""),
        ("\x1bOAq", ["up", "q"], ""),
        ("a\x1b[1;", ["a"], "\x1b[1;"),
        ("\x1b" + "[" + "1" * 100, ["escape", "[", *"1" * 100], ""),
        ("\x03\x00", [], ""),
    ],
)
def test_what_terminals_send(sent: str, keys: list[str], rest: str) -> None:
    assert split(sent) == (keys, rest)


def test_it_can_be_imported_where_there_are_no_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    spec = importlib.util.find_spec("hotloop.apps.top.keys")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "termios", None)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.Keys(sys.stdin) as keys:
        assert not keys.heard
        assert keys.wait(0) is None
