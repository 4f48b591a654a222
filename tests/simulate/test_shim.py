"""The library that torch loads: built once, found again, and refused with reasons."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotloop.apps.simulate import shim
from hotloop.apps.simulate.shim import CannotSimulate, install, library, load, remove


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiler(folder: Path, body: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_it_is_built_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "CXX", compiler(tmp_path, f'echo built >> {tmp_path}/log; while [ "$1" != -o ]; do shift; done; echo > "$2"')
    )
    first, second = library(), library()
    assert first == second
    assert first.exists()
    assert (tmp_path / "log").read_text() == "built\n"
    assert [path.name for path in (cache / "simulate").iterdir()] == [first.name]


def test_another_torch_gets_a_library_of_its_own(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo > "$2"'))
    first = library()
    monkeypatch.setattr(shim.importlib.metadata, "version", lambda name: "2.99.0")
    assert library() != first


def test_without_a_compiler_it_says_how_to_get_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannotSimulate, match="C\\+\\+ compiler") as caught:
        library()
    assert "apt install g++" in str(caught.value.fix)


def test_a_compiler_that_fails_is_quoted(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "printf 'shim.cpp:1: error: \\033[2Jno such thing\\n' >&2; exit 1"))
    with pytest.raises(CannotSimulate, match="no such thing") as caught:
        library()
    assert "\033" not in str(caught.value)
    assert not list((cache / "simulate").iterdir())


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "riscv64")])
def test_other_machines_are_refused_with_the_reason(
    system: str, machine: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim.sys, "platform", system)
    monkeypatch.setattr(shim.platform, "machine", lambda: machine)
    with pytest.raises(CannotSimulate, match=machine) as caught:
        library()
    assert "Linux" in str(caught.value.fix)


def test_a_folder_that_cannot_be_written_is_an_error_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path / "file"))
    with pytest.raises(CannotSimulate, match="cannot be built") as caught:
        library()
    assert "HOTLOOP_CACHE" in str(caught.value.fix)


def plant(cache: Path) -> Path:
    """A library under the name that is looked for; what loads it runs it."""
    (cache / "simulate").mkdir(mode=0o700, parents=True)
    cache.chmod(0o700)
    planted = cache / "simulate" / f"{shim._key(shim._torch_folder())}.so"
    planted.write_text("not of ours")
    planted.chmod(0o600)
    return planted


@pytest.mark.parametrize("place", ["the file", "its folder", "the folder above"])
@pytest.mark.parametrize("what", ["another's", "for the group", "for all"])
def test_a_library_that_somebody_else_could_have_put_there_is_not_loaded(place: str, what: str, cache: Path) -> None:
    planted = plant(cache)
    touched = {"the file": planted, "its folder": planted.parent, "the folder above": cache}[place]
    if what == "another's":
        if os.getuid():
            pytest.skip("only root can give a file away")
        os.chown(touched, 12345, -1)
    else:
        touched.chmod(touched.stat().st_mode | (stat.S_IWGRP if what == "for the group" else stat.S_IWOTH))
    for use in (library, lambda: load(planted)):
        with pytest.raises(CannotSimulate, match="another user" if what == "another's" else "other users") as caught:
            use()
        assert "HOTLOOP_CACHE" in str(caught.value.fix)
    assert planted.read_text() == "not of ours"


def test_a_place_for_everyone_where_nobody_can_replace_what_is_ours(cache: Path) -> None:
    planted = plant(cache)
    cache.chmod(0o1777)  # as /tmp
    assert library() == planted


def test_what_is_built_is_for_its_owner_alone_whatever_the_umask(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo > "$2"'))
    script = "from hotloop.apps.simulate.shim import library; import os; os.umask(0); library(); print(library())"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    built = Path(ran.stdout.strip())
    assert [oct(path.stat().st_mode & 0o777) for path in (cache, built.parent, built)] == ["0o700"] * 3


def test_it_is_found_whatever_the_encoding_of_the_terminal(built: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, **ascii_only, "HOTLOOP_CACHE": str(built.parent.parent)}
    script = "from hotloop.apps.simulate.shim import library; print(library())"
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert Path(ran.stdout.strip()) == built


def test_a_device_comes_and_goes_in_a_process_that_has_used_torch(built: Path) -> None:
    loaded = load(built)
    before = torch.accelerator.current_accelerator()
    install(loaded)
    try:
        assert torch.accelerator.current_accelerator().type == "cuda"
        assert torch.zeros(1).pin_memory().is_pinned()
        assert torch.Generator(device="cuda").device.type == "cuda"
    finally:
        remove(loaded)
    assert torch.accelerator.current_accelerator() == before


def test_a_library_that_cannot_be_loaded_is_an_error_with_advice(tmp_path: Path) -> None:
    broken = tmp_path / "shim.so"
    broken.write_text("")
    with pytest.raises(CannotSimulate, match="cannot be loaded") as caught:
        load(broken)
    assert "delete" in str(caught.value.fix)
