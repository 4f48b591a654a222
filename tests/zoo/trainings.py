"""The zoo: small trainings that hold state in unusual places, and the loop that a person would write for them.

Every training is built anew from a seed, says what it observes besides weights, and what is expected of it where it
cannot be the same to the bit. Scripts import this file too, so it imports nothing that lies beside it. Learning rates
are powers of two: a CUDA graph reads them in 32 bits, and these are the same there.
"""

import copy
import itertools
import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import hotloop

ROWS, BATCH, FEATURES, CLASSES = 40, 8, 6, 3
SWITCH = 8  # the step at which some trainings begin to do something new

# "exact": equal to the bit. "close": but for rounding. "told": equal, or a warning or an error has one of the names.
# "refuses": an error has one of the names.
Promise = Literal["exact", "close", "told", "refuses"]


@dataclass
class Parts:
    """A training, built: what a `Loop` is given and what is looked at afterwards."""

    model: nn.Module
    optimizer: Any
    loader: Any
    loss: Any = None
    objective: Any = None
    scheduler: list[Any] = field(default_factory=list)
    schedule: Literal["step", "epoch"] = "step"
    transform: Any = None
    accumulate: int = 1
    clip_norm: float | None = None
    stateful: dict[str, Any] | None = None
    observe: Callable[[], Any] = lambda: None  # state besides weights, buffers, optimizers and global generators

    @property
    def optimizers(self) -> list[Any]:
        every = self.optimizer
        if isinstance(every, Mapping):
            return list(every.values())
        return list(every) if isinstance(every, list) else [every]

    @property
    def turns(self) -> list[tuple[Any, list[Any]]]:
        """Objectives and the optimizers that follow each."""
        if isinstance(self.objective, Mapping):
            return [(self.objective[name], [self.optimizer[name]]) for name in self.objective]
        return [(self.objective or self._by_convention, self.optimizers)]

    def _by_convention(self, model: nn.Module, batch: Any) -> Any:
        if self.loss is None:
            return model(**batch).loss
        return self.loss(model(batch[0]), batch[1])

    def loop(self, plan: Any, *more: LRScheduler, device: str | torch.device = "cpu") -> hotloop.Loop:
        """What a person would write with hotloop."""
        return hotloop.Loop(
            self.model,
            self.optimizer,
            self.loss,
            objective=self.objective,
            device=device,
            accumulate=self.accumulate,
            clip_norm=self.clip_norm,
            scheduler=[*self.scheduler, *more] or None,
            schedule=self.schedule,
            plan=plan,
            **({} if self.stateful is None else {"stateful": self.stateful}),
        )

    def halt(self, after: int, error: type[BaseException]) -> "Halt":
        """What ends a run after so many updates, or after the epochs that hold them where the schedule counts those."""
        return Halt(self.optimizers[-1], after if self.schedule == "step" else -(-after // 5), error)

    def everything(self) -> dict[str, Any]:
        """A copy of all that training may change."""
        modules = {"model": self.model, **({"loss": self.loss} if isinstance(self.loss, nn.Module) else {})}
        return aside(
            {
                "weights": {f"{k}.{n}": p for k, m in modules.items() for n, p in m.named_parameters()},
                "buffers": {f"{k}.{n}": b for k, m in modules.items() for n, b in m.named_buffers()},
                "modes": {n: m.training for n, m in self.model.named_modules()},
                "optimizers": [o.state_dict()["state"] for o in self.optimizers],
                "rates": [[float(group["lr"]) for group in o.param_groups] for o in self.optimizers],
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "own": self.observe(),
            }
        )


@dataclass(frozen=True)
class Training:
    """A member of the zoo."""

    name: str
    make: Callable[[torch.device], Parts]
    oom: Promise = "exact"
    resume: Promise = "exact"
    names: tuple[str, ...] = ()  # one of which a warning has, where it is told that something cannot be the same
    coupled: bool = False  # micro-batches are another training: items, or calls, depend on those before
    has_length: bool = True
    only_fit: bool = False
    only_forward: str = ""  # the one function in which memory runs out, where others must be spared
    cuda: bool = True  # whether it is of interest on a GPU

    def build(self, device: str | torch.device = "cpu", seed: int = 7) -> Parts:
        """Everything anew."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return self.make(torch.device(device))

    def is_told(self, words: Sequence[str]) -> bool:
        """Whether one of the names stands in what was said, as a word of its own."""
        return any(re.search(rf"\b{name}\b", word) for name in self.names for word in words)


ZOO: list[Training] = []


def training(**traits: Any) -> Callable[[Callable[[torch.device], Parts]], Callable[[torch.device], Parts]]:
    """Put a training into the zoo, under the name of its function."""

    def put(make: Callable[[torch.device], Parts]) -> Callable[[torch.device], Parts]:
        ZOO.append(Training(make.__name__, make, **traits))
        return make

    return put


# The loop by hand, and how two runs are compared


class Halt(LRScheduler):
    """Ends a run of any length after so many updates, as a schedule that fails would; rates are left alone."""

    def __init__(self, optimizer: Any, after: int, error: type[BaseException]) -> None:
        self.after = after
        self._error = error
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch >= self.after:
            raise self._error
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "_error"}


class Halted(Exception):
    """The run is as long as it was meant to be."""


class Killed(BaseException):
    """Nothing that a run does for a graceful end may happen."""


class Endless:
    """The epochs of a loader as one long one."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._loader


def by_hand(
    parts: Parts,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    sizes: Sequence[int | None] | None = None,
    device: torch.device | None = None,
) -> list[Tensor]:
    """The loop that a person would write; `sizes` has the items of a micro-batch for each step. Its losses."""
    losses: list[Tensor] = []
    held = 0  # batches whose gradients wait for their update
    for _ in range(epochs or 10**6):
        seen: list[tuple[float, int]] = []
        for given in parts.loader:
            batch = given if device is None else map_tensors(given, lambda t: t.to(device))
            batch = batch if parts.transform is None else parts.transform(batch)
            items = items_in(batch)  # before an objective takes things out of it
            size = None if sizes is None else sizes[len(losses)]
            held += 1
            total = torch.zeros(())
            for objective, optimizers in parts.turns:
                if held == 1:
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                only = _parameters_of(optimizers) if len(parts.turns) > 1 else None
                total = total + _learn(parts.model, objective, batch, size, only).cpu()
                if held == parts.accumulate:
                    _update(parts, optimizers, held)
            held %= parts.accumulate
            losses.append(total)
            seen.append((float(total), items))
            if steps is not None and len(losses) == steps:
                return losses
        for _, optimizers in parts.turns if held else ():
            _update(parts, optimizers, held)
        held = 0
        for scheduler in parts.scheduler:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(sum(value * n for value, n in seen) / sum(n for _, n in seen))
            elif parts.schedule == "epoch":
                scheduler.step()
    return losses


def _learn(model: nn.Module, objective: Any, batch: Any, size: int | None, only: Any) -> Tensor:
    """Forward and backward of one batch, in micro-batches where there is a size."""
    items = items_in(batch)
    if size is None or size >= items:
        loss, _ = loss_of(objective(model, batch))
        loss.backward(inputs=only)
        return loss.detach()
    whole, counted = torch.zeros((), device=first_device(batch)), torch.zeros(())
    for piece in [cut(batch, items, rows) for rows in even(items, size)]:
        weight = items_in(piece) / items  # before the objective takes things out of it
        loss, count = loss_of(objective(model, piece))
        if count is not None:
            weight, counted = count, counted + count
        (loss * weight).backward(inputs=only)
        whole = whole + loss.detach() * weight
    if not counted:
        return whole
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= counted
    return whole / counted


def first_device(batch: Any) -> torch.device:
    devices: list[torch.device] = []
    map_tensors(batch, lambda t: devices.append(t.device) or t)  # type: ignore[func-returns-value]
    return devices[0]


def _update(parts: Parts, optimizers: Sequence[Any], held: int) -> None:
    parameters = _parameters_of(optimizers)
    for parameter in parameters if held > 1 else ():
        if parameter.grad is not None:
            parameter.grad /= held
    if parts.clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, parts.clip_norm)
    for optimizer in optimizers:
        optimizer.step()
    for scheduler in parts.scheduler if parts.schedule == "step" else ():
        if scheduler.optimizer in optimizers and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()


def _parameters_of(optimizers: Sequence[Any]) -> list[nn.Parameter]:
    return list(dict.fromkeys(p for o in optimizers for group in o.param_groups for p in group["params"]))


def loss_of(returned: Any) -> tuple[Tensor, int | None]:
    count = None
    if isinstance(returned, tuple):
        returned, count = returned
    return (sum(returned.values()) if isinstance(returned, Mapping) else returned), count


def even(items: int, size: int) -> Iterator[slice]:
    """Even micro-batches of at most `size`."""
    count = -(-items // size)
    least, more = divmod(items, count)
    start = 0
    for number in range(count):
        stop = start + least + (number < more)
        yield slice(start, stop)
        start = stop


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same batch with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, Pair):
        return Pair(map_tensors(value.x, change), map_tensors(value.y, change))
    return value


def cut(batch: Any, items: int, rows: slice) -> Any:
    return map_tensors(batch, lambda t: t[rows] if t.dim() and t.size(0) == items else t)


def items_in(batch: Any) -> int:
    sizes: list[int] = []
    map_tensors(batch, lambda t: sizes.append(t.size(0)) or t)  # type: ignore[func-returns-value]
    return sizes[0]


def aside(value: Any) -> Any:
    """A copy that nothing can change any more, of plain types."""
    if isinstance(value, Tensor):
        return value.detach().clone().cpu()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: aside(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [aside(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(value)
    return copy.deepcopy(value)


def differences(a: Any, b: Any, path: str = "", *, close: float | None = None) -> list[str]:
    """Where two copies are not the same to the bit, by name; `close` allows for rounding in floating point."""
    inside = partial(differences, close=close)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        apart = _apart(a, b, close)
        return [f"{path}: {apart}"] if apart else []
    if isinstance(a, np.ndarray):
        return [] if np.array_equal(a, b) else [f"{path}: arrays differ"]
    if isinstance(a, dict) and isinstance(b, dict):
        lost = [f"{path}.{key}: only in one" for key in a.keys() ^ b.keys()]
        return lost + [found for key in a.keys() & b.keys() for found in inside(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return [f"{path}: lengths {len(a)} and {len(b)}"]
        pairs = enumerate(zip(a, b, strict=True))
        every = [found for number, (x, y) in pairs for found in inside(x, y, f"{path}[{number}]")]
        return every if len(every) < 4 else [*every[:2], f"{path}: and {len(every) - 2} more"]
    if close is not None and isinstance(a, float) and isinstance(b, float) and abs(a - b) <= close * max(1, abs(a)):
        return []
    return [] if a == b else [f"{path}: {str(a)[:60]} and {str(b)[:60]}"]


def _apart(a: Tensor, b: Tensor, close: float | None) -> str | None:
    """How two tensors differ."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    a, b = a.to_dense(), b.to_dense()
    if torch.equal(a, b):
        return None
    if close is not None and (a.is_floating_point() or a.is_complex()) and torch.allclose(a, b, close, close):
        return None
    kind = torch.complex128 if a.is_complex() else torch.float64
    return f"tensors {float((a.to(kind) - b.to(kind)).abs().max()):.3g} apart"


# What most members are made of


def table(rows: int = ROWS, *shape: int) -> TensorDataset:
    """Inputs and classes that can be told from them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, *(shape or (FEATURES,)), generator=generator)
    return TensorDataset(x, x.flatten(1)[:, :CLASSES].argmax(1))


def shuffled(dataset: Any, **options: Any) -> DataLoader[Any]:
    options.setdefault("generator", torch.Generator().manual_seed(3))
    return DataLoader(dataset, options.pop("batch_size", BATCH), shuffle=True, **options)


def dicts() -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": y} for x, y in zip(*table().tensors, strict=True)]


def mlp(*extra: nn.Module, out: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), *extra, nn.Linear(12, out))


def sgd(*modules: nn.Module, lr: float = 2**-3) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr, momentum=0.9)


def adam(*modules: nn.Module, lr: float = 2**-7) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for m in modules for p in m.parameters()], lr)


def classify(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def usual(model: nn.Module, **changes: Any) -> Parts:
    """A model of this table, with what most people would give beside it."""
    parts = Parts(model, adam(model), shuffled(table()), nn.CrossEntropyLoss())
    return replace(parts, **{"loss": None, **changes} if "objective" in changes else changes)


# Plain ones


@training()
def plain_mlp(device: torch.device) -> Parts:
    model = mlp()
    return usual(model, optimizer=sgd(model))


@training()
def adamw_with_a_tail(device: torch.device) -> Parts:
    model = mlp()
    return usual(model, loader=shuffled(table(ROWS - 4)))


@training(coupled=True)
def cnn_with_batchnorm(device: torch.device) -> Parts:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, CLASSES)
    )
    return usual(model, loader=shuffled(table(ROWS, 2, 4, 4)), optimizer=sgd(model))


