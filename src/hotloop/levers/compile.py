"""The forward and backward pass are compiled by `torch.compile`: of the whole objective, or of repeated blocks."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._torch import compiler_cache, inductor, mark_dynamic
from hotloop.device.backend import backend_of
from hotloop.errors import OutputError
from hotloop.levers.base import Delay, Lever, LeverTarget, Undo, replace_forward
from hotloop.levers.checkpointing import repeated_blocks
from hotloop.placement.moving import has_strides, known_shape
from hotloop.plan import Plan
from hotloop.records.cache import cache_folder, make_private
from hotloop.records.files import write_json
from hotloop.values import tree

IMPORTS, CACHED_SHARE = 5.0, 0.1  # seconds to load the compiler, and the share of a compilation that is not cached
MANY_BLOCKS = 3  # that a model repeats, from which on one of them is compiled and not the whole
Varying = frozenset[tuple[int, int]]  # the n-th tensor, and its dimension
_CODES: WeakKeyDictionary[type[nn.Module], Any] = WeakKeyDictionary()  # the compiled `forward` of each class of blocks


class CompileLever(Lever):
    """**What it does.** `torch.compile` turns the objective (the model with its loss) and its backward pass into fewer,
    larger kernels. Intermediate results are no longer written to memory and read again.

    **The numbers.** Tier B: fused kernels round in other places, and dropout draws other masks from the same seed.

    **Sizes that vary.** If the first batches differ in length, as sequences padded to the longest do, `fit` compiles
    once for all lengths. With a plan of your own, the first compilation is for the shape of the first batch, and a
    second one, for all lengths, follows when another length comes. The smaller last batch of an epoch runs eagerly.

    **What it needs.** A CUDA device or a CPU, with what the compiler needs there (Triton, a C++ compiler), no hooks on
    the model, and an objective that uses the model it is given.

    **What it costs.** A compilation, from seconds to minutes: hotloop expects 15 seconds and a third of one for each
    layer, or the time it took before if PyTorch has cached it. The training waits for it: `fit` compiles only if that
    is at most 3% of the rest of the run, and not in a run of unknown length. `loop.tune` compiles if that may pay back
    in the run it is told of.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", compile="default"))
    ```

    The model itself is never wrapped. If the compiler fails in a trial, hotloop drops the lever, gives its message and
    goes on eagerly.

    **When it does not help.** In short runs. If the step is one large matmul after another. If the model branches on
    its data.

    Measured by hand on an H200, on top of bf16: a small CNN from 386,000 to 572,000 images per second, ResNet-18 from
    53,000 to 67,300, a GPT of 124M parameters from 361,000 to 444,000 tokens per second.
    """

    name = "compile"
    order = 140
    tier = "B"
    what = "`torch.compile` fuses the forward and backward pass into fewer kernels"
    cost = "a compilation"
    undo = "the compiled function is dropped"
    is_alone = True
    computes_the_same = True

    def pull(self, plan: Plan) -> Plan:
        return replace(plan, compile="max-autotune" if plan.compile == "max-autotune" else "default")

    def off(self, plan: Plan) -> Plan:
        return plan if plan.compile == "blocks" else replace(plan, compile="off")

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        return _why_not_compiled(target)

    def refines(self, model: nn.Module) -> bool:
        return not _repeats_one_block(model)

    def delay(self, target: LeverTarget, plan: Plan, batch: Any, *, shapes_vary: bool) -> Delay | str:
        return _delay_by_compiling(target.model, self.pull(plan), batch)


class CompileBlocksLever(Lever):
    """**What it does.** [Compiles](compile.md) the blocks that a model repeats, such as those of a transformer: the
    forward and backward pass of one block is compiled once, and all blocks of its class run that code. Everything
    outside the blocks (embeddings, the loss) runs eagerly.

    **The numbers.** Tier B, as with `compile`.

    **What it needs.** What `compile` needs, and blocks that the model repeats: items of one class in a `ModuleList` or
    `Sequential`, each with layers inside.

    **What it costs.** One compilation of a block, however many there are: for a model of 24 blocks about a tenth of the
    time that `compile` takes. hotloop expects 15 seconds, and a third of one for each layer of the block.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", compile="blocks"))
    ```

    While the lever is applied, a copy or a pickle of the model has eager blocks, and its `state_dict` is the same.

    **When it does not help.** If the time goes into layers that are not repeated. If there are only two or three
    blocks: the whole model compiles nearly as fast. In evaluation, blocks run eagerly.
    """

    name = "compile blocks"
    order = 135
    tier = "B"
    what = "repeated blocks are compiled, once for all of them"
    cost = "a compilation"
    undo = "the blocks' `forward` is restored"
    is_alone = True
    computes_the_same = True
    sets = "compile", "blocks"

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        return _why_not_compiled(target) or (None if plan.compile == "off" else "the whole step is compiled")

    def refines(self, model: nn.Module) -> bool:
        return _repeats_one_block(model)

    def delay(self, target: LeverTarget, plan: Plan, batch: Any, *, shapes_vary: bool) -> Delay | str:
        return _delay_by_compiling(target.model, self.pull(plan), batch)

    def impossible(self, target: LeverTarget, plan: Plan) -> str | None:
        return None if repeated_blocks(target.model) else "the model repeats no block that could be compiled once"

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterator[Undo]:
        for block in repeated_blocks(model):
            if "forward" not in vars(block):  # else somebody has replaced it for a reason
                kind = type(block)
                if kind not in _CODES:
                    _CODES[kind] = torch.compile(kind.forward, backend=inductor(None))
                yield replace_forward(block, compiled_forward, block, _CODES[kind])


def compiled_forward(block: nn.Module, code: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a block while it is compiled; in evaluation it is eager."""
    if not block.training or not torch.is_grad_enabled():
        return type(block).forward(block, *args, **kwargs)
    return code(block, *args, **kwargs)


