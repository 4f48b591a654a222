"""CUDA source compiled by NVRTC, NVIDIA's compiler that comes with PyTorch, and its kernels launched on the current
stream by the driver's documented C functions."""

import ctypes
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread

import torch
from torch import Tensor

from hotloop.kernels import compiler
from hotloop.kernels.compiler import KernelError, check, compiled, path_of
from hotloop.records.cache import cache_folder, make_private, why_foreign
from hotloop.records.files import write_whole

OLDEST = (8, 0)  # Ampere, which rounds to bf16 by itself

HALVES = (torch.bfloat16, torch.float16)  # the precisions that the kernels know, beside fp32
HEADER = Path(__file__).with_name("half.cuh")  # what all sources include

Argument = Tensor | int | float | None


def why_no_kernels(device: torch.device) -> str | None:
    """Why a device cannot run kernels of hotloop's own; None where it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device.type}"
    if torch.version.cuda is None:
        return "this PyTorch is built for GPUs of another maker"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return "the GPU is older than compute capability 8.0"
    try:
        _compiler()
        _driver()
    except OSError as problem:
        return f"NVIDIA's run-time compiler is not there ({problem})"
    return None


def computes_in_half(batch: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels can compute with a batch in a precision of two bytes: it is in memory, and no compiler reads."""
    is_there = type(batch) is Tensor and not torch.compiler.is_compiling()
    return is_there and dtype in HALVES and not why_no_kernels(batch.device)


class Kernels:
    """The kernels of one source with some macros, for one kind of GPU. Compiled once for each, and kept on disk."""

    def __init__(self, source: Path, macros: Sequence[str], capability: tuple[int, int]) -> None:
        self._source = source
        self._told = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
        self._told += [f"-D{macro}" for macro in macros]
        self._options = [*self._told, f"--include-path={HEADER.parent}"]
        self._lock = Lock()
        self._code: bytes | None = None
        self._loaded: dict[int, ctypes.c_void_p] = {}
        self._functions: dict[tuple[int, str], ctypes.c_void_p] = {}

    def compile(self, *, apart: bool = False) -> bytes:
        """The machine code; other threads run on while it is made. `apart`: by a process, beside other compilations."""
        with self._lock:
            if self._code is None:
                self._code = self._cached(apart=apart)
            return self._code

    def compile_beside(self) -> None:
        """Compile in a process beside whatever is done meanwhile."""
        Thread(target=self._compile_quietly, name="hotloop-nvrtc").start()

    def _compile_quietly(self) -> None:
        with suppress(KernelError, OSError):  # who launches them meets it again, and says it
            self.compile(apart=True)

    def launch(self, name: str, grid: tuple[int, int, int], block: tuple[int, int], *arguments: Argument) -> None:
        """Start a kernel on the current stream of the current device."""
        device = torch.cuda.current_device()
        function = self._functions.get((device, name)) or self._function(device, name)
        _check(_driver().cuCtxSetCurrent(_context(device)), name)  # autograd's threads have none
        values = [_as_c(each) for each in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(_driver().cuLaunchKernel(function, *grid, *block, 1, 0, stream, pointers, None), name)

    def _function(self, device: int, name: str) -> ctypes.c_void_p:
        if device not in self._loaded:
            module = ctypes.c_void_p()
            _check(_driver().cuCtxSetCurrent(_context(device)), "its module")
            _check(_driver().cuModuleLoadData(ctypes.byref(module), self.compile()), "its module")
            self._loaded[device] = module
        function = ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), self._loaded[device], name.encode()), name)
        self._functions[device, name] = function
        return function

    def _cached(self, *, apart: bool) -> bytes:
        """What an earlier run has compiled, if the source, the options and the compiler are the same."""
        source = self._source.read_bytes()
        told = repr((source, HEADER.read_bytes(), self._told, _version())).encode()
        path = cache_folder("kernels") / f"{hashlib.sha256(told).hexdigest()[:32]}.cubin"
        with suppress(OSError):
            if not why_foreign(path):
                return path.read_bytes()
        code = _compiled_apart(self._source, self._options) if apart else None
        if code is None:
            code = compiled(_compiler(), source, self._source.name, self._options)
        with suppress(OSError):
            make_private(path.parent)
            if not why_foreign(path):
                write_whole(path, code, mode=0o600)
        return code


def kernels_of(source: Path, device: torch.device, dtype: torch.dtype, *macros: str) -> Kernels:
    """A source with some macros, compiled on first use for a kind of GPU and of numbers of two bytes."""
    half = ("FP16",) if dtype == torch.float16 else ()
    return _kernels(source, torch.cuda.get_device_capability(device), (*half, *macros))


@cache
def _kernels(source: Path, capability: tuple[int, int], macros: tuple[str, ...]) -> Kernels:
    return Kernels(source, macros, capability)


def _compiled_apart(source: Path, options: Sequence[str]) -> bytes | None:
    """The same by a process of its own; None where there cannot be one, or it fails: who compiles it here says why."""
    library = path_of("libnvrtc.so")
    is_python = Path(sys.executable or "").name.startswith("python")  # else a program with Python in it, perhaps
    if library is None or not is_python:
        return None
    command = [sys.executable, "-I", "-S", str(Path(compiler.__file__)), library, str(source), *options]
    try:
        ended = subprocess.run(command, check=False, capture_output=True, timeout=60, start_new_session=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout or None if ended.returncode == 0 else None


def _as_c(value: Argument) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if isinstance(value, float):
        return ctypes.c_float(value)
    if isinstance(value, int):
        return ctypes.c_int(value)
    return ctypes.c_void_p(0 if value is None else value.data_ptr())


def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    check(_compiler(), _compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@cache
def _compiler() -> ctypes.CDLL:
    major = str(torch.version.cuda).split(".")[0]
    beside = Path(torch.__file__).parents[1] / "nvidia"  # where pip puts the libraries of PyTorch
    found = sorted(map(str, beside.glob(f"*/lib/libnvrtc.so.{major}*")))
    return _first([f"libnvrtc.so.{major}", *found, "libnvrtc.so"])


@cache
def _context(device: int) -> ctypes.c_void_p:
    """The context of a device that PyTorch uses as well."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(number), device), "the device")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "the device")
    return context


@cache
def _driver() -> ctypes.CDLL:
    return _first(["libcuda.so.1"])


def _first(names: Sequence[str]) -> ctypes.CDLL:
    for name in names:
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise OSError(f"{names[0]} was not found")


def _check(result: int, what: str) -> None:
    if result:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(words))
        raise KernelError(f"{what}: {(words.value or b'an unknown error of the CUDA driver').decode(errors='replace')}")