@training()
def dropout(device: torch.device) -> Parts:
    return usual(mlp(nn.Dropout(0.3)))


class DiffusionBlock(nn.Module):
    """A block of a diffusion transformer: shifts, scales and gates are chunks of one projection of the conditioning,
    and of one learnt table, which broadcasts over the batch."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Parameter(torch.randn(6, width) / width**0.5)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        chunks = (self.table + self.modulation(condition).unflatten(1, self.table.shape)).chunk(6, dim=1)
        shift, scale, gate, second_shift, second_scale, second_gate = chunks
        y = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = F.layer_norm(x, x.shape[-1:]) * (1 + second_scale) + second_shift
        return x + second_gate * self.mlp(y)


@training()
def diffusion_transformer(device: torch.device) -> Parts:
    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(DiffusionBlock(8) for _ in range(2))
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            tokens, condition = x[:, 1:], x[:, 0]
            for block in self.blocks:
                tokens = block(tokens, condition)
            return self.head(tokens.mean(1))

    return usual(Transformer(), loader=shuffled(table(ROWS, 5, 8)))


@training()
def weight_tying(device: torch.device) -> Parts:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 6)
            self.mix = nn.Linear(6, 6)
            self.head = nn.Linear(6, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.mix(self.embedding(x))).mean(1))

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 10, (ROWS, 4), generator=generator)
    model = Tied()
    return usual(model, loader=shuffled(TensorDataset(words, words[:, 0])))


@training()
def spectral_norm(device: torch.device) -> Parts:
    """Its power iteration writes buffers in every forward pass."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(FEATURES, 12)), nn.Tanh(), nn.Linear(12, CLASSES))
    return usual(model)


