"""Sources are compiled by processes beside one another, and here where that cannot be."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hotloop.kernels import nvrtc
from hotloop.kernels.compiler import path_of
from hotloop.kernels.images import _SOURCE
from hotloop.kernels.nvrtc import Kernels

NVRTC = r"""
#include <cstring>
#include <string>
static std::string code;
extern "C" {
int nvrtcCreateProgram(void **p, const char *source, const char *name, int, void *, void *) {
  code = std::string(name) + ":" + source; *p = &code; return 0; }
int nvrtcCompileProgram(void *, int n, const char **options) {
  for (int i = 0; i < n; i++) code += std::string("|") + options[i];
  return code.find("wrong") != std::string::npos; }
int nvrtcGetCUBINSize(void *, size_t *size) { *size = code.size(); return 0; }
int nvrtcGetCUBIN(void *, char *out) { memcpy(out, code.data(), code.size()); return 0; }
int nvrtcGetProgramLogSize(void *, size_t *size) { *size = 4; return 0; }
int nvrtcGetProgramLog(void *, char *out) { memcpy(out, "bad", 4); return 0; }
int nvrtcDestroyProgram(void **) { return 0; }
}
"""  # a library that gives back what it was told


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_process_compiles_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libnvrtc.so"
    command = ["g++", "-shared", "-fPIC", "-O0", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=NVRTC.encode(), check=True)
    monkeypatch.setattr(nvrtc, "path_of", lambda name: str(library))
    source = tmp_path / "own.cu"
    source.write_text("kernel")
    assert nvrtc._compiled_apart(source, ["-DKIND=1", "-x"]) == b"own.cu:kernel|-DKIND=1|-x"
    assert nvrtc._compiled_apart(source, ["-Dwrong"]) is None


@pytest.mark.parametrize("library", [None, "/nowhere/libnvrtc.so"])
def test_without_a_library_that_can_be_found_nothing_is_compiled_apart(
    library: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "path_of", lambda name: library)
    assert nvrtc._compiled_apart(tmp_path / "own.cu", []) is None


def test_a_program_that_is_no_python_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "path_of", lambda name: "libnvrtc.so")
    monkeypatch.setattr("sys.executable", str(tmp_path / "application"))
    monkeypatch.setattr("subprocess.run", None)
    assert nvrtc._compiled_apart(tmp_path / "own.cu", []) is None


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_where_a_library_lies() -> None:
    found = path_of("libtorch_cpu")
    assert Path(found).exists()
    assert path_of("libnothing") is None


@pytest.mark.gpu
def test_on_a_gpu_a_process_gives_the_same_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device, codes = torch.device("cuda:0"), []
    for apart in (True, False):
        monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path / str(apart)))
        kernels = Kernels(_SOURCE, ("KIND=1",), torch.cuda.get_device_capability(device))
        if apart:
            made = nvrtc._compiled_apart(kernels._source, kernels._options)
            assert made is not None, "it was not compiled here"
        codes.append(kernels.compile(apart=apart))
        assert len(list((tmp_path / str(apart)).rglob("*.cubin"))) == 1
    assert codes[0] == codes[1] == made
