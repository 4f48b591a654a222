"""The small library that lets PyTorch believe in a CUDA device: built once for each version of torch, then loaded."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hotloop.errors import HotloopError
from hotloop.printing.text import printable
from hotloop.records.cache import cache_folder, make_private, why_foreign

SOURCE = Path(__file__).with_name("shim.cpp")
MACHINES = ("x86_64", "aarch64")
BUILDING = 300.0  # seconds after which a compiler is given up


class CannotSimulate(HotloopError, RuntimeError):
    """This machine cannot run a simulated GPU, or the script cannot be simulated."""


def library() -> Path:
    """The built library; built now where it is not there yet."""
    _check_machine()
    torch = _torch_folder()
    try:
        built = cache_folder("simulate") / f"{_key(torch)}.so"
    except RuntimeError as error:
        raise CannotSimulate(
            f"there is no place for the simulated GPU: {error}",
            fix="set HOTLOOP_CACHE to a folder that you may write to",
        ) from error
    _must_be_ours(built)
    if not built.exists():
        _build(torch, built)
    return built


def load(built: Path) -> ctypes.CDLL:
    """Load it into this process, beside torch; nothing changes yet."""
    import torch  # noqa: F401, PLC0415  # whose libraries it needs

    _must_be_ours(built)
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise CannotSimulate(
            f"the simulated GPU cannot be loaded: {error}", fix=f"delete {built} so that it is built again"
        ) from error


def install(loaded: ctypes.CDLL) -> None:
    """Put the device in place, and see that it works."""
    import torch  # noqa: PLC0415

    loaded.hotloop_simulate_begin()
    if not torch.zeros(1, device="cpu").pin_memory().is_pinned():
        remove(loaded)
        raise CannotSimulate("this version of torch does not use the simulated GPU", fix="use torch 2.11 to 2.15")


def remove(loaded: ctypes.CDLL) -> None:
    """Take it away: the process has the devices again that it had."""
    loaded.hotloop_simulate_end()


def _check_machine() -> None:
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise CannotSimulate(
            f"the simulated GPU runs on Linux (x86-64 and arm64), and this is {sys.platform} on {platform.machine()}",
            fix="run it in a Linux container or virtual machine, in WSL, or on a Linux server: it needs no GPU",
        )


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CannotSimulate("torch is not installed", fix="pip install torch")
    return Path(found.origin).parent


def _key(torch: Path) -> str:
    """Different for whatever needs another build: torch and where it lies, the machine, Python's ABI and our source."""
    facts = (importlib.metadata.version("torch"), str(torch), platform.machine(), SOURCE.read_text(encoding="utf-8"))
    return "shim-" + hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]


def _must_be_ours(built: Path) -> None:
    """Refuse a library that somebody else may have put there: to load it is to run it."""
    try:
        why = why_foreign(built)
    except OSError as error:
        raise _no_room(built, error) from error
    if why is not None:
        raise CannotSimulate(
            f"{why}, so the compiled library of the simulated GPU in it is not loaded",
            fix="set HOTLOOP_CACHE to a folder of your own; where nobody else uses this one, "
            f"`chmod -R go-w {shlex.quote(str(built.parent.parent))}`",
        )


def _compiler() -> str:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise CannotSimulate(
        "the simulated GPU needs a C++ compiler once, and none was found",
        fix="install one: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), apk add g++ (Alpine), "
        "conda install gxx; or set CXX to yours",
    )


def _build(torch: Path, built: Path) -> None:
    """Compile beside the place and rename, so that two who build at once do not meet."""
    compiler = _compiler()
    try:
        make_private(built.parent)
        with tempfile.TemporaryDirectory(dir=built.parent, prefix=".building-") as folder:
            made = Path(folder, built.name)
            libraries = torch / "lib"
            command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-I{torch / 'include'}", str(SOURCE)]
            command += ["-o", str(made), f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
            command += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
            run = subprocess.run(  # noqa: S603  # a compiler that the person has installed
                command, capture_output=True, text=True, timeout=BUILDING, check=False
            )
            if run.returncode:
                raise _failed(compiler, run.stderr)
            made.chmod(0o700)  # whatever the umask is
            made.replace(built)
    except subprocess.TimeoutExpired:
        raise _failed(compiler, f"it did not end within {BUILDING:.0f} s") from None
    except OSError as error:
        raise _no_room(built, error) from error


def _no_room(built: Path, error: OSError) -> CannotSimulate:
    return CannotSimulate(
        f"the simulated GPU cannot be built in {printable(str(built.parent))}: {error.strerror or error}",
        fix="set HOTLOOP_CACHE to a folder that you may write to",
    )


def _failed(compiler: str, words: str) -> CannotSimulate:
    first = next((line for line in words.splitlines() if "error" in line), words[:200])
    return CannotSimulate(
        f"{printable(compiler)} could not build the simulated GPU for torch {importlib.metadata.version('torch')}: "
        f"{printable(first)}",
        fix="use a compiler that knows C++20, such as g++ 11 or newer, or set CXX to one",
    )
