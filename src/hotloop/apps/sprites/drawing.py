"""How the drawer learns and draws: hide pixels and guess them; then guess all, keep the surest, and guess again."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotloop.apps.sprites.dataset import SIDE
from hotloop.apps.sprites.models import MASK, TOKENS, Drawer
from hotloop.errors import BadArgument

PIXELS = SIDE * SIDE
COLDEST, HOTTEST = 0.01, 100.0  # temperatures, between which the scores stay finite and mean something
WANDER = 6.0  # how much chance has a say in which pixels are kept, less with every step
FORGET = 0.1  # how often the drawer is not told the class, so that it also learns what any sprite looks like


def guess_hidden(model: Drawer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The objective: hide a random share of the pixels and score the guesses for them."""
    pixels, labels = batch
    count = len(pixels)
    share = torch.cos(torch.rand(count, 1, 1, device=pixels.device) * math.pi / 2)
    hidden = torch.rand(pixels.shape, device=pixels.device) < share.clamp_min(1 / PIXELS)
    told = torch.where(torch.rand(count, device=pixels.device) < FORGET, model_classes(model), labels)
    scores = model(pixels.int().masked_fill(hidden, MASK), told)
    losses = F.cross_entropy(scores.float(), pixels.long(), reduction="none")
    return (losses * hidden).sum() / hidden.sum().clamp_min(1)


def model_classes(model: torch.nn.Module) -> int:
    """The number that means "any class"."""
    inner: Any = getattr(model, "module", model)  # inside DataParallel or DistributedDataParallel
    return int(inner.size.classes)


@torch.inference_mode()
def draw(
    model: Drawer,
    labels: Tensor,
    *,
    steps: int = 16,
    temperature: float = 0.7,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """New sprites of these classes, uint8 (n, 16, 16), all at once in a few steps.

    In each step the drawer guesses every pixel that is still open and keeps the surest. A lower `temperature` draws
    cleaner and less varied sprites. `progress(step, steps)` is called after each step.
    """
    if not 1 <= steps <= PIXELS:
        raise BadArgument(f"steps={steps}", fix=f"choose from 1 to {PIXELS}: a sprite has no more pixels")
    if not COLDEST <= temperature <= HOTTEST:  # so is NaN
        raise BadArgument(f"temperature={temperature}", fix=f"choose from {COLDEST} to {HOTTEST:.0f}, such as 0.7")
    device, count = labels.device, len(labels)
    generator = torch.Generator(device).manual_seed(seed)
    pixels = torch.full((count, PIXELS), MASK, device=device, dtype=torch.long)
    for step in range(1, steps + 1):
        noise = torch.rand((count, PIXELS, TOKENS), generator=generator, device=device)
        chance = torch.rand((count, PIXELS), generator=generator, device=device)
        pixels = _advanced(pixels, _scores(model, pixels, labels) / temperature, noise, chance, step, steps)
        if progress is not None:
            progress(step, steps)
    return pixels.view(-1, SIDE, SIDE).to(torch.uint8)


def _advanced(pixels: Tensor, scores: Tensor, noise: Tensor, chance: Tensor, step: int, steps: int) -> Tensor:
    """Half-drawn sprites, a step further."""
    guess = (scores + _gumbel(noise)).argmax(-1)
    sure = scores.log_softmax(-1).gather(-1, guess[..., None]).squeeze(-1)
    sure = sure + WANDER * (1 - step / steps) * _gumbel(chance)
    open_ = pixels == MASK
    pixels = torch.where(open_, guess, pixels)
    left = math.floor(PIXELS * math.cos(math.pi / 2 * step / steps))
    if left > 0:  # after the last step of 13, and of a few others, rounding leaves -1
        unsure = sure.masked_fill(~open_, math.inf).topk(left, largest=False).indices
        pixels.scatter_(1, unsure, MASK)
    return pixels


def _scores(model: Drawer, pixels: Tensor, labels: Tensor) -> Tensor:
    """Scores (n, pixels, 17), pushed away from any sprite, towards the class."""
    board = pixels.view(-1, SIDE, SIDE)
    anything = torch.full_like(labels, model_classes(model))
    told, untold = model(torch.cat([board, board]), torch.cat([labels, anything])).chunk(2)
    flat: Tensor = (told + (told - untold)).float().flatten(2).transpose(1, 2)
    return flat


def _gumbel(noise: Tensor) -> Tensor:
    return -torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-7)))
