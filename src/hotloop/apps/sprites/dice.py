"""Dice that fall the same way everywhere: a counter-based integer hash instead of a random generator with a state.

Every draw is a pure function of the seed, the sprite's number and the draw's name, so that a sprite depends neither on
the batch it is made in nor on the device or the torch version that makes it.
"""

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

WORD = 1 << 64
STEP = 0x9E3779B97F4A7C15  # the golden ratio: consecutive numbers land far apart
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64


def signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    word %= WORD
    return word - WORD if word >= WORD >> 1 else word


def mix_word(word: int) -> int:
    """`mix` for one Python integer, the result in 0 to 2**64 - 1."""
    word %= WORD
    word = (word ^ (word >> 30)) * FACTORS[0] % WORD
    word = (word ^ (word >> 27)) * FACTORS[1] % WORD
    return word ^ (word >> 31)


def mix(words: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64: every input bit reaches every output bit."""
    words = _right(words, 30).bitwise_xor_(words).mul_(signed(FACTORS[0]))
    words = _right(words, 27).bitwise_xor_(words).mul_(signed(FACTORS[1]))
    return _right(words, 31).bitwise_xor_(words)


def _right(words: Tensor, by: int) -> Tensor:
    """A logical shift: torch's own copies the sign bit down."""
    return (words >> by).bitwise_and_((1 << (64 - by)) - 1)


class Dice:
    """One set of dice for each sprite of a batch; each draw has a name, and the same name gives the same result.

    >>> dice = Dice(7, torch.arange(4))
    >>> bool((dice.below("size", 6) == dice.below("size", 6)).all())
    True
    """

    def __init__(self, seed: int, numbers: Tensor, topic: str = "") -> None:
        self.seed = seed
        self.topic = topic
        self.steps = numbers.long() * signed(STEP)
        self.count, self.device = len(numbers), numbers.device

    def words(self, name: str) -> Tensor:
        """64 random bits per sprite, as int64 (n,)."""
        key = mix_word(mix_word(self.seed) + crc32(f"{self.topic}/{name}".encode()) * STEP)
        return mix(self.steps + signed(key))

    def below(self, name: str, limit: int) -> Tensor:
        """A whole number from 0 to limit - 1, as int64 (n,); limit is at most 2**31."""
        return (_right(self.words(name), 32) * limit) >> 32

    def between(self, name: str, low: int, high: int) -> Tensor:
        """A whole number from low to high, both included."""
        return self.below(name, high - low + 1) + low

    def chance(self, name: str, part: int, whole: int) -> Tensor:
        """True for `part` sprites in `whole`, as bool (n,)."""
        return self.below(name, whole) < part

    def choose(self, name: str, table: Sequence[object]) -> Tensor:
        """One row of a table of integers for each sprite."""
        return torch.tensor(table, device=self.device)[self.below(name, len(table))]

    def speckle(self, name: str, part: int) -> Tensor:
        """A mask, bool (n, 16, 16), in which every pixel is set with a chance of `part` in 32, 0 < part < 32."""
        lanes = torch.arange(5 * 4, device=self.device) * signed(mix_word(STEP))
        words = mix(self.words(name)[:, None] + lanes).view(self.count, 5, 4, 1)
        shifts = torch.tensor((0, 16, 32, 48), device=self.device)
        rows = ((words >> shifts) & 0xFFFF).to(torch.int32).view(self.count, 5, 16)
        mask = torch.zeros_like(rows[:, 0])
        for bit in range(5):  # each coin halves the chance, or halves what is missing from it
            mask = mask | rows[:, bit] if part >> bit & 1 else mask & rows[:, bit]
        return (mask[..., None] >> torch.arange(16, device=self.device) & 1).bool()
