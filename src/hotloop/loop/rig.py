"""`Rig`: what a plan changes in a model, its optimizers and PyTorch's settings, and how each change is undone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from hotloop.levers import can_be_flipped, repeated_blocks
from hotloop.loop.flipped import flipped
from hotloop.placement import map_tensors
from hotloop.plan import Plan
from hotloop.rng import RngStates

_HOST = torch.device("cpu")


class Rig:
    """The changes of one plan; `engage` makes them, `release` undoes them, `around` holds PyTorch's own switches."""

    def __init__(self, plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.plan = plan
        self._model = model
        self._optimizers = optimizers
        self._undo: list[Callable[[], object]] = []
        cudnn = _cudnn if plan.precision == "fp32" else _cudnn_anew
        self.switches = [switch for wanted, switch in ((plan.tf32, _tf32), (plan.cudnn_benchmark, cudnn)) if wanted]

    def engage(self) -> None:
        """Set the optimizers' flags and wrap the blocks that are computed twice."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                self._flag(optimizer, group)
            _settle_steps(optimizer)
        if self.plan.flipped:
            for layer in filter(can_be_flipped, self._model.modules()):
                assert isinstance(layer, nn.Conv2d)
                self._undo.append(_attribute(layer, "forward", partial(flipped, layer)))
        for block in self._recomputed():
            contexts = partial(_contexts, block)
            again = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
            self._undo.append(_attribute(block, "forward", again))

    def release(self) -> None:
        """Undo what `engage` did."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        for optimizer in self._optimizers:
            _settle_steps(optimizer)

    def around(self) -> AbstractContextManager[Any]:
        """The context in which a step runs; nothing is left switched when it ends."""
        if not self.switches:
            return nullcontext()
        return _switched(self.switches)

    def inputs(self, batch: Any) -> Any:
        """A batch in the layout of the plan."""
        return map_tensors(batch, _channels_last) if self.plan.channels_last else batch

    def _recomputed(self) -> Sequence[nn.Module]:
        """The blocks whose activations are computed again."""
        if self.plan.checkpointing:
            return repeated_blocks(self._model)
        known = dict(self._model.named_modules()) if self.plan.recompute else {}
        return [known[name] for name in self.plan.recompute if name in known]

    def _flag(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        wanted: dict[str, Any] = {}
        if self.plan.graph and "capturable" in group:
            wanted |= {"capturable": True}
        # SGD has no `capturable`: only its fused kernel reads a learning rate that lies on the device.
        if "fused" in group and (self.plan.fused or (self.plan.graph and not wanted)):
            wanted |= {"fused": True, "foreach": False}
        before = {key: group[key] for key in wanted}
        group.update(wanted)
        self._undo.append(partial(group.update, before))
        if "capturable" in wanted:  # the tail of an epoch runs outside the graph on purpose: no warning is due
            self._undo.append(_attribute(optimizer, "_warned_capturable_if_run_uncaptured", True))
        if "fused" in wanted:
            self._undo.append(_attribute(optimizer, "_step_supports_amp_scaling", True))


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For the forward pass, and for its repetition, which draws the same numbers and leaves no trace."""
    drawn: list[RngStates] = []
    return _noted(drawn), _repeated(block, drawn)


@contextmanager
def _noted(drawn: list[RngStates]) -> Iterator[None]:
    drawn.append(RngStates(_HOST))  # PyTorch itself looks after its own generators, and not after the others
    yield


@contextmanager
def _repeated(block: nn.Module, drawn: list[RngStates]) -> Iterator[None]:
    """While a block is computed again: buffers stay as they are, such as running means."""
    tables = [(inner._buffers, dict(inner._buffers)) for inner in block.modules() if inner._buffers]
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    random = RngStates(_HOST)
    drawn[0].restore()
    try:
        yield
    finally:
        random.restore()
        for table, buffers in tables:
            table.update(buffers)
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)


def _attribute(target: object, name: str, value: object) -> Callable[[], object]:
    """Set an attribute; the call that undoes it."""
    there = name in vars(target)
    before = getattr(target, name, None)
    setattr(target, name, value)
    return partial(setattr, target, name, before) if there else partial(vars(target).pop, name, None)


def _settle_steps(optimizer: Optimizer) -> None:
    """Adam and its kin count steps on the host, unless a kernel on the device reads the count."""
    for group in optimizer.param_groups:
        there = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            count = state.get("step") if isinstance(state, dict) else None
            if isinstance(count, Tensor):
                # A kernel reads 32 bits; elsewhere the count keeps the type that it has.
                state["step"] = count.to(parameter.device, torch.float32) if there else count.cpu()


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


@contextmanager
def _switched(switches: Sequence[Callable[[], AbstractContextManager[Any]]]) -> Iterator[None]:
    if len(switches) == 1:
        with switches[0]():
            yield
        return
    with switches[0](), _switched(switches[1:]):
        yield


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    libraries = [getattr(torch.backends, name).matmul for name in ("cuda", "mkldnn")]
    each = [library.fp32_precision for library in libraries]
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for library, precision in zip(libraries, each, strict=True):
            library.fp32_precision = precision


@contextmanager
def _cudnn() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _cudnn_anew() -> Iterator[None]:
    """The same for convolutions in half precision, also for those that have run before.

    PyTorch keeps the algorithm that was chosen for a convolution, however it was chosen, by its shapes and by whether
    TF32 is allowed, which says nothing of half precision: without TF32, nothing is chosen yet. It is never allowed
    where it was not, since parts of the model may be in fp32.
    """
    library, allowed = torch.backends.cudnn, False
    with suppress(RuntimeError):  # the person has set precisions by the newer names: then the older cannot be read
        allowed = library.allow_tf32
    with _cudnn():
        if allowed:
            library.allow_tf32 = False
        try:
            yield
        finally:
            if allowed:
                library.allow_tf32 = True
