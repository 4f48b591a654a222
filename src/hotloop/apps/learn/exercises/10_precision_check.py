"""Watches the scaler, and compares the weights with those of training in fp32."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("cpu",)


@contextmanager
def watch() -> Iterator[Counter[str]]:
    """Counts the calls of the scaler, and what autocast was entered with."""
    seen: Counter[str] = Counter()
    before = {name: getattr(torch.amp.GradScaler, name) for name in ("scale", "step", "update")}
    enter = torch.autocast.__enter__

    def counted(name: str) -> Any:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            seen[name] += 1
            return before[name](self, *args, **options)

        return call

    def entered(self: Any) -> Any:
        seen[str(self.fast_dtype)] += 1
        return enter(self)

    for name in before:
        setattr(torch.amp.GradScaler, name, counted(name))
    torch.autocast.__enter__ = entered  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        for name, method in before.items():
            setattr(torch.amp.GradScaler, name, method)
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


def expected() -> torch.Tensor:
    """The weights after the same training in fp32."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    x = torch.rand(64, 8)
    y = x.sum(1, keepdim=True)
    for _ in range(10):
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(x), y) * 1e-7).backward()
        optimizer.step()
    return model.weight.detach()


def check(ran: Ran) -> Iterator[CheckVerdict]:
    seen: Counter[str] = ran.watched
    half = seen["torch.float16"] + seen["torch.bfloat16"]
    yield CheckVerdict(
        "the forward pass runs in 16 bits under autocast",
        half >= 10,
        "without autocast this is training in fp32: keep `with torch.autocast(…):` around the forward pass",
    )
    model = ran["model"]
    yield CheckVerdict(
        "the weights stay in fp32",
        model.weight.dtype == torch.float32,
        "model.half() makes the weights themselves fp16, where small updates are lost: leave them, autocast converts",
    )
    scaled = seen["torch.float16"] == 0
    hint = 'fp16 needs a scaler: scaler = torch.amp.GradScaler("cpu"), then scaler.scale(loss).backward()'
    if seen["scale"] and not seen["step"]:
        hint = "the gradients are those of the scaled loss, 65536 times too large: scaler.step(optimizer) divides them"
    elif seen["scale"] and seen["step"] and not seen["update"]:
        hint = (
            "scaler.update() is missing: after each step it adapts the scale, and forgets which optimizer was unscaled"
        )
    complete = min(seen["scale"], seen["step"], seen["update"]) >= 10
    yield CheckVerdict("scale, step and update are called in each step, or it is bf16", scaled or complete, hint)
    away = float((model.weight.detach().float() - expected()).abs().max())
    yield CheckVerdict(
        "the weights end where fp32 brings them",
        away < 0.1,
        f"they are up to {away:.2g} away from there"
        if away < 1e6
        else "they are far away: the gradients were too large",
    )
