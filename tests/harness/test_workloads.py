"""Each workload is the same for the same seed, and has the size that suits the device."""

import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves

from harness.contestants import contestants
from harness.workloads import WORKLOADS, workload
from harness.workloads.language import RaggedTextDataset, padded
from harness.workloads.pictures import JpegDataset, flip_and_shift
from hotloop.errors import BadArgument

from .racing import CPU, EXPERTS, loss_of, needs_packages_of


def weights_and_batches(name: str, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a training begins with, and its first two batches."""
    parts = workload(name, "cpu", quick=True, seed=seed).parts()
    batches = [leaf for _, batch in zip(range(2), parts.loader, strict=False) for leaf in tree_leaves(batch)]
    return list(parts.model.parameters()), batches


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_and_another_another(name: str) -> None:
    needs_packages_of(name)
    for one, two, other in zip(*(weights_and_batches(name, seed) for seed in (3, 3, 4)), strict=True):
        assert len(one) == len(two) > 0
        assert all(map(torch.equal, one, two))
        assert not all(map(torch.equal, one, other))


def test_a_cpu_gets_less_and_the_note_says_so() -> None:
    work = workload("gpt", "cpu")
    assert work.units_per_item == 128
    assert "small" in work.note
    assert workload("cnn", "cpu").items % 256 == 80  # a tail, as in the full size
    quick = workload("gpt", "cpu", quick=True)
    assert (quick.units, quick.steps) == (quick.items * 16, 2)


def test_hugging_face_gets_dicts_and_returns_its_own_loss_also_in_the_loop_of_an_expert() -> None:
    pytest.importorskip("transformers")
    work = workload("gpt2", "cpu", quick=True)
    parts = work.parts()
    batch = next(iter(parts.loader))
    assert set(batch) == {"input_ids", "labels"}
    assert parts.compute(parts.model, batch).dim() == 0
    before = loss_of(work, parts)
    assert contestants(["expert"], experts=EXPERTS)["expert"](parts, CPU).run(3) > 0
    assert loss_of(work, parts) < before


def test_pictures_are_decoded_cropped_and_flipped_at_random_from_the_same_files() -> None:
    work = workload("jpeg", "cpu", quick=True)
    assert isinstance(work.dataset, JpegDataset)
    torch.manual_seed(1)
    one, two = work.dataset[0], work.dataset[0]
    torch.manual_seed(1)
    again = work.dataset[0]
    assert one[0].shape == (3, 32, 32)
    assert one[1] == two[1] == 0
    assert torch.equal(one[0], again[0])
    assert not torch.equal(one[0], two[0])
    assert workload("jpeg", "cpu", quick=True).parts().loader.num_workers == 1


def test_texts_are_padded_to_the_longest_of_their_batch() -> None:
    texts = RaggedTextDataset(40, 64, 600, seed=0)
    lengths = [len(text["input_ids"]) for text in texts]
    assert min(lengths) >= 16
    assert max(lengths) <= 64
    batch = padded([texts[0], texts[1]])
    assert batch["input_ids"].shape == (2, max(lengths[:2]))
    assert batch["attention_mask"].sum(1).tolist() == lengths[:2]
    assert batch["labels"].shape == (2,)


def test_each_image_is_flipped_or_not_and_shifted_by_two_pixels_at_most() -> None:
    torch.manual_seed(0)
    pictures = torch.rand(64, 3, 8, 8)
    moved, labels = flip_and_shift([pictures, torch.arange(64)])
    assert torch.equal(labels, torch.arange(64))
    seen = set()
    for one, other in zip(pictures, moved, strict=True):
        inner = other[:, 2:-2, 2:-2]  # what no edge was mirrored into
        found = {
            (down, across, flip)
            for down, across, flip in itertools.product(range(-2, 3), range(-2, 3), (False, True))
            if torch.equal((one.flip(2) if flip else one)[:, 2 + down : 6 + down, 2 + across : 6 + across], inner)
        }
        assert len(found) == 1
        seen |= found
    assert {flip for *_, flip in seen} == {False, True}
    assert {down for down, *_ in seen} == set(range(-2, 3))


def test_two_objectives_have_an_optimizer_each_for_the_network_of_their_name() -> None:
    parts = workload("dcgan", "cpu", quick=True).parts()
    assert isinstance(parts.optimizer, dict)
    assert list(parts.optimizer) == ["discriminator", "generator"]
    (tell_apart, first), (_, second) = parts.updates
    batch = next(iter(parts.loader))
    tell_apart(parts.model, batch).backward()
    assert all(weight.grad is not None for group in first.param_groups for weight in group["params"])
    assert all(weight.grad is None for group in second.param_groups for weight in group["params"])
    with pytest.raises(BadArgument, match="several objectives"):
        parts.compute(parts.model, batch)
    with pytest.raises(BadArgument, match="several optimizers"):
        _ = parts.only_optimizer


def test_a_workload_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(BadArgument, match="resnet18"):
        workload("vgg", "cpu")
