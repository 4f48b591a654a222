"""`loop.predict` gives the outputs of every item in order, on the host."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import BadArgument, EmptyLoader


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.drop(self.layer(x))
        return {"y": y, "norm": y.norm(dim=1)}


def loop_of(model: nn.Module) -> hotloop.Loop:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain")


X = torch.linspace(-1, 1, 33).view(11, 3)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(X, X), 4),
        DataLoader(TensorDataset(X), 4),
        DataLoader(X, 4),
        [{"input": X[:5]}, {"input": X[5:]}],
    ],
    ids=["input and target", "one of each", "inputs alone", "dicts"],
)
def test_outputs_come_in_order_whatever_the_batches_are(loader: Any) -> None:
    model = nn.Linear(3, 2)
    assert torch.equal(loop_of(model).predict(loader), model(X).detach())
    assert model.training, "it is put back into its mode"


def test_parts_are_joined_each_for_itself_and_dropout_is_off() -> None:
    model = Two()
    outputs = loop_of(model).predict(DataLoader(TensorDataset(X, X), 4))
    model.eval()
    expected = model(X)
    assert outputs.keys() == expected.keys()
    assert all(torch.allclose(outputs[name], expected[name]) for name in expected)
    assert not any(value.requires_grad for value in outputs.values())


def test_memory_that_runs_out_changes_nothing(memory_of: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4096), nn.ReLU(), nn.Linear(4096, 2))
    loop = loop_of(model)
    expected = model(X).detach()
    with memory_of(8 * 4096 * 4):
        outputs = loop.predict(DataLoader(TensorDataset(X, X), 11))
    assert torch.allclose(outputs, expected)


def test_what_cannot_be_joined_and_an_empty_loader_are_refused() -> None:
    with pytest.raises(BadArgument, match="cannot be joined"):
        loop_of(nn.Linear(3, 2)).predict(DataLoader(TensorDataset(X, X), 4), predict=lambda model, batch: "words")
    with pytest.raises(EmptyLoader):
        loop_of(nn.Linear(3, 2)).predict([])


def boxes(model: nn.Module, batch: Any) -> list[dict[str, Tensor]]:
    """As many rows for an item as its first number says."""
    return [{"boxes": model(row).expand(1 + int(row[0] > 0), 2)} for row in batch[0]]


@pytest.mark.parametrize("rows", [8, 11])
def test_a_list_with_an_entry_for_each_item_becomes_one_of_all_items(rows: int) -> None:
    model, loader = nn.Linear(3, 2), DataLoader(TensorDataset(X[:rows], X[:rows]), 4)
    loop = loop_of(model)
    found, expected = loop.predict(loader, predict=boxes), boxes(model, (X[:rows],))
    assert isinstance(found, list)
    assert [each["boxes"].shape for each in found] == [each["boxes"].shape for each in expected]
    assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(found, expected, strict=True))
    assert not found[0]["boxes"].is_inference(), "it can be trained on"
    texts = loop.predict(loader, predict=lambda _, batch: [str(float(row[0])) for row in batch[0]])
    assert texts == [str(float(row[0])) for row in X[:rows]]
    heads = loop.predict(loader, predict=lambda model, batch: [model(batch[0])] * 2)
    assert [each.shape for each in heads] == [(rows, 2)] * 2


def test_sparse_outputs_are_joined() -> None:
    model = nn.Linear(3, 2)
    found = loop_of(model).predict([X[:5], X[5:]], predict=lambda model, batch: model(batch).relu().to_sparse())
    assert torch.equal(found.to_dense(), model(X).relu().detach())


@pytest.mark.parametrize(
    ("predict", "words"),
    [
        (lambda model, batch: model(batch)[:, : len(batch) - 4], r"the output has the shape \(5, 1\) .* and \(6, 2\)"),
        (lambda model, batch: {"y": model(batch), "extra": None}, r"the output\['extra'\] is a NoneType"),
        (lambda model, batch: (model(batch),) * len(batch), r"has the parts 5 in one batch and 6"),
        (lambda model, batch: {str(len(batch)): model(batch)}, r"has the parts \['5'\] in one batch and \['6'\]"),
    ],
    ids=["ragged", "nothing", "a tuple of another length", "other keys"],
)
def test_outputs_that_cannot_be_joined_are_named(predict: Any, words: str) -> None:
    with pytest.raises(BadArgument, match=words) as caught:
        loop_of(nn.Linear(3, 2)).predict([X[:5], X[5:]], predict=predict)
    assert "predict=lambda" in str(caught.value.fix)


class Answer(dict[str, Any]):
    """An output as Hugging Face models give it: a dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, input_ids: Tensor) -> Answer:
        return Answer({"logits": self.layer(input_ids.unsqueeze(-1))})


class Cached(Texts):
    def forward(self, input_ids: Tensor) -> Answer:
        return Answer({"last_hidden_state": super().forward(input_ids).logits, "past_key_values": object()})


def test_what_cannot_be_joined_says_how_a_model_with_dicts_is_called() -> None:
    ragged = [{"input_ids": torch.ones(2, length)} for length in (3, 4)]
    with pytest.raises(BadArgument, match=r"for row in model\(\*\*batch\)\.logits\]"):
        loop_of(Texts()).predict(ragged)
    rows = loop_of(Texts()).predict(ragged, predict=lambda model, batch: [{"y": row} for row in model(**batch).logits])
    assert [len(row["y"]) for row in rows] == [3, 3, 4, 4]
    with pytest.raises(BadArgument, match=r"'past_key_values'\] is an object(.|\n)*model\(\*\*batch\)\.…"):
        loop_of(Cached()).predict(ragged[:1])
