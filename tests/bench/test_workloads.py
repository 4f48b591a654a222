"""Each workload is the same for the same seed, and has the size that suits the device."""

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from hotloop.bench.packages import MissingPackage
from hotloop.bench.workloads import WORKLOADS, workload
from hotloop.errors import BadArgument

WITHOUT_EXTRAS = [name for name in WORKLOADS if name != "gpt2"]


def first_batches(name: str, seed: int) -> list[torch.Tensor]:
    parts = workload(name, "cpu", quick=True, seed=seed).parts()
    return [leaf for _, batch in zip(range(2), parts.loader, strict=False) for leaf in tree_leaves(batch)]


@pytest.mark.parametrize("name", WITHOUT_EXTRAS)
def test_the_same_seed_gives_the_same_and_another_another(name: str) -> None:
    one, two, other = (workload(name, "cpu", quick=True, seed=seed).parts() for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert all(map(torch.equal, first_batches(name, 3), first_batches(name, 3)))
    assert not all(map(torch.equal, first_batches(name, 3), first_batches(name, 4)))


def test_parts_are_equal_each_time_but_the_data_is_there_once() -> None:
    work = workload("cnn", "cpu", quick=True)
    one, two = work.parts(), work.parts()
    assert one.loader.dataset is two.loader.dataset
    assert one.model is not two.model
    assert all(map(torch.equal, tree_leaves(next(iter(one.loader))), tree_leaves(next(iter(two.loader)))))


def test_the_full_size_of_the_mlp_is_that_of_the_reference() -> None:
    work = workload("mlp", "cuda")
    assert (work.items, work.batch, work.steps, work.workers, work.pinned) == (1024, 64, 16, 2, True)
    assert not workload("mlp", "cpu").pinned


def test_a_cpu_gets_less_and_the_note_says_so() -> None:
    work = workload("gpt", "cpu")
    assert work.units_per_item == 128
    assert "small" in work.note
    assert workload("cnn", "cpu").items % 256 == 80  # a tail, as in the full size


def test_epochs_are_counted_in_units_and_in_batches() -> None:
    work = workload("gpt", "cpu", quick=True)
    assert work.units == work.items * 16
    assert work.steps == 2
    assert isinstance(work.dataset, TensorDataset)
    inputs, targets = work.dataset.tensors
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_hugging_face_gets_dicts_and_returns_its_own_loss() -> None:
    pytest.importorskip("transformers")
    parts = workload("gpt2", "cpu", quick=True).parts()
    batch = next(iter(parts.loader))
    assert set(batch) == {"input_ids", "labels"}
    assert parts.compute(parts.model, batch).dim() == 0


def test_without_transformers_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingPackage, match="pip install transformers"):
        workload("gpt2", "cpu", quick=True)


def test_a_workload_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(BadArgument, match="resnet18"):
        workload("vgg", "cpu")
