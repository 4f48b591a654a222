"""Every operation of a script: those on the host run as usual, those on the simulated device are told, not computed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.apps.simulate._torch import (
    SHAPE_UNKNOWN,
    OperationMode,
    Shapes,
    any_fake,
    current_node,
    device_of,
    is_fake,
    is_simulated,
    storage_id,
)
from hotloop.apps.simulate.crossing import Crossings
from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.families import LAST_FIRST, SHAPES
from hotloop.apps.simulate.findings import Findings
from hotloop.apps.simulate.known import Known
from hotloop.apps.simulate.operations import (
    OperationSchema,
    facts,
    is_host,
    named,
    on_device,
    plain,
    shape_of,
)
from hotloop.apps.simulate.shim import CannotSimulate
from hotloop.apps.simulate.telling import Circumstances, Storages, Teller
from hotloop.apps.simulate.values import Values, hint
from hotloop.placement.sites import user_site
from hotloop.scripts.training_steps import ByHand
from hotloop.values.tree import map_tensors, tensors_of

_DEVICE = torch.ops.prim.device.default
HOME = torch.device("cuda", 0)
_RANDOM, _LARGE = {"normal_", "uniform_"}, 1 << 18  # weights on the host are not drawn: a large model takes no memory
_KINDS = {"forward": "activation"}  # what memory that comes in a phase is, until it is named otherwise


class Mixed(Exception):
    """An operation was given operands on different devices; whoever called it may repair them."""

    def __init__(self, *, written: bool) -> None:
        self.written = written  # what is elsewhere would be written to
        super().__init__("operands on different devices")


class SimulatedGpu(OperationMode):
    """Runs operations that have an operand on the simulated device without data, and tells them."""

    def __init__(
        self, teller: Teller, circumstances: Circumstances, storages: Storages, known: Known, findings: Findings
    ) -> None:
        super().__init__()
        self.fake = Shapes()
        self.teller = teller
        self.circumstances = circumstances
        self.storages = storages
        self.known = known
        self.values = Values(known)
        self.findings = findings
        self.draws = known.everything  # whether the weights of large models on the host are drawn
        self.beside_a_real_one = False  # whether tensors may come that are on a GPU that is there
        self.guarded = 0  # calls around this one that repair operands
        self.silent = 0  # more than 0 while operands are repaired
        self.operations = self.trained = 0  # of the device; those of backward passes and optimizers
        self.accumulated = False  # whether a gradient came into being since somebody looked
        self.by_hand = ByHand(lambda: None)
        self.synchronizes: Callable[[], None] = lambda: None  # called where PyTorch makes the host wait
        self._one_at_a_time = RLock()  # a script may train in threads
        self._crossings = Crossings(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return device_of(args[0])
        known = facts(func)
        if self.beside_a_real_one:
            _refuse_real(args, kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._there(kwargs["device"])}
        if not any_fake(types) and not on_device(kwargs.get("device")):
            if on_device(getattr(kwargs.get("generator"), "device", None)):
                self.findings.generator(known.name, "cuda", "cpu")
                kwargs = {**kwargs, "generator": None}
            if not self.draws and known.name in _RANDOM and args[0].numel() >= _LARGE and _initialises():
                return args[0]
            result = func(*args, **kwargs)
            self._learns(known, func, args, kwargs)
            if known.makes and isinstance(result, Tensor):
                self.findings.origins.made(result)
            return result
        with self._one_at_a_time:
            try:
                result = self._on_device(known, func, types, args, kwargs)
            except (NotImplementedError, AssertionError, RuntimeError) as error:  # what PyTorch raises for them
                raise _sparse_error(known.name, args, kwargs) or error from error
            self._learns(known, func, args, kwargs)
            return result

    def _there(self, device: Any) -> Any:
        """A device, or the one that is there in place of another."""
        asked = torch.device(device)
        if asked.type != "cuda" or not asked.index:
            return device
        self.findings.no_such_device(asked.index)
        return HOME

    def _on_device(
        self, known: OperationSchema, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        crossing = self._crossings.of(known.name)
        if crossing is not None:
            result = crossing(func, types, args, kwargs)
            if result is not NotImplemented:
                return result
        if known.composite:  # in inference mode they come whole
            with self:
                return func.decompose(*args, **kwargs)
        if any_fake(types):
            self.check(func, args, kwargs)
        return self.compute(func, types, args, kwargs)

    def compute(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any = None) -> Any:
        """Find what an operation gives, and tell it; `given` are the script's own arguments, where they are others."""
        known = facts(func)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type == "cpu":
            self.findings.generator(known.name, "cpu", "cuda")
            kwargs = {**kwargs, "generator": None}
        given = (args if given is None else given, kwargs)
        if any(map(is_host, tensors_of((args, kwargs)))):
            args = tuple(map(self._stand, args))
            kwargs = {name: self._stand(value) for name, value in kwargs.items()}
        result = self._without_data(func, types, args, kwargs, given)
        self.happened(known, func, args, kwargs, result)
        self.known.happened(func, given[0], given[1], result)
        return self._landed(result)

    def happened(
        self, known: OperationSchema, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Tell an operation and the memory of its results."""
        made = [t for t in tensors_of(result) if is_simulated(t)]
        inputs = tensors_of((args, kwargs))
        phase, module = self.circumstances.now(learns=any(t.requires_grad for t in inputs))
        kind = _KINDS.get(phase, "temporary")
        self.operations += 1
        self.trained += phase in ("backward", "optimizer")
        if phase == "backward":
            parameter = self.circumstances.accumulates()
            if parameter is not None:
                kind, self.accumulated = "gradient", True
                if is_simulated(parameter):
                    self.storages.name(parameter, "parameter")
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
            arguments={k: plain(v) for k, v in named(func, args, kwargs) if not tensors_of(v)},
            phase=phase,
            module=module,
            place=user_site(),
        )
        self.teller.before(operation)
        for tensor in reversed(made) if known.name in LAST_FIRST else made:
            self.storages.born(tensor, kind)
        self.teller.after(operation)
        hint(func, args, result)

    def _learns(self, known: OperationSchema, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notice a backward pass, and a parameter that the script writes to after it, on the host too."""
        if not self.by_hand.listening or self.circumstances.optimizing:
            return
        if current_node() is not None:
            parameter = self.circumstances.accumulates()
            self.by_hand.differentiates(None if parameter is None else storage_id(parameter))
        elif known.written and self.by_hand.pending:
            for tensor in tensors_of([value for name, value in named(func, args, kwargs) if name in known.written]):
                self.updated(tensor)

    def updated(self, tensor: Tensor) -> None:
        """The script writes to a tensor, or gives it other data."""
        if self.by_hand.pending and not self.circumstances.optimizing:
            leaf = tensor.requires_grad and tensor.is_leaf
            self.by_hand.writes(storage_id(tensor), parameter=leaf or self.storages.kind(tensor) == "parameter")

    @contextmanager
    def silently(self) -> Iterator[None]:
        """Copies and waits are ours, and not told."""
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1

    def stand_in(self, tensor: Tensor, device: str | torch.device = HOME) -> Tensor:
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
        except SHAPE_UNKNOWN as error:
            rule = SHAPES.get(name)
            with self.fake:
                if rule is not None:
                    return rule(*args, **kwargs)
            try:
                return map_tensors(func(*_exemplary(given[0]), **_exemplary(given[1])), self.stand_in)
            except (RuntimeError, NotImplementedError):
                self.findings.unknown.add(str(func))
                raise NotImplementedError(
                    f"{func} cannot be simulated: its result is not known without a GPU"
                ) from error

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See that all operands are on the device, as far as PyTorch asks for it."""
        known = facts(func)
        strangers = []
        written = False
        for name, value in named(func, args, kwargs):
            if name in known.host:
                continue
            for tensor in tensors_of(value):
                number = is_host(tensor) and not (tensor.dim() or known.strict or name in known.written)
                if is_host(tensor) and not number:
                    strangers.append((name, tensor))
                    written = written or name in known.written
        if not strangers:
            return
        if self.guarded and current_node() is None:
            raise Mixed(written=written)
        operands = [(n, t) for n, v in named(func, args, kwargs) for t in tensors_of(v)]
        self.findings.mixed(known.name, operands, strangers)

    def _stand(self, value: Any) -> Any:
        return map_tensors(value, lambda t: self.stand_in(t, HOME if t.dim() else "cpu") if is_host(t) else t)

    def _landed(self, result: Any) -> Any:
        """Results with real tensors in place of those that would be on the host."""
        return map_tensors(result, lambda t: self.values.tensor(t) if is_fake(t) and not is_simulated(t) else t)


def _exemplary(value: Any) -> Any:
    """Arguments with tensors on the host in place of those without data."""
    return map_tensors(value, lambda t: torch.zeros(t.size(), dtype=t.dtype) if is_fake(t) else t)


def _refuse_real(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(is_host(tensor) and tensor.is_cuda for tensor in tensors_of((args, kwargs))):
        raise CannotSimulate(
            "a tensor on the real GPU was used together with the simulated one",
            fix="move it to the CPU before the simulation: tensor = tensor.cpu()",
        )


def _sparse_error(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CannotSimulate | None:
    """The error to raise where an operation on sparse tensors fails: without data, PyTorch has few of them."""
    layouts = {kwargs.get("layout"), *(tensor.layout for tensor in tensors_of((args, kwargs)))}
    if "sparse" not in name and not layouts - {None, torch.strided}:
        return None
    return CannotSimulate(
        f"sparse tensors are not simulated, and {name} has one",
        fix="simulate with dense ones: nn.Embedding(…, sparse=False), tensor.to_dense()",
    )


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
