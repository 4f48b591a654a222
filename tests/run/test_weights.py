"""`load_weights` gives a model the weights of a run, the last or the best, or says why it cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import hotloop
from hotloop.checkpoint.store import Store
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


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.", "module.module."]
)
def test_what_was_around_the_model_that_was_saved_makes_no_difference(tmp_path: Path, prefix: str) -> None:
    model = blocks()
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, tmp_path / "a.pt")
    assert equal(hotloop.load_weights(blocks(), tmp_path / "a.pt"), model)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # of torch.compile itself
def test_what_is_around_the_model_makes_no_difference(tmp_path: Path) -> None:
    model, within = blocks(), blocks()
    within[1] = torch.compile(within[1])  # which compiles nothing before it is called
    torch.save(model.state_dict(), tmp_path / "a.pt")
    for wrapped in (torch.compile(blocks()), nn.DataParallel(blocks()), within):
        assert equal(hotloop.load_weights(wrapped, tmp_path / "a.pt"), model)
        torch.save(wrapped.state_dict(), tmp_path / "b.pt")
        assert equal(hotloop.load_weights(blocks(), tmp_path / "b.pt"), model)
    torch.save(hotloop.Ema(model).state_dict(), tmp_path / "ema.pt")
    assert equal(hotloop.load_weights(blocks(), tmp_path / "ema.pt"), model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_once_in_a_file_of_safetensors(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, str(tmp_path / "a.safetensors"))
    loaded = hotloop.load_weights(Tied(), tmp_path / "a.safetensors")
    assert equal(loaded, model)
    assert loaded.head.weight is loaded.embedding.weight


def test_what_load_state_dict_takes_is_taken(tmp_path: Path) -> None:
    model = blocks()  # PyTorch before 0.4.1 and some converters save no num_batches_tracked
    torch.save({k: v for k, v in model.state_dict().items() if "tracked" not in k}, tmp_path / "a.pt")
    assert equal(hotloop.load_weights(blocks(), tmp_path / "a.pt"), model)
    layer = weight_norm(nn.Linear(2, 2))
    state = layer.state_dict()
    old = {f"weight_{letter}": state[f"parametrizations.weight.original{i}"] for i, letter in enumerate("gv")}
    torch.save({"bias": state["bias"], **old}, tmp_path / "b.pt")  # as torch.nn.utils.weight_norm names them
    assert equal(hotloop.load_weights(weight_norm(nn.Linear(2, 2)), tmp_path / "b.pt"), layer)


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 1).state_dict(), tmp_path / "a.pt")
    with pytest.raises(BadArgument, match=r"weight, bias on the meta device(.|\n)*to_empty"):
        hotloop.load_weights(nn.Linear(2, 1, device="meta"), tmp_path / "a.pt")
    with pytest.raises(BadArgument, match=r"the model is a str(.|\n)*comes first"):
        hotloop.load_weights(str(tmp_path / "a.pt"), nn.Linear(2, 1))


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
        hotloop.load_weights(model, tmp_path / "run", "first")
    with pytest.raises(BadArgument, match="do not fit the model; of another shape: weight"):
        hotloop.load_weights(nn.Linear(3, 1), tmp_path / "run")
    with pytest.raises(BadArgument, match=r"missing: 0\.weight, 0\.bias; not of this model: weight, bias"):
        hotloop.load_weights(nn.Sequential(nn.Linear(2, 1)), tmp_path / "run")
    Store(tmp_path / "own").save(3, {"model": model.state_dict()})
    with pytest.raises(BadArgument, match=r"is not one of Loop\.fit"):
        hotloop.load_weights(model, tmp_path / "own")
    assert torch.equal(model.weight, before)
