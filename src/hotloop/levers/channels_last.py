"""Images and the weights of convolutions have the memory format `channels_last`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop import kernels
from hotloop._torch import storage_id
from hotloop.levers.base import Lever, LeverRule, LeverTarget, RunFacts
from hotloop.plan import Plan
from hotloop.values.snapshot import owned_tensors
from hotloop.values.tree import map_tensors

FEWEST = 8  # channels of a convolution that tensor cores take in this format
BY_CUDNN = 1.5  # seconds in which cuDNN compiles its kernels for one depthwise convolution, as seen on an H200
HELD_UP_SHARE = 0.03  # of the rest of a run, for which that may hold it up
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


class ChannelsLastLever(Lever):
    """**What it does.** Images usually lie in memory one channel after the other. Tensor cores want the channels of a
    pixel together; in that memory format a convolution need not rearrange its input and output. Values and shapes stay;
    only the strides change.

    **The numbers.** Tier B: PyTorch chooses other kernels, which add in another order. `nn.Dropout` on images draws its
    mask in the order of memory, so the same seed gives another mask; that of `nn.Dropout2d` is the same.

    **What it needs.** A two-dimensional convolution, on any device, and a model that works in this memory format: one
    that flattens activations by `.view` fails, and the tuner drops the lever and gives the reason (`.flatten` and
    `.reshape` work). Four-dimensional floating-point batches take the memory format of the weights. The tuner does not
    convert weights that share their memory, such as slices of one vector: a conversion would copy them out of it.

    **What it costs.** A moment to convert the weights, their gradients and the optimizer's state; then a copy of each
    batch that is in the other format.

    **By hand.** The plan converts the weights, the optimizer's state and the batches:

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", channels_last=True))
    ```

    Later, `model.to(memory_format=torch.contiguous_format)` restores the format.

    The tuner tries it once more after it has kept a compilation.

    **When it does not help.** If layers between the convolutions work in the other format, as PyTorch's `GroupNorm`
    does. Measured by hand on an H200, a sprite UNet in bf16 fell from 21,200 to 16,700 images per second with it, and
    rose to 40,600 once it was compiled too; with the lever [kernels](kernels.md) it helps there as well. On a 2-core
    CPU, measured by hand, it took a small CNN from about 440 to 880 images per second.
    """

    name = "channels last"
    order = 100
    tier = "B"
    what = "images and weights have the memory format channels_last"
    cost = "a moment"
    undo = "the memory format of the weights is restored"
    trust = 3
    sets = "channels_last", True
    rule = LeverRule(
        f"half of the convolutions or more have at least {FEWEST} channels on both sides, there is no InstanceNorm"
        " between them and no GroupNorm that hotloop's kernels do not know, and no depthwise convolution for which"
        " cuDNN would compile kernels, unless the run is long",
        lambda facts: _suits(facts.target.model) and not _is_held_up(facts) and not _waits_for_cudnn(facts),
        "H200 in bf16: a step of ResNet-18 at 32² took 5.0 ms instead of 13.7, of DCGAN 3.0 instead of 4.5, of a UNet"
        " with PyTorch's GroupNorm 45.5 instead of 39.0",
    )

    def in_words(self, plan: Plan) -> str:
        return "channels_last"

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        layers = convolutions_of(target.model)
        if not layers:
            return "the model has no two-dimensional convolution"
        if target.stays_in_place is not None:
            return target.stays_in_place
        weights = [parameter for layer in layers for parameter in layer.parameters() if parameter.dim() == 4]
        telling = [w for w in weights if w.shape[2:] != (1, 1) and w.shape[1] > 1]  # others have both formats at once
        if telling and all(w.is_contiguous(memory_format=torch.channels_last) for w in telling):
            return "the model is in channels_last already"
        if target.on_cuda and plan.precision == "fp32" and any(map(_is_by_channel, layers)):
            return "in fp32 cuDNN would compile kernels for each depthwise convolution, for seconds"
        if (name := _shared(target.model)) is not None:
            return f"{name} lies in memory that others read or write too, and would leave it"
        return None

    def inputs(self, batch: Any, plan: Plan) -> Any:
        return map_tensors(batch, _converted)


def to_memory_format(
    modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], memory_format: torch.memory_format
) -> None:
    """Give four-dimensional weights, buffers, gradients and optimizer state a memory format."""

    def converted(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=memory_format) if tensor.dim() == 4 else tensor

    for tensor in owned_tensors(modules, optimizers):
        tensor.data = converted(tensor.data)
        if tensor.is_leaf and tensor.grad is not None:
            tensor.grad = converted(tensor.grad)
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            optimizer.state[parameter] = map_tensors(state, converted)


def _shared(model: nn.Module) -> str | None:
    """A tensor that would be copied and is not alone in its memory: with other tensors, or with other processes."""
    every = (*model.named_parameters(), *model.named_buffers())
    named = {n: t for n, t in every if t.layout == torch.strided and not is_lazy(t) and not hasattr(t, "to_local")}
    held = Counter(storage_id(tensor.untyped_storage()) for tensor in named.values())
    for name, tensor in named.items():
        if tensor.dim() == 4 and not tensor.is_contiguous(memory_format=torch.channels_last):
            storage = tensor.untyped_storage()
            is_slice = storage.nbytes() > tensor.numel() * tensor.element_size()
            if is_slice or held[storage_id(storage)] > 1 or (tensor.is_cpu and tensor.is_shared()):
                return name
    return None


def _is_held_up(facts: RunFacts) -> bool:
    """Whether layers want the channels apart, so that activations would be copied to and fro."""
    target = facts.target
    layers = {each for each in target.model.modules() if isinstance(each, nn.GroupNorm | nn.InstanceNorm2d)}
    has_kernels = facts.is_heavy and not kernels.nvrtc.why_no_kernels(target.device)
    return bool(layers.difference(kernels.layers.layers_to_fuse(target.model)) if has_kernels else layers)


def _waits_for_cudnn(facts: RunFacts) -> bool:
    """Whether the run is too short for what cuDNN compiles for depthwise convolutions."""
    target = facts.target
    layers = [each for each in convolutions_of(target.model) if _is_by_channel(each)]
    if facts.is_heavy and not kernels.nvrtc.why_no_kernels(target.device):
        layers = [each for each in layers if not kernels.depthwise.is_depthwise(each)]
    kinds = {(each.in_channels, each.kernel_size, each.stride, each.dilation) for each in layers}
    return target.on_cuda and facts.left is not None and BY_CUDNN * len(kinds) > HELD_UP_SHARE * facts.left


def _is_by_channel(layer: nn.Module) -> "TypeGuard[nn.Conv2d]":
    return isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1


def _suits(model: nn.Module) -> bool:
    layers = [each for each in convolutions_of(model) if isinstance(each, nn.Conv2d | nn.ConvTranspose2d)]
    return 2 * sum(min(each.in_channels, each.out_channels) >= FEWEST for each in layers) >= len(layers)


def convolutions_of(model: nn.Module) -> list[nn.Module]:
    """The two-dimensional convolutions of a model."""
    return [module for module in model.modules() if isinstance(module, _CONVOLUTIONS)]


def _converted(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
