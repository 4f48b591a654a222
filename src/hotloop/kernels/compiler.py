"""NVRTC by its documented C functions, and a program that compiles one source: NVRTC compiles one after the other in a
process, so that several are compiled in as many. It imports nothing of PyTorch's, which would take longer than it."""

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class KernelError(RuntimeError):
    """A kernel could not be compiled, loaded or launched."""


def compiled(library: ctypes.CDLL, source: bytes, name: str, options: Sequence[str]) -> bytes:
    """The machine code of a source."""
    program = ctypes.c_void_p()
    check(library, library.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            log = _read(library, program, "ProgramLog").decode(errors="replace")
            raise KernelError(f"{name} could not be compiled:\n{log}")
        return _read(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def check(library: ctypes.CDLL, result: int) -> None:
    """Raise what a function of the library has returned."""
    if result:
        describe = library.nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        raise KernelError(f"NVRTC: {describe(result).decode(errors='replace')}")


def path_of(name: str) -> str | None:
    """Where a library that this process has loaded lies, for another process to load; None where that is not told."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if Path(path).name.startswith(name):
                return path
    return None


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """The log or the machine code of a program."""
    size = ctypes.c_size_t()
    check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    check(library, getattr(library, f"nvrtcGet{what}")(program, text))
    return text.raw


if __name__ == "__main__":  # the library, the source, its options; the machine code is written to the standard output
    own = Path(sys.argv[2])
    sys.stdout.buffer.write(compiled(ctypes.CDLL(sys.argv[1]), own.read_bytes(), own.name, sys.argv[3:]))
