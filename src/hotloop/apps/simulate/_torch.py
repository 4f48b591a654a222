"""The one door to PyTorch's private parts: what each function gives, and what happens where a PyTorch lacks it.

What has no fallback is imported first; without it nothing can be simulated, and `CannotSimulate` says so.
"""

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import data

from hotloop.apps.simulate.replaced import Patches
from hotloop.apps.simulate.shim import CannotSimulate

try:
    from torch._C import DispatchKey
    from torch._ops import OpOverload
    from torch._subclasses import fake_tensor as _fake
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    raise CannotSimulate(
        f"torch {torch.__version__} has no tensors without data where they are looked for: {error}",
        fix="use torch 2.11 to 2.15",
    ) from error

_AUTOGRAD = (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView)


def _module(name: str) -> Any:
    """A module, or None where this PyTorch has none of the name."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# Tensors without data

_ERRORS = ("UnsupportedOperatorException", "DataDependentOutputException", "DynamicOutputShapeException")
SHAPE_UNKNOWN: tuple[type[Exception], ...] = (  # raised where PyTorch does not tell the shape of a result
    *(getattr(_fake, name) for name in _ERRORS if hasattr(_fake, name)),
    NotImplementedError,
)


class Shapes(FakeTensorMode):
    """PyTorch's own tensors without data, refused once the device that they are on is gone."""

    def __init__(self) -> None:
        super().__init__(allow_fallback_kernels=False)
        self.gone = False

    def __enter__(self) -> "Shapes":
        if self.gone:
            raise CannotSimulate(
                "a tensor of a simulated GPU was used after the simulation had ended; it has a shape and no values",
                fix="use it within the block: with hotloop.simulate(…): …",
            )
        super().__enter__()
        return self

    def forget(self) -> None:
        """Drop the weak references to tensors, which forbid a swap; without them there is nothing to drop."""
        converter = getattr(getattr(self, "fake_tensor_converter", None), "meta_converter", None)
        memo = getattr(converter, "tensor_memo", None)
        if memo is not None:
            memo.clear()


class OperationMode(TorchDispatchMode):
    """A mode in which `__torch_dispatch__` sees every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper would cost every operation


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without data."""
    return isinstance(value, FakeTensor)


def any_fake(types: Iterable[type]) -> bool:
    """Whether the types that `__torch_dispatch__` gets hold that of tensors without data."""
    return FakeTensor in types


def is_simulated(tensor: Any) -> bool:
    """Whether a tensor is on the simulated device."""
    device = getattr(tensor, "fake_device", None)
    return device is not None and device.type == "cuda"


def device_of(tensor: Tensor) -> torch.device:
    """The device that a tensor says it is on: one without data is on `meta`, below what it says."""
    found: torch.device | None = getattr(tensor, "fake_device", None)
    return tensor.device if found is None else found


def teach_fakes(patches: Patches, methods: dict[str, Any]) -> None:
    """Give tensors without data other methods."""
    for name, method in methods.items():
        patches.set(FakeTensor, name, method)


def accept_fakes(patches: Patches) -> None:
    """Let foreach optimizers take tensors without data, and none of these initialise CUDA.

    Without PyTorch's list of types, its optimizers go from tensor to tensor.
    """
    if hasattr(_fake, "init_gpu_context"):
        patches.set(_fake, "init_gpu_context", lambda device: None)
    for module in (_module("torch.utils._foreach_utils"), _module("torch.optim.optimizer")):
        types = getattr(module, "_foreach_supported_types", None)
        if types is not None:
            patches.set(module, "_foreach_supported_types", [*types, FakeTensor])


def mark_as_parameter(tensor: Tensor, like: Tensor) -> None:
    """A tensor without data counts as a parameter where another does: `isinstance(…, nn.Parameter)` asks this."""
    if getattr(like, "_is_param", False):
        tensor._is_param = True


def fake_files() -> str:
    """The folder of PyTorch's code for tensors without data, which is nobody's own line."""
    return str(Path(_fake.__file__).parent)


# Memory and trees

_BY_ADDRESS = hasattr(torch.UntypedStorage, "_cdata")


def storage_id(of: Tensor | torch.UntypedStorage) -> int:
    """The identity of a storage, while it lives; without its address, that of the Python object that PyTorch keeps."""
    storage = of.untyped_storage() if isinstance(of, Tensor) else of
    return storage._cdata if _BY_ADDRESS else id(storage)


@contextmanager
def sole_owners() -> Iterator[None]:
    """Let `swap_tensors` believe that nobody else holds a tensor; without the count, it asks nobody."""
    patches = Patches()
    if hasattr(Tensor, "_use_count"):
        patches.set(Tensor, "_use_count", lambda tensor: 1)
    try:
        yield
    finally:
        patches.restore()


# Operators


