"""Messages of a loop: what cannot be trained, what to try for a non-finite loss, how it continues in little memory."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from torch import nn

from hotloop._torch import BatchNorm
from hotloop.errors import BadArgument
from hotloop.plan import Plan
from hotloop.printing.text import plural, printable, shorten
from hotloop.step.trained_objectives import TrainedObjective

# What other libraries call an argument of `Loop` or `fit`.
_ELSEWHERE = {
    "epochs": ("max_epochs", "num_epochs", "n_epochs", "num_train_epochs"),
    "clip_norm": ("grad_clip", "gradient_clip_val", "max_grad_norm", "max_norm", "grad_clip_norm"),
    "accumulate": ("accumulate_grad_batches", "gradient_accumulation_steps"),
    "validate": ("val_loader", "val_dataloader", "val_dataloaders", "eval_loader", "validation_data"),
    "loss": ("criterion", "loss_fn", "loss_func"),
    "precision": ("dtype", "amp", "mixed_precision"),
    "scheduler": ("lr_scheduler",),
    "log": ("logger", "loggers"),
    "save": ("checkpoint_dir", "default_root_dir", "output_dir"),
    "on_step": ("max_steps", "callbacks"),
}


def refuse_unknown(unknown: Iterable[str], own: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Raise for an argument that the function `own` has not, and say which of these functions has it."""
    name = next(iter(unknown), None)
    if name is None:
        return
    known = {each: function for function in functions for each in signature(functions[function]).parameters}
    known |= dict.fromkeys(signature(functions[own]).parameters, own)
    word = next((word for word, others in _ELSEWHERE.items() if name in others), name)
    near = next(iter(get_close_matches(word, known, 1)), None)
    if near is None:
        fix = f"it has {', '.join(each for each, function in known.items() if function == own and each != 'self')}"
    elif name == "max_steps":
        fix = f'end the run by a hook: {known[near]}(…, on_step=lambda record: "stop" if record.step == … else None)'
    else:
        fix = f"{'write' if near == word else 'did you mean'} {known[near]}(…, {near}=…)"
    raise BadArgument(f"{own} has no argument {printable(name)!r}", fix=fix)


def check_that_it_can_learn(model: nn.Module, objectives: tuple[TrainedObjective, ...]) -> None:
    """Raise for a run that would change nothing: an optimizer of another model, or all weights frozen."""
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for each in objectives for parameter in each.parameters if id(parameter) in own]
    if not held:
        raise BadArgument("the optimizer holds none of the model's parameters", fix="build it from model.parameters()")
    if not any(parameter.requires_grad for parameter in held):
        raise BadArgument(
            "every parameter that the optimizer holds is frozen", fix="call requires_grad_() on the parameters to train"
        )


def advice_on_loss(plan: Plan) -> list[str]:
    """What to try when the loss is not finite."""
    advice = ["lower the learning rate"]
    if plan.clip_norm is None:
        advice.append("clip the gradient with clip_norm=1.0")
    if plan.precision == "fp16":
        advice.append('use precision="bf16" or "fp32": fp16 holds nothing above 65,504')
    return advice


def memory_words(model: nn.Module, failed: int, follows: int, *, exact: bool = True) -> str:
    """The warning that memory ran out, and how training continues; `exact`: with the gradient of the whole batch."""
    words = f"out of memory with {plural(failed, 'item')} at once: batches are computed in micro-batches of {follows}"
    if not exact:
        return words + ', each weighted by its number of items, as split="items" says'
    norms = [name for name, module in model.named_modules() if isinstance(module, BatchNorm) and module.training]
    if not norms:
        return words + ", with the gradient of the whole batch"
    return words + (
        f"; batch normalisation ({shorten(norms, 2)}) normalises each micro-batch by itself, so its statistics depend"
        " on their size: put those layers in eval mode, or keep to one size with Loop(…, micro_batch=…)"
    )
