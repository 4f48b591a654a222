"""The data of the workloads: made from a seed, and such that there is something to learn."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

KNOWN = 512  # tokens that texts are made of, so that a model meets each one often enough to learn it
CHOICES = 4  # tokens that may follow a token


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of 16 numbers, and for each the number to learn."""
    dice = _dice(seed)
    inputs, noise = torch.randn(count, 16, generator=dice), torch.randn(count, 1, generator=dice)
    return inputs, inputs[:, :4].sum(1, keepdim=True) + 0.5 * noise


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pictures of 3x32x32, each one of ten patterns under as much noise, and which one it is.

    One answer in five is drawn by lot, so that the loss has a floor, as on real pictures, and does not end in rounding.
    """
    dice = _dice(seed)
    patterns = torch.randint(0, 256, (10, 3, 32, 32), generator=dice, dtype=torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=dice)
    noise = torch.randint(0, 256, (count, 3, 32, 32), generator=dice, dtype=torch.uint8)
    pixels = noise.float()
    pixels += patterns.float()[labels]
    answers = torch.where(
        torch.rand(count, generator=dice) < 0.2, torch.randint(0, 10, (count,), generator=dice), labels
    )
    return pixels.div_(255).sub_(1), answers


def tokens(count: int, length: int, vocabulary: int, seed: int) -> Tensor:
    """Texts of a chain in which only a few tokens may follow each token.

    >>> tokens(2, 8, 100, seed=0).shape
    torch.Size([2, 8])
    """
    dice = _dice(seed)
    known = torch.randperm(vocabulary, generator=dice)[:KNOWN]
    follows = torch.randint(0, len(known), (len(known), CHOICES), generator=dice)
    at = torch.randint(0, len(known), (count,), generator=dice)
    turns = torch.randint(0, CHOICES, (length, count), generator=dice)
    walk = []
    for turn in turns:
        walk.append(at)
        at = follows[at, turn]
    return known[torch.stack(walk, 1)]


class TextDataset(Dataset[dict[str, Tensor]]):
    """Texts as the models of Hugging Face take them."""

    def __init__(self, texts: Tensor) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def _dice(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
