"""`Lever`: a named change from one plan to another, with its tier, what it needs and what it costs to pull."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from hotloop.plan import Plan, Tier
from hotloop.text import shorten

Cost = Literal["nothing", "a moment", "a compilation", "a long compilation"]
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True)
class LeverTarget:
    """What levers are pulled on."""

    device: torch.device
    model: nn.Module
    optimizers: Sequence[Optimizer]
    pinned_precision: bool = False  # the person asked for this precision
    why_not_resident: str | None = None
    loader_pins: bool = False  # batches come in pinned memory already
    only: str | None = None  # why nothing but tier A may be pulled

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Lever:
    """One change of a plan. `tier` A leaves the numbers as they are, B changes their rounding, C the training."""

    name: str
    tier: Tier
    what: str
    cost: Cost
    undo: str
    pull: Callable[[Plan], Plan]
    obstacle: Callable[[LeverTarget, Plan], str | None]  # why it cannot be pulled here

    @property
    def page(self) -> str:
        """Its page in the documentation."""
        return f"levers/{self.name.replace(' ', '-')}.md"

    def why_not(self, scene: LeverTarget, plan: Plan) -> str | None:
        """Why it cannot be pulled on this scene; None where it can."""
        if self.pull(plan) == plan:
            return "it is pulled already"
        if self.tier == "C":
            return "it changes the training, so it is pulled only where the plan asks for it"
        if self.tier == "B" and scene.only:
            return scene.only
        return self.obstacle(scene, plan)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a deep model repeats: the items of a list or sequence that are of one class and not layers."""
    blocks: list[nn.Module] = []
    for holder in model.modules():
        if isinstance(holder, nn.ModuleList | nn.Sequential):
            inner = [child for child in holder if any(True for _ in child.children())]
            if len(inner) > 1 and len({type(child) for child in inner}) == 1:
                blocks += inner
    blocks = list(dict.fromkeys(blocks))
    held = {id(m) for block in blocks for m in block.modules() if m is not block}
    return [block for block in blocks if id(block) not in held]  # a block inside a block is recomputed with it


def products_in_fp32() -> str:
    """What PyTorch calls the precision of fp32 matrix products; "mixed" where its parts were set one by one."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


def _cuda(scene: LeverTarget, plan: Plan) -> str | None:
    return None if scene.on_cuda else f"it needs a CUDA device, and this is {scene.device.type}"


def _has_convolutions(scene: LeverTarget) -> bool:
    return any(isinstance(module, _CONVOLUTIONS) for module in scene.model.modules())


def _resident(scene: LeverTarget, plan: Plan) -> str | None:
    return scene.why_not_resident


def _prefetch(scene: LeverTarget, plan: Plan) -> str | None:
    if plan.stream == "resident":
        return "the data lives on the device"
    return _cuda(scene, plan)


def _pinned(scene: LeverTarget, plan: Plan) -> str | None:
    if scene.loader_pins:
        return "the loader pins its batches already"
    return _prefetch(scene, plan)


def _fused(scene: LeverTarget, plan: Plan) -> str | None:
    for optimizer in scene.optimizers:
        if all(group.get("fused") for group in optimizer.param_groups):
            return f"{type(optimizer).__name__} is fused already"
        if why := without_fused_kernel(optimizer):
            return why
    if scene.device.type not in ("cuda", "cpu", "mps", "xpu"):
        return f"there is no fused kernel for {scene.device.type}"
    return None


def without_fused_kernel(optimizer: Optimizer) -> str | None:
    """Why an optimizer cannot update all its weights in one kernel; None where it can."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if "fused" not in group:
            return f"{name} has no fused kernel"
        if group.get("differentiable"):
            return f"{name} is differentiable"
        if any(not p.is_floating_point() or p.is_sparse for p in group["params"]):
            return f"{name} holds weights that are not plain floating-point numbers"
    return None


def _tf32(scene: LeverTarget, plan: Plan) -> str | None:
    if why := _cuda(scene, plan):
        return why
    if scene.pinned_precision:
        return f"precision={plan.precision!r} was asked for"
    if torch.cuda.get_device_capability(scene.device) < (8, 0):
        return "the GPU has no TF32 arithmetic (it came with compute capability 8.0)"
    if products_in_fp32() != "highest":
        return "the precision of matrix products was set by hand"
    return None if plan.precision == "fp32" else f"the matrix products are in {plan.precision}"


