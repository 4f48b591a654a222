"""What would go wrong on the GPU, each with the person's line, the tensor, where it was made, and the line to write."""

import re
import sys
import weakref
from collections import Counter
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._torch import buffers_of, parameters_of
from hotloop.apps.simulate._torch import is_simulated, storage_id
from hotloop.apps.simulate.events import Listener
from hotloop.apps.simulate.simulation_record import Copy, DeviceFinding, Sync
from hotloop.placement.golden import Origin, Scene, modules_in_sight
from hotloop.placement.moving import shape_of
from hotloop.placement.sites import Site, as_buffer, frames, user_frames, user_site

Operands = list[tuple[str, Tensor]]


class Origins:
    """Where tensors on the host were made, by their memory: forgotten when that is gone."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Any], Origin]] = {}

    def made(self, tensor: Tensor) -> None:
        self._note(tensor, "made")

    def moved(self, tensor: Tensor) -> None:
        self._note(tensor, "moved")

    def get(self, tensor: Tensor) -> Origin | None:
        storage = tensor.untyped_storage()
        held = self._seen.get(storage_id(storage))
        return held[1] if held is not None and held[0]() is storage else None

    def _note(self, tensor: Tensor, verb: str) -> None:
        place = user_site()
        if place is None or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        ref = weakref.ref(storage, lambda gone: self._forget(address, gone))
        self._seen[address] = (ref, Origin(verb, place))

    def _forget(self, address: int, gone: Any) -> None:
        held = self._seen.get(address)
        if held is not None and held[0] is gone:
            del self._seen[address]


class Findings:
    """All that was found, once for each line."""

    def __init__(self) -> None:
        self.origins = Origins()
        self.guessed: set[Site] = set()  # lines at which a shape depended on values
        self.unknown: set[str] = set()  # operations that cannot be simulated
        self._found: dict[tuple[str, str, int], DeviceFinding] = {}
        self._left: dict[int, tuple[str, str, int]] = {}  # by module that was left on the host: its finding

    def all(self, folder: Path) -> tuple[DeviceFinding, ...]:
        """Everything, with files as they are called from a folder."""
        return tuple(replace(found, file=relative(found.file, folder)) for found in self._found.values())

    def add(self, code: str, message: str, fix: str, place: Site | None = None) -> Any:
        """Note something; at a line where it was found before it is only counted."""
        place = place or user_site() or Site("", 0)
        key = (code, place.file, place.line)
        before = self._found.get(key)
        if before is not None:
            self._found[key] = replace(before, count=before.count + 1)
        else:
            self._found[key] = DeviceFinding(
                code, "error", "shown", place.file, place.line, place.function, message, fix
            )
        return key

    def mixed(self, name: str, operands: Operands, strangers: Operands) -> None:
        """One operation was given tensors on different devices."""
        place = user_site()
        for code in ("mixed-devices", "model-on-cpu", "left-on-cpu", "made-on-cpu", "state-on-cpu"):
            if place is not None and (code, place.file, place.line) in self._found:
                self.add(code, "", "", place)
                return
        scene = SimulatedScene(user_frames(), modules_in_sight(None), self.origins)
        root = self._left_root(strangers, scene)
        if root is not None and id(root) in self._left:
            key = self._left[id(root)]
            self._found[key] = replace(self._found[key], count=self._found[key].count + 1)
            return
        code, fix = self._remedy(strangers, scene, root)
        key = self.add(code, self._message(name, operands, scene), fix, place)
        if root is not None:
            self._left[id(root)] = key

    def numpy(self, tensor: Tensor, asked: str) -> None:
        """NumPy was asked to read memory of the device."""
        scene = Scene(user_frames(), [], self.origins)
        name = scene.variable(tensor, scene.frames) or "tensor"
        grad = ".detach()" if tensor.requires_grad else ""
        self.add(
            "numpy-of-cuda",
            f"{asked} of a tensor on {tensor.device} ({shape_of(tensor)}); NumPy reads host memory only",
            f"{name}{grad}.cpu().numpy()",
        )

    def needs_host(self, name: str, argument: str, tensor: Tensor) -> None:
        """An operation wants to read a tensor on the host that is on the device."""
        variable = _variable(tensor, user_frames()) or argument
        self.add(
            "needs-cpu",
            f"{name} reads {argument} ({shape_of(tensor)}) on the host, and it is on {tensor.device}",
            f"{variable}.cpu()",
        )

    def generator(self, name: str, given: str, wanted: str) -> None:
        """Random numbers on one device were asked of the generator of another."""
        self.add(
            "generator-device",
            f"{name} makes random numbers on {wanted}, and was given a generator of {given}",
            f'generator = torch.Generator(device="{wanted}")',
        )

    def no_such_device(self, index: int) -> None:
        """A GPU was asked for that the machine does not have."""
        self.add(
            "no-such-device",
            f"cuda:{index} was asked for, and the simulated machine has one GPU, cuda:0; "
            "PyTorch says: CUDA error: invalid device ordinal",
            "use the one that is there: cuda:0",
        )

    def orphans(self, optimizer: Optimizer) -> None:
        """An optimizer holds parameters that no longer belong to the model."""
        self.add(
            "orphaned-parameters",
            f"{type(optimizer).__name__} steps, but none of its parameters has a gradient, while others got theirs: "
            "it was built for other parameters, and the model does not learn",
            "build the optimizer after the model is made and moved: optimizer = "
            f"torch.optim.{type(optimizer).__name__}(model.parameters(), …)",
        )

    def _message(self, name: str, operands: Operands, scene: Scene) -> str:
        devices = " and ".join(sorted({str(tensor.device) for _, tensor in operands}))
        lines = [f"{name} was given tensors on {devices}; one operation needs one device"]
        for argument, tensor in operands[:6]:
            origin = None if is_simulated(tensor) else self.origins.get(tensor)
            where = f", {origin.verb} at {origin.site}" if origin else ""
            lines.append(f"{scene.named(argument, tensor)}{where}")
        return "\n  ".join(lines)

    def _left_root(self, strangers: Operands, scene: Scene) -> nn.Module | None:
        """The outermost module that holds the first stranger, where all of its parameters are on the host."""
        for module in scene.modules:
            held = [*module.parameters(), *module.buffers()]
            if any(t is held_tensor for _, t in strangers for held_tensor in held):
                return None if any(map(is_simulated, held)) else module
        return None

    def _remedy(self, strangers: Operands, scene: Scene, root: nn.Module | None) -> tuple[str, str]:
        device = _device_word(scene.frames)
        if root is not None and (holder := _plain_holder(root, scene.frames)):
            return "left-on-cpu", holder
        if root is not None:
            model = _variable(root, scene.frames) or "model"
            learns = any(True for _ in root.parameters())
            return ("model-on-cpu" if learns else "left-on-cpu"), f"{model} = {model}.to({device})"
        argument, tensor = strangers[0]
        path, kind = scene.owner(tensor)
        attribute = path.rsplit(".", 1)[-1]
        if kind == "attribute":
            made = self.origins.get(tensor)
            return "left-on-cpu", as_buffer(attribute, made.site if made else None)
        if kind:
            return "left-on-cpu", f"move the model after it is complete: model.to({device})  # {path} came later"
        line = scene.frames[:1]  # below it a closure is the person's own code, not the optimizer's
        running = [*takewhile(lambda frame: frame not in line, frames(sys._getframe(1))), *line]
        if any(isinstance(frame.f_locals.get("self"), Optimizer) for frame in running):
            return "state-on-cpu", f"load the optimizer's state after model.to({device})"
        origin = self.origins.get(tensor)
        if origin is not None and _in_forward(origin.site, scene.frames):
            device = "give it the device of the input where it is made, device=x.device"
            return "made-on-cpu", f"{device}: {origin.site}"
        if name := scene.variable(tensor, scene.frames[::-1]):
            return "mixed-devices", f"{name} = {name}.to({device})"
        if origin is not None and origin.verb == "made":
            return "mixed-devices", f"device={device} where it is made: {origin.site}"
        return "mixed-devices", f"{argument}.to({device})"


class Syncs(Listener):
    """A listener that counts copies and waits."""

    def __init__(self) -> None:
        self._copies: Counter[tuple[Site | None, str, bool, bool]] = Counter()
        self._bytes: Counter[tuple[Site | None, str, bool, bool]] = Counter()
        self._waits: Counter[tuple[Site | None, str]] = Counter()

    def copied(self, size: int, direction: str, *, pinned: bool, blocking: bool, place: Site | None) -> None:
        key = (place, direction, pinned, blocking)
        self._copies[key] += 1
        self._bytes[key] += size

    def waited(self, kind: str, place: Site | None) -> None:
        self._waits[place, kind] += 1

    def copies(self, folder: Path) -> tuple[Copy, ...]:
        """Copies by line, in the order in which they first came."""
        found = []
        for key, count in self._copies.items():
            place, direction, pinned, blocking = key
            found.append(Copy(*_line(place, folder), direction, self._bytes[key], pinned, blocking, count))
        return tuple(found)

    def syncs(self, folder: Path) -> tuple[Sync, ...]:
        """Waits by line."""
        return tuple(Sync(*_line(place, folder), kind, count) for (place, kind), count in self._waits.items())


class SimulatedScene(Scene):
    """A scene in which tensors are also known by the memory that they are a part of."""

    def owner(self, tensor: Tensor) -> tuple[str, str]:
        """The module's tensor that this one is, or is a part of."""
        found = super().owner(tensor)
        if found[1] or tensor.layout is not torch.strided:
            return found
        memory = storage_id(tensor)
        for module in self.modules:
            for prefix, part in module.named_modules():
                for name, value in [*vars(part).items(), *buffers_of(part).items(), *parameters_of(part).items()]:
                    if _is_on_host(value) and storage_id(value) == memory:
                        return f"{prefix}.{name}".lstrip("."), "attribute" if name in vars(part) else "buffer"
        return _named_in_line(self.frames) or found


