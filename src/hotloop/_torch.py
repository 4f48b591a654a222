"""The one door to PyTorch's private parts: each has a name here that says what hotloop uses it for.

Where a version of PyTorch may lack a part, it is looked for, and the docstring says what hotloop does without it.
"""

import argparse
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim import optimizer as _optim
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as _worker
from torch.utils.data.dataloader import _BaseDataLoaderIter

# Processes


def is_fork_without_cuda() -> bool:
    """Whether this process was forked from one that had asked for CUDA devices, and so cannot use any.

    Where PyTorch does not tell, it is taken to be able to: it will raise its own error.
    """
    tells = getattr(torch._C, "_cuda_isInBadFork", None)
    return bool(tells is not None and tells())


# Tensors


def storage_id(storage: torch.UntypedStorage) -> int:
    """The identity of a tensor's memory, also of memory without an address (on `meta`, or empty)."""
    address: int = storage._cdata
    return address


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written in place; None of an inference tensor, which does not count."""
    return None if tensor.is_inference() else tensor._version


def as_without_storage(kind: type[Tensor], like: Tensor, *, requires_grad: bool) -> Any:
    """A tensor of a subclass with the sizes, strides and dtype of another, and no memory."""
    sizes: Any = {"strides": like.stride(), "dtype": like.dtype, "layout": like.layout, "device": like.device}
    return Tensor._make_wrapper_subclass(kind, like.shape, requires_grad=requires_grad, **sizes)


def without_overrides() -> AbstractContextManager[Any]:
    """Call functions on tensors of a subclass as if they were plain ones."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context


def saves_through_hooks() -> bool:
    """Whether tensors for the backward pass go through hooks now, as with activation checkpointing; where PyTorch does
    not tell, it is taken for granted."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def inner_tensors(tensor: Tensor) -> list[Tensor] | None:
    """The tensors that a wrapper subclass such as `DTensor` is made of; None of any other tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Indices and values of a sparse COO tensor; unlike `indices()`, also of one that is not coalesced."""
    return [tensor._indices(), tensor._values()]


def _one_by_one(method: str, tensors: Sequence[Tensor], others: Any) -> None:
    several = others if isinstance(others, Sequence) else [others] * len(tensors)
    for tensor, other in zip(tensors, several, strict=True):
        getattr(tensor, method)(other)


def _foreach(method: str) -> Callable[[Sequence[Tensor], Any], object]:
    """A method of tensors for whole lists, in one kernel; where PyTorch lacks it, one tensor after the other."""
    return getattr(torch, f"_foreach_{method}", None) or partial(_one_by_one, method)


foreach_add_ = _foreach("add_")  # (tensors, tensors or number)
_foreach_copy_ = _foreach("copy_")  # (targets, sources)
foreach_div_ = _foreach("div_")  # (tensors, tensors, tensor or number)
COPIED_SINGLY = 4  # tensors that are copied one by one: the kernel that copies many takes long to load on a GPU


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor], few: int = COPIED_SINGLY) -> None:
    """Copy tensors into others: up to `few` of them one by one, more in one kernel."""
    (partial(_one_by_one, "copy_") if len(targets) <= few else _foreach_copy_)(targets, sources)


_UPDATES = ("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp", "copy")


def updating_functions() -> Iterator[tuple[Any, str]]:
    """Where the functions are that parameters are updated with, tensors or lists of them: owner and name."""
    yield from ((Tensor, f"{name}_") for name in _UPDATES)
    yield from ((Tensor, f"__i{name}__") for name in ("add", "sub", "mul", "truediv"))
    yield from ((torch, f"_foreach_{name}_") for name in _UPDATES if hasattr(torch, f"_foreach_{name}_"))


# Modules

METADATA = "_metadata"  # attribute of a module's state_dict: the versions of its layers
BatchNorm: type[nn.Module] = _BatchNorm  # what all layers of batch normalisation have in common, `SyncBatchNorm` too
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"  # attributes of a module: what is registered in it
REGISTERED = (PARAMETERS, BUFFERS, MODULES)
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has: what is registered, hooks, `training`
# Attributes of modules and optimizers that their state_dict alone uses; FSDP and hotloop put hooks there.
OF_STATE_DICT = (
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
    *("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_post_hooks"),
)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters, without those of modules inside it; what is changed in it is changed."""
    return module._parameters