def _bf16(scene: LeverTarget, plan: Plan) -> str | None:
    if scene.pinned_precision:
        return f"precision={plan.precision!r} was asked for"
    if scene.on_cuda:
        able = torch.cuda.get_device_capability(scene.device) >= (8, 0)
        return None if able else "the GPU has no bf16 arithmetic (it came with compute capability 8.0)"
    if scene.device.type == "cpu":
        return None if torch.cpu._is_amx_tile_supported() else "this CPU would emulate bf16 and be slower"
    return f"it is not tried on {scene.device.type}"


def _fp16(scene: LeverTarget, plan: Plan) -> str | None:
    if scene.pinned_precision:
        return f"precision={plan.precision!r} was asked for"
    if why := _cuda(scene, plan):
        return why
    if torch.cuda.get_device_capability(scene.device) >= (8, 0):
        return "the GPU has bf16, which is as fast and needs no scaler"
    return None if torch.cuda.get_device_capability(scene.device) >= (7, 0) else "the GPU has no fast fp16 arithmetic"


def _channels_last(scene: LeverTarget, plan: Plan) -> str | None:
    if not _has_convolutions(scene):
        return "the model has no two-dimensional convolution"
    weights = [p for m in scene.model.modules() if isinstance(m, _CONVOLUTIONS) for p in m.parameters() if p.dim() == 4]
    thick = [w for w in weights if w.shape[2:] != (1, 1) and w.shape[1] > 1]  # others have both layouts at once
    if thick and all(w.is_contiguous(memory_format=torch.channels_last) for w in thick):
        return "the model is in channels_last already"
    return None


def can_be_flipped(layer: nn.Module) -> bool:
    """Whether the gradient of a layer's input is a convolution of the same kind, with the weights turned round."""
    return (
        type(layer) is nn.Conv2d
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and all(pad < size for pad, size in zip(layer.padding, layer.kernel_size, strict=True))
    )


def _flipped(scene: LeverTarget, plan: Plan) -> str | None:
    if scene.device.type != "cpu":
        return f"it is for CPUs, and this is {scene.device.type}"
    if plan.precision != "fp32":
        return f"the convolutions are in {plan.precision}"
    if plan.compile != "off":
        return "the step is compiled"
    able = any(can_be_flipped(module) for module in scene.model.modules())
    return None if able else "the model has no two-dimensional convolution of stride 1"


def _cudnn(scene: LeverTarget, plan: Plan) -> str | None:
    if why := _cuda(scene, plan):
        return why
    if torch.backends.cudnn.benchmark:
        return "it is on already"
    return None if _has_convolutions(scene) else "the model has no two-dimensional convolution"


def _compile(scene: LeverTarget, plan: Plan) -> str | None:
    if scene.device.type not in ("cuda", "cpu"):
        return f"it is not tried on {scene.device.type}"
    return _hooks(scene, "a compiled step may leave out")


def _autotune(scene: LeverTarget, plan: Plan) -> str | None:
    if why := _cuda(scene, plan):
        return why
    return None if plan.compile == "default" else "the plain compilation was not kept"


def _graph(scene: LeverTarget, plan: Plan) -> str | None:
    if why := _cuda(scene, plan):
        return why
    if plan.precision == "fp16":
        return "the scaler of fp16 decides on the host whether to update"
    for optimizer in scene.optimizers:
        capturable = all("capturable" in group for group in optimizer.param_groups)
        if not capturable and type(optimizer) is not SGD:
            return f"{type(optimizer).__name__} cannot be recorded (it has no `capturable`)"
        if not capturable and (why := without_fused_kernel(optimizer)):
            return f"only its fused kernel can be recorded, and {why}"
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return f"{type(optimizer).__name__} has hooks, which a recording would leave out"
    return _hooks(scene, "a recording would leave out")


