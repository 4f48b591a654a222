"""Shape and dtype errors of a batch: which layer or loss raised, what it was given, what it expects."""

import dis
import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hotloop.errors import BadArgument, BatchError, DeviceMismatch, HotloopError
from hotloop.memory.oom import is_out_of_memory
from hotloop.objective.objectives import criterion_line, own_loss
from hotloop.placement.moving import shape_of
from hotloop.placement.sites import variables
from hotloop.printing.text import plural
from hotloop.values.tree import tensors_in

T = TypeVar("T")
_TORCH = str(Path(torch.__file__).parent) + os.sep  # torchmetrics and torchvision are others
# What layers call the size that their input must have, and which size that is.
_EXPECTATIONS = (
    ("in_features", "the last size"),
    ("in_channels", "the size of dimension 1 (channels)"),
    ("num_features", "the size of dimension 1 (features)"),
    ("num_channels", "the size of dimension 1 (channels)"),
    ("input_size", "the last size"),
    ("embed_dim", "the last size"),
    ("normalized_shape", "the last sizes"),
)


# Losses whose target is the number of a class, as their modules and functions are named.
_OF_CLASSES = ("crossentropy", "nll", "multimargin")
# What PyTorch raises for a wrong shape or dtype; the last, where a dict was taken for a tensor.
TORCH_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AttributeError)


def attempt(call: Callable[[], T], model: nn.Module, batch: Any, where: str) -> T:
    """`call()`, a forward pass of `batch`, which `where` names; errors of PyTorch are explained."""
    try:
        return call()
    except TORCH_ERRORS as error:
        better = explanation(error, model, batch, where, call)
        if better is None:
            raise
        raise better from error


def explanation(
    error: Exception, model: nn.Module, batch: Any, where: str, again: Callable[[], object]
) -> HotloopError | None:
    """The error to raise in place of PyTorch's, or None where that is not about the batch.

    `again` repeats the forward pass: where devices were mixed it runs once more, under the golden rule.
    """
    if isinstance(error, HotloopError) or is_out_of_memory(error):
        return None
    if isinstance(error, torch.AcceleratorError):
        return _assert_on_device(error, where)
    stack = [frame for frame, _ in walk_tb(error.__traceback__)]
    if isinstance(error, TypeError | AttributeError) and (better := _without_loss(error, model, stack, where)):
        return better
    if isinstance(error, AttributeError) and not isinstance(error.obj, list | tuple):
        return _about_inputs_together(error, batch, where)
    if not stack or _raised_by_hand(error.__traceback__):
        return None
    if "device" in str(error):  # torch has no type for it; run once more under the rule, which names the tensors
        from hotloop.placement.golden import golden_rule

        with suppress(Exception), golden_rule(model):
            try:
                again()
            except DeviceMismatch as mismatch:
                return mismatch
    if "does not require grad and does not have a grad_fn" in str(error) and _is_ours(stack):
        return _without_gradient(model, where)
    if "backward through the graph a second time" in str(error) and _is_ours(stack):
        return BadArgument(
            f"the graph of the loss of {where} was freed: the objective calls backward itself, or uses a tensor"
            " of an earlier step, such as the state of an RNN",
            fix="return the loss without calling backward, and detach tensors kept for later steps: h = h.detach()",
        )
    owner = _miscall(error, model, stack[-1]) or _owner(model, stack, str(error))
    if owner is None:
        return None
    what, fix = owner
    shapes = "; ".join(f"{name} {shape_of(t)}" for name, t in tensors_in(batch))
    return BatchError(f"{where} cannot be used: {what}\n  the batch: {shapes}\n  torch says: {error}", fix=fix)


def _without_loss(
    error: TypeError | AttributeError, model: nn.Module, stack: list[FrameType], where: str
) -> HotloopError | None:
    """Neither a loss nor an objective was given, and the model took a whole `(input, target)` for its input."""
    batch = next((variables(frame)["batch"] for frame in stack if frame.f_code is own_loss.__code__), None)
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        return None
    taken = [error.obj] if isinstance(error, AttributeError) else variables(stack[-1]).values()
    if not any(each is batch for each in taken):
        return None
    of_classes = isinstance(batch[-1], Tensor) and not batch[-1].is_floating_point()
    return BatchError(
        f"{where} cannot be used: loss= was not given, so {type(model).__name__} was called with the whole batch,"
        f" {plural(len(batch), 'value')} as one argument, and is to return its loss",
        fix=f"give the criterion: Loop(model, optimizer, loss=nn.{'CrossEntropyLoss' if of_classes else 'MSELoss'}()),"
        " or another one; objective=lambda model, batch: … says anything else",
    )