def _plain_holder(module: nn.Module, among: list[FrameType]) -> str | None:
    """What to write where layers are in a plain list or dict, which neither moves nor shows them to an optimizer."""
    for frame in among:
        owner = frame.f_locals.get("self")
        held = vars(owner).items() if isinstance(owner, nn.Module) else ()
        for prefix, names in (("self.", held), ("", frame.f_locals.items())):
            for name, value in names:
                parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
                if any(part is module for part in parts) and not name.startswith("_"):
                    kind = "ModuleDict" if isinstance(value, dict) else "ModuleList"
                    why = f"a plain {type(value).__name__} of layers does not move with the model"
                    return f"{prefix}{name} = nn.{kind}({prefix}{name}), where it is made and before it moves: {why}"
    return None


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_simulated(value) and value.layout is torch.strided


def _named_in_line(among: list[FrameType]) -> tuple[str, str] | None:
    """A plain tensor of a module on the host that the line names, such as `self.queue` in `self.queue.clone()`."""
    module = among[0].f_locals.get("self") if among else None
    if not isinstance(module, nn.Module):
        return None
    for name in re.findall(r"\bself\.(\w+)", Site(among[0].f_code.co_filename, among[0].f_lineno).code):
        value = vars(module).get(name)
        if isinstance(value, Tensor) and not is_simulated(value) and value.dim():
            return name, "attribute"
    return None


