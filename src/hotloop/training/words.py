"""Messages of a loop: what cannot be trained, what to try for a non-finite loss, how it continues in little memory."""

from torch import nn

from hotloop._torch import BatchNorm
from hotloop.errors import BadArgument
from hotloop.plan import Plan
from hotloop.step.objectives import TrainedObjective
from hotloop.text import plural, shorten


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