def recurrence(layer: nn.RNNBase, weights: Sequence[Tensor], *given: Any) -> Any:
    """What a recurrent layer gives if it has these weights, which may be results of other operations.

    `torch.func.functional_call` would do, but the layer would hold on to the weights, and to the operations behind
    them. A layer that is made on `meta` fails where PyTorch keeps weights elsewhere.
    """
    held = vars(layer)
    held["_flat_weight_refs"], held["_flat_weights_names"] = [], []  # by which it would look for its own
    held["_flat_weights"] = list(weights)
    try:
        return layer(*given)
    finally:
        held["_flat_weights"] = []


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The table of a module's own buffers, without those of modules inside it; what is changed in it is changed."""
    return module._buffers


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that its `state_dict` leaves out (`persistent=False`)."""
    return module._non_persistent_buffers_set


def metadata_of(state_dict: Mapping[str, Any]) -> Any:
    """The versions of the layers that a module's `state_dict` carries; None where it carries none."""
    return getattr(state_dict, METADATA, None)


def set_metadata(state_dict: Mapping[str, Any], metadata: Any) -> None:
    """Let a state_dict carry versions of layers, which `load_state_dict` reads; a plain dict cannot."""
    setattr(state_dict, METADATA, metadata)


def has_extra_state(state_dict: Iterable[str]) -> bool:
    """Whether a state_dict holds what a `get_extra_state` gave."""
    return any(name.endswith("_extra_state") for name in state_dict)


# Hooks

