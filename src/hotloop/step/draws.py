"""`HostDraws`: random numbers that a step draws on the host and that decide nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hotloop.device.backend import backend_of
from hotloop.step.dispatching import FEW_NUMBERS, name_of, values_of
from hotloop.values.rng import RngStates, host_rngs, same_state

Draw = tuple[tuple[int, ...], torch.dtype]  # its shape and type
# Whether a number of [0, 1) that is compared so with another is always found on one side of it.
_DECIDED: dict[str, Callable[[float], bool]] = {
    "aten.lt.Scalar": lambda limit: limit <= 0 or limit >= 1,
    "aten.ge.Scalar": lambda limit: limit <= 0 or limit >= 1,
    "aten.le.Scalar": lambda limit: limit <= -1 or limit >= 1,  # in the type of a draw, a limit near 0 is 0
    "aten.gt.Scalar": lambda limit: limit <= -1 or limit >= 1,
}


@dataclass
class HostDraws:
    """Draws of `torch.rand` on the host in a pass, and whether any of them decided something.

    Whisper, BART and their kin draw a number for each layer and drop the layer where it is below `layerdrop`, which is
    0 unless somebody says otherwise. Such a step does the same work each time: a capture may leave the draws out if
    they are repeated for the generator's sake.
    """

    made: list[Draw] = field(default_factory=list)  # in their order
    matter: bool = False  # whether a number was used for anything but a comparison that is always decided alike
    _drawn: dict[int, Tensor] = field(default_factory=dict)  # held, so that no other takes the place

    def concern(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether an operation draws such numbers, or uses them."""
        if name_of(func) == "aten.rand.default":
            shape, device = args[0], kwargs.get("device")
            return (device is None or backend_of(device).is_host) and torch.Size(shape).numel() <= FEW_NUMBERS
        return bool(self._drawn) and any(id(each) in self._drawn for each in values_of(args, kwargs))

    def note(self, func: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Note such an operation and its result."""
        name = name_of(func)
        if name == "aten.rand.default":
            self.made.append((tuple(result.shape), result.dtype))
        if name in ("aten.rand.default", "aten.detach.default"):  # PyTorch detaches what somebody else holds, too
            self._drawn[id(result)] = result
            return
        decided = _DECIDED.get(name)
        if decided is None or id(args[0]) not in self._drawn or not decided(float(args[1])):
            self.matter = True

    def explain(self, first: int, before: RngStates, after: RngStates) -> bool:
        """Whether the draws from the `first` on explain every change of the host's rng states."""
        if self.matter:
            return False
        then, now = before.state_dict(), after.state_dict()
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(then["torch"])
            repeat(self.made[first:])
            then["torch"] = torch.get_rng_state()
        return all(same_state(then[name], now[name]) for name in host_rngs())


def repeat(draws: Sequence[Draw], times: int = 1) -> None:
    """Repeat the draws, so that the generator has the same state after them."""
    for _ in range(times):
        for shape, dtype in draws:
            torch.rand(shape, dtype=dtype, device="cpu")  # whatever the default device is
