"""What drivers and processes answer, kept as data. Whoever prints text of it must escape it: it may hold anything."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST_COMMAND = 4096  # characters of a command line that are kept; the kernel allows megabytes
SURROGATES = re.compile(r"[\ud800-\udfff]")  # how Python writes bytes that are no UTF-8; no file or page takes them


def decoded(answer: Any) -> str | None:
    """The text of an answer, with what cannot be decoded replaced; old bindings answer in bytes.

    >>> decoded(b"NVIDIA H200"), decoded("caf" + chr(0xDCE9))
    ('NVIDIA H200', 'caf�')
    """
    if answer is None:
        return None
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
    text = SURROGATES.sub("\ufffd", text)
    return text if len(text) <= LONGEST_COMMAND else f"{text[: LONGEST_COMMAND - 1]}…"


def or_none(ask: Callable[[], T]) -> T | None:
    """What psutil tells, or None: a process has ended or may not be asked, or a sandbox lacks files of /proc."""
    try:
        return ask()
    except Exception:  # noqa: BLE001  # besides its own errors, psutil passes on those of parsing a sandbox's /proc
        return None