FORWARD_HOOKS = "_forward_hooks"
_OF_MODULES = (FORWARD_HOOKS, "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def module_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """What was registered to run around a module's forward and backward; also of one whose `__init__` failed."""
    held = vars(module)
    return [hook for kind in _OF_MODULES if (hooks := held.get(kind)) for hook in list(hooks.values())]


def gradient_hooks(tensor: Tensor) -> list[Callable[..., Any]]:
    """What was registered to run when the gradient of a tensor is computed, and when it has been accumulated."""
    return [*(tensor._backward_hooks or {}).values(), *accumulated_hooks(tensor)]


def accumulated_hooks(tensor: Tensor) -> list[Callable[..., Any]]:
    """What was registered to run when the gradient of a tensor has been accumulated, such as an optimizer's step."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """What was registered to run around the steps of this optimizer."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def global_step_hooks() -> list[Callable[..., Any]]:
    """What was registered to run around the steps of every optimizer."""
    return [*_optim._global_optimizer_pre_hooks.values(), *_optim._global_optimizer_post_hooks.values()]


# Optimizers and schedulers

COUNTS = ("step", "mu_product")  # state of a weight that its optimizer keeps on the host, where no kernel reads it
SCHEDULERS = "_schedulers"  # where the state of a scheduler that is made of others has theirs
# Attributes of an optimizer in which schedulers, and then fused kernels, note something. No state_dict has them.
SCHEDULER_NOTES = frozenset(("_opt_called", "_step_count"))
FUSED_NOTES = frozenset(("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"))
UNSCALES = "_step_supports_amp_scaling"  # attribute of an optimizer: its step divides by a `GradScaler`'s scale itself
WARNED_UNCAPTURED = "_warned_capturable_if_run_uncaptured"  # the same: a capturable one has warned of an eager step


# What PyTorch puts around the step of every class of optimizers; of a version that does not, nothing that is found.
_PROFILED = getattr(Optimizer, "profile_hook_step", lambda step: step)(lambda: None).__code__


def unprofiled_step(optimizer: Optimizer) -> Callable[[], Any]:
    """`optimizer.step` without a name for profilers, which costs the host more than several kernels would.

    It is `optimizer.step` as it stands where a profiler records, where hooks are to run, and where something else is
    around the step: that of a scheduler, of another library, or of another version of PyTorch.
    """
    step = optimizer.step
    method: Any = getattr(step, "__func__", None)
    if getattr(method, "__code__", None) is not _PROFILED or profiler_runs():
        return step
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return step
    if _optim._global_optimizer_pre_hooks or _optim._global_optimizer_post_hooks:
        return step
    return partial(method.__wrapped__, optimizer)


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options of a parser such as torchrun's, by each of their names; argparse has no public list."""
    return parser._option_string_actions


@contextmanager
def ignored_by_ddp(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Where `DistributedDataParallel` is put around a module: parameters whose gradients it leaves alone."""
    module._ddp_params_and_buffers_to_ignore = set(names)  # type: ignore[assignment]  # read by its constructor
    try:
        yield
    finally:
        del module._ddp_params_and_buffers_to_ignore


def store_of_ranks(timeout: float) -> Any:
    """The store over which the ranks of a run meet, as a connection of its own that waits so many seconds at most.

    None outside of a run, and where PyTorch gives no such connection: then ranks tell one another nothing, and an error
    names none of them.
    """
    read = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    if read is None or not torch.distributed.is_initialized():
        return None
    try:
        store = read().clone()
        store.set_timeout(timedelta(seconds=timeout))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return store


def mark_stepped(optimizer: Optimizer) -> None:
    """Let schedulers know that the optimizer has stepped, else they warn that they are ahead of it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def inner_schedulers(scheduler: Any) -> Sequence[Any]:
    """The schedulers that one is made of, such as a `SequentialLR`."""
    return getattr(scheduler, SCHEDULERS, ())


# Data loaders

LOADER = DataLoader.__module__  # the name of the module whose frames belong to a loader
OF_WORKERS = (LOADER, "torch.utils.data._utils.signal_handling")  # those that complain of workers
LoaderIterator: type[Any] = _BaseDataLoaderIter  # of every DataLoader: its `__next__` gives a batch


def keeps_workers(loader: DataLoader[Any]) -> bool:
    """Whether persistent workers of a loader are there, from an epoch before.

    Where PyTorch does not tell, they count as not there: their rng states are taken to be fresh.
    """
    return getattr(loader, "_iterator", None) is not None


def dismiss_workers(loader: DataLoader[Any]) -> None:
    """Let the next epoch of a loader begin with new workers."""
    loader.__dict__["_iterator"] = None


class _Asked:
    """A call that is made where it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def ask_workers(loader: DataLoader[Any], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function gives in each persistent worker of a loader, between two epochs.

    It goes the way on which PyTorch tells workers of a new epoch. Where PyTorch has renamed that, or there are no
    workers, nobody answers. RuntimeError: one has died.
    """
    batches, resume = getattr(loader, "_iterator", None), getattr(_worker, "_ResumeIteration", None)
    queues = getattr(batches, "_index_queues", ())
    if batches is None or resume is None or not hasattr(batches, "_get_data"):
        return []
    for queue in queues:
        queue.put(resume(_Asked(function, *arguments)))
    answers: list[Any] = []
    while len(answers) < len(queues):
        answer, _ = batches._get_data()
        if isinstance(answer, resume):
            answers.append(answer.seed)
    return answers


def end_as_garbage(batches: Iterator[Any]) -> None:
    """Let the workers of a loader's iterator end at once where the garbage collector comes by it.

    The collector closes their queues first, so that PyTorch cannot tell them to end, and waits five seconds for each.
    It does so where PyTorch has renamed the queues.
    """
    queues, done = getattr(batches, "_index_queues", None), getattr(batches, "_workers_done_event", None)
    if queues and done is not None:
        weakref.finalize(batches, _tell_to_end, tuple(queues), done).atexit = False


def _tell_to_end(queues: Sequence[Any], done: Any) -> None:
    with suppress(ValueError, OSError):  # they were closed in good order
        done.set()
        for queue in queues:
            queue.put(None)


def waits_for_workers(frame: FrameType | None) -> bool:
    """Whether a loader waits for a batch of its workers, by the frame that runs.

    Where PyTorch has renamed the method, never; a loader whose workers died finds out by itself, some seconds later.
    """
    frames = (each for each, _ in traceback.walk_stack(frame))
    return any(each.f_code.co_name == "_try_get_data" and each.f_globals.get("__name__") == LOADER for each in frames)


# Autograd

_LEAF = 2**64 - 1  # the number of every node that adds to a gradient


def backward_pass() -> int | None:
    """The number of the backward pass that runs in this thread; None outside of one, and where PyTorch does not tell.

    Then what runs in a backward pass counts as forward.
    """
    read = getattr(torch._C, "_current_graph_task_id", None)
    number = -1 if read is None else read()
    return None if number == -1 else number


def running_node() -> Any:
    """The node of autograd that runs in this thread; None outside of a backward pass, or if PyTorch does not tell."""
    read = getattr(torch._C, "_current_autograd_node", None)
    return None if read is None or backward_pass() is None else read()


def next_node_number() -> int:
    """The number that the next node of autograd will have: each thread counts its own, in the order they are made."""
    read = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return 0 if read is None else read()


def node_number(node: Any) -> int | None:
    """The number of a node of autograd; None of one that adds to a gradient, and where PyTorch does not number nodes.

    Then nobody knows which line or module made a node, or in which step.
    """
    read = getattr(node, "_sequence_nr", None)
    if read is None or not hasattr(torch._C._autograd, "_get_sequence_nr"):
        return None
    number: int = read()
    return None if number == _LEAF else number


# Operations


class DispatchMode(TorchDispatchMode):
    """Sees every operation of a block below autograd, as `__torch_dispatch__(func, types, args, kwargs)`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


def without_dispatch() -> AbstractContextManager[Any]:
    """Hide operations from dispatch modes; where PyTorch cannot, a mode sees its own questions, and is slower."""
    hide = getattr(torch._C, "_DisableTorchDispatch", None)
    return nullcontext() if hide is None else hide()


def schema_of(func: Any) -> Any:
    """The schema of an operator: name, arguments, whether it writes; None of a higher-order one, which has none."""
    return getattr(func, "_schema", None)


def _operators(*names: str) -> tuple[Any, ...]:
    """Operators that people do not call; without those that this version lacks."""
    return tuple(getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name))


def has_fused_rms_norm() -> bool:
    """Whether `rms_norm` is one kernel on a GPU."""
    return bool(_operators("_fused_rms_norm"))


UNSAFE_VIEW = _operators("_unsafe_view")  # a view of a fresh result
CPU_ATTENTION = _operators("_scaled_dot_product_flash_attention_for_cpu")
CPU_ATTENTION_BACKWARD = _operators("_scaled_dot_product_flash_attention_for_cpu_backward")
SHALLOW_COPY_CHECK = "_has_compatible_shallow_copy_type"  # the function by which `Module.to` compares two devices

# The compiler

# Modules of what PyTorch itself keeps of a model: the compiler, DDP and FSDP.
ENGINES = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.distributed", "torch.nn.parallel")


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether somebody has compiled a model or modules of it, by `torch.compile` or `module.compile()`."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


def compiler_is_loaded() -> bool:
    """Whether Dynamo was imported: without it nothing was compiled, and to import it takes seconds."""
    return "torch._dynamo" in sys.modules


def load_compiler() -> None:
    """Import Dynamo, which the first optimizer would do; where it is not to be had, that will say so."""
    with suppress(ImportError):
        import_module("torch._dynamo")


def has_compiled() -> bool:
    """Whether Dynamo has seen any frame to compile; where it does not count them any more, not."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters and counters["frames"]["total"])


def compiler_error(error: BaseException) -> BaseException:
    """The error of the compiler that Dynamo wraps in one of its own; any other as it is."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else error


def compiler_cache() -> str:
    """The folder in which Inductor keeps what it has compiled; where PyTorch does not say, one that does not exist."""
    with suppress(ImportError, AttributeError):
        return str(import_module("torch._inductor.runtime.cache_dir_utils").cache_dir())
    return "unknown"


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Let a compilation hold for all sizes of a dimension; where PyTorch cannot, it holds for this one."""
    mark = getattr(import_module("torch._dynamo"), "maybe_mark_dynamic", None)
    if mark is not None:
        mark(tensor, dim)


class Inductor:
    """The backend "inductor" of `torch.compile`. Dynamo finds what was compiled by it again wherever it is given.

    The backward pass is compiled together with the forward pass; where PyTorch cannot, in the first backward pass.
    """

    def __init__(self, mode: str | None) -> None:
        self.graphs = 0  # compiled so far
        self._mode = mode

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        options = import_module("torch._inductor").list_mode_options(self._mode) if self._mode else None
        config = import_module("torch._functorch.config")
        wanted = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": True}
        with config.patch({name: value for name, value in wanted.items() if hasattr(config, name)}):
            compile_fx = import_module("torch._inductor.compile_fx").compile_fx
            compiled: Callable[..., Any] = compile_fx(graph, inputs, config_patches=options)
        return compiled


@cache
def inductor(mode: str | None) -> Inductor:
    """The one backend for a mode of `torch.compile`."""
    return Inductor(mode)


# Profiler, processor and allocator


def profiler_runs() -> bool:
    """Whether a profiler of PyTorch records; where that is unknown, not, and PyTorch refuses a second by itself."""
    read = getattr(torch._C._autograd, "_profiler_enabled", None)
    return read is not None and bool(read())


def is_simulated_gpu() -> bool:
    """Whether `torch.cuda` is the one of `hotloop simulate`."""
    return torch.cuda.CUDAGraph.__module__.startswith("hotloop.")


def has_amx() -> bool:
    """Whether the CPU multiplies bf16 matrices in hardware (AMX); where PyTorch does not tell, bf16 counts as slow."""
    read = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return read is not None and bool(read())


_ALLOCATOR_WRITERS = (  # the newer first
    "_accelerator_setAllocatorSettings",
    "_cuda_cudaCachingAllocator_set_allocator_settings",
)


def allocator_settings() -> str | None:
    """What CUDA's caching allocator was told, by the environment or since; None where PyTorch does not say."""
    with suppress(AttributeError):
        return str(torch._C._accelerator_getAllocatorSettings())
    with suppress(AttributeError, KeyError, RuntimeError):  # a version that tells it only among everything else
        return str(torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])
    return None


def set_allocator_settings(settings: str) -> None:
    """Tell CUDA's caching allocator its settings; `NotImplementedError` where PyTorch has no way to."""
    for name in _ALLOCATOR_WRITERS:
        if (write := getattr(torch._C, name, None)) is not None:
            write(settings)
            return
    raise NotImplementedError("this PyTorch does not let a running process change the settings of its allocator")


def end_capture_pool(device: torch.device, pool: Any) -> None:
    """Tell the allocator that a capture which failed is over: else it would never again give cached memory back.

    PyTorch does it itself from 2.12 on, the release of the pool included (pytorch#180395, pytorch#190348), and before
    that where the capture could be ended. Then the graph releases the pool; to do it twice would end the process.
    """
    with suppress(RuntimeError, AttributeError):  # it is over already
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        if TorchVersion(torch.__version__) < "2.12":
            torch._C._cuda_releasePool(device.index or 0, pool)
