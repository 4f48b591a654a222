"""`load_weights` gives a model the weights of a run, the last or the best, or says why it cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.checkpoint import Store
from hotloop.errors import BadArgument

BATCHES = [(torch.ones(4, 2), torch.ones(4, 1))] * 2


def run(folder: Path, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain")
    loop.fit(BATCHES, epochs=3, save=folder, progress=False, monitor=False, **options)
    return model


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs()


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))


def test_the_last_and_the_best(tmp_path: Path) -> None:
    options: dict[str, Any] = {"validate": BATCHES[:1], "metrics": {"distance": distance}}
    model = run(tmp_path, best=("distance", "max"), **options)  # which falls, so that the first epoch is the best
    assert equal(hotloop.load_weights(nn.Linear(2, 1), tmp_path), model)
    empty = nn.Linear(2, 1)
    best = hotloop.load_weights(empty, str(tmp_path), "best")
    assert best is empty
    assert not equal(best, model)
    first = tmp_path / "step-000000002"
    assert equal(hotloop.load_weights(nn.Linear(2, 1), first), best), "one checkpoint"


def test_files_from_elsewhere(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    torch.save(nn.DataParallel(model).state_dict(), tmp_path / "wrapped.pt")
    for name in ("plain.pt", "wrapped.pt"):
        assert equal(hotloop.load_weights(nn.Linear(2, 1), tmp_path / name), model)


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    before = model.weight.clone()
    with pytest.raises(BadArgument, match="holds no checkpoint"):
        hotloop.load_weights(model, tmp_path)
    with pytest.raises(BadArgument, match=r"is not there\n.*the folder of fit"):
        hotloop.load_weights(model, tmp_path / "nowhere")
    run(tmp_path / "run")
    with pytest.raises(BadArgument, match=r"(?s)is the best: the run has evaluated nothing.*validate=.*of step 6"):
        hotloop.load_weights(model, tmp_path / "run", "best")
    with pytest.raises(BadArgument, match='choose "last" or "best"'):
        hotloop.load_weights(model, tmp_path / "run", "first")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="do not fit the model; of another shape: weight"):
        hotloop.load_weights(nn.Linear(3, 1), tmp_path / "run")
    with pytest.raises(BadArgument, match=r"missing: 0\.weight, 0\.bias; not of this model: weight, bias"):
        hotloop.load_weights(nn.Sequential(nn.Linear(2, 1)), tmp_path / "run")
    Store(tmp_path / "own").save(3, {"model": model.state_dict()})
    with pytest.raises(BadArgument, match=r"is not one of Loop\.fit"):
        hotloop.load_weights(model, tmp_path / "own")
    assert torch.equal(model.weight, before)