def form_of(value: Any, varying: Varying = frozenset()) -> Hashable:
    """What must be the same in two batches, or two calls of a block, for them to run the same compiled code.

    As far as it can be told quickly; Dynamo looks at the rest. Where the n-th tensor is of any size, it is left out.

    >>> form_of([torch.zeros(2, 3)], frozenset({(0, 1)})) == form_of([torch.zeros(2, 5)], frozenset({(0, 1)}))
    True
    """
    numbers = itertools.count()

    def form(leaf: Any) -> Hashable:
        if not isinstance(leaf, Tensor):
            is_word = leaf is None or isinstance(leaf, bool | int | float | str)
            return leaf if is_word else type(leaf).__qualname__
        number = next(numbers)
        if not has_strides(leaf):
            return known_shape(leaf), leaf.dtype, str(leaf.layout), leaf.requires_grad
        if any(number == known for known, _ in varying):
            shape = [-1 if (number, dim) in varying else size for dim, size in enumerate(leaf.shape)]
            return tuple(shape), leaf.dtype, leaf.is_contiguous(), leaf.requires_grad
        return leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad

    return tree.form_of(value, form)


def sizes_of(value: Any) -> Any:
    """What `form_of` a batch can be told from, without its numbers."""

    def size(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and has_strides(leaf):
            return torch.empty_like(leaf, device="meta").requires_grad_(leaf.requires_grad)
        return form_of(leaf)

    return tree.map_leaves(value, size)


def varying_between(first: Any, second: Any) -> Varying | None:
    """The dimensions in which the tensors of two batches differ; None where something else than a size differs.

    >>> sorted(varying_between([torch.zeros(2, 3), 1], [torch.zeros(2, 5), 1]) or ())
    [(0, 1)]
    """
    pairs = list(zip(tree.tensors_of(first), tree.tensors_of(second), strict=False))
    found = frozenset(
        (number, dim)
        for number, (a, b) in enumerate(pairs)
        if a.dim() == b.dim()
        for dim in range(a.dim())
        if a.size(dim) != b.size(dim)
    )
    return found if form_of(first, found) == form_of(second, found) else None


def mark_varying(value: Any, varying: Varying) -> None:
    """Let a compilation for these tensors hold for all sizes of what varies."""
    for number, tensor in enumerate(tree.tensors_of(value)):
        for dim in range(tensor.dim()):
            if (number, dim) in varying:
                mark_dynamic(tensor, dim)


def _why_not_compiled(target: LeverTarget) -> str | None:
    if not backend_of(target.device).compiles:
        return f"it is not tried on {target.device.type}"
    return target.why_hooks_are_lost("a compiled step")


class MaxAutotuneLever(Lever):
    """**What it does.** [Compiles](compile.md) with `mode="max-autotune-no-cudagraphs"`: for matmuls the compiler also
    tries its own kernels beside those of the libraries, and keeps the fastest. (hotloop captures CUDA graphs itself, of
    whole steps.)

    **The numbers.** Tier B, as with `compile`. The fastest kernel may differ from run to run.

    **What it needs.** A CUDA device, and `compile` kept before it. Only `loop.tune` and `hotloop tune` try it: `fit`
    and `batches` do not.

    **What it costs.** A long compilation: the tuner expects eight times that of `compile`, and a gain of 5% in speed.
    So it tries this lever only for long runs.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", compile="max-autotune"))
    ```

    **When it does not help.** If the kernels of the libraries are the best already, which is common for large matmuls.
    In most runs: it has to win back minutes.
    """

    name = "max-autotune"
    order = 150
    tier = "B"
    what = "the compiler also tries its own kernels for matmuls"
    cost = "a long compilation"
    undo = "the compiled function is dropped"
    computes_the_same = True
    needs_cuda = True
    sets = "compile", "max-autotune"

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        return None if plan.compile == "default" else "`compile` was not kept"


def _repeats_one_block(model: nn.Module) -> bool:
    """Whether most blocks of a model have one shape, so that one compilation serves them."""
    blocks = repeated_blocks(model)
    shapes = Counter((type(each), tuple(p.shape for p in each.parameters())) for each in blocks)
    return bool(shapes) and max(shapes.values()) >= max(MANY_BLOCKS, 0.75 * len(blocks))


def _delay_by_compiling(model: nn.Module, plan: Plan, batch: Any) -> Delay:
    key = key_of(model, batch, plan)
    return replace(expected_seconds(model, plan.compile, key), key=key)


def expected_seconds(model: nn.Module, mode: str, key: str | None = None) -> Delay:
    """The expected time of a compilation; `key`, of `key_of`, finds an earlier one on this machine."""
    if key is not None and (before := _remembered(key)) is not None:
        return Delay(
            "a compilation", before, "by the time that it took before on this machine, where PyTorch has cached it"
        )
    blocks = repeated_blocks(model)[:1] if mode == "blocks" else []
    layers = sum(not any(True for _ in m.children()) for root in blocks or [model] for m in root.modules())
    seconds = 15.0 + 0.35 * layers
    if mode == "max-autotune":
        return Delay("a compilation", 8 * seconds, "eight times that of the usual mode, as seen on an H200")
    what = "a block" if blocks else "the model"
    return Delay("a compilation", seconds, f"by the {layers} layers of {what}, as seen on an H200 with nothing cached")


def key_of(model: nn.Module, batch: Any, plan: Plan) -> str:
    """A key of what a compilation depends on: the model's class and weights, the batch, the plan."""
    weights = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    where = backend_of(plan.device).device_name()
    told = (torch.__version__, where, type(model).__qualname__, weights, str(form_of(batch)))
    settings = (plan.compile, plan.precision, plan.channels_last, plan.tf32)
    return hashlib.sha256(repr((told, settings)).encode()).hexdigest()[:32]


def _remembered(key: str) -> float | None:
    """Expected seconds of a compilation that PyTorch has cached; None where it has not."""
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):  # nobody may know where home is
        told = json.loads((cache_folder("compiled") / f"{key}.json").read_text())
        if any(Path(told["folder"]).iterdir()):
            return float(told["seconds"])
    return None


def remember_seconds(key: str, seconds: float) -> None:
    """Note how long a compilation took, which PyTorch has cached."""
    again = seconds if _remembered(key) is not None else min(seconds, IMPORTS + CACHED_SHARE * seconds)
    with suppress(OSError, OutputError, RuntimeError):  # without it, the next run takes it for a new one
        folder = cache_folder("compiled")
        make_private(folder)
        write_json(folder / f"{key}.json", {"seconds": again, "folder": compiler_cache()}, mode=0o600)
