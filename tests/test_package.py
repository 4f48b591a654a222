"""The package as a whole: nothing happens at import, and the public names are there."""

import subprocess
import sys

import pytest

import hotloop


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_lazy() -> None:
    assert run("import hotloop, sys; print('torch' in sys.modules)") == "False\n"


def test_import_of_everything_starts_no_gpu_and_sets_nothing() -> None:
    code = """
import os, torch
def settings():
    return dict(os.environ), torch.get_default_dtype(), torch.backends.cudnn.benchmark, torch.get_num_threads()
before = settings()
import hotloop
for name in hotloop.__all__: getattr(hotloop, name)
print(before == settings(), torch.cuda.is_initialized())
"""
    assert run(code) == "True False\n"


@pytest.mark.parametrize("name", hotloop.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(hotloop, name) is not None
    assert name in dir(hotloop)


def test_a_name_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(AttributeError, match="golden_rule"):
        hotloop.golden_rulle  # noqa: B018
