"""`nn.DataParallel`, asked for or found around a model. Without GPUs it passes through."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import BadArgument
from hotloop.ranks.group import Ranks
from hotloop.run.ranks_together import Together
from hotloop.step.data_parallel import SpreadModel, refuse_own_loss, spread_over_gpus


def loader() -> DataLoader[Any]:
    x = torch.rand(40, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x.sum(1) * 7).long() % 5), 16, shuffle=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 5))


def looped(model: nn.Module, **options: Any) -> hotloop.Loop:
    options = {"plan": "plain", "device": "cpu", **options}
    if "objective" not in options:
        options["loss"] = nn.CrossEntropyLoss()
    return hotloop.Loop(model, torch.optim.AdamW(model.parameters(), 1e-2), **options)


def fitted(model: nn.Module, **options: Any) -> tuple[hotloop.Loop, Any]:
    loop = looped(model, **options)
    return loop, loop.fit(loader(), epochs=2, validate=loader(), progress=False, monitor=False)


def written_for_it(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model.module(batch[0]), batch[1])


def test_it_trains_what_the_model_alone_does_and_its_names_have_no_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    alone, report = fitted(network())
    assert report.parallel is None
    expected = alone.state_dict()["model"]
    model = network()
    for loop, report in (
        fitted(nn.DataParallel(model)),
        fitted(network(), plan=hotloop.Plan("cpu", parallel="data_parallel")),
        fitted(nn.DataParallel(network()), objective=written_for_it),
    ):
        state = loop.state_dict()["model"]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert loop.plan.parallel == "data_parallel"
        assert "passes through" in report.parallel
        assert "`hotloop launch --gpus N script.py`" in str(report)
    assert looped(nn.DataParallel(model)).model is model
    looped(nn.DataParallel(network())).fit(loader(), progress=True, monitor=False)
    assert len([line for line in capsys.readouterr().err.splitlines() if "DataParallel passes through" in line]) == 1


def test_its_checkpoint_goes_on_in_a_plain_model(tmp_path: Path) -> None:
    options = {"save": tmp_path, "every": "1 steps", "progress": False, "monitor": False}
    looped(nn.DataParallel(network())).fit(loader(), epochs=1, **options)
    loop = looped(network())
    assert loop.fit(loader(), epochs=2, resume=True, **options).resumed == 1
    whole = looped(network())
    whole.fit(loader(), epochs=2, progress=False, monitor=False)
    assert all(torch.equal(value, loop.model.state_dict()[name]) for name, value in whole.model.state_dict().items())


def test_weights_that_were_saved_with_its_prefix_fit_a_plain_model(tmp_path: Path) -> None:
    model, other = network(), network()
    torch.save(nn.DataParallel(model).state_dict(), tmp_path / "wrapped.pt")
    with torch.no_grad():
        other[0].weight.zero_()
    hotloop.load_weights(other, tmp_path / "wrapped.pt")
    assert torch.equal(other[0].weight, model[0].weight)


def several(model: nn.Module) -> "nn.DataParallel[Any]":
    wrapper = nn.DataParallel(model)
    wrapper.device_ids = [0, 1]  # as where there are GPUs
    return wrapper


def test_several_gpus_are_told_and_refuse_what_would_change_the_one_model() -> None:
    model = network()
    spread = spread_over_gpus(model, several(model), hotloop.Plan("cuda"))
    assert spread is not None
    assert spread.is_active
    assert "over 2 GPUs: 15 items in a step, 8 on each" in spread.words(15)
    assert "`hotloop launch --gpus 2 script.py`" in spread.words()
    with pytest.raises(BadArgument, match="2 GPUs with compile in the plan"):
        spread_over_gpus(model, several(model), hotloop.Plan("cuda", compile="default"))
    with pytest.raises(BadArgument, match="a loss for each of 2 GPUs"):
        refuse_own_loss(spread, has_loss=False)
    refuse_own_loss(spread, has_loss=True)
    on_host = spread_over_gpus(model, several(model), hotloop.Plan("cpu"))
    assert on_host == SpreadModel(None, 0), "a model on the host is called as it is"


def test_on_ranks_ddp_takes_its_place() -> None:
    ranks = Together(Ranks(0, 2, 0, "here", torch.device("cpu")))
    plan = hotloop.Plan("cpu", parallel="data_parallel")
    with pytest.raises(BadArgument, match="on 2 ranks"):
        ranks.spread(network(), None, plan, [], [])
