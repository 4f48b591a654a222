"""`WarmupCosine`: a learning rate that warms up in a line and falls along a cosine."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hotloop.errors import BadArgument


class WarmupCosine(LambdaLR):
    """Warm-up, then half a cosine: each rate rises in a line to the one that its optimizer has, and falls to `end`.

    `steps` are all updates of the run, `epochs * len(loader)` where nothing is accumulated. `warmup` is a share of
    them, or their number. `end` is a share of the optimizer's rates. After the last step the rates stay there.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    >>> scheduler = WarmupCosine(optimizer, steps=8, warmup=3)
    >>> [round(scheduler.factor(step), 3) for step in range(9)]
    [0.25, 0.5, 0.75, 1.0, 0.905, 0.655, 0.345, 0.095, 0.0]
    """

    def __init__(self, optimizer: Optimizer, steps: int, *, warmup: float = 0.05, end: float = 0.0) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise BadArgument(f"steps={steps!r}", fix="give the number of updates of the run: epochs * len(loader)")
        if isinstance(warmup, bool) or not isinstance(warmup, int | float) or not 0 <= warmup < steps:
            raise BadArgument(
                f"warmup={warmup!r} of {steps} steps", fix="give a share such as 0.05, or a number of steps"
            )
        if isinstance(end, bool) or not isinstance(end, int | float) or not 0 <= end <= 1:
            raise BadArgument(f"end={end!r}", fix="give a share of the learning rate, from 0 to 1")
        rising = round(warmup * steps) if isinstance(warmup, float) and warmup < 1 else int(warmup)
        falling = max(steps - rising, 1)

        # A function, of which a checkpoint holds nothing: a run that is resumed may be given more steps.
        def factor(step: int) -> float:
            if step < rising:
                return (step + 1) / (rising + 1)
            done = min((step - rising) / falling, 1.0)
            return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * done))

        self.total_steps = steps
        super().__init__(optimizer, factor)

    def factor(self, step: int) -> float:
        """The factor of the rates in a step, from 0."""
        value: float = self.lr_lambdas[0](step)
        return value
