"""A fork of the process of `tests/warm.py` that forks itself, with what a check of an exercise needs loaded as well."""

import importlib.util
import signal
import sys
from pathlib import Path


def warm_up() -> None:
    """A step on the simulated GPU and a graph: what they import, read and compile, no fork has to do again."""
    import torch

    lab = importlib.import_module("hotloop.apps.learn.lab")
    importlib.import_module("hotloop.apps.learn.child")
    # To compile lets a CUDA build count eight GPUs where there is no driver. Autograd begins a thread for each with the
    # first backward pass, and with threads it refuses forks.
    torch.ones((), requires_grad=True).backward()
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    with lab.gpu(quiet=True):
        model = torch.nn.Linear(2, 2).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                model(torch.rand(4, 2).to("cuda")), torch.zeros(4).long().to("cuda")
            ).backward()
            optimizer.step()


def main() -> None:
    signal.alarm(0)  # it serves all tests of a worker
    warm_up()
    spec = importlib.util.spec_from_file_location("warm", Path(__file__).parents[1] / "warm.py")
    assert spec is not None
    assert spec.loader is not None
    warm = importlib.util.module_from_spec(spec)
    sys.modules["warm"] = warm  # its dataclasses look for their module
    spec.loader.exec_module(warm)
    warm.serve(sys.argv[1], for_ever=True)


if __name__ == "__main__":
    main()
