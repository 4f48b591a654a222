"""`pick`: the device to train on, the precision that suits it, and the reason in words."""

import difflib
import os
import re
from dataclasses import dataclass
from typing import Any, Self

import torch

from hotloop.device.backend import BACKENDS, backend_of, precision_for
from hotloop.device.causes import Cause, unsupported, why_no_cuda, why_no_mps, why_none
from hotloop.device.facts import MachineFacts, VisibleGpu
from hotloop.device.machine import cpu_name
from hotloop.device.probe import probe
from hotloop.errors import BadArgument, DeviceUnavailable, HotloopError
from hotloop.plan import Precision
from hotloop.printing import markup
from hotloop.printing.text import an, plural, printable, shorten, size
from hotloop.records import Record

VARIABLE = "HOTLOOP_DEVICE"
MEANT = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps", "apple": "mps", "intel": "xpu"}


@dataclass(frozen=True)
class Choice(Record):
    """A device and a precision, and why these."""

    device: torch.device
    precision: Precision
    reason: str
    causes: tuple[Cause, ...] = ()  # why not something better
    name: str = ""  # of the GPU or the processor

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))  # the names in it come from drivers

    def __str__(self) -> str:
        return f"{self.device} in {self.precision}: {self.reason}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: the device, why this one, and what to do for a better one."""
        name = f" ({self.name})" if self.name else ""
        rows = [(cause.what, cause.fix) for cause in self.causes]
        return markup.box(
            markup.line(f"{self.device}{name} in {self.precision}", strong=True),
            markup.line(self.reason),
            markup.table(rows, ["why nothing better", "fix"], words=(0, 1)) if rows else "",
        )

    def to_json(self) -> dict[str, Any]:
        causes = [cause.to_json() for cause in self.causes]
        return {
            "device": str(self.device),
            "precision": self.precision,
            "reason": self.reason,
            "causes": causes,
            "name": self.name,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return super().from_json({**data, "device": torch.device(data["device"])})


@dataclass(frozen=True)
class _Request:
    """What the person wants, and where they said so."""

    type: str
    index: int | None
    said: str  # "you asked for" or "HOTLOOP_DEVICE asks for"

    def __str__(self) -> str:
        return f"{self.said} {self.type}" + ("" if self.index is None else f":{self.index}")


def pick(want: str | torch.device | Choice | None = None) -> Choice:
    """The device to use: the one asked for, here or in HOTLOOP_DEVICE, else the best there is.

    What was picked before stays what it is, with its reason.

    >>> pick("cpu").reason
    'You asked for cpu.'
    """
    return pick_from(None, want)


def pick_from(facts: MachineFacts | None, want: str | torch.device | Choice | None = None) -> Choice:
    """`pick` on the machine that the facts describe; None: this one, which is looked at only where that is needed."""
    if isinstance(want, Choice):
        return want
    request = _request(want, facts)
    if request is not None and request.type == "cpu":  # settled without a look at any GPU
        return _asked_cpu(request, facts)
    facts = facts or probe()
    if request is None:
        return _best(facts)
    asked = {"cuda": _asked_cuda, "mps": _asked_mps}
    return asked.get(request.type, _asked_other)(request, facts)


def device_error(device: str | torch.device, error: Exception) -> HotloopError | None:
    """The error that says why a device cannot be used, for what PyTorch raised; None where that has another cause."""
    if isinstance(error, torch.OutOfMemoryError) or torch.device(device).type not in BACKENDS:
        return None
    try:
        pick(device)
    except HotloopError as why:
        return why
    return None


def as_device(device: str | torch.device) -> torch.device:
    """`torch.device(device)`; raises with the choices where there is no such device.

    >>> as_device("cuda:1")
    device(type='cuda', index=1)
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        pick(device)  # raises with the choices
        raise BadArgument(
            f"{device!r} is not the name of a device", fix="hotloop.pick().device is the best one here"
        ) from error


def available(facts: MachineFacts) -> list[str]:
    """The devices that can be used, as a person may ask for them.

    >>> available(MachineFacts())
    ['cpu']
    """
    cuda = [printable(str(gpu)) for gpu in facts.usable]
    others = [f"{device} ({printable(name)})" for device, name in facts.accelerators]
    return [*cuda, *(["mps"] if facts.mps_available else []), *others, "cpu"]


def _request(want: str | torch.device | None, facts: MachineFacts | None) -> _Request | None:
    """The request from the argument, else from the environment; None for "choose for me"."""
    said = "you asked for"
    if want is None:
        want, said = os.environ.get(VARIABLE, "").strip() or None, f"{VARIABLE} asks for"
    if want is None:
        return None
    text = str(want).strip().lower()
    if text == "auto":
        return None
    match = re.fullmatch(r"([a-z]+)(?::(\d{1,4}))?", text, re.ASCII)
    if match is None or match[1] not in BACKENDS or not isinstance(want, str | torch.device):
        raise _not_a_device(want, said, facts or probe())
    return _Request(match[1], None if match[2] is None else int(match[2]), said)


def _not_a_device(want: object, said: str, facts: MachineFacts) -> BadArgument:
    kind = str(want).strip().lower().split(":")[0]
    what = f"{said} {printable(repr(want))}, which is not the name of a device"
    fix = f"choose one of what is here: {shorten([*available(facts), 'auto'])}"
    if kind == "meta":
        return BadArgument(f"{said} meta, where tensors hold no data, so nothing can be trained", fix=fix)
    if kind in BACKENDS:
        return BadArgument(f"{what}: after the colon comes the number of the GPU, counted from 0", fix=fix)
    typos = difflib.get_close_matches(kind, [*BACKENDS, "auto"], 1)
    meant = "cuda" if isinstance(want, int) else MEANT.get(kind, typos[0] if typos else None)
    return BadArgument(what, fix=fix if meant is None else f"did you mean {meant!r}? Else {fix}")


def _not_here(request: _Request, facts: MachineFacts, why: str, fix: str | None = None) -> DeviceUnavailable:
    choices = f"choose one of what is here: {shorten(available(facts))}"
    return DeviceUnavailable(f"{request}, but {why}", fix=choices if fix is None else f"{fix}; or {choices}")


def _best(facts: MachineFacts) -> Choice:
    if facts.usable:
        gpu, why = _most_free(facts.usable)
        left_out = tuple(unsupported(facts, other) for other in facts.gpus if not facts.covers(other))
        return _cuda(gpu, why, left_out)
    causes = why_no_cuda(facts)
    if facts.mps_available:
        reason = "mps is the GPU of this Mac, and torch can use it."
        return Choice(torch.device("mps", 0), "fp32", reason, name=facts.cpu.name or "")
    if facts.accelerators:
        device, name = facts.accelerators[0]
        reason = f"{device} ({name}) is {an(backend_of(device).called)} that torch can use."
        nearby = causes if facts.hardware else ()  # an NVIDIA GPU beside it is worth a word
        return Choice(torch.device(device), "fp32", reason, nearby, name)
    no_mps = why_no_mps(facts)
    if facts.system == "Darwin" and no_mps is not None:
        causes = (no_mps,)
    reason = f"No GPU can be used, so this is the CPU: {causes[0]}"
    return Choice(torch.device("cpu"), "fp32", reason, causes, facts.cpu.name or "")


def _most_free(gpus: tuple[VisibleGpu, ...]) -> tuple[VisibleGpu, str]:
    """The GPU with the most free memory, and the words for it."""
    best = max(gpus, key=lambda gpu: (-1 if gpu.free is None else gpu.free, -gpu.index))
    name, usable = str(best), plural(len(gpus), "usable GPU")
    if len(gpus) == 1:
        return best, f"{name} is the GPU that torch can use here, with {_memory(best)}."
    if best.free is None:
        return best, f"{name} is the first of {usable}; how much memory each has free is unknown."
    others = shorten([f"cuda:{gpu.index} has {size(gpu.free)}" for gpu in gpus if gpu != best])
    return best, f"{name} has the most free memory of {usable}: {size(best.free)}; {others}."


def _memory(gpu: VisibleGpu) -> str:
    if gpu.free is None:
        return f"{size(gpu.total)} of memory" if gpu.total is not None else "an unknown amount of memory"
    return f"{size(gpu.free)} of {size(gpu.total)} free"


def _cuda(gpu: VisibleGpu, why: str, causes: tuple[Cause, ...] = ()) -> Choice:
    precision = precision_for(gpu.capability)
    level = "{}.{}".format(*gpu.capability)
    fit = "has no fast half precision, so fp32" if precision == "fp32" else f"is fast in {precision}"
    reason = f"{why} Its compute capability, {level}, {fit}."
    return Choice(torch.device("cuda", gpu.index), precision, reason, causes, gpu.name)


def _asked_cpu(request: _Request, facts: MachineFacts | None) -> Choice:
    if request.index:
        raise _not_here(request, facts or probe(), "torch knows one CPU, whatever its cores")
    name = cpu_name() if facts is None else facts.cpu.name
    return Choice(torch.device("cpu"), "fp32", f"{_capital(request.said)} cpu.", name=name or "")


def _asked_cuda(request: _Request, facts: MachineFacts) -> Choice:
    causes = why_no_cuda(facts)
    chosen = next((gpu for gpu in facts.gpus if gpu.index == request.index), None)
    if chosen is not None and not facts.covers(chosen):
        causes = (unsupported(facts, chosen),)
    if causes:
        raise _not_here(request, facts, causes[0].what, causes[0].fix)
    if request.index is None:
        gpu, why = _most_free(facts.usable)
        return _cuda(gpu, f"{_capital(str(request))}. {why}")
    if chosen is None:
        why = f"torch sees {plural(len(facts.gpus), 'GPU')}, counted from 0"
        if facts.visible is not None:
            why += f" (CUDA_VISIBLE_DEVICES='{printable(facts.visible)}' hides and renumbers GPUs)"
        raise _not_here(request, facts, why)
    return _cuda(chosen, f"{_capital(str(request))}: {chosen.name} with {_memory(chosen)}.")


def _asked_mps(request: _Request, facts: MachineFacts) -> Choice:
    cause = why_no_mps(facts)
    if cause is not None:
        raise _not_here(request, facts, cause.what, None if cause.code == "not-macos" else cause.fix)
    if request.index:
        raise _not_here(request, facts, "a Mac has one GPU for torch")
    return Choice(torch.device("mps", 0), "fp32", f"{_capital(str(request))}.", name=facts.cpu.name or "")


def _asked_other(request: _Request, facts: MachineFacts) -> Choice:
    called = backend_of(request.type).called
    cause = why_none(facts, request.type, called)
    if cause is not None:
        raise _not_here(request, facts, cause.what, cause.fix)
    there = {device: name for device, name in facts.accelerators if device.startswith(f"{request.type}:")}
    device = f"{request.type}:{request.index or 0}"
    if device not in there:
        raise _not_here(request, facts, f"torch sees {plural(len(there), called)}, counted from 0")
    name = there[device]
    return Choice(torch.device(device), "fp32", f"{_capital(str(request))}: {name}.", name=name)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
