"""`pick`: the device to train on, the precision that suits it, and the reason in words."""

import os
from dataclasses import dataclass
from typing import Any, Self

import torch

from hotloop.device.backend import BACKENDS
from hotloop.device.facts import Cause
from hotloop.device.machine import cpu_name
from hotloop.errors import BadArgument, HotloopError
from hotloop.plan import Precision
from hotloop.printing import markup
from hotloop.printing.text import printable
from hotloop.records import Record

VARIABLE = "HOTLOOP_DEVICE"


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


def pick(want: str | torch.device | Choice | None = None) -> Choice:
    """The device to use: the one asked for, here or in HOTLOOP_DEVICE, else the best there is.

    What was picked before stays what it is, with its reason.

    >>> pick("cpu").reason
    'You asked for cpu.'
    """
    if isinstance(want, Choice):
        return want
    said, asked = asked_for(want)
    if isinstance(asked, str | torch.device) and str(asked).strip().lower() == "cpu":  # no GPU is looked at
        return asked_cpu(said, cpu_name())
    from hotloop.device.picking import pick_from  # noqa: PLC0415
    from hotloop.device.probe import probe  # noqa: PLC0415

    return pick_from(probe(), want)


def asked_for(want: object) -> tuple[str, Any]:
    """Who asks for a device, the argument or the environment, and for which; None for "choose for me"."""
    said = "you asked for"
    if want is None:
        want, said = os.environ.get(VARIABLE, "").strip() or None, f"{VARIABLE} asks for"
    return said, None if str(want).strip().lower() == "auto" else want


def asked_cpu(said: str, name: str | None) -> Choice:
    """The CPU, because somebody asked for it."""
    return Choice(torch.device("cpu"), "fp32", f"{said[:1].upper()}{said[1:]} cpu.", name=name or "")


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