def relative(file: str, folder: Path) -> str:
    """A path as it is called from a folder, where it lies in it."""
    try:
        return str(Path(file).resolve().relative_to(folder))
    except ValueError:
        return file


def _line(place: Site | None, folder: Path) -> tuple[str, int]:
    return (relative(place.file, folder), place.line) if place is not None else ("", 0)


def _variable(value: object, among: list[FrameType]) -> str | None:
    for frame in reversed(among):
        for name, held in frame.f_locals.items():
            if held is value and name != "self":
                return name
    for frame in among:
        owner = frame.f_locals.get("self")
        for name, held in getattr(owner, "__dict__", {}).items():
            if held is value:
                return f"self.{name}"
    return None


def _device_word(among: list[FrameType]) -> str:
    """The person's own word for the device, where they have one."""
    for frame in among:
        for names in (frame.f_locals, frame.f_globals):
            value = names.get("device")
            if isinstance(value, str | torch.device) and str(value).startswith("cuda"):
                return "device"
    return '"cuda"'


def _in_forward(place: Site, among: list[FrameType]) -> bool:
    """Whether a tensor was made in a module's code that is running."""
    return any(
        isinstance(f.f_locals.get("self"), nn.Module) and f.f_code.co_filename == place.file for f in among
    ) and any(f.f_code.co_name == place.function for f in among)
