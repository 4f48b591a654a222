"""FSDP2: parameters, gradients and optimizer states sharded over the ranks, and gathered for a checkpoint."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument
from hotloop.levers.checkpointing import repeated_blocks
from hotloop.plan import Plan
from hotloop.printing.text import shorten
from hotloop.ranks.group import Ranks, timeout
from hotloop.values.tree import map_tensors

if TYPE_CHECKING:
    from hotloop.checkpoint.shards import Team

# Settings of a plan that change weights, capture or scale, none of which was tried with shards.
_OTHERS = ("channels_last", "micro_batch", "cudnn_benchmark")


def shard(model: nn.Module, optimizers: Sequence[Optimizer], ranks: Ranks, plan: Plan) -> None:
    """Shard a model in place, by its repeated blocks, and give its optimizers the new parameters.

    The weights are those of rank 0. In bf16, blocks are gathered in bf16 and gradients are reduced in fp32.
    """
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  # these take a second to import
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    _check(model, optimizers, plan)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), 0, group=ranks.group)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    group = ranks.group or dist.group.WORLD
    mesh = DeviceMesh.from_group(group, ranks.device.type)  # type: ignore[arg-type]  # the default group is there
    bf16 = plan.precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in [*repeated_blocks(model), model]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    parameters = dict(model.named_parameters())
    for optimizer in optimizers:
        for settings in optimizer.param_groups:
            settings["params"] = [parameters[names[id(each)]] for each in settings["params"]]


def _check(model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Raise for settings that do not work with shards."""
    others = [name for name in _OTHERS if getattr(plan, name) != getattr(Plan, name)]
    if plan.precision == "fp16":
        others.append("precision='fp16'")
    if plan.compile != "off":
        others.append("compile")
    if others:
        raise BadArgument(f"parallel='fsdp' with {shorten(others, 4)}", fix="leave that out of the plan, or use DDP")
    refuse_lazy(model)
    if any(optimizer.state for optimizer in optimizers):
        raise BadArgument(
            "the optimizer has made steps before the model is sharded", fix="make the Loop first, then train or load"
        )
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(p) not in known for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]):
        raise BadArgument(
            "the optimizer has parameters that are not the model's, and only the model is sharded",
            fix="make them parameters of the model, or use parallel='ddp'",
        )


def refuse_lazy(model: nn.Module) -> None:
    """Raise for parameters without shapes, which ranks can neither share nor shard."""
    if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise BadArgument(
            f"{shorten(lazy, 3)} have no shapes yet, so that ranks cannot have the same weights",
            fix="run one batch through the model before it is handed to the Loop",
        )


def is_sharded(model: nn.Module) -> bool:
    """Whether a model has sharded parameters, which need a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def local_shard(tensor: Any) -> Tensor:
    """This rank's shard of a tensor under FSDP, or the tensor itself; no gather."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def whole(tree: Any) -> Any:
    """A state_dict with its shards gathered on the host; a collective call."""
    return map_tensors(tree, lambda tensor: _gathered(tensor) if hasattr(tensor, "full_tensor") else tensor)


def _gathered(shard: Any) -> Tensor:
    """The whole tensor of a shard, on the host."""
    if dist.get_backend(shard.device_mesh.get_group()) == "gloo":
        shard = shard.cpu()  # from a GPU that ranks share; PyTorch 2.11 crashes where gloo gathers shards on a GPU
    whole: Tensor = shard.full_tensor()
    return whole.cpu()


def team_of(model: nn.Module, ranks: Ranks) -> "Team | None":
    """The ranks that hold a model's shards and write and read its checkpoints; None for an unsharded model."""
    shard: Any = next((parameter for parameter in model.parameters() if hasattr(parameter, "full_tensor")), None)
    if shard is None:
        return None
    from hotloop.checkpoint.shards import Team  # noqa: PLC0415  # loaded where there are shards

    return Team(ranks.rank, ranks.size, ranks.gather, partial(_joined, shard.device_mesh), timeout().total_seconds())


def _joined(mesh: Any, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The sharded tensor of which this rank has these rows."""
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415  # loaded where there are shards

    strides = tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
    return DTensor.from_local(
        rows.to(mesh.device_type), mesh, (Shard(0),), run_check=False, shape=torch.Size(shape), stride=strides
    )


def sharded_as(value: Any, like: Any) -> Any:
    """This rank's shard of a whole tensor, where `like` is a shard of the same shape; else the tensor.

    A sharded tensor is gathered where `like` is whole.
    """
    if hasattr(value, "full_tensor"):
        return value if hasattr(like, "full_tensor") else _gathered(value).to(value.device)
    if not isinstance(value, Tensor) or not hasattr(like, "full_tensor") or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # loaded where there are shards

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def sharded(module: nn.Module, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A whole state_dict, sharded like the module."""
    if not is_sharded(module):
        return values
    now = module.state_dict()
    return {name: sharded_as(value, now.get(name)) for name, value in values.items()}


def optimizer_sharded(optimizer: Optimizer, values: dict[str, Any]) -> dict[str, Any]:
    """The whole state_dict of an optimizer, sharded like its parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(hasattr(parameter, "full_tensor") for parameter in parameters):
        return values
    numbers = [number for group in values["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=True))
    state = {
        number: {name: sharded_as(value, owners.get(number)) for name, value in each.items()}
        for number, each in values["state"].items()
    }
    return {**values, "state": state}


def across_ranks(model: nn.Module, optimizers: Sequence[Optimizer], ranks: Ranks, plan: Plan) -> nn.Module:
    """The model with SyncBatchNorm or FSDP as the plan asks on several ranks; raises where that is impossible."""
    if plan.sync_batchnorm:
        if not backend_of(ranks.device).has_sync_batchnorm:
            raise BadArgument(
                f"sync_batchnorm on {ranks.device.type}: PyTorch has it for GPUs", fix="use GroupNorm or LayerNorm"
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, ranks.group)
    if plan.parallel == "fsdp":
        shard(model, optimizers, ranks, plan)
    return model