def _hooks(scene: LeverTarget, what: str) -> str | None:
    hooked = [
        name or type(module).__name__
        for name, module in scene.model.named_modules()
        if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))
    ]
    hooked += [n for n, p in scene.model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    return f"{shorten(hooked, 3)} has hooks, which {what}" if hooked else None


def _several(scene: LeverTarget, plan: Plan) -> str | None:
    if plan.graph < 1:
        return "the step is not captured"
    return None if plan.stream == "resident" else "the data does not live on the device"


def _checkpointing(scene: LeverTarget, plan: Plan) -> str | None:
    if not repeated_blocks(scene.model):
        return "the model repeats no block whose activations could be computed again"
    return "it saves memory and costs time, and the step fits without it"


def _never(scene: LeverTarget, plan: Plan) -> str | None:
    return None


def _with(**changes: Any) -> Callable[[Plan], Plan]:
    return partial(replace, **changes)


MOST_STEPS = 16  # in one CUDA graph

# In the order in which they are tried: first what makes the others measurable, last what costs most to pull.
LEVERS: tuple[Lever, ...] = (
    Lever(
        "resident", "A", "the data lives on the device", "a moment", "the loader is read again",
        _with(stream="resident"), _resident,
    ),
    Lever(
        "pinned memory", "A", "the loader's batches lie where the GPU can copy them by itself", "nothing",
        "the loader is read as it is", _with(pinned=True), _pinned,
    ),
    Lever(
        "prefetch", "A", "the next batches are copied while this one computes", "nothing",
        "batches are copied when their turn comes", _with(stream="prefetched"), _prefetch,
    ),
    Lever(
        "workers", "C", "processes load batches ahead; random augmentation then draws other numbers", "a moment",
        "the loader is read as it is", lambda plan: replace(plan, workers=plan.workers or 4), _never,
    ),
    Lever(
        "graph", "A", "the whole step is recorded once and replayed with one call", "a moment",
        "the recording is thrown away", lambda plan: replace(plan, graph=max(plan.graph, 1)), _graph,
    ),
    Lever(
        "several steps", "A", f"up to {MOST_STEPS} steps in one recording, inside `fit`", "a moment",
        "the recording is thrown away", lambda plan: replace(plan, graph=plan.graph if plan.graph > 1 else MOST_STEPS),
        _several,
    ),
    Lever(
        "bf16", "B", "the forward and backward pass compute in bfloat16 where that is safe", "nothing",
        "autocast is left off", _with(precision="bf16"), _bf16,
    ),
    Lever(
        "fp16", "B", "the same in float16, with a scaler", "nothing", "autocast is left off",
        _with(precision="fp16"), _fp16,
    ),
    Lever(
        "tf32", "B", "matrix products read 10 bits of mantissa instead of 23", "nothing",
        "the switch is set back after each step", _with(tf32=True), _tf32,
    ),
    Lever(
        "channels last", "B", "the channels of a pixel lie together", "a moment",
        "the weights are laid out as before",
        _with(channels_last=True), _channels_last,
    ),
    Lever(
        "cudnn benchmark", "B", "the fastest algorithm of each convolution is found by trying", "a moment",
        "the switch is set back after each step", _with(cudnn_benchmark=True), _cudnn,
    ),
    Lever(
        "flipped", "B", "gradients of convolutions are computed as convolutions with flipped weights", "nothing",
        "the layers compute as before", _with(flipped=True, compile="off"), _flipped,
    ),
    Lever(
        "fused", "B", "one kernel updates all weights", "nothing", "the optimizer's flag is set back",
        _with(fused=True), _fused,
    ),
    Lever(
        "compile", "B", "the forward and backward pass are fused into fewer kernels", "a compilation",
        "the compiled function is dropped",
        lambda plan: replace(plan, compile="default" if plan.compile == "off" else plan.compile, flipped=False),
        _compile,
    ),
    Lever(
        "max-autotune", "B", "a compilation that also tries kernels for the matrix products", "a long compilation",
        "the compiled function is dropped", _with(compile="max-autotune", flipped=False), _autotune,
    ),
    Lever(
        "checkpointing", "A", "activations are computed again instead of kept", "nothing", "the blocks are unwrapped",
        _with(checkpointing=True), _checkpointing,
    ),
)  # fmt: skip


COMPILE = next(lever for lever in LEVERS if lever.name == "compile")


def levers_of(plan: Plan) -> list[str]:
    """The names of the levers that a plan has pulled.

    >>> levers_of(Plan(device="cuda", precision="bf16", graph=1))
    ['graph', 'bf16']
    """
    return [lever.name for lever in LEVERS if lever.pull(plan) == plan]