@training()
def weight_norm(device: torch.device) -> Parts:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, 12)), nn.Tanh(), nn.Linear(12, CLASSES))
    return usual(model)


@training(oom="told", names=("materialize", "lazy", "_initialize_hook"))
def lazy_modules(device: torch.device) -> Parts:
    return usual(nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.LazyLinear(CLASSES)))


@training(cuda=False)
def sparse_embedding(device: torch.device) -> Parts:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 6, sparse=True)
            self.head = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embedding(x).mean(1))

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 20, (ROWS, 4), generator=generator)
    model = Words()
    optimizers = [torch.optim.SparseAdam(model.embedding.parameters(), 0.01), adam(model.head)]
    return usual(model, optimizer=optimizers, loader=shuffled(TensorDataset(words, words[:, 0] % CLASSES)))


@training()
def two_optimizers_for_one_objective(device: torch.device) -> Parts:
    model = mlp()
    return usual(model, optimizer=[sgd(model[0]), adam(model[2])])


@training(oom="close")  # a batch is added as a whole to those before it
def gradient_accumulation(device: torch.device) -> Parts:
    return usual(mlp(), accumulate=2)


@training()
def clipping(device: torch.device) -> Parts:
    model = mlp()
    return usual(model, optimizer=sgd(model), clip_norm=0.1)


@training(only_fit=True)
def reduce_on_plateau(device: torch.device) -> Parts:
    model = mlp()
    optimizer = sgd(model, lr=2.0)
    return usual(model, optimizer=optimizer, scheduler=[ReduceLROnPlateau(optimizer, patience=0, factor=0.5)])


@training()
def one_cycle_each_step(device: torch.device) -> Parts:
    model = mlp()
    optimizer = sgd(model)
    schedule = OneCycleLR(optimizer, 0.3, total_steps=10**8, pct_start=2e-7)  # for ever, and up within 20 steps
    return usual(model, optimizer=optimizer, scheduler=[schedule])


@training(only_fit=True)
def schedule_by_epoch(device: torch.device) -> Parts:
    model = mlp()
    optimizer = sgd(model)
    return usual(model, optimizer=optimizer, scheduler=[StepLR(optimizer, 1, 0.5)], schedule="epoch")


@training()
def float64_weights(device: torch.device) -> Parts:
    data = TensorDataset(*(t.double() if t.is_floating_point() else t for t in table().tensors))
    model = mlp().double()
    return usual(model, loader=shuffled(data))


@training()
def complex_weights(device: torch.device) -> Parts:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.randn(FEATURES, 12, dtype=torch.complex64) / 3)
            self.head = nn.Linear(12, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x.to(torch.complex64) @ self.mix).abs())

    model = Waves()
    return usual(model, optimizer=torch.optim.Adam(model.parameters(), 2**-7))


@training()
def gradient_penalty(device: torch.device) -> Parts:
    """Backward twice."""

    def objective(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x = x.detach().clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + 0.1 * slope.square().sum(1).mean()

    return usual(mlp(), objective=objective)


@training()
def loss_with_weights(device: torch.device) -> Parts:
    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(CLASSES))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output * self.scale, target) + 0.01 * self.scale.square().sum()

    model, loss = mlp(), Margin()
    return usual(model, loss=loss, optimizer=adam(model, loss))


