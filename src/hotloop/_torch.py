"""The one door to PyTorch's private parts: each has a name here that says what hotloop uses it for.

Where a version of PyTorch may lack a part, it is looked for, and the docstring says what hotloop does without it.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim import optimizer as _optim
from torch.torch_version import TorchVersion
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

# Tensors


def storage_id(storage: torch.UntypedStorage) -> int:
    """The identity of a tensor's memory, also of memory without an address (on `meta`, or empty)."""
    address: int = storage._cdata
    return address


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written in place; None of an inference tensor, which does not count."""
    return None if tensor.is_inference() else tensor._version


def inner_tensors(tensor: Tensor) -> list[Tensor] | None:
    """The tensors that a wrapper subclass such as `DTensor` is made of; None of any other tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Indices and values of a sparse COO tensor; unlike `indices()`, also of one that is not coalesced."""
    return [tensor._indices(), tensor._values()]


def leaves_of(tree: Any) -> list[Any]:
    """What lies in nested containers, in order: those of Python, and those registered with PyTorch."""
    return _pytree.tree_leaves(tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same containers around what `function` makes of each leaf."""
    return _pytree.tree_map(function, tree)


def _one_by_one(method: str, tensors: Sequence[Tensor], others: Any) -> None:
    several = others if isinstance(others, Sequence) else [others] * len(tensors)
    for tensor, other in zip(tensors, several, strict=True):
        getattr(tensor, method)(other)


def _foreach(method: str) -> Callable[[Sequence[Tensor], Any], object]:
    """A method of tensors for whole lists, in one kernel; where PyTorch lacks it, one tensor after the other."""
    return getattr(torch, f"_foreach_{method}", None) or partial(_one_by_one, method)


foreach_add_ = _foreach("add_")  # (tensors, tensors or number)
foreach_copy_ = _foreach("copy_")  # (targets, sources)
foreach_div_ = _foreach("div_")  # (tensors, tensors, tensor or number)

# Modules

METADATA = "_metadata"  # attribute of a module's state_dict: the versions of its layers
BatchNorm: type[nn.Module] = _BatchNorm  # what all layers of batch normalisation have in common, `SyncBatchNorm` too
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"  # attributes of a module: what is registered in it
REGISTERED = (PARAMETERS, BUFFERS, MODULES)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters, without those of modules inside it; what is changed in it is changed."""
    return module._parameters


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

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def module_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """What was registered to run around a module's forward and backward; also of one whose `__init__` failed."""
    return [hook for kind in _OF_MODULES for hook in list((vars(module).get(kind) or {}).values())]


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

SCHEDULERS = "_schedulers"  # where the state of a scheduler that is made of others has theirs
# Attributes of an optimizer in which schedulers, and then fused kernels, note something. No state_dict has them.
SCHEDULER_NOTES = frozenset(("_opt_called", "_step_count"))
FUSED_NOTES = frozenset(("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"))
UNSCALES = "_step_supports_amp_scaling"  # attribute of an optimizer: its step divides by a `GradScaler`'s scale itself
WARNED_UNCAPTURED = "_warned_capturable_if_run_uncaptured"  # the same: a capturable one has warned of an eager step


def mark_stepped(optimizer: Optimizer) -> None:
    """Let schedulers know that the optimizer has stepped, else they warn that they are ahead of it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def inner_schedulers(scheduler: Any) -> Sequence[Any]:
    """The schedulers that one is made of, such as a `SequentialLR`."""
    return getattr(scheduler, SCHEDULERS, ())


# Data loaders

LOADER = DataLoader.__module__  # the name of the module whose frames belong to a loader
LoaderIterator: type[Any] = _BaseDataLoaderIter  # of every DataLoader: its `__next__` gives a batch


def keeps_workers(loader: DataLoader[Any]) -> bool:
    """Whether persistent workers of a loader are there, from an epoch before.

    Where PyTorch does not tell, they count as not there: their random states are taken to be fresh.
    """
    return getattr(loader, "_iterator", None) is not None


def dismiss_workers(loader: DataLoader[Any]) -> None:
    """Let the next epoch of a loader begin with new workers."""
    loader.__dict__["_iterator"] = None


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


UNSAFE_VIEW = _operators("_unsafe_view")  # a view of a fresh result
CPU_ATTENTION = _operators("_scaled_dot_product_flash_attention_for_cpu")
CPU_ATTENTION_BACKWARD = _operators("_scaled_dot_product_flash_attention_for_cpu_backward")
SHALLOW_COPY_CHECK = "_has_compatible_shallow_copy_type"  # the function by which `Module.to` compares two devices
REBUILDING = "torch._utils"  # the module whose functions a pickle of tensors names

# The compiler

COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")  # modules of what it keeps of a model


def compiler_is_loaded() -> bool:
    """Whether Dynamo was imported: without it nothing was compiled, and to import it takes seconds."""
    return "torch._dynamo" in sys.modules


def has_compiled() -> bool:
    """Whether Dynamo has seen any frame to compile; where it does not count them any more, not."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters and counters["frames"]["total"])


# Profiler, processor and allocator


def profiler_runs() -> bool:
    """Whether a profiler of PyTorch records; where that is unknown, not, and PyTorch refuses a second by itself."""
    read = getattr(torch._C._autograd, "_profiler_enabled", None)
    return read is not None and bool(read())


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