def overload(name: str) -> Any:
    """The operator of a name such as aten.add.Tensor, or None where PyTorch knows none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if isinstance(found, OpOverload) else None


def aten(name: str) -> Any:
    """An operator of ATen, also one that is PyTorch's own business: `aten("_cudnn_rnn")`."""
    return getattr(torch.ops.aten, name)


def is_composite(operator: Any) -> bool:
    """Whether an operator is made of others, which are what runs."""
    return bool(operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


@contextmanager
def with_cuda_kernels(names: Iterable[str], kernel: Callable[..., Any]) -> Iterator[None]:
    """Let operators of ATen have this CUDA kernel, whether or not this build of PyTorch has one of its own."""
    kernels = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():  # of a kernel that the build has
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name in names:
                kernels.impl(name, kernel, "CUDA")
        yield
    finally:
        kernels._destroy()


def recurrent_functions() -> ModuleType:
    """The module in which `nn.LSTM` and its like look up `lstm`, `gru`, `rnn_tanh` and `rnn_relu`."""
    return torch._VF


def attention_on_host(*args: Any, **options: Any) -> Tensor:
    """PyTorch's own `scaled_dot_product_attention`, whatever stands in its place."""
    found: Tensor = torch._C._nn.scaled_dot_product_attention(*args, **options)
    return found


def negated_view(tensor: Tensor) -> Tensor:
    """A view with the negative bit."""
    return torch._neg_view(tensor)


# Autograd and dispatch


def current_node() -> Any:
    """The node that the backward pass runs in this thread, or None."""
    return torch._C._current_autograd_node()


def next_sequence_number() -> int:
    """That of the next node that this thread makes."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def sequence_number(node: Node) -> int:
    """The number by which autograd runs first what was made last."""
    return node._sequence_nr()


def set_sequence_number(node: Node, number: int) -> None:
    """Let a node run earlier or later; where it cannot be set, it runs in the order of one thread."""
    change = getattr(node, "_set_sequence_nr", None)
    if change is not None:
        change(number)


def wrap_backward(patches: Patches, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a function around every backward pass; without the one place that runs all, none is wrapped."""
    run = getattr(torch.autograd, "_engine_run_backward", None)
    if run is not None:
        patches.set(torch.autograd, "_engine_run_backward", wrapper(run))


@contextmanager
def autograd_again() -> Iterator[None]:
    """Autograd for what is called here, although operators are called below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def without_functions() -> AbstractContextManager[None]:
    """No `TorchFunctionMode` sees what is called here."""
    return torch._C.DisableTorchFunction()


@contextmanager
def lifting_on_host() -> Iterator[None]:
    """`torch.tensor(…, device="cuda")` makes its values on the host, and moves them; older ones do so anyway."""
    if not hasattr(torch._C, "_set_only_lift_cpu_tensors"):
        yield
        return
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


# Modules and loaders


def wrap_moves(patches: Patches, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a function around what `.to()`, `.cuda()` and `.half()` of every module do, one call for each part of it."""
    patches.set(nn.Module, "_apply", wrapper(nn.Module._apply))


def loader_iterator() -> Any:
    """The class of what `iter(DataLoader)` gives; None: the time that batches take is not measured."""
    return getattr(data.dataloader, "_BaseDataLoaderIter", None)


def fetchers() -> list[Any]:
    """The classes that get samples for a loader, by index and one by one; none: samples are not counted."""
    fetch = _module("torch.utils.data._utils.fetch")
    found = [getattr(fetch, name, None) for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher")]
    return found if None not in found else []


# The device


def default_device() -> torch.device | None:
    """What `torch.set_default_device` was last given; where that is not kept, what it amounts to."""
    functions = _module("torch.utils._device")
    return functions.CURRENT_DEVICE if hasattr(functions, "CURRENT_DEVICE") else torch.get_default_device()


def answer_below_cuda(exchange: Callable[[Any], int], configure: Callable[[str], None]) -> dict[str, Any]:
    """What `torch.cuda` asks of itself, by its own names: whether it is initialised, and the current device."""
    return {
        "_initialized": True,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "_set_allocator_settings": configure,
        "_record_memory_history": lambda *_, **__: None,
        "_dump_snapshot": lambda *_, **__: None,
    }


def answer_for_cudnn(patches: Patches) -> None:
    """`torch.backends.cudnn.benchmark_limit`, which a build without CUDA does not have."""
    if not hasattr(torch._C, "_cuda_get_cudnn_benchmark_limit"):
        patches.set(torch._C, "_cuda_get_cudnn_benchmark_limit", lambda: 10)
        patches.set(torch._C, "_cuda_set_cudnn_benchmark_limit", lambda limit: None)


def leave_out_nccl(patches: Patches) -> None:
    """Let `torch.distributed` be a build without NCCL, which would ask for the driver; without the flag it is asked."""
    groups = _module("torch.distributed.distributed_c10d")
    if hasattr(groups, "_NCCL_AVAILABLE"):
        patches.set(groups, "_NCCL_AVAILABLE", False)
