"""Text from drivers and processes, kept as data. Whoever prints it must escape it: it may hold anything."""

import re
from typing import Any

LONGEST = 4096  # characters of a command line that are kept; the kernel allows megabytes
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
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
