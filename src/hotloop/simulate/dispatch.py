"""Every operation of a script: those on the host run as usual, those on the simulated device are told, not computed."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.simulate.crossing import Crossings
from hotloop.simulate.events import Operation
from hotloop.simulate.findings import Findings
from hotloop.simulate.operations import Facts, facts, is_simulated, named, plain, shape_of
from hotloop.simulate.places import here
from hotloop.simulate.rules import RULES
from hotloop.simulate.storages import Storages
from hotloop.simulate.telling import Circumstances, Teller
from hotloop.simulate.values import Values, hint

_DEVICE = torch.ops.prim.device.default
_FILLS = {"zeros": 0, "zeros_like": 0, "zero_": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILL_WITH = {"full": 1, "full_like": 1, "fill_": 1, "scalar_tensor": 0, "new_full": 2}  # where the number stands
_KEEP = {"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"}  # nothing is infinite here
_RANDOM, _LARGE = {"normal_", "uniform_"}, 1 << 18  # weights on the host are not drawn: a large model takes no memory
_FILLED = 64  # numbers up to which a filled tensor is remembered
_NOT_TOLD = (
    UnsupportedOperatorException,
    NotImplementedError,
    DataDependentOutputException,
    DynamicOutputShapeException,
)
_KINDS = {"forward": "activation"}  # what memory that comes in a phase is, until it is named otherwise


class Mixed(Exception):
    """An operation was given operands on different devices; whoever called it may repair them."""

    def __init__(self, *, written: bool) -> None:
        self.written = written  # what is on the host would be written to
        super().__init__("operands on different devices")


class SimulatedGpu(TorchDispatchMode):
    """Runs operations that have an operand on the simulated device without data, and tells them."""

    def __init__(
        self, teller: Teller, circumstances: Circumstances, storages: Storages, values: Values, findings: Findings
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_fallback_kernels=False)
        self.teller = teller
        self.circumstances = circumstances
        self.storages = storages
        self.values = values
        self.findings = findings
        self.guarded = 0  # calls around this one that repair operands
        self.silent = 0  # more than 0 while operands are repaired
        self.accumulated = False  # whether a gradient came into being since somebody looked
        self._crossings = Crossings(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper would cost every operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return args[0].fake_device
        known = facts(func)
        if FakeTensor not in types and not _on_device(kwargs.get("device")):
            if _on_device(getattr(kwargs.get("generator"), "device", None)):
                self.findings.generator(known.name, "cuda", "cpu")
                kwargs = {**kwargs, "generator": None}
            if known.name in _RANDOM and args[0].numel() >= _LARGE and _initialises():
                return args[0]
            result = func(*args, **kwargs)
            if known.makes and isinstance(result, Tensor):
                self.findings.origins.made(result)
            return result
        crossing = self._crossings.of(known.name)
        if crossing is not None:
            result = crossing(func, types, args, kwargs)
            if result is not NotImplemented:
                return result
        if known.composite:  # in inference mode they come whole
            with self:
                return func.decompose(*args, **kwargs)
        if FakeTensor in types:
            self.check(func, args, kwargs)
        return self.compute(func, types, args, kwargs)

    def compute(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Find what an operation gives, and tell it."""
        known = facts(func)
        given = (args, kwargs)
        if any(_is_host(t) for t in _tensors(args, kwargs)):
            args = tuple(map(self._stand, args))
            kwargs = {name: self._stand(value) for name, value in kwargs.items()}
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type == "cpu":
            self.findings.generator(known.name, "cpu", "cuda")
            kwargs = {**kwargs, "generator": None}
        result = self._without_data(func, types, args, kwargs, given)
        self.happened(known, func, args, kwargs, result)
        return self._landed(result)

    def happened(self, known: Facts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Tell an operation and the memory of its results, and keep what is known of their values."""
        made = [t for t in _tensors((result,), {}) if is_simulated(t)]
        inputs = [t for t in _tensors(args, kwargs) if isinstance(t, Tensor)]
        phase, module = self.circumstances.now(learns=any(t.requires_grad for t in inputs))
        kind = _KINDS.get(phase, "temporary")
        if phase == "backward" and self.circumstances.accumulating:
            kind, self.accumulated = "gradient", True
        if not known.kernel:
            for tensor in made:
                self.storages.born(tensor, kind)
                if kind == "gradient":
                    self.storages.name(tensor, kind)
            if known.name.startswith("resize"):
                self.storages.resized(made[0], kind)
            return
        operation = Operation(
            name=str(func),
            inputs=tuple(map(shape_of, inputs)),
            outputs=tuple(map(shape_of, made)),
            arguments={k: plain(v) for k, v in named(func, args, kwargs) if not _holds_tensor(v)},
            phase=phase,
            module=module,
            place=here(),
        )
        self.teller.before(operation)
        for tensor in made:
            self.storages.born(tensor, kind)
        self.teller.after(operation)
        self._remember(known, func, args, kwargs, made)
        hint(func, args, result)

    def stand_in(self, tensor: Tensor, device: str = "cuda") -> Tensor:
        """A tensor without data of the same shape, which nobody is told of."""
        with self.fake:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    def _without_data(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: tuple[Any, Any]
    ) -> Any:
        """What an operation gives, by PyTorch's own rules of shapes, or where it has none by an example on the host."""
        name = facts(func).name
        if name.startswith(("_foreach_", "_fused_")) and name.endswith("_"):
            return None  # these write to what they are given, and give nothing
        try:
            return self.fake.dispatch(func, types, args, kwargs)
        except _NOT_TOLD as error:
            rule = RULES.get(name)
            with self.fake:
                if rule is not None:
                    return rule(*args, **kwargs)
            try:
                return self._as_on_device(func(*_exemplary(given[0]), **_exemplary(given[1])))
            except (RuntimeError, NotImplementedError):
                self.findings.unknown.add(str(func))
                raise NotImplementedError(
                    f"{func} cannot be simulated: its result is not known without a GPU"
                ) from error

    def _as_on_device(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            return self.stand_in(result)
        return [self._as_on_device(item) for item in result] if isinstance(result, list | tuple) else result

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See that all operands are on the device, as far as PyTorch asks for it."""
        known = facts(func)
        strangers = []
        written = False
        for name, value in named(func, args, kwargs):
            if name in known.host:
                continue
            for tensor in _tensors((value,), {}):
                if _is_host(tensor) and (tensor.dim() or known.strict or name in known.written):
                    strangers.append((name, tensor))
                    written = written or name in known.written
        if not strangers:
            return
        if self.guarded and torch._C._current_autograd_node() is None:
            raise Mixed(written=written)
        operands = [(n, t) for n, v in named(func, args, kwargs) for t in _tensors((v,), {})]
        self.findings.mixed(known.name, operands, strangers)

    def _stand(self, value: Any) -> Any:
        if _is_host(value):
            return self.stand_in(value, "cuda" if value.dim() else "cpu")
        if isinstance(value, list | tuple):
            return [self._stand(item) for item in value]
        return value

    def _landed(self, result: Any) -> Any:
        """Results with real tensors in place of those that would be on the host."""
        if isinstance(result, FakeTensor):
            return result if is_simulated(result) else self.values.tensor(result)
        if isinstance(result, list | tuple) and not all(map(is_simulated, result)):
            return [self._landed(item) for item in result]
        return result

    def _remember(
        self, known: Facts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]
    ) -> None:
        if known.written and known.name not in _KEEP:
            for name, value in named(func, args, kwargs):
                if name in known.written:
                    for tensor in _tensors((value,), {}):
                        self.storages.forget(tensor)
        if len(made) != 1 or made[0].numel() > _FILLED:
            return
        if known.name in ("_to_copy", "clone"):
            values = self.storages.values(args[0])
            if values is not None:
                self.storages.know(made[0], values.to(made[0].dtype))
            return
        place = _FILL_WITH.get(known.name)
        number = _FILLS.get(known.name) if place is None else (args[place] if len(args) > place else None)
        if isinstance(number, int | float):
            like = torch.empty_strided(made[0].size(), made[0].stride(), dtype=made[0].dtype)
            self.storages.know(made[0], like.fill_(number))


def _tensors(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value, {})
    for value in kwargs.values():
        yield from _tensors((value,), {})


def _exemplary(value: Any) -> Any:
    """Arguments with tensors on the host in place of those without data."""
    if isinstance(value, FakeTensor):
        return torch.zeros(value.size(), dtype=value.dtype)
    if isinstance(value, dict):
        return {key: _exemplary(item) for key, item in value.items()}
    return [_exemplary(item) for item in value] if isinstance(value, list | tuple) else value


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_holds_tensor, value)))


def _is_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _initialises() -> bool:
    """Whether weights are being drawn by `torch.nn.init`, which go to the device next."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_filename == nn.init.__file__:
            return True
        frame = frame.f_back
    return False


def _on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"
