"""What must be the same on all ranks: script, model and settings at the start, the weights while they train."""

import hashlib
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop.levers.flags import FLAGS
from hotloop.plan import Plan
from hotloop.printing.text import printable, shorten
from hotloop.ranks.group import Ranks, RanksDiffer
from hotloop.run.checks import is_real
from hotloop.version import __version__

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_PLAIN = (bool, int, float, str, type(None))


def facts_of_run(model: nn.Module, plan: Plan, optimizers: Iterable[Optimizer], goals: Iterable[Any]) -> dict[str, Any]:
    """Facts that must be the same on all ranks, by the names that a person knows; `goals` are losses and objectives."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    source = script.read_bytes() if script is not None and script.is_file() else b""
    shapes = [f"{name} {_shape(tensor)}" for name, tensor in [*model.named_parameters(), *model.named_buffers()]]
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]
    goals = [goal for goal in goals if goal is not None]
    return {
        "version of hotloop": __version__,
        "version of PyTorch": str(torch.__version__),
        "script": hashlib.sha256(source).hexdigest()[:12],
        "model": f"{type(model).__name__} with {len(shapes)} tensors ({digest})",
        "plan": str(plan.to_json()),
        "loss": ", ".join(map(_name_of, goals)),
        **_settings_of_layers([model, *(goal for goal in goals if isinstance(goal, nn.Module))]),
        **_settings_of_optimizers(list(optimizers)),
    }


def _shape(tensor: Tensor) -> str:
    return "lazy" if is_lazy(tensor) else f"{tuple(tensor.shape)} {tensor.dtype}"


def _name_of(goal: Any) -> str:
    while isinstance(goal, partial):
        goal = goal.func
    code = getattr(goal, "__code__", None)
    if code is None:
        return type(goal).__name__
    return f"{goal.__qualname__} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _settings_of_layers(modules: Iterable[nn.Module]) -> dict[str, str]:
    """The numbers and words of PyTorch's own layers, as the rate of a dropout: those of each kind together."""
    found: dict[str, Counter[str]] = {}
    for layer in (inner for module in modules for inner in module.modules()):
        if type(layer).__module__.startswith("torch.nn."):
            kept = {k: v for k, v in vars(layer).items() if type(v) in _PLAIN and k[0] != "_" and k != "training"}
            words = ", ".join(f"{key}={value}" for key, value in sorted(kept.items()))
            found.setdefault(type(layer).__name__, Counter())[words] += 1
    return {
        f"setting of {kind} layers": "; ".join(f"{number} with {words}" for words, number in sorted(several.items()))
        for kind, several in found.items()
    }


def _settings_of_optimizers(optimizers: list[Optimizer]) -> dict[str, str]:
    found = {"optimizer": ", ".join(f"{type(each).__name__} of {len(each.param_groups)}" for each in optimizers)}
    for number, optimizer in enumerate(optimizers, 1):
        which = type(optimizer).__name__ + (f" {number}" if len(optimizers) > 1 else "")
        for n, group in enumerate(optimizer.param_groups):
            where = f"{which}, group {n}" if len(optimizer.param_groups) > 1 else which
            settings = {key: _plain(group[key]) for key in optimizer.defaults.keys() & group.keys() - set(FLAGS)}
            found |= {f"{key} of {where}": str(settings[key]) for key in sorted(settings)}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if is_real(value):
        return float(value)
    return value if type(value) in _PLAIN else type(value).__name__


def checksum(weights: Iterable[Tensor]) -> float:
    """A number that is another one, but for chance, where any bit of the weights is; synchronizes."""
    sums = [_bits(each).sum(dtype=torch.int64) for each in weights if _is_whole(each)]
    if not sums:
        return 0.0
    digest = hashlib.blake2b(repr(torch.stack([each.to(sums[0].device) for each in sums]).tolist()).encode())
    return float(int.from_bytes(digest.digest()[:6], "big"))  # which float64 holds exactly


def how_apart(ranks: Ranks, weights: Mapping[str, Tensor], checksums: list[float]) -> str | None:
    """Raise where weights of ranks are apart by more than rounding; words where it is no more. All ranks call it."""
    ((common, _),) = Counter(checksums).most_common(1)
    odd = [rank for rank, each in enumerate(checksums) if each != common]
    others = [rank for rank, each in enumerate(checksums) if each == common]
    if not odd:
        return None
    apart, name = 0.0, "nothing that can be compared"
    mine = {key: _values(weight) for key, weight in weights.items() if _is_whole(weight) and weight.numel()}
    least = 1e-3 * max(map(_size, mine.values()), default=0.0)  # of a weight: less may be noise alone
    for key, values in mine.items():
        theirs = ranks.from_rank(values, others[0])
        worst = float((values - theirs).abs().max()) / max(_size(theirs), least, torch.finfo(values.dtype).tiny)
        share = worst / torch.finfo(weights[key].dtype).eps ** 0.5  # over 1: more than rounding
        if not share <= apart:
            apart, name = (math.inf if math.isnan(share) else share), f"{key}, by {worst:.2g} of its size"
    told = ranks.gather([ranks.host, apart, name])
    host, apart, name = max((told[rank] for rank in odd), key=lambda each: (not each[1] <= 1, each[1]))
    what = (
        f"{_named(odd)} on {printable(host)} {'have' if len(odd) > 1 else 'has'} other weights than {_named(others)}:"
        f" {printable(name)}"
    )
    if apart == 0:  # two zeros
        return None
    if apart <= 1:
        return f"{what}, as rounding on different hardware or without deterministic algorithms makes it"
    raise RanksDiffer(
        f"{what}. Their training is not that of one model any more",
        fix="look for code that only some ranks run, or run otherwise: a write to a weight, a learning rate that a hook"
        " sets, a condition on the rank; then resume from the last checkpoint, where all had the same",
    )


def _named(ranks: list[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shorten(list(map(str, ranks)), 8)}"


def _is_whole(weight: Tensor) -> bool:
    """Whether it is a tensor of floats; not a shard, of which each rank has its own."""
    is_number = weight.is_floating_point() or weight.is_complex()
    return is_number and type(weight.detach()) is Tensor and weight.layout == torch.strided and not weight.is_meta


def _values(weight: Tensor) -> Tensor:
    """On the host, in a dtype that ranks can send."""
    plain = torch.view_as_real(weight.detach()) if weight.is_complex() else weight.detach()
    return plain.to("cpu", torch.float64 if plain.dtype == torch.float64 else torch.float32).contiguous()


def _size(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _bits(weight: Tensor) -> Tensor:
    """Its bytes as integers, eight together where that is possible: their sum takes a tenth of the time."""
    plain = torch.view_as_real(weight.detach()) if weight.is_complex() else weight.detach()
    flat = plain.contiguous().view(-1)
    size = flat.element_size()
    is_aligned = (flat.numel() * size) % 8 == 0 and (flat.storage_offset() * size) % 8 == 0
    return flat.view(torch.int64 if is_aligned else _BITS[size])
