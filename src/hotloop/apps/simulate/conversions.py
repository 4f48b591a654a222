"""What else of torch must know of tensors without data: modules that move, printing, NumPy, loaders."""

import copy
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from operator import methodcaller
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from hotloop._torch import buffers_of, parameters_of
from hotloop.apps.simulate._torch import (
    accept_fakes,
    is_simulated,
    loader_iterator,
    mark_as_parameter,
    sole_owners,
    storage_id,
    teach_fakes,
    wrap_moves,
)
from hotloop.apps.simulate.borrowed import Borrowed
from hotloop.apps.simulate.dispatch import SimulatedGpu
from hotloop.apps.simulate.replaced import Patches
from hotloop.apps.simulate.saved_aside import SimulatedFiles, tensors_held
from hotloop.apps.simulate.shim import CannotSimulate
from hotloop.placement.sites import is_users, user_site
from hotloop.values.tree import map_tensors, tensors_of

_WORKERS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}


class Conversions:
    """Teaches torch's Python code about the simulated device."""

    def __init__(self, gpu: SimulatedGpu, borrowed: Borrowed | None = None) -> None:
        self._gpu = gpu
        self._borrowed = borrowed  # where what goes to the device comes back later
        self._hooks: list[Any] = []
        self._workers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # that a loader, and what it gives, asked for
        self.saved = SimulatedFiles(gpu)
        self.left_out: dict[str, None] = {}  # what was asked for and not done, in sentences
        self.compiled = False  # whether torch.compile was asked for

    def install(self, patches: Patches) -> None:
        accept_fakes(patches)
        patches.set(torch, "compile", self._compile)
        patches.set(nn.Module, "compile", lambda module, *_, **__: setattr(self, "compiled", True))
        patches.set(torch.jit, "script", self._script)
        self._trace(patches)
        self._processes(patches)
        patches.set(nn.RNNBase, "flatten_parameters", lambda module: None)
        self._modules(patches)
        self._tensors(patches)
        self._loaders(patches)
        self._watchers(patches)
        self.saved.install(patches.set)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def name_all(self, optimizer: Optimizer) -> None:
        """What an optimizer holds is parameters, gradients and its state."""
        storages = self._gpu.storages
        for group in optimizer.param_groups:
            for parameter in filter(is_simulated, group["params"]):
                storages.name(parameter, "parameter")
                if parameter.grad is not None and is_simulated(parameter.grad):
                    storages.name(parameter.grad, "gradient")
        for tensor in filter(is_simulated, tensors_of(list(optimizer.state.values()))):
            storages.name(tensor, "optimizer")

    def _modules(self, patches: Patches) -> None:
        registered = nn.modules.module
        self._hooks += [
            registered.register_module_parameter_registration_hook(self._names("parameter")),
            registered.register_module_buffer_registration_hook(self._names("buffer")),
        ]
        wrap_moves(patches, self._moving)
        patches.set(nn.DataParallel, "forward", _on_one)
        swap = torch.utils.swap_tensors

        def swapped(first: Tensor, second: Tensor) -> None:
            if first is second:  # of a module that is moved to shared memory
                return
            self._gpu.fake.forget()
            try:
                swap(first, second)  # type: ignore[no-untyped-call]
            except RuntimeError:  # a graph holds it, as in `weight_norm`; a real `.cuda()` does not ask
                with sole_owners():
                    swap(first, second)  # type: ignore[no-untyped-call]
            if self._borrowed is not None:
                self._borrowed.swapped(first, second)

        patches.set(torch.utils, "swap_tensors", swapped)

    def _moving(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def moved(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
            _refuse_lazy(module)
            if self._borrowed is not None:
                self._borrowed.moves(module)
            result: nn.Module = apply(module, fn, recurse)
            for tensors, kind in ((parameters_of(module), "parameter"), (buffers_of(module), "buffer")):
                for tensor in tensors.values():
                    if tensor is not None and is_simulated(tensor):
                        self._gpu.storages.name(tensor, kind)
            return result

        return moved

    def _names(self, kind: str) -> Callable[[nn.Module, str, Any], None]:
        def name(_module: nn.Module, _name: str, tensor: Any) -> None:
            if is_simulated(tensor):
                self._gpu.storages.name(tensor, kind)

        return name

    def _tensors(self, patches: Patches) -> None:
        gpu = self._gpu

        def array(tensor: Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
            gpu.findings.numpy(tensor, "np.asarray")
            values = gpu.values.tensor(tensor).numpy()
            return values if dtype is None else values.astype(dtype)

        def numpy(tensor: Tensor, *, force: bool = False) -> Any:
            if force:
                return tensor.detach().cpu().numpy()
            gpu.findings.numpy(tensor, ".numpy()")
            return gpu.values.tensor(tensor).numpy()

        def words(tensor: Tensor, *, tensor_contents: Any = None) -> str:
            gpu.teller.waited("print", user_site())
            shown = repr(gpu.values.tensor(tensor))
            return f"{shown[:-1]}, device='{tensor.device}')"

        def formatted(tensor: Tensor, spec: str) -> str:
            return format(tensor.item(), spec) if not tensor.dim() else format(repr(tensor), spec)

        def listed(tensor: Tensor) -> Any:
            return tensor.detach().cpu().tolist()

        data: Any = Tensor.data

        def given(tensor: Tensor, other: Tensor) -> None:
            gpu.updated(tensor)
            data.__set__(tensor, other)

        patches.set(Tensor, "data", property(data.__get__, given))
        methods: dict[str, Any] = {
            "numpy": numpy,
            "__array__": array,
            "__repr__": words,
            "__format__": formatted,
            "tolist": listed,
            "record_stream": lambda tensor, stream: None,
            "__deepcopy__": _deep_copy,
            "data_ptr": lambda tensor: storage_id(tensor) + tensor.storage_offset() * tensor.dtype.itemsize,
            "is_shared": lambda tensor: False,
            "share_memory_": lambda tensor: tensor,
        }
        teach_fakes(patches, methods)

    def _loaders(self, patches: Patches) -> None:
        original = DataLoader.__init__

        def make(loader: Any, *args: Any, **kwargs: Any) -> None:
            workers = args[5] if len(args) > 5 else kwargs.get("num_workers", 0)
            kwargs.update({name: value for name, value in _WORKERS.items() if name in kwargs})
            kwargs.pop("multiprocessing_context", None)
            if len(args) > 5:  # the number of workers, by place
                args = (*args[:5], 0, *args[6:])
            original(loader, *args, **kwargs)
            if isinstance(workers, int):
                self._workers[loader] = min(workers, os.cpu_count() or 1)

        patches.set(DataLoader, "__init__", make)
        batches = loader_iterator()
        if batches is None:
            return
        begin, following = batches.__init__, batches.__next__

        def begun(iterator: Any, loader: Any) -> None:
            begin(iterator, loader)
            self._workers[iterator] = self._workers.get(loader, 0)

        def next_batch(iterator: Any) -> Any:
            begun = time.perf_counter()
            batch = following(iterator)
            self._gpu.teller.loaded(time.perf_counter() - begun, self._workers.get(iterator, 0))
            return batch

        patches.set(batches, "__init__", begun)
        patches.set(batches, "__next__", next_batch)

    def _watchers(self, patches: Patches) -> None:
        """What looks at values or at a real device has nothing to see here."""
        watch, profile = torch.set_anomaly_enabled, torch.profiler.profile.__init__

        def watched(mode: bool, check_nan: bool = True) -> None:
            if mode and check_nan:
                self.left_out["anomaly detection looks for no NaN: there are no values to look at"] = None
            watch(mode, False)

        def profiled(profiler: Any, *, activities: Any = None, **kwargs: Any) -> None:
            if activities is None or torch.profiler.ProfilerActivity.CUDA in activities:
                self.left_out["torch.profiler sees the CPU alone: of the simulated GPU there is no trace"] = None
            profile(profiler, activities=[torch.profiler.ProfilerActivity.CPU], **kwargs)

        patches.set(torch, "set_anomaly_enabled", watched)
        patches.set(torch.profiler.profile, "__init__", profiled)

    def _compile(self, model: Any = None, **_: Any) -> Any:
        self.compiled = True
        return model if model is not None else (lambda function: function)

    def _script(self, obj: Any, *_: Any, **__: Any) -> Any:
        """The same in Python: some functions of torch are replaced here by others that TorchScript cannot read."""
        self.left_out["torch.jit.script was left out: its memory and its speed are not simulated"] = None
        return obj

    def _trace(self, patches: Patches) -> None:
        """Nothing can be traced without values; a library, which wants to draw the graph, gets that of no layer."""
        trace: Any = torch.jit.trace

        def traced(obj: Any, *inputs: Any, **options: Any) -> Any:
            if not any(map(is_simulated, tensors_held([obj, *inputs, *options.values()]))):
                return trace(obj, *inputs, **options)
            self.left_out["torch.jit.trace was left out: a graph that TensorBoard draws of the model is empty"] = None
            return obj if is_users(sys._getframe(1)) else trace(nn.Identity(), torch.zeros(1, device="cpu"))

        patches.set(torch.jit, "trace", traced)

    def _processes(self, patches: Patches) -> None:
        """What a process of the script's own does cannot be seen, so that one that is given the model ends here."""
        start = BaseProcess.start

        def started(process: Any) -> None:
            if any(map(is_simulated, tensors_held(list(vars(process).values())))):
                raise CannotSimulate(
                    "a process of the script's own is given tensors of the GPU, and what it does cannot be seen",
                    fix="simulate what one of them does: call its function here, in place of starting a process",
                )
            start(process)

        patches.set(BaseProcess, "start", started)


def _refuse_lazy(module: nn.Module) -> None:
    held = (*parameters_of(module).values(), *buffers_of(module).values())
    if any(tensor is not None and is_lazy(tensor) for tensor in held):
        raise CannotSimulate(
            f"{type(module).__name__} moves or is converted before it has a shape",
            fix="call the model on a batch on the CPU first, which gives its lazy layers their shapes",
        )


def _on_one(parallel: "nn.DataParallel[Any]", *inputs: Any, **kwargs: Any) -> Any:
    """The whole batch on the first GPU."""
    moved, options = map_tensors((inputs, kwargs), methodcaller("to", "cuda:0"))
    return parallel.module(*moved, **options)


def _deep_copy(tensor: Any, memo: dict[int, Any]) -> Any:
    """A copy of its own, as `copy.deepcopy` makes one of a tensor with data."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
    with torch.no_grad():
        made = tensor.detach().clone()
    made.requires_grad_(tensor.requires_grad)
    mark_as_parameter(made, tensor)
    if tensor.grad is not None:
        made.grad = copy.deepcopy(tensor.grad, memo)
    memo[id(tensor)] = made
    return made
