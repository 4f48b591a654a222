"""A loop as plain data and tensors, and a loop that goes on from there: what a checkpoint holds of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.errors import BadArgument
from hotloop.plan import Plan, Tuning
from hotloop.state import Randomness
from hotloop.text import plural, shorten

if TYPE_CHECKING:
    from hotloop.loop.loop import Loop

FORMAT = 1
_FLAGS = ("fused", "foreach", "capturable")  # how an optimizer computes: the plan's affair, not the checkpoint's


def state_of(loop: "Loop") -> dict[str, Any]:
    """Everything that decides how training goes on, but the position of the loader. Nothing waits for the device."""
    tuning = loop.tuning
    return {
        "format": FORMAT,
        "model": loop.model.state_dict(),
        "others": [module.state_dict() for module in loop._subject.modules[1:]],
        "buffers": [_unsaved(module) for module in loop._subject.modules],
        "optimizers": [optimizer.state_dict() for optimizer in loop._optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in loop._schedule.schedulers],
        "update": loop._step.update.to_state(),
        "portion": loop._survivor.portion.to_state(),
        "watch": loop._watch.to_state(),
        "random": Randomness(loop.device).to_state(),
        "epoch": loop.epoch,
        "plan": loop._step.plan.to_json(),
        "tuning": None if tuning is None else tuning.to_json(),
    }


def put_back(loop: "Loop", state: dict[str, Any]) -> None:
    """Make a loop what it was when `state_of` was asked; the random states are put back last, by `put_randomness`."""
    if state.get("format") != FORMAT:
        raise BadArgument(
            f"the checkpoint has format {state.get('format')!r}, and this version reads {FORMAT}",
            fix="use the version of hotloop that wrote it",
        )
    _check(loop, state)
    with loop._plain_for_a_while():
        loop.model.load_state_dict(state["model"])
        for module, values in zip(loop._subject.modules[1:], state["others"], strict=True):
            module.load_state_dict(values)
        for module, values in zip(loop._subject.modules, state["buffers"], strict=True):
            _put_buffers(module, values)
        for optimizer, values in zip(loop._optimizers, state["optimizers"], strict=True):
            with _own_flags(optimizer):
                optimizer.load_state_dict(values)
        for scheduler, values in zip(loop._schedule.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(values)
    if state["tuning"] is not None:
        loop._tuner.go_on(Tuning.from_json(state["tuning"]))
    loop.go_on_with(Plan.from_json(state["plan"]))
    loop._step.update.go_on(state["update"])
    loop._survivor.portion.go_on(state["portion"])
    loop.epoch = state["epoch"]


def put_randomness(loop: "Loop", state: dict[str, Any]) -> None:
    Randomness.from_state(state["random"], loop.device).put()


def _unsaved(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that a state_dict leaves out, though training may change them."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, inner in module.named_modules()
        for name, buffer in inner._buffers.items()
        if buffer is not None and name in inner._non_persistent_buffers_set
    }


@torch.no_grad()
def _put_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in _unsaved(module).items():
        if name in values:
            buffer.copy_(values[name])


@contextmanager
def _own_flags(optimizer: Optimizer) -> Iterator[None]:
    """While a state is loaded: the flags stay those that the optimizer was made with."""
    before = [{flag: group[flag] for flag in _FLAGS if flag in group} for group in optimizer.param_groups]
    yield
    for group, flags in zip(optimizer.param_groups, before, strict=True):
        group.update(flags)


def _check(loop: "Loop", state: dict[str, Any]) -> None:
    """Refuse a checkpoint of something else before anything has changed."""
    mine, theirs = _shapes(loop.model.state_dict()), _shapes(state["model"])
    wrong = [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
    if wrong:
        first = sorted(wrong)[0]
        raise BadArgument(
            f"the checkpoint is of another model: {plural(len(wrong), 'tensor')} differ ({shorten(sorted(wrong), 3)});"
            f" {first} is {mine.get(first, 'not there')} here and {theirs.get(first, 'not there')} in the checkpoint",
            fix="build the model as it was, or choose another folder for a new run",
        )
    held: Sequence[tuple[str, int, Callable[[], int]]] = (
        ("optimizers", len(loop._optimizers), lambda: len(state["optimizers"])),
        ("schedulers", len(loop._schedule.schedulers), lambda: len(state["schedulers"])),
        ("others", len(loop._subject.modules) - 1, lambda: len(state["others"])),
    )
    for name, here, there in held:
        if here != there():
            raise BadArgument(
                f"the checkpoint holds {there()} {name}, and this loop has {here}",
                fix="build the loop as it was, or choose another folder for a new run",
            )


def _shapes(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
