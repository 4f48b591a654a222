"""`make`: as many sprites as you like, each one a function of the seed, its number and its class."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from hotloop.apps.sprites.dataset import SIDE, SpriteSet, label_of
from hotloop.apps.sprites.dice import Dice
from hotloop.apps.sprites.palette import palette_tensor
from hotloop.apps.sprites.shapes import DRAWINGS
from hotloop.errors import BadArgument, DoesNotFit
from hotloop.memory.usage import usage
from hotloop.printing.text import plural, size

CLASSES: tuple[str, ...] = tuple(DRAWINGS)
CHUNK = 32768  # sprites drawn at a time: torch has enough to do in each call, and memory stays below 400 MB
SEEDS = 1 << 63
EACH = SIDE * SIDE + 8  # bytes of a sprite and its label


def make(
    count: int,
    *,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> SpriteSet:
    """Draw sprites: the same bytes for the same seed on every machine and device, all classes equally often.

    `progress(done, count)` is called after each part of the work.

    >>> make(32, seed=7).of("sword").pixels.shape
    torch.Size([2, 16, 16])
    """
    chosen = _checked(count, seed, classes)
    free = usage(device).free
    if free is not None and count * EACH > free:
        raise DoesNotFit(
            f"{plural(count, 'sprite')} take {size(count * EACH)} of memory, and {size(free)} are free",
            fix=f"ask for at most {free // EACH:,}",
        )
    pixels = torch.empty(count, SIDE, SIDE, dtype=torch.uint8, device=device)
    labels = torch.empty(count, dtype=torch.int64, device=device)
    with _one_thread():
        for start in range(0, count, CHUNK):
            numbers = torch.arange(start, min(start + CHUNK, count), device=device)
            labels[numbers] = _deal(seed, numbers, len(chosen))
            for label, name in enumerate(chosen):
                mine = numbers[labels[numbers] == label]
                if len(mine):
                    pixels[mine] = draw(name, mine, seed=seed)
            if progress is not None:
                progress(start + len(numbers), count)
    return SpriteSet(pixels, labels, chosen, palette_tensor(device), f"made by hotloop, seed {seed}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one core: waking others for thousands of small operations costs more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draw(name: str, numbers: Tensor, *, seed: int = 0) -> Tensor:
    """The sprites of one class that have these numbers, as uint8 (n, 16, 16).

    >>> draw("gem", torch.tensor([3, 14]), seed=7).dtype
    torch.uint8
    """
    return DRAWINGS[name](Dice(seed, numbers, name))


def _checked(count: int, seed: int, classes: Sequence[str] | None) -> tuple[str, ...]:
    """The classes to make, once the arguments make sense."""
    if count < 1:
        raise BadArgument(f"cannot make {count} sprites", fix="ask for one or more")
    if not 0 <= seed < SEEDS:
        raise BadArgument(f"seed {seed} is out of range", fix="choose one from 0 to 2**63 - 1")
    if classes is not None and not classes:
        raise BadArgument("no class to make", fix=f"name at least one of: {', '.join(CLASSES)}")
    chosen = tuple(dict.fromkeys(CLASSES if classes is None else classes))
    for name in chosen:
        label_of(name, CLASSES)
    return chosen


def _deal(seed: int, numbers: Tensor, kinds: int) -> Tensor:
    """A class for each sprite: every round of `kinds` sprites has each class once, in an order of its own."""
    first, last = int(numbers[0]) // kinds, int(numbers[-1]) // kinds
    rounds = Dice(seed, torch.arange(first, last + 1, device=numbers.device), "deal")
    cards = torch.stack([rounds.words(f"card {card}") for card in range(kinds)], 1)
    order = cards.argsort(dim=1, stable=True).view(-1)
    return order[numbers - first * kinds]


def load_or_make(data: Path | None, number: int, seed: int, classes: list[str] | None = None) -> SpriteSet:
    """The set in a file, or freshly made sprites; of the given classes."""
    if data is None:
        return make(number, seed=seed, classes=classes)
    return SpriteSet.load(data) if not classes else SpriteSet.load(data).only(classes)
