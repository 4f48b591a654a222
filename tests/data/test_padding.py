"""Sequences are padded to a few lengths; a model that masks computes the same loss and gradient."""

import copy
import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import hotloop
from hotloop import pad_to
from hotloop.errors import BadArgument

from ..thorough import tries


class Reader(nn.Module):
    """Attention over texts of any length, a label for each token; it reads nothing that the mask leaves out."""

    def __init__(self, words: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = x + self.attention(x, x, x, key_padding_mask=attention_mask == 0)[0]
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def texts(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 11, (length,), generator=generator) for length in lengths]


def collate(items: list[Tensor]) -> dict[str, Tensor]:
    ids = pad_sequence(items, batch_first=True)
    mask = pad_sequence([torch.ones_like(each) for each in items], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": pad_sequence(items, True, -100)}


@settings(deadline=None, max_examples=tries(20, 60))
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    to=st.one_of(st.integers(1, 24), st.lists(st.integers(1, 30), min_size=1, max_size=4)),
)
def test_loss_and_gradient_are_those_of_the_batch_as_it_was(lengths: list[int], to: int | list[int]) -> None:
    torch.manual_seed(0)
    model = Reader().double()
    batch = collate(texts(lengths))
    padded = pad_to(to)(batch)
    longest = max(lengths)
    options = [-(-longest // to) * to] if isinstance(to, int) else [each for each in to if each >= longest]
    assert padded["input_ids"].shape[1] == min(options, default=longest)
    found = []
    for each in (batch, padded):
        loss = model(**each)
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for plain, other in zip(*found, strict=True):
        assert torch.allclose(plain, other, rtol=1e-9, atol=1e-12)


def loader_of(collate_fn: Any = collate, **options: Any) -> DataLoader[Any]:
    lengths = torch.randint(1, 40, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    return DataLoader(texts(lengths), 4, collate_fn=collate_fn, **options)


def losses_of(loader: Any, transform: Any = None) -> tuple[list[float], set[int]]:
    torch.manual_seed(0)
    model = Reader()
    loop = hotloop.Loop(
        model, torch.optim.SGD(model.parameters(), 0.1), objective=lambda m, b: m(**b), device="cpu", plan="plain"
    )
    losses, lengths = [], set()
    for batch in loop.batches(loader, device_transform=transform):
        lengths.add(batch["input_ids"].shape[1])
        losses.append(float(loop.step(batch)))
    return losses, lengths


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_is_the_same_in_fewer_shapes_on_the_device_or_in_the_loader(workers: int) -> None:
    plain, many = losses_of(loader_of())
    assert len(many) > 5
    on_device, lengths = losses_of(loader_of(), pad_to(16))
    assert lengths <= {16, 32, 48}
    assert on_device == pytest.approx(plain, rel=1e-4)
    in_loader, lengths = losses_of(loader_of(pad_to(16, after=collate), num_workers=workers))
    assert lengths <= {16, 32, 48}
    assert in_loader == on_device


def test_fit_takes_it_and_a_transform_of_ones_own_comes_first() -> None:
    torch.manual_seed(0)
    model, seen = Reader(), set()

    def noted(model: nn.Module, batch: Any) -> Tensor:
        seen.add(batch["input_ids"].shape[1])
        return model(**batch)

    def shortened(batch: Any) -> Any:
        return {name: tensor[:, :20] for name, tensor in batch.items()}

    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), objective=noted, device="cpu")
    loop.fit(loader_of(), device_transform=pad_to([8, 24], after=shortened), progress=False)
    assert seen in ({24}, {8, 24})


Pair = namedtuple("Pair", "input_ids labels")


@dataclass
class Sample:
    tokens: Tensor
    target: Tensor


def test_types_are_kept_and_what_has_the_length_already_is_the_same_object() -> None:
    ids = torch.ones(2, 5).long()
    pad = pad_to(4, values={"input_ids": 7})
    pair = pad(Pair(ids, ids))
    assert type(pair) is Pair
    assert pair.input_ids.tolist() == [[1] * 5 + [7] * 3] * 2
    assert pair.labels.tolist() == [[1] * 5 + [-100] * 3] * 2
    sample = Sample(ids, torch.ones(2))
    longer = pad_to(4, values={"tokens": 0})(sample)
    assert longer.tokens.shape == (2, 8)
    assert longer.target is sample.target
    assert sample.tokens is ids
    batch = {"input_ids": torch.ones(2, 8).long(), "other": [torch.ones(2), "text"]}
    assert pad_to(4)(batch) is batch
    assert copy.deepcopy(pad_to([64, 8], values={0: 1})) == pad_to([8, 64], values={0: 1})


def test_hugging_faces_encodings_are_padded() -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.ones(2, 5).long()
    encoding = transformers.BatchEncoding({"input_ids": ids, "attention_mask": ids, "token_type_ids": ids})
    padded = pad_to(8)(encoding)
    assert type(padded) is transformers.BatchEncoding
    assert {name: tensor.shape[1] for name, tensor in padded.items()} == dict.fromkeys(encoding, 8)
    assert encoding["input_ids"] is ids


def test_features_are_padded_with_zeros_and_what_has_no_length_stays() -> None:
    features, classes = torch.ones(2, 5, 3), torch.ones(2).long()
    padded, same = pad_to(8)((features, classes))
    assert padded.shape == (2, 8, 3)
    assert padded[:, 5:].abs().sum() == 0
    assert same is classes
    (alone,) = pad_to(8)([features])
    assert torch.equal(alone, padded)
    assert torch.equal(pad_to(8)(features), padded)
    mask = pad_to(8)({"src": features, "src_key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)})
    assert mask["src_key_padding_mask"].tolist() == [[False] * 5 + [True] * 3] * 2


def test_a_value_can_be_named_by_the_path_and_a_tensor_left_alone() -> None:
    ids = torch.ones(2, 5).long()
    ((first, second), third) = pad_to(8, values={"batch[0][0]": 0, "batch[0][1]": 3, "batch[1]": None})(
        ((ids, ids), ids)
    )
    assert first[0, -1] == 0
    assert second[0, -1] == 3
    assert third is ids


def test_labels_of_whole_texts_stay() -> None:
    ids, classes = torch.ones(2, 5).long(), torch.ones(2, 5)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": classes}
    assert pad_to(8)(batch)["labels"] is classes
    assert pad_to(8)({**batch, "labels": classes[:, 0].long()})["labels"].shape == (2,)
    assert pad_to(8)({"labels": classes[:, :3], "input_values": classes})["input_values"].shape == (2, 8)


def test_targets_of_pictures_and_sound_are_padded_and_channels_are_not() -> None:
    batch = {"input_features": torch.ones(2, 5, 30), "labels": torch.ones(2, 5).long()}
    padded = pad_to(8)(batch)
    assert padded["input_features"] is batch["input_features"]
    assert padded["labels"].tolist() == [[1] * 5 + [-100] * 3] * 2


ids = torch.ones(2, 5).long()


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((ids, ids), r"batch\[0\], of shape \(2, 5\), holds whole numbers(.|\n)*values={0: 0}"),
        ((ids.float(), ids.float()), r"batch\[1\].* holds numbers of unknown meaning"),
        ((ids.float(), ids.bool()), r"batch\[1\].* holds True and False"),
        ({"input_ids": ids}, "without an attention_mask"),
        ({"input_ids": ids, "attention_mask": ids, "labels": ids[:, :3]}, "has another length than batch"),
        ({"input_ids": ids, "attention_mask": ids, "extra": ids}, r"batch\['extra'\]"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 5, 5)}, "more than one dimension"),
        (torch.ones(3), "no tensor of the batch has sequences"),
        ("text", "no tensor of the batch has sequences"),
    ],
)
def test_what_cannot_be_guessed_is_an_error_in_words(batch: Any, says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        pad_to(8)(batch)


def test_wrong_arguments() -> None:
    for lengths in (0, -1, [], [8, 0], [8.0], True):
        with pytest.raises(BadArgument, match="lengths="):
            pad_to(lengths)
    with pytest.raises(BadArgument, match="labls"):
        pad_to(8, values={"labls": 0})({"input_ids": ids, "attention_mask": ids})
    with pytest.raises(BadArgument, match="cannot hold -100"):
        pad_to(8, values={0: -100})((ids.to(torch.uint8),))
    for value in (math.nan, math.inf):
        with pytest.raises(BadArgument, match="cannot hold"):
            pad_to(8, values={0: value})((ids,))
