"""Operations between host and device, and those whose result's shape depends on values: both make the host wait."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotloop.apps.simulate._torch import is_fake, is_simulated
from hotloop.apps.simulate.families import recurrent
from hotloop.apps.simulate.operations import facts, named
from hotloop.placement.sites import user_site
from hotloop.values.tree import map_tensors

if TYPE_CHECKING:
    from hotloop.apps.simulate.dispatch import SimulatedGpu

TO_DEVICE, TO_HOST = "to the device", "to the host"
Handler = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


class Crossings:
    """Handlers of single operations; one that answers NotImplemented leaves it to the ordinary way."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self._gpu = gpu
        self._handlers: dict[str, Handler] = {
            "_to_copy": self._to_copy,
            "copy_": self._copy,
            "_foreach_copy_": self._foreach_copy,
            "_local_scalar_dense": self._scalar,
            "equal": self._equal,
            "allclose": self._equal,
            "is_pinned": lambda *_: False,
            "_pin_memory": self._pin,
            "record_stream": lambda *_: None,
            "nonzero": self._nonzero,
            "masked_select": self._masked_select,
            "index": self._index,
            "_unique2": self._unique,
            "_unique": self._unique,
            "unique_consecutive": self._unique,
            "unique_dim": self._unique,
            "bincount": self._bincount,
            "repeat_interleave": self._repeat_interleave,
            "_pack_padded_sequence": self._pack,
            "_use_cudnn_ctc_loss": lambda *_: False,
            "_use_miopen_ctc_loss": lambda *_: False,
            "_cudnn_rnn": self._recurrent,
            "_cudnn_rnn_backward": self._recurrent_backward,
        }

    def of(self, name: str) -> Handler | None:
        """The handler of an operation that needs one."""
        return self._handlers.get(name)

    def copied(self, size: int, direction: str, *, pinned: bool, blocking: bool) -> None:
        """Tell a copy, unless it is one of ours."""
        if not self._gpu.silent:
            if blocking:
                self._gpu.synchronizes()
            self._gpu.teller.copied(size, direction, pinned=pinned, blocking=blocking, place=user_site())

    def waited(self, kind: str) -> None:
        """Tell that the host waits."""
        if not self._gpu.silent:
            self._gpu.synchronizes()
            self._gpu.teller.waited(kind, user_site())

    def _to_copy(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, device = args[0], kwargs.get("device")
        goes = torch.device(device).type if device is not None else ("cuda" if is_simulated(source) else "cpu")
        if is_simulated(source) == (goes == "cuda"):
            return NotImplemented
        blocking = not kwargs.get("non_blocking", False)
        if goes == "cuda":
            return self._to_device(func, types, source, kwargs, blocking=blocking)
        result = self._gpu.values.tensor(source)
        if kwargs.get("pin_memory"):
            result = result.pin_memory()
        self.copied(_bytes(source), TO_HOST, pinned=bool(kwargs.get("pin_memory")), blocking=blocking)
        self._gpu.findings.origins.moved(result)
        wanted = kwargs.get("dtype")
        return result if wanted is None else result.to(wanted)

    def _to_device(self, func: Any, types: Any, source: Tensor, kwargs: dict[str, Any], *, blocking: bool) -> Tensor:
        gpu = self._gpu
        with gpu.fake:
            result: Tensor = func(gpu.stand_in(source, "cpu"), **kwargs)
        size = _bytes(result) if blocking else _bytes(source)  # blocking copies are converted on the host
        self.copied(size, TO_DEVICE, pinned=source.is_pinned(), blocking=blocking)
        gpu.storages.born(result, "input")
        gpu.known.arrived(result, source)
        return result

    def _copy(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, source = args[:2]
        if is_simulated(target) == is_simulated(source):
            return NotImplemented
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if is_simulated(target):
            self.copied(_bytes(target if waits else source), TO_DEVICE, pinned=source.is_pinned(), blocking=waits)
            self._gpu.known.arrived(target, source)
            return target
        self.copied(_bytes(source), TO_HOST, pinned=target.is_pinned(), blocking=waits)
        return target.copy_(self._gpu.values.tensor(source))

    def _foreach_copy(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if all(map(is_simulated, [*args[0], *args[1]])):
            return NotImplemented
        for target, source in zip(args[0], args[1], strict=True):
            if not (is_simulated(target) or is_simulated(source)):
                target.copy_(source)
            elif self._copy(func, types, (target, source), kwargs) is NotImplemented:
                self._gpu.compute(torch.ops.aten.copy_.default, types, (target, source), kwargs)
        return None

    def _scalar(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.waited("item")
        return self._gpu.values.number(args[0], user_site())

    def _equal(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not all(map(is_simulated, args[:2])):
            return NotImplemented
        self.waited(facts(func).name)
        known = [self._gpu.known.values(each) for each in args[:2]]
        same = args[0].size() == args[1].size()
        return func(*known, *args[2:], **kwargs) if same and all(k is not None for k in known) else same

    def _pin(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def _nonzero(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.waited("nonzero")
        return self._made(func, args, kwargs, (self._chosen(args[0]), args[0].dim()), torch.int64)

    def _masked_select(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not all(map(is_simulated, args[:2])):
            return NotImplemented
        self.waited("masked_select")
        mask = args[1].expand(torch.broadcast_shapes(args[0].size(), args[1].size()))
        return self._made(func, args, kwargs, (self._chosen(mask),), args[0].dtype)

    def _index(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Masks become indices, as PyTorch does it; indices on the host are copied to the device first."""
        source, indices = args
        if not is_simulated(source):
            return NotImplemented if all(i is None or not is_simulated(i) for i in indices) else self._on_host(args)
        ready: list[Any] = []
        for index in indices:
            if index is None:
                ready.append(None)
            elif index.dtype in (torch.bool, torch.uint8):
                ready += self._positions(index)
            else:
                ready.append(index if is_simulated(index) else self._brought(index))
        return self._gpu.compute(func, types, (source, ready), kwargs, given=args)

    def _positions(self, mask: Tensor) -> list[Tensor]:
        if is_simulated(mask):
            self.waited("mask indexing")
            count = self._chosen(mask)
            with self._gpu.fake:
                return [torch.empty(count, dtype=torch.int64, device=mask.device) for _ in range(mask.dim())]
        return [self._brought(index) for index in mask.nonzero(as_tuple=True)]

    def _brought(self, index: Tensor) -> Tensor:
        if index.dim():
            self.copied(_bytes(index), TO_DEVICE, pinned=index.is_pinned(), blocking=True)
        return self._gpu.stand_in(index)

    def _on_host(self, args: tuple[Any, ...]) -> Any:
        """Memory of the host cannot be indexed from the device: said, and gone on with indices on the host."""
        source, indices = args
        gpu = self._gpu
        operands = [("self", source), *(("indices", i) for i in indices if i is not None)]
        gpu.findings.mixed("indexing", operands, [("self", source)])
        values = [gpu.values.tensor(i) if i is not None and is_simulated(i) else i for i in indices]
        return torch.ops.aten.index.Tensor(source, values)

    def _unique(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.waited("unique")
        return self._like_host(func, args, kwargs, func(self._gpu.values.tensor(args[0]), *args[1:], **kwargs))

    def _bincount(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.waited("bincount")
        values = [self._gpu.values.tensor(a) if is_fake(a) else a for a in args]
        return self._like_host(func, args, kwargs, func(*values, **kwargs))

    def _repeat_interleave(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("output_size") is not None:
            return self._made(func, args, kwargs, (kwargs["output_size"],), args[0].dtype)
        self.waited("repeat_interleave")
        known = self._gpu.known.values(args[0])
        count = int(known.sum()) if known is not None else args[0].numel()
        return self._made(func, args, kwargs, (count,), args[0].dtype)

    def _pack(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """How long the packed sequence is follows from the lengths, which are on the host and real."""
        source, lengths, *rest = args
        if is_simulated(lengths):
            gpu = self._gpu
            gpu.findings.needs_host("pack_padded_sequence", "lengths", lengths)
            known, longest = gpu.known.values(lengths), source.size(1 if rest and rest[0] else 0)
            lengths = known if known is not None else torch.full(lengths.size(), longest, device="cpu")
        thin = torch.zeros(*source.size()[:2], 1, device="cpu")
        packed, batch_sizes = func(thin, lengths, *rest, **kwargs)
        return self._made(func, args, kwargs, (packed.size(0), *source.size()[2:]), source.dtype), batch_sizes

    def _recurrent(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._gpu.check(func, args, kwargs)
        with self._gpu.fake:
            result = recurrent.results(*args)
        told = [t for t in result[:4] if t.numel() or t is result[3]]  # the reserve is empty here, and yet it is there
        self._happened(func, args, kwargs, told)
        return result

    def _recurrent_backward(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = dict(named(func, args, kwargs))["batch_first"]
        with self._gpu.fake:
            source, states, weights = recurrent.gradients(args, batch_first=first)
        result = (source, *(t if t is not None else self._gpu.stand_in(args[0][:0]) for t in states), weights)
        self._happened(func, args, kwargs, result)
        return result

    def _like_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Tensors of the device, like those that the host gave."""
        made = map_tensors(result, self._gpu.stand_in)
        self._happened(func, args, kwargs, made)
        return made

    def _made(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        with self._gpu.fake:
            result = torch.empty(sizes, dtype=dtype, device="cuda:0")
        self._happened(func, args, kwargs, result)
        return result

    def _happened(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._gpu.happened(facts(func), func, args, kwargs, result)
        self._gpu.known.happened(func, args, kwargs, result)

    def _chosen(self, mask: Tensor) -> int:
        """How many elements are not zero."""
        known = self._gpu.known.values(mask)
        return int(known.count_nonzero()) if known is not None else self._guess(mask.numel())

    def _guess(self, most: int) -> int:
        """How many of so many are chosen, where only values could tell: half."""
        place = user_site()
        if place is not None and not self._gpu.silent:
            self._gpu.findings.guessed.add(place)
        return (most + 1) // 2


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
