"""A person's script, run with its training steps noticed, and ended when there were enough of them."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotloop._torch import storage_id, updating_functions
from hotloop.device.backend import backend_of, is_capturing
from hotloop.memory.storages import storages_of
from hotloop.scripts.as_main import Enough, quiet_threads, run_as_main
from hotloop.step.rounds import Rounds

# What is said of a script whose steps were waited for in vain.
WITHOUT_STEPS = "without a training step: no gradient was made and then used by an optimizer or by hand"
TRAIN = "give the arguments with which it trains; a script that trains in processes of its own cannot be seen"

BY_HAND = 0  # stands for an optimizer, of which it is no `id`


class ScriptSteps:
    """Runs a script and calls `on_step` after each of its training steps, until that says that it is enough.

    Steps are found by the optimizers, and by the replays of a CUDA graph in which some have stepped: a replay is one
    step, however often. Until an optimizer steps, updates by hand count too. The script is then ended as Ctrl-C would
    end it, so that its clean-up runs.
    """

    def __init__(self, on_step: Callable[[], bool], tell: Callable[[str], None] = lambda words: None) -> None:
        self._on_step, self._tell = on_step, tell
        self._rounds = Rounds()
        self._by_hand = ByHand(self._updated_by_hand)
        self._noticing = ExitStack()  # of updates by hand
        self._told = 0  # times that the script was told to end
        self.device: torch.device | None = None  # where it trains, known until an optimizer steps
        self._captured: dict[int, None] = {}  # optimizers that step in the graph that is captured now
        self._graphs: WeakKeyDictionary[torch.cuda.CUDAGraph, tuple[int, ...]] = WeakKeyDictionary()

    @property
    def is_ended(self) -> bool:
        """Whether it was told to end."""
        return self._told > 0

    @property
    def calls(self) -> int:
        """How often optimizers have stepped lately, whole steps or not."""
        return self._rounds.calls

    def run(
        self, target: str, arguments: Sequence[str], *, module: bool = False, source: str | None = None
    ) -> BaseException | None:
        """Run it, or `source` in its place; what ended it, or None where it came to its end or was told to end."""
        with ExitStack() as undo:
            undo.callback(register_optimizer_step_pre_hook(self._left_to_optimizer).remove)
            undo.callback(register_optimizer_step_post_hook(self._updated).remove)
            undo.enter_context(quiet_threads())
            undo.enter_context(after_each(Optimizer, "__init__", self._expect))
            undo.enter_context(after_each(torch.cuda.CUDAGraph, "capture_end", self._captured_by))
            undo.enter_context(after_each(torch.cuda.CUDAGraph, "replay", self._replayed))
            undo.enter_context(self._noticing).enter_context(noticing(self._by_hand, self._trained))
            try:
                run_as_main(target, arguments, module=module, source=source)
                self._by_hand.finish()
            except Enough:
                return None
            except SystemExit as ending:
                if isinstance(ending.code, str):
                    print(ending.code, file=sys.stderr)
                return ending
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # whatever the script lets through
                return error
        return None

    def _expect(self, _: None, optimizer: Optimizer, *args: Any, **options: Any) -> None:
        self._rounds.expect(id(optimizer))
        finalize(optimizer, self._rounds.forget, id(optimizer)).atexit = False

    def _updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped, or will in the replays of what is captured now."""
        if is_capturing():
            self._captured[id(optimizer)] = None
        else:
            self._count(id(optimizer))

    def _left_to_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._by_hand.listening:
            self._by_hand.leave_to_optimizer()
            self.device = None
            self._noticing.close()

    def _trained(self, parameter: Tensor) -> None:
        if self.device is None or backend_of(self.device).is_host:
            self.device = parameter.device

    def _updated_by_hand(self) -> None:
        if is_capturing():
            self._captured[BY_HAND] = None
        else:
            self._step_made()

    def _count(self, optimizer: int) -> None:
        if self._told or optimizer == BY_HAND or self._rounds.ends(optimizer):
            self._step_made()

    def _step_made(self) -> None:
        if self._told or self._on_step():
            self.end()

    def _captured_by(self, _: None, graph: torch.cuda.CUDAGraph) -> None:
        self._graphs[graph], self._captured = tuple(self._captured), {}

    def _replayed(self, _: None, graph: torch.cuda.CUDAGraph) -> None:
        for optimizer in self._graphs.get(graph, ()):
            self._count(optimizer)

    def end(self) -> None:
        """End the script from inside: from a call that it makes."""
        if not self._told:
            self._tell("that is enough: ending the script")
        self._told += 1
        if self._told > 2:
            self._tell("the script catches every exception, so it is ended without its own clean-up")
            sys.stdout.flush()
            os._exit(0)
        raise Enough


