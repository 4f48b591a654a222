"""`torch.cuda.FloatTensor` and its like, which a build without CUDA does not have."""

from typing import Any

import torch
from torch import Tensor

from hotloop.simulate.patches import Patches

_NAMES = ("Float", "Double", "Half", "BFloat16", "Bool", "Byte", "Char", "Short", "Int", "Long")
_DTYPES = {f"{name}Tensor": getattr(torch, f"{name}Tensor").dtype for name in _NAMES}


class CudaType(type):
    """The type of such types: a call makes a tensor, `isinstance` asks for its device and numbers."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> Any:
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.as_tensor(args[0], dtype=cls.dtype, device="cuda")
        return torch.empty(*(args or (0,)), dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype == cls.dtype


def install(patches: Patches) -> None:
    """Put them in place, also where they are named to be converted to or to be the default."""
    types = {name: CudaType(name, (), {"dtype": dtype}) for name, dtype in _DTYPES.items()}
    for name, kind in types.items():
        patches.set(torch.cuda, name, kind)
    convert, set_default = Tensor.type, torch.set_default_tensor_type

    def found(kind: Any) -> CudaType | None:
        return kind if isinstance(kind, CudaType) else types.get(str(kind).removeprefix("torch.cuda."))

    def converted(tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        kind = found(dtype)
        return convert(tensor, dtype, *args, **kwargs) if kind is None else tensor.to("cuda", kind.dtype)

    def made_default(kind: Any) -> None:
        wanted = found(kind)
        torch.set_default_device(None if wanted is None else "cuda")
        if wanted is None:
            set_default(kind)
        else:
            torch.set_default_dtype(wanted.dtype)

    patches.set(Tensor, "type", converted)
    patches.set(torch, "set_default_tensor_type", made_default)