def _about_inputs_together(error: AttributeError, batch: Any, where: str) -> HotloopError | None:
    """A dict of inputs in `(inputs, target)`, given to a model that takes them one by one."""
    inputs = batch[0] if isinstance(batch, list | tuple) and len(batch) == 2 else None
    if not isinstance(inputs, Mapping) or error.obj is not inputs:
        return None
    kind = type(inputs).__name__
    return BatchError(
        f"{where} cannot be used: the model was given the {kind} of its inputs as one argument, and took it for a"
        f" tensor\n  the {kind} has: {', '.join(map(str, inputs))}",
        fix="say how it is called, in place of loss=: Loop(…, objective=lambda model, batch: loss(model(**batch[0]),"
        " batch[1])), with .logits of Hugging Face models",
    )


def _raised_by_hand(trace: TracebackType | None) -> bool:
    """Whether the person's own code raised the error, which then stays as it is."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename.startswith(_TORCH):
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _miscall(error: Exception, model: nn.Module, frame: FrameType) -> tuple[str, str] | None:
    """A module called with too few or too many inputs, and the fix; None where the call was not what failed."""
    named = variables(frame)
    module, args, options = (named.get(name) for name in ("self", "args", "kwargs"))
    if not isinstance(error, TypeError) or not isinstance(module, nn.Module) or not isinstance(args, tuple):
        return None
    takes = inspect.signature(module.forward)
    try:
        takes.bind(*args, **(options or {}))
    except TypeError:
        pass
    else:
        return None
    path = next((path for path, inner in model.named_modules() if inner is module), None)
    label = "the loss" if path is None else f"layer {path}" if path else "the model"
    fix = "call it with these in its model's forward"
    if path is None:
        fix = "say how it is called: Loop(…, objective=lambda model, batch: loss(…)) in place of loss="
    elif not path:
        call = _call(list(takes.parameters), args, options or {})
        fix = f"say how it is called, in place of loss=: Loop(…, objective=lambda model, batch: … {call} …)"
    wanted = ", ".join(takes.parameters)
    given = ", ".join([*([plural(len(args), "input")] if args or not options else []), *(options or {})])
    return f"{label}, {type(module).__name__}, takes ({wanted}) and was given {given}", fix


def _call(wanted: list[str], args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """How to call a model with these parameters on the batch, as code."""
    if options:
        return f"model({', '.join(f'{name}=batch[{name!r}]' for name in wanted if name in options)})"
    if len(args) == 1 and isinstance(args[0], Mapping | list | tuple):  # the inputs lie together: batch[0]
        return "model(**batch[0])" if isinstance(args[0], Mapping) else "model(*batch[0])"
    if len(wanted) < len(args):
        return f"model({', '.join(f'batch[{n}]' for n in range(len(wanted)))})"
    return "model(*batch)"


def _owner(model: nn.Module, stack: list[FrameType], said: str) -> tuple[str, str] | None:
    """The innermost layer or loss on the stack and its inputs, in words, and the fix."""
    paths = {module: path for path, module in model.named_modules()}
    for frame in reversed(stack):
        module = variables(frame).get("self")
        if isinstance(module, nn.Module) and module in paths and module is not model:
            return _about_layer(module, paths[module], frame, said)
        if isinstance(module, nn.Module) and module is not model and not type(module).__module__.startswith("hotloop."):
            return _about_loss(
                module, frame, by_hotloop=_is_ours(stack)
            )  # what hotloop wraps around one, with metrics, is none
        if frame.f_code.co_filename.startswith(_TORCH) and "target" in variables(frame):
            return _about_loss(frame.f_code.co_name, frame, by_hotloop=_is_ours(stack))
    inside = next((f for f in reversed(stack) if variables(f).get("self") is model), None)
    return _about_layer(model, "", inside, said) if inside else None


def _about_layer(module: nn.Module, path: str, frame: FrameType, said: str) -> tuple[str, str]:
    turned = _turned(module, frame)
    arrays = [name for name, value in variables(frame).items() if isinstance(value, np.ndarray)]
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    inputs = {name: t for name, t in _tensors(frame) if id(t) not in own}
    given = " and ".join(f"{name} {shape_of(t)}" for name, t in inputs.items()) or "these inputs"
    kind = type(module).__name__
    label = f"layer {path}, {kind}({module.extra_repr()})," if path else f"the model, {kind},"
    if arrays and not inputs:
        return f"{label} was given a NumPy array", "convert it: torch.from_numpy(x), in the dataset or in collate_fn"
    if "Expected more than 1 value per channel" in said:
        return (
            f"{label} was given {given}; batch normalisation needs more than one item in training mode",
            "leave out the last batch, which has one item: DataLoader(…, drop_last=True)",
        )
    dtype = next((p.dtype for p in module.parameters(recurse=False)), None)
    takes_numbers = isinstance(module, nn.Embedding | nn.EmbeddingBag)  # and looks up what is under them
    if dtype and any(t.dtype != dtype and not (takes_numbers and not t.is_floating_point()) for t in inputs.values()):
        short = str(dtype).removeprefix("torch.")
        fix = f"convert the input: x = x.to(torch.{short})"
        if any(t.dtype == torch.uint8 for t in inputs.values()):
            fix = f"convert the images: x = x{turned}.float() / 255, in the dataset or in fit(…, device_transform=…)"
        return f"{label} was given {given}; its weights are {short}", fix
    for attribute, which in _EXPECTATIONS:
        wanted = getattr(module, attribute, None)
        if wanted is not None and turned:
            what = f"{label} was given {given}, whose channels come last; {which} must be {wanted}"
            return what, f"put the channels first: x = x{turned}, in the dataset or in fit(…, device_transform=…)"
        if wanted is not None:
            return (
                f"{label} was given {given}; {which} must be {wanted}",
                f"give it inputs with {which} {wanted}, or build the layer with {attribute}= what the data has",
            )
    if isinstance(module, nn.Embedding):
        return (
            f"{label} was given {given}; its indices go from 0 to {module.num_embeddings - 1}",
            "give it indices in that range, or build it with a larger num_embeddings",
        )
    return f"{label} was given {given}", "make the inputs and the layer agree"


def _turned(module: nn.Module, frame: FrameType) -> str:
    """The call that puts channels first which come last in the input of a convolution; empty for any other."""
    channels = getattr(module, "in_channels", None)
    sizes = [t.shape for _, t in _tensors(frame) if t.dim() > 2]
    if channels is None or not sizes or sizes[0][-1] != channels or sizes[0][1] == channels:
        return ""
    return f".permute({', '.join(map(str, (0, len(sizes[0]) - 1, *range(1, len(sizes[0]) - 1))))})"


def _about_loss(loss: nn.Module | str, frame: FrameType, *, by_hotloop: bool) -> tuple[str, str]:
    """What a loss was given; `by_hotloop`: called with output and target, so that the line to write is a criterion."""
    tensors = dict(_tensors(frame))
    given = " and ".join(f"{name} {shape_of(t)}" for name, t in tensors.items()) or "these tensors"
    label = loss if isinstance(loss, str) else type(loss).__name__
    output, target = variables(frame).get("input"), tensors.get("target")
    fix: _Fix | None = None
    if isinstance(output, Tensor) and target is not None:
        about = _about_classes if label.lower().replace("_", "").removesuffix("loss") in _OF_CLASSES else _about_values
        fix = about(output, target)
        if label == "binary_cross_entropy" and fix is None and not (output.min() >= 0 and output.max() <= 1):
            fix = _Fix(
                "use nn.BCEWithLogitsLoss(), which takes outputs of any size, or end the model with nn.Sigmoid()"
            )
    elif isinstance(output, list | tuple) and output and isinstance(output[0], Tensor):
        has_loss = any(each is None or (isinstance(each, Tensor) and each.dim() == 0) for each in output[1:])
        fix = _Fix(f"the model returns {plural(len(output), 'value')}; give the loss the first", "output[0]")
        if has_loss and by_hotloop:
            fix = replace(fix, words=f"leave loss= out if the model computes its own, or, since {fix.words}")
    fallback = "make the model's output and the target agree in shape and type, as this loss documents them"
    return f"the loss {label} was given {given}", fix.said(by_hotloop=by_hotloop) if fix else fallback


@dataclass(frozen=True)
class _Fix:
    """What to do about output and target of a loss, and what it is to be given instead of one of them."""

    words: str
    output: str = "output"
    target: str = "target"

    def said(self, *, by_hotloop: bool) -> str:
        changed = [code for code, name in ((self.output, "output"), (self.target, "target")) if code != name]
        if not changed:
            return self.words
        return f"{self.words}: {criterion_line(self.output, self.target) if by_hotloop else ', '.join(changed)}"


def _about_classes(output: Tensor, target: Tensor) -> _Fix | None:
    """The fix for a target that should be one class index per item."""
    if target.shape == (*output.shape[:1], 1) and output.dim() == 2:
        return _Fix("give one class index per item", target="target.squeeze(-1)")
    if target.dim() > 1 and target.shape == output.shape[:-1] != (output.shape[0], *output.shape[2:]):
        return _Fix("move the classes from the last dimension to dimension 1", output="output.movedim(-1, 1)")
    if target.is_floating_point() and target.shape != output.shape:
        return _Fix("give class indices", target="target.long()")
    if target.is_floating_point() or output.dim() < 2 or not target.numel():
        return None
    if target.shape == output.shape:
        return _Fix("give class indices instead of one-hot rows", target="target.argmax(1)")
    classes, low, high = output.shape[1], int(target.min()), int(target.max())
    if target.shape[:1] == output.shape[:1] and not 0 <= low <= high < classes:
        has = plural(classes, "class", "classes")
        return _Fix(f"the targets go from {low} to {high}, and the output has {has}: 0 to {classes - 1}")
    fits = target.shape == (output.shape[0], *output.shape[2:])
    return _Fix("give class indices", target="target.long()") if fits and target.dtype != torch.long else None


def _about_values(output: Tensor, target: Tensor) -> _Fix | None:
    """The fix for a loss that compares output and target element by element."""
    if output.squeeze().shape == target.squeeze().shape and output.shape != target.shape:
        longer = "output" if output.dim() > target.dim() else "target"
        return _Fix("give both one shape", **{longer: f"{longer}.squeeze(-1)"})
    if output.is_floating_point() and not target.is_floating_point():
        return _Fix("convert the target", target="target.float()")
    return None


def _is_ours(stack: list[FrameType]) -> bool:
    """Whether hotloop, not the person's code, called the PyTorch function that failed."""
    caller = next((f for f in reversed(stack) if not f.f_code.co_filename.startswith(_TORCH)), None)
    return caller is not None and str(caller.f_globals.get("__name__")).startswith("hotloop.")


def _without_gradient(model: nn.Module, where: str) -> HotloopError:
    if not torch.is_grad_enabled():
        why, fix = "gradients are switched off", "train outside of torch.no_grad() and torch.inference_mode()"
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        why, fix = "all parameters of the model are frozen", "unfreeze some: model.requires_grad_(True)"
    else:
        why = "it was detached from the parameters, or does not depend on those that are trained"
        fix = "compute it from the output without .detach(), .data, .item(), argmax, NumPy or torch.no_grad()"
    return BadArgument(f"the loss of {where} has no gradient: {why}", fix=fix)


def _assert_on_device(error: Exception, where: str) -> HotloopError:
    first = str(error).strip().splitlines()[0]
    return BatchError(
        f"the GPU stopped with an assertion at or shortly before {where}: {first}\n"
        "  the usual cause is an index out of range: a class that the output lacks, a token past the vocabulary",
        fix="run the same script with HOTLOOP_DEVICE=cpu; there the error names the layer and the values",
    )


def _tensors(frame: FrameType) -> list[tuple[str, Tensor]]:
    named = [(name, value) for name, value in variables(frame).items() if name != "self"]
    return [pair for name, value in named for pair in tensors_in(value, name)][:4]