@training()
def dict_of_losses(device: torch.device) -> Parts:
    def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        out = model(x)
        return {"classes": F.cross_entropy(out, y), "size": 0.1 * out.square().mean()}

    return usual(mlp(), objective=objective)


@training(oom="close")
def loss_and_count(device: torch.device) -> Parts:
    """A mean over what is not ignored, with how much that is."""

    def objective(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        y = torch.where(x[:, 3] > 1, -100, y)
        return F.cross_entropy(model(x), y, ignore_index=-100), (y != -100).sum()

    return usual(mlp(), objective=objective)


@training()
def hugging_face(device: torch.device) -> Parts:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=CLASSES, **sizes)
    )
    model.train()
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 20, (ROWS, 4), generator=generator)
    rows = [{"input_ids": row, "labels": row[0] % CLASSES} for row in words]
    return usual(model, loss=None, loader=shuffled(rows))


@training(coupled=True, only_forward="judge")
def gan(device: torch.device) -> Parts:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, FEATURES))
            self.judge = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def judge(model: Any, batch: Any) -> Tensor:
        real = batch[0]
        fake = model.make(torch.randn(len(real), 4, device=real.device)).detach()
        return F.softplus(-model.judge(real)).mean() + F.softplus(model.judge(fake)).mean()

    def make(model: Any, batch: Any) -> Tensor:
        return F.softplus(-model.judge(model.make(torch.randn(len(batch[0]), 4, device=batch[0].device)))).mean()

    model = Gan()
    optimizers = {"judge": adam(model.judge), "make": adam(model.make)}
    return usual(model, optimizer=optimizers, objective={"judge": judge, "make": make})


@training(only_forward="judge", oom="close")
def two_objectives_that_accumulate(device: torch.device) -> Parts:
    """The second objective's gradients must not reach the weights of the first, which wait for their update."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.judge = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)

    def judge(model: Any, batch: Any) -> Tensor:
        real, fake = batch[0], model.make(batch[0]).detach()
        return F.softplus(-model.judge(real)).mean() + F.softplus(model.judge(fake)).mean()

    def make(model: Any, batch: Any) -> Tensor:
        return F.softplus(-model.judge(model.make(batch[0]))).mean()

    model = Pair()
    optimizers = {"judge": adam(model.judge), "make": adam(model.make)}
    return usual(model, optimizer=optimizers, objective={"judge": judge, "make": make}, accumulate=2)


# What a pass does to its batch


@training()
def input_normalised_in_place(device: torch.device) -> Parts:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.sub_(3.0).mul_(0.5))

    data = table()
    return usual(InPlace(), loader=shuffled(TensorDataset(data.tensors[0] * 2 + 3, data.tensors[1])))


@training()
def labels_popped_from_a_dict(device: torch.device) -> Parts:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        labels = batch.pop("labels")
        return F.cross_entropy(model(batch["x"]), labels)

    x, y = table().tensors
    return usual(
        mlp(), objective=objective, loader=shuffled([{"x": a, "labels": b} for a, b in zip(x, y, strict=True)])
    )


@training()
def labels_popped_from_a_list(device: torch.device) -> Parts:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        labels = batch.pop()
        return F.cross_entropy(model(batch[0]), labels)

    return usual(mlp(), objective=objective)


class Rows(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Pair:
    x: Tensor
    y: Tensor


def as_pair(rows: Any) -> Pair:
    return Pair(*default_collate(rows))


@training()
def batches_are_namedtuples(device: torch.device) -> Parts:
    x, y = table().tensors
    return usual(mlp(), objective=classify, loader=shuffled([Rows(a, b) for a, b in zip(x, y, strict=True)]))


@training()
def batches_are_dataclasses(device: torch.device) -> Parts:
    def objective(model: nn.Module, batch: Pair) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    return usual(mlp(), objective=objective, loader=shuffled(table(), collate_fn=as_pair))


@training()
def objective_rescales_its_batch(device: torch.device) -> Parts:
    """An item of a dict is exchanged for another."""

    def objective(model: nn.Module, batch: Any) -> Tensor:
        batch["x"] = batch["x"] * 0.5 + 1
        return F.cross_entropy(model(batch["x"]), batch["labels"])

    x, y = table().tensors
    return usual(
        mlp(), objective=objective, loader=shuffled([{"x": a, "labels": b} for a, b in zip(x, y, strict=True)])
    )


# State in modules


@training(oom="refuses", names=("hidden",))
def lstm_that_carries_its_state(device: torch.device) -> Parts:
    class Carrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(FEATURES, 8, batch_first=True)
            self.head = nn.Linear(8, CLASSES)
            self.hidden: tuple[Tensor, Tensor] | None = None

        def forward(self, x: Tensor) -> Tensor:
            out, hidden = self.lstm(x, self.hidden)
            self.hidden = tuple(h.detach() for h in hidden)
            return self.head(out[:, -1])

    model = Carrying()
    return usual(model, loader=shuffled(table(ROWS, 5, FEATURES)), observe=lambda: model.hidden)


@training(coupled=True)
def hidden_state_of_any_batch(device: torch.device) -> Parts:
    """A tuple of tensors as an attribute, which is exchanged in each pass."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.state = (torch.zeros(CLASSES, device=device), 0)

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x) + 0.1 * self.state[0]
            self.state = (0.5 * self.state[0] + 0.5 * out.detach().mean(0), self.state[1] + 1)
            return out

    model = Recurrent()
    return usual(model, observe=lambda: model.state)


def with_forward(forward: Callable[[Any, Tensor], Tensor], **attributes: Any) -> Any:
    """A module around the usual network with attributes, which its forward pass may use and change."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            for name, value in attributes.items():
                setattr(self, name, value)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)

    return Stateful()


@training(coupled=True)
def list_of_features(device: torch.device) -> Parts:
    """A queue as MoCo has it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.queue:
            out = out - 0.1 * torch.stack(self.queue).mean(0)
        self.queue.append(out.detach().mean(0))
        del self.queue[:-4]
        return out

    model = with_forward(forward, queue=[])
    return usual(model, observe=lambda: model.queue)