class ByHand:
    """Says when the parameters that got a gradient were updated by the script's own code. Memory goes by its number."""

    def __init__(self, stepped: Callable[[], None]) -> None:
        self._stepped = stepped
        self._awaiting: set[int] = set()  # memory of parameters with a gradient that came since the last step
        self._written: set[int] = set()  # and of those that were updated
        self._differentiated = False
        self.listening = True

    @property
    def pending(self) -> bool:
        """Whether a write to a parameter would be an update."""
        return self.listening and (self._differentiated or bool(self._awaiting))

    def leave_to_optimizer(self) -> None:
        """One steps: what else writes to parameters, such as clipping or an average, is no step."""
        self.listening = False
        self._forget()

    def differentiates(self, parameter: int | None = None) -> None:
        """A backward pass runs; with the memory of a parameter that it makes a gradient for."""
        if self._written:
            self._end()  # a new backward pass, so that whatever was not updated will not be
        self._differentiated = True
        if parameter is not None:
            self._awaiting.add(parameter)

    def writes(self, memory: int, *, parameter: bool) -> None:
        """Something is written to the memory of a tensor; `parameter` where that is one's."""
        if memory in self._awaiting or (parameter and not self._awaiting):  # after `torch.autograd.grad` none awaits
            self._written.add(memory)
        if self._awaiting and self._written >= self._awaiting:
            self._end()

    def finish(self) -> None:
        """The script came to its end."""
        if self._written:
            self._end()

    def _end(self) -> None:
        self._forget()
        self._stepped()

    def _forget(self) -> None:
        self._awaiting.clear()
        self._written.clear()
        self._differentiated = False


@contextmanager
def noticing(by_hand: ByHand, trained: Callable[[Tensor], None]) -> Iterator[None]:
    """Tell `by_hand` of backward passes, and of what writes to tensors after them; `trained` gets the parameters.

    Writing are `p.data.add_(…)` and its like, `p -= …`, `p.data = …` and `torch._foreach_add_(…)`.
    """

    def writes(tensor: Tensor, memory: Iterable[int]) -> None:
        for each in memory if by_hand.pending else ():
            by_hand.writes(each, parameter=tensor.is_leaf and tensor.requires_grad)

    def writing(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def write(target: Any, *args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or not by_hand.pending:
                return original(target, *args, **options)
            result = original(target, *args, **options)
            for tensor in _listed(target):
                writes(tensor, _memory_of(tensor))
            return result

        return write

    def replacing(data: Any) -> Any:
        def replace(tensor: Tensor, other: Tensor) -> None:
            pending = not torch.compiler.is_compiling() and by_hand.pending
            memory = _memory_of(tensor) if pending else []  # for which the gradient was
            data.__set__(tensor, other)
            if pending:
                writes(tensor, memory)

        return property(data.__get__, replace)

    def going_back(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def differentiate(*args: Any, **options: Any) -> Any:
            by_hand.differentiates()
            given = options.get("inputs", args[1] if original is gradients and len(args) > 1 else None)
            parameters = _parameters_below(differentiated(args, options)) if given is None else _listed(given)
            result = original(*args, **options)
            for parameter in parameters:
                if parameter.is_leaf and parameter.requires_grad:
                    trained(parameter)
                    for memory in _memory_of(parameter):
                        by_hand.differentiates(memory)
            return result

        return differentiate

    gradients = torch.autograd.grad
    with ExitStack() as undo:
        for owner, name in updating_functions():
            undo.enter_context(around(owner, name, writing))
        undo.enter_context(around(Tensor, "data", replacing))
        undo.enter_context(around(torch.autograd, "backward", going_back))
        undo.enter_context(around(torch.autograd, "grad", going_back))
        yield


def _memory_of(tensor: Tensor) -> list[int]:
    return [storage_id(storage) for storage in storages_of(tensor)]


def differentiated(args: tuple[Any, ...], options: Mapping[str, Any]) -> list[Tensor]:
    """What a backward pass begins with, from a call of `torch.autograd.backward` or `torch.autograd.grad`."""
    return _listed(args[0] if args else options.get("tensors", options.get("outputs", ())))


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [each for each in tensors if isinstance(each, Tensor)]


def _parameters_below(roots: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of a graph, which get gradients."""
    found = [root for root in roots if root.grad_fn is None]
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        waiting += new
    return found


@contextmanager
def around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put another function in place of an attribute for a while."""
    before = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def before_each(owner: Any, name: str, see: Callable[..., None]) -> AbstractContextManager[None]:
    """For a while, `see` gets the arguments of every call of a function, before it is made."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            see(*args, **options)
            return original(*args, **options)

        return call

    return around(owner, name, make)


def after_each(owner: Any, name: str, see: Callable[..., None]) -> AbstractContextManager[None]:
    """For a while, `see` gets the result of every call of a function, and its arguments."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            see(result, *args, **options)
            return result

        return call

    return around(owner, name, make)


@contextmanager
def before_backward(see: Callable[..., None]) -> Iterator[None]:
    """For a while, `see` gets the arguments of every backward pass, before it runs."""
    with before_each(torch.autograd, "backward", see), before_each(torch.autograd, "grad", see):
        yield
