"""Changes that make room, made to a script while it runs: what a person would write, without writing it."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from hotloop.apps.simulate._torch import wrap_calls
from hotloop.apps.simulate.replaced import Patches
from hotloop.levers import repeated_blocks

BF16, FP16, CHECKPOINTING, ACCUMULATION = "bf16", "fp16", "checkpointing", "accumulation"


class Change:
    """A change that is made as soon as there is something to make it to; `made` says whether there was."""

    def __init__(self) -> None:
        self.made = False
        self._patches = Patches()

    def __enter__(self) -> Self:
        self.install(self._patches)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.restore()

    def install(self, patches: Patches) -> None:
        """Put it in place."""


class Autocast(Change):
    """`torch.autocast` from the call of a model until the backward pass: the loss is inside, as it should be."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._context: Any = None

    def install(self, patches: Patches) -> None:
        _before_models(patches, self._enter)
        for name in ("backward", "grad"):
            patches.set(torch.autograd, name, self._leaving(getattr(torch.autograd, name)))

    def __exit__(self, *_: object) -> None:
        self._leave()
        super().__exit__()

    def _enter(self, _model: nn.Module) -> None:
        if self._context is None and not torch.is_autocast_enabled("cuda"):
            self._context = torch.autocast("cuda", dtype=self._dtype)
            self._context.__enter__()
            self.made = True

    def _leave(self) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None

    def _leaving(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self._leave()
            return call(*args, **kwargs)

        return called


class Checkpointing(Change):
    """The blocks that a model repeats keep their inputs alone, and are computed again in the backward pass."""

    def install(self, patches: Patches) -> None:
        self._wrapped: set[int] = set()
        _before_models(patches, self._wrap)

    def _wrap(self, model: nn.Module) -> None:
        if id(model) in self._wrapped:
            return
        self._wrapped.add(id(model))
        for block in repeated_blocks(model):
            self._patches.set(block, "forward", partial(checkpoint, block.forward, use_reentrant=False))
            self.made = True


class Accumulation(Change):
    """Gradient accumulation: each optimizer steps after `micro_batches` calls only, and gradients stay until then.

    With a batch that is as many times smaller, that is the same batch in micro-batches.
    """

    def __init__(self, micro_batches: int) -> None:
        super().__init__()
        self._micro_batches = micro_batches
        self._pending: dict[int, int] = {}  # by optimizer: steps that were left out since the last that was made

    def install(self, patches: Patches) -> None:
        make, zero, zero_all = Optimizer.__init__, Optimizer.zero_grad, nn.Module.zero_grad

        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            # A method, since schedulers wrap it as one.
            optimizer.step = MethodType(self._step(type(optimizer).step), optimizer)

        def zeroed(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if not self._pending.get(id(optimizer)):
                zero(optimizer, *args, **kwargs)

        def zeroed_all(model: Any, *args: Any, **kwargs: Any) -> None:
            if not any(self._pending.values()):
                zero_all(model, *args, **kwargs)

        patches.set(Optimizer, "__init__", made)
        patches.set(Optimizer, "zero_grad", zeroed)
        patches.set(nn.Module, "zero_grad", zeroed_all)

    def _step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            left = self._pending.get(id(optimizer), 0) + 1
            self._pending[id(optimizer)] = left % self._micro_batches
            self.made = self.made or left < self._micro_batches
            return step(optimizer, *args, **kwargs) if left == self._micro_batches else None

        return stepped


def change_of(name: str | None) -> Change:
    """The change that a name means, such as bf16 or accumulation:4; without a name, none."""
    kind, _, number = (name or "").partition(":")
    if kind in (BF16, FP16):
        return Autocast(torch.bfloat16 if kind == BF16 else torch.float16)
    if kind == CHECKPOINTING:
        return Checkpointing()
    return Accumulation(int(number)) if kind == ACCUMULATION else Change()


def _before_models(patches: Patches, then: Callable[[nn.Module], None]) -> None:
    """Call something before each outermost call of a module that learns; a loss has nothing to learn."""
    depth = [0]

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not depth[0] and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
                then(module)
            depth[0] += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                depth[0] -= 1

        return called

    wrap_calls(patches, around)