@training(coupled=True)
def deque_of_numbers(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.recent.append(float(out.detach().abs().mean()))
        return out / (1 + sum(self.recent) / len(self.recent))

    model = with_forward(forward, recent=deque(maxlen=5))
    return usual(model, observe=lambda: model.recent)


@training(oom="told", names=("running",), coupled=True)
def dict_of_statistics(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.running["n"] += 1
        self.running["mean"].lerp_(x.detach().mean(0), 0.1)
        return self.inner(x - self.running["mean"]) * (1 + 0.01 * self.running["n"])

    model = with_forward(forward, running={"n": 0, "mean": torch.zeros(FEATURES, device=device)})
    return usual(model, observe=lambda: model.running)


@training(coupled=True)
def set_of_labels(device: torch.device) -> Parts:
    def objective(model: Any, batch: Any) -> Tensor:
        x, y = batch
        model.labels_seen.update((y * 7 + (x[:, 0] * 3).long()).tolist())
        return F.cross_entropy(model(x), y) * (1 + 0.05 * len(model.labels_seen))

    model = with_forward(lambda self, x: self.inner(x), labels_seen=set())
    return usual(model, objective=objective, observe=lambda: model.labels_seen)


@training(oom="told", names=("config",), coupled=True)
def number_in_a_config_object(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.config.temperature *= 0.97
        return self.inner(x) / self.config.temperature

    model = with_forward(forward, config=SimpleNamespace(temperature=2.0))
    return usual(model, observe=lambda: model.config.temperature)


@training(oom="told", resume="told", names=("calls", "Counting"), coupled=True)
def number_of_a_class(device: torch.device) -> Parts:
    class Counting(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return self.inner(x) / (1 + 0.05 * type(self).calls)

    return usual(Counting(), observe=lambda: Counting.calls)


@training()
def temperature_as_attribute(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.temperature = max(0.5, self.temperature * 0.95)
        return self.inner(x) / self.temperature

    model = with_forward(forward, temperature=2.0)
    return usual(model, observe=lambda: model.temperature)


@training()
def attention_that_is_kept(device: torch.device) -> Parts:
    """The attention of the last pass stays as an attribute, with its graph, as for a plot."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(FEATURES, 24)
            self.head = nn.Linear(8, CLASSES)
            self.attention: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            self.attention = (q @ k.transpose(1, 2) / 3).softmax(-1)
            return self.head((self.attention @ v).mean(1))

    model = Attending()
    return usual(model, loader=shuffled(table(ROWS, 4, FEATURES)), observe=lambda: model.attention)


@training(coupled=True)
def average_in_a_buffer(device: torch.device) -> Parts:
    """The outputs' mean is exchanged, the weights' mean is written in place."""

    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("mean", torch.zeros(CLASSES))
            self.register_buffer("weight", self.inner[0].weight.detach().clone(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
            self.weight.lerp_(self.inner[0].weight.detach(), 0.1)
            return out - self.mean + 0.01 * self.weight.sum()

    return usual(Averaging())


@training(coupled=True)
def vq_codebook(device: torch.device) -> Parts:
    """A codebook that follows its inputs in the forward pass."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(FEATURES, 4)
            self.decode = nn.Linear(4, CLASSES)
            self.register_buffer("codes", torch.randn(5, 4))
            self.register_buffer("uses", torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            z = self.encode(x)
            nearest = torch.cdist(z.detach(), self.codes).argmin(1)
            hot = F.one_hot(nearest, 5).float()
            self.uses.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes.lerp_(hot.T @ z.detach() / self.uses.clamp_min(0.1)[:, None], 0.1)
            return self.decode(z + (self.codes[nearest] - z).detach())

    return usual(Quantised())


@training(coupled=True)
def replay_queue(device: torch.device) -> Parts:
    """A buffer that is written cyclically, by a pointer that is a plain number."""

    class Replaying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("memory", torch.zeros(20, CLASSES))
            self.pointer = 0

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            result = out - 0.1 * self.memory.mean(0)
            for row in out.detach():
                self.memory[self.pointer] = row
                self.pointer = (self.pointer + 1) % len(self.memory)
            return result

    model = Replaying()
    return usual(model, observe=lambda: model.pointer)


@training(oom="told", names=("running_mean", "num_batches_tracked"), coupled=True)
def batchnorm_unfrozen_in_mid_run(device: torch.device) -> Parts:
    class Thawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 12)
            self.norm = nn.BatchNorm1d(12).eval()
            self.last = nn.Linear(12, CLASSES)
            self.passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            if self.passes == SWITCH:
                self.norm.train()
            return self.last(torch.relu(self.norm(self.first(x))))

    model = Thawing()
    return usual(model, observe=lambda: model.passes)


@training(oom="told", names=("offset",))
def buffer_written_from_step_8(device: torch.device) -> Parts:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("passes", torch.zeros((), dtype=torch.long))
            self.register_buffer("offset", torch.zeros(CLASSES))
            self.count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            out = self.inner(x)
            if self.count >= SWITCH:
                self.offset.add_(0.01)
            return out + self.offset * torch.arange(CLASSES, device=x.device)

    model = Late()
    return usual(model, observe=lambda: model.count)


@training()
def randomness_from_step_8(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return self.inner(x + 0.1 * torch.rand_like(x) if self.count >= SWITCH else x)

    model = with_forward(forward, count=0)
    return usual(model, observe=lambda: model.count)


@training(oom="told", names=("memory",), coupled=True)
def containers_in_containers(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.inner(x)
        recent = self.memory["outputs"][0]
        recent.append(float(out.detach().mean()))
        return out * (1 + 0.1 * sum(recent))

    model = with_forward(forward, memory={"outputs": [deque(maxlen=4)]})
    return usual(model, observe=lambda: model.memory)


@training(oom="told", names=("histogram",), coupled=True)
def array_of_numpy(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.histogram[int(self.histogram.sum()) % CLASSES] += 1
        return self.inner(x) + torch.as_tensor(0.1 * self.histogram, dtype=x.dtype, device=x.device)

    model = with_forward(forward, histogram=np.zeros(CLASSES))
    return usual(model, observe=lambda: model.histogram)


@training(coupled=True)
def tensor_that_is_no_buffer(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.offset.add_(torch.arange(CLASSES, device=x.device), alpha=0.01)
        return self.inner(x) + self.offset

    model = with_forward(forward, offset=torch.zeros(CLASSES, device=device))
    return usual(model, observe=lambda: model.offset)


class Ring:
    """A queue of one's own, with slots."""

    __slots__ = ("at", "rows")

    def __init__(self, device: torch.device) -> None:
        self.at, self.rows = 0, torch.zeros(4, CLASSES, device=device)

    def push(self, row: Tensor) -> None:
        self.rows[self.at] = row
        self.at = (self.at + 1) % len(self.rows)


@training(oom="told", resume="told", names=("ring",), coupled=True)
def queue_with_slots(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.inner(x) - 0.1 * self.ring.rows.mean(0)
        self.ring.push(out.detach().mean(0))
        return out

    model = with_forward(forward, ring=Ring(device))
    return usual(model, observe=lambda: (model.ring.at, model.ring.rows))


@training(oom="told", resume="told", names=("temperatures",), coupled=True)
def python_generator(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.latest = next(self.temperatures)
        return self.inner(x) / self.latest

    falling = (2 * 0.97**step for step in itertools.count())
    model = with_forward(forward, temperatures=falling, latest=0.0)
    return usual(model, observe=lambda: model.latest)


@training(oom="told", resume="told", names=("levels",), coupled=True)
def cycle_of_itertools(device: torch.device) -> Parts:
    levels = itertools.cycle([0.5, 1.0, 2.0, 0.25, 1.5])

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * next(levels)

    return usual(mlp(), objective=objective, observe=lambda: list(itertools.islice(copy.copy(levels), 2)))


@training()
def layer_unfrozen_in_mid_run(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        self.inner[0].requires_grad_(self.count >= SWITCH)
        return self.inner(x)

    model = with_forward(forward, count=0)
    model.inner[0].requires_grad_(False)
    return usual(model, observe=lambda: (model.count, [p.requires_grad for p in model.parameters()]))


@training()
def seeds_itself(device: torch.device) -> Parts:
    """The global generator is seeded anew in every pass."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        torch.manual_seed(self.count)
        return self.inner(x + 0.1 * torch.rand_like(x))

    model = with_forward(forward, count=0)
    return usual(model, observe=lambda: model.count)


@training(oom="told", resume="told", names=("logged",))
def forward_hook_that_logs(device: torch.device) -> Parts:
    model = mlp()
    logged: list[float] = []
    model[0].register_forward_hook(lambda module, inputs, output: logged.append(float(output.detach().sum())))
    return usual(model, observe=lambda: logged)


@training(oom="told", resume="told", names=("calls",))
def gradient_hook_with_a_counter(device: torch.device) -> Parts:
    model = mlp()
    calls = [0]

    def scale(gradient: Tensor) -> Tensor:
        calls[0] += 1
        return gradient / (1 + 0.05 * calls[0])

    model[0].weight.register_hook(scale)
    return usual(model, observe=lambda: calls)


# Random numbers


@training()
def module_with_a_torch_generator(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator, device=x.device)
        return self.inner(x + 0.1 * noise)

    model = with_forward(forward, generator=torch.Generator(device).manual_seed(5))
    return usual(model, observe=lambda: [model.generator.get_state()])


@training()
def module_with_a_numpy_generator(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner(x * float(self.numbers.uniform(0.8, 1.2)))

    model = with_forward(forward, numbers=np.random.default_rng(5))
    return usual(model, observe=lambda: model.numbers.bit_generator.state)


@training()
def module_with_a_python_random(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner(x * self.chance.uniform(0.8, 1.2))

    model = with_forward(forward, chance=random.Random(5))  # noqa: S311
    return usual(model, observe=lambda: [model.chance.getstate()])


class Noisy(Dataset[Any]):
    """Adds noise from a generator of its own to every item."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self.x, self.y = table().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.rand(FEATURES, generator=self.generator), self.y[index]


@training()
def dataset_with_a_generator(device: torch.device) -> Parts:
    data = Noisy(torch.Generator().manual_seed(5))
    return usual(mlp(), loader=shuffled(data), observe=lambda: [data.generator.get_state()])


@training()
def dataset_that_draws_from_the_global_one(device: torch.device) -> Parts:
    return usual(mlp(), loader=shuffled(Noisy(None)))


class Jitter:
    """A transform on the device, with a generator of its own."""

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(5)

    def __call__(self, batch: Any) -> Any:
        x, y = batch
        return x + 0.1 * torch.rand(x.shape, generator=self.generator, device=x.device), y


@training()
def transform_with_a_generator(device: torch.device) -> Parts:
    jitter = Jitter(device)
    return usual(mlp(), transform=jitter, observe=lambda: [jitter.generator.get_state()])


@training()
def transform_that_draws_from_the_global_one(device: torch.device) -> Parts:
    def jitter(batch: Any) -> Any:
        x, y = batch
        return x + 0.1 * torch.rand_like(x), y

    return usual(mlp(), transform=jitter)


@training()
def scheduled_sampling_by_python(device: torch.device) -> Parts:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.inner(x)
        return self.inner(x + out.detach().mean(1, keepdim=True)) if random.random() < 0.5 else out  # noqa: S311

    return usual(with_forward(forward))


@training()
def stochastic_depth(device: torch.device) -> Parts:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.last = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                if random.random() < 0.7:  # noqa: S311
                    x = x + torch.tanh(block(x))
            return self.last(x)

    return usual(Deep())


@training(coupled=True)
def mixup_by_numpy(device: torch.device) -> Parts:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        share = float(np.random.beta(0.4, 0.4))
        out = model(share * x + (1 - share) * x.flip(0))
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y.flip(0))

    return usual(mlp(), objective=objective)


# State in and around objectives and optimizers


@training(resume="told", names=("averaged",))
def averaged_model_in_a_hook(device: torch.device) -> Parts:
    model = mlp()
    optimizer = sgd(model)
    averaged = AveragedModel(model, device=device)
    optimizer.register_step_post_hook(lambda *_: averaged.update_parameters(model))
    return usual(model, optimizer=optimizer, observe=lambda: [averaged.state_dict()])


@training()
def averaged_model_that_is_handed_over(device: torch.device) -> Parts:
    """The same, and told to the loop."""
    model = mlp()
    optimizer = sgd(model)
    averaged = AveragedModel(model, device=device)
    optimizer.register_step_post_hook(lambda *_: averaged.update_parameters(model))
    parts = usual(model, optimizer=optimizer, observe=lambda: [averaged.state_dict()])
    return replace(parts, stateful={"averaged": averaged})


class Counted:
    """A number that can be saved."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@training(oom="told", names=("calls",), coupled=True)
def counter_that_is_handed_over(device: torch.device) -> Parts:
    counter = Counted()

    def objective(model: nn.Module, batch: Any) -> Tensor:
        counter.calls += 1
        return classify(model, batch) / (1 + 0.05 * counter.calls)

    return usual(mlp(), objective=objective, stateful={"counter": counter}, observe=lambda: counter.calls)


@training(oom="told", resume="told", names=("teacher",), coupled=True)
def mean_teacher_in_the_objective(device: torch.device) -> Parts:
    model = mlp()
    teacher = copy.deepcopy(model).to(device).requires_grad_(False)

    def objective(student: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for mean, weight in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
        x, y = batch
        out = student(x)
        return F.cross_entropy(out, y) + F.mse_loss(out, teacher(x))

    return usual(model, objective=objective, observe=lambda: [teacher.state_dict()])


@training(oom="told", resume="told", names=("calls",), coupled=True)
def counter_in_a_closure(device: torch.device) -> Parts:
    calls = 0

    def objective(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return classify(model, batch) / (1 + 0.05 * calls)

    return usual(mlp(), objective=objective, observe=lambda: calls)


GLOBAL_CALLS = 0


@training(oom="told", resume="told", names=("GLOBAL_CALLS",), coupled=True)
def counter_in_a_global(device: torch.device) -> Parts:
    global GLOBAL_CALLS  # noqa: PLW0603
    GLOBAL_CALLS = 0

    def objective(model: nn.Module, batch: Any) -> Tensor:
        global GLOBAL_CALLS  # noqa: PLW0603
        GLOBAL_CALLS += 1
        return classify(model, batch) / (1 + 0.05 * GLOBAL_CALLS)

    return usual(mlp(), objective=objective, observe=lambda: GLOBAL_CALLS)


CURRICULUM = {"level": 0.1}


@training(oom="told", resume="told", names=("CURRICULUM", "level"), coupled=True)
def curriculum_in_a_global(device: torch.device) -> Parts:
    CURRICULUM["level"] = 0.1

    def objective(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        CURRICULUM["level"] = min(1.0, CURRICULUM["level"] * 1.1)
        return F.cross_entropy(model(x * CURRICULUM["level"]), y)

    return usual(mlp(), objective=objective, observe=lambda: CURRICULUM)


class Annealed:
    """An objective with a number, a list and a tensor of its own."""

    def __init__(self, device: torch.device) -> None:
        self.calls = 0
        self.history: list[float] = []
        self.mean = torch.zeros((), device=device)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        loss = classify(model, batch)
        self.history.append(self.calls * 0.5)
        self.mean.lerp_(loss.detach(), 0.1)
        return loss * (1 + 0.1 * self.mean) / (1 + 0.01 * self.calls + 0.001 * len(self.history))

    def learn(self, model: nn.Module, batch: Any) -> Tensor:
        return self(model, batch)


@training(oom="told", names=("calls", "history"), coupled=True)
def objective_that_is_an_object(device: torch.device) -> Parts:
    objective = Annealed(device)
    return usual(mlp(), objective=objective, observe=lambda: dict(vars(objective)))


@training(oom="told", names=("calls", "history"), coupled=True)
def objective_that_is_a_method(device: torch.device) -> Parts:
    trainer = Annealed(device)
    return usual(mlp(), objective=trainer.learn, observe=lambda: dict(vars(trainer)))


@training(oom="told", resume="told", names=("numbers",), coupled=True)
def counter_of_itertools(device: torch.device) -> Parts:
    numbers = itertools.count(1)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) / (1 + 0.05 * next(numbers))

    return usual(mlp(), objective=objective, observe=lambda: repr(numbers))


@training(oom="told", resume="told", names=("lengths",), coupled=True)
def list_as_a_default_argument(device: torch.device) -> Parts:
    def objective(model: nn.Module, batch: Any, lengths: list[int] = []) -> Tensor:  # noqa: B006
        lengths.append(len(batch[0]))
        return classify(model, batch) / (1 + 0.05 * len(lengths))

    return usual(mlp(), objective=objective, observe=lambda: objective.__defaults__)


@training(oom="told", resume="told", names=("tally",), coupled=True)
def dict_in_a_partial(device: torch.device) -> Parts:
    def objective(model: nn.Module, batch: Any, tally: dict[str, int]) -> Tensor:
        tally["calls"] = tally.get("calls", 0) + 1
        return classify(model, batch) / (1 + 0.05 * tally["calls"])

    tally: dict[str, int] = {}
    return usual(mlp(), objective=partial(objective, tally=tally), observe=lambda: tally)


@training(oom="told", resume="told", names=("kl_weight",))
def kl_weight_in_a_closure(device: torch.device) -> Parts:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(FEATURES, 8)
            self.decode = nn.Linear(4, FEATURES)

    kl_weight = 0.01

    def objective(model: Any, batch: Any) -> Tensor:
        nonlocal kl_weight
        kl_weight = min(1.0, kl_weight * 1.2)
        mean, spread = model.encode(batch[0]).chunk(2, 1)
        out = model.decode(mean + torch.randn_like(mean) * spread.exp())
        kl = 0.5 * (mean.square() + (2 * spread).exp() - 1 - 2 * spread).sum(1).mean()
        return F.mse_loss(out, batch[0]) + kl_weight * kl

    return usual(Vae(), objective=objective, observe=lambda: kl_weight)


@training(oom="told", names=("weight",), coupled=True)
def weights_changed_in_the_objective(device: torch.device) -> Parts:
    def objective(model: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            model[0].weight.mul_(0.98)
        return classify(model, batch)

    return usual(mlp(), objective=objective)


@training(oom="told", names=("param_groups", "lr", "optimizer"))
def rate_changed_in_the_objective(device: torch.device) -> Parts:
    model = mlp()
    optimizer = sgd(model)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] *= 0.97
        return classify(model, batch)

    return usual(model, optimizer=optimizer, objective=objective)


@training(oom="told", resume="told", names=("scheduler",))
def scheduler_in_the_objective(device: torch.device) -> Parts:
    model = mlp()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 4, 0.5)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        if optimizer.state:  # after the first update
            scheduler.step()
        return classify(model, batch)

    return usual(model, optimizer=optimizer, objective=objective, observe=lambda: scheduler.last_epoch)


@training(oom="told", resume="told", names=("accuracy",))
def metric_in_the_objective(device: torch.device) -> Parts:
    from torchmetrics.classification import MulticlassAccuracy

    accuracy = MulticlassAccuracy(CLASSES, average="micro").to(device)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        out = model(x)
        accuracy.update(out.detach(), y)
        return F.cross_entropy(out, y)

    return usual(mlp(), objective=objective, observe=lambda: [accuracy.compute()])


class Warming(torch.optim.SGD):
    """An optimizer that counts its steps in an attribute, by which they grow."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 2**-3)
        self.updates = 0
        self.norms: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.updates += 1
        self.norms.append(1 / self.updates)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(
                        parameter.grad, alpha=-group["lr"] * min(1.0, self.updates / 10) * sum(self.norms[-3:])
                    )


@training()
def optimizer_with_attributes(device: torch.device) -> Parts:
    model = mlp()
    optimizer = Warming(model.parameters())
    return usual(model, optimizer=optimizer, observe=lambda: (optimizer.updates, optimizer.norms))


@training(resume="told", names=("counted",))
def optimizer_hook_that_counts(device: torch.device) -> Parts:
    model = mlp()
    optimizer = sgd(model)
    counted = [0]

    def shrink(optimizer: Any, *_: Any) -> None:
        counted[0] += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(1 / (1 + 0.05 * counted[0]))

    optimizer.register_step_pre_hook(shrink)
    return usual(model, optimizer=optimizer, observe=lambda: counted)


@training(only_fit=True, oom="told", names=(r"average\S*",))
def stochastic_weight_averaging(device: torch.device) -> Parts:
    """The average is a part of the model, and is updated once in five passes."""

    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.average = AveragedModel(self.inner)
            self.passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            if self.passes % 5 == 0:
                self.average.update_parameters(self.inner)
            return self.inner(x)

    model = Averaging()
    optimizer = sgd(model.inner)
    return usual(
        model,
        optimizer=optimizer,
        scheduler=[SWALR(optimizer, swa_lr=2**-5, anneal_epochs=2)],
        schedule="epoch",
        observe=lambda: model.passes,
    )


# Data


class Drifting(Sampler[int]):
    """A sampler that goes on where the last epoch has ended, with an attribute."""

    def __init__(self, rows: int) -> None:
        self.rows, self.offset = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        self.offset += 3
        order = [(7 * index + self.offset) % self.rows for index in range(self.rows)]
        yield from order


@training()
def sampler_with_state(device: torch.device) -> Parts:
    sampler = Drifting(ROWS)
    return usual(mlp(), loader=DataLoader(table(), BATCH, sampler=sampler), observe=lambda: sampler.offset)


@training()
def weighted_sampler(device: torch.device) -> Parts:
    sampler = WeightedRandomSampler(torch.arange(1.0, ROWS + 1), ROWS, generator=torch.Generator().manual_seed(3))
    return usual(mlp(), loader=DataLoader(table(), BATCH, sampler=sampler))


class Flowing(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        x, y = table().tensors
        for index in torch.randperm(len(x)).tolist():
            yield x[index], y[index]


@training(has_length=False)
def iterable_without_length(device: torch.device) -> Parts:
    return usual(mlp(), loader=DataLoader(Flowing(), BATCH))


@training(cuda=False)
def loader_with_workers(device: torch.device) -> Parts:
    return usual(mlp(), loader=shuffled(Noisy(None), num_workers=1))


class Augmenting(Noisy):
    """Noise that grows with the items that were read."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.x[index] * (1 + 0.001 * self.reads), self.y[index]


@training()
def dataset_that_counts(device: torch.device) -> Parts:
    data = Augmenting()
    return usual(mlp(), loader=shuffled(data), observe=lambda: data.reads)


class Collating:
    """Puts rows together with noise from a generator of its own, and counts."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.calls = 0

    def __call__(self, rows: Any) -> Any:
        self.calls += 1
        x, y = default_collate(rows)
        return x + 0.01 * self.calls * torch.rand(x.shape, generator=self.generator), y


@training(resume="told", names=("generator", "calls", "Collating", "collate_fn"))
def collate_with_state(device: torch.device) -> Parts:
    collate = Collating()
    loader = shuffled(table(), collate_fn=collate)
    return usual(mlp(), loader=loader, observe=lambda: (collate.calls, collate.generator.get_state()))


class Own:
    """A loader of one's own, with a generator and a count of its epochs."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.epochs = 0

    def __len__(self) -> int:
        return ROWS // BATCH

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        x, y = table().tensors
        for rows in torch.randperm(ROWS, generator=self.generator).split(BATCH):
            yield x[rows] * (1 + 0.1 * self.epochs), y[rows]


@training()
def loader_of_ones_own(device: torch.device) -> Parts:
    loader = Own()
    return usual(mlp(), loader=loader, observe=lambda: (loader.epochs, loader.generator.get_state()))
