"""The device to train on, by the facts of a machine, with the reason in words."""

import difflib
import re
from dataclasses import dataclass

import torch

from hotloop.device.backend import BACKENDS, backend_of, precision_for
from hotloop.device.causes import unsupported, why_no_cuda, why_no_mps, why_none
from hotloop.device.choice import Choice, asked_cpu, asked_for
from hotloop.device.facts import Cause, MachineFacts, VisibleGpu
from hotloop.errors import BadArgument, DeviceUnavailable
from hotloop.printing.text import an, plural, printable, shorten, size

MEANT = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps", "apple": "mps", "intel": "xpu"}


@dataclass(frozen=True)
class _Request:
    """What the person wants, and where they said so."""

    type: str
    index: int | None
    said: str  # "you asked for" or "HOTLOOP_DEVICE asks for"

    def __str__(self) -> str:
        return f"{self.said} {self.type}" + ("" if self.index is None else f":{self.index}")


def pick_from(facts: MachineFacts, want: str | torch.device | None = None) -> Choice:
    """`pick` on the machine that the facts describe."""
    said, asked = asked_for(want)
    if asked is None:
        return _best(facts)
    match = re.fullmatch(r"([a-z]+)(?::(\d{1,4}))?", str(asked).strip().lower(), re.ASCII)
    if match is None or match[1] not in BACKENDS or not isinstance(asked, str | torch.device):
        raise _not_a_device(asked, said, facts)
    request = _Request(match[1], None if match[2] is None else int(match[2]), said)
    answers = {"cpu": _asked_cpu, "cuda": _asked_cuda, "mps": _asked_mps}
    return answers.get(request.type, _asked_other)(request, facts)


def available(facts: MachineFacts) -> list[str]:
    """The devices that can be used, as a person may ask for them.

    >>> available(MachineFacts())
    ['cpu']
    """
    cuda = [printable(str(gpu)) for gpu in facts.usable]
    others = [f"{device} ({printable(name)})" for device, name in facts.accelerators]
    return [*cuda, *(["mps"] if facts.mps_available else []), *others, "cpu"]


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


def _asked_cpu(request: _Request, facts: MachineFacts) -> Choice:
    if request.index:
        raise _not_here(request, facts, "torch knows one CPU, whatever its cores")
    return asked_cpu(request.said, facts.cpu.name)


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
