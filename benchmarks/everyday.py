"""What people bring: twenty-two trainings of many kinds, by the tutorial's loop and then by `Loop(…).fit(…)`.

    python benchmarks/everyday.py --out benchmarks/results/everyday.json

Each has a process of its own with nothing in the caches. As in a notebook, the tutorial's loop comes first and its last
loss is still there when hotloop gets the same model with its first weights again. The tutorial's rate is that of steps
before and after, from the sixth on, since a process may get slower with time; hotloop's run counts everything. Nothing
here was chosen for being fast: losses of one's own, steps that wait for the device, numbers drawn on the host, ragged
batches, second derivatives.
"""

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hotloop
from harness.about import facts
from harness.packages import MissingPackage, require
from hotloop.device.clock import synchronize
from hotloop.records.files import write_json

WARM = 5  # steps of the tutorial's loop before it is timed
SHARE = 0.7  # of the seconds that hotloop's run would take in the tutorial's loop, for which that is timed
LEAST = 0.97  # times the tutorial's loop, which no training may be under
LIMIT = 600  # seconds for a training
CLASSES, WORDS = 10, 8_000


@dataclass(frozen=True)
class Case:
    """A training: with neither a loss nor an objective, the model returns its own loss."""

    model: nn.Module
    optimize: Callable[..., Optimizer]
    loader: Any
    loss: Callable[[Any, Any], Tensor] | None = None
    objective: Callable[[nn.Module, Any], Tensor] | None = None

    def compute(self, batch: Any) -> Tensor:
        """The loss of a batch, as a tutorial computes it."""
        if self.objective is not None:
            return self.objective(self.model, batch)
        if self.loss is not None:
            return self.loss(self.model(batch[0]), batch[1])
        loss: Tensor = self.model(**batch).loss
        return loss


@dataclass(frozen=True)
class Outcome:
    """What came of one."""

    name: str
    steps: int
    tutorial: float  # seconds that it takes for so many steps
    paces: tuple[float, float]  # of it, seconds of a step before hotloop's run and after
    default: float
    losses: tuple[float | None, float]  # of the first epoch; None where the tutorial's was not whole
    gigabytes: tuple[float, float]  # at the peak
    plan: str
    dropped: dict[str, str]

    @property
    def times(self) -> float:
        return self.tutorial / self.default


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeded())


def choices(most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape, generator=seeded())


def batches(size: int, *tensors: Tensor, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), size, shuffle=True, **options)


class Texts(Dataset[dict[str, Tensor]]):
    """Batches for models that return their own loss."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


# Pictures


def of_torchvision(name: str, batch: int, *, small: bool) -> Case:
    model = getattr(require("torchvision").models, name)(num_classes=CLASSES)
    count, side = (4, 64) if small else (1024, 224)
    loader = batches(min(batch, count), numbers(count, 3, side, side), choices(CLASSES, count))
    return Case(model, partial(SGD, lr=0.002, momentum=0.9), loader, nn.CrossEntropyLoss())


def of_timm(name: str, *, small: bool) -> Case:
    model = require("timm").create_model(name, num_classes=CLASSES, pretrained=False)
    count = 4 if small else 1024
    loader = batches(min(64, count), numbers(count, 3, 224, 224), choices(CLASSES, count))
    return Case(model, partial(AdamW, lr=3e-4), loader, nn.CrossEntropyLoss())


def digits(*, small: bool) -> Case:
    """The network of PyTorch's example for MNIST."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, CLASSES), nn.LogSoftmax(1)),
    )
    count = 128 if small else 20_000
    loader = batches(64, numbers(count, 1, 28, 28), choices(CLASSES, count))
    return Case(model, partial(Adadelta, lr=1.0), loader, nn.NLLLoss())


def segmentation(*, small: bool) -> Case:
    models = require("torchvision").models.segmentation
    model = models.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)
    count, side = (4, 64) if small else (256, 256)
    loader = batches(min(32, count), numbers(count, 3, side, side), choices(CLASSES, count, side, side))
    return Case(model, AdamW, loader, objective=lambda model, batch: F.cross_entropy(model(batch[0])["out"], batch[1]))


def contrastive(*, small: bool) -> Case:
    """Two views of each picture are to find one another, as in SimCLR."""
    model = require("torchvision").models.resnet18(num_classes=128)
    size = 8 if small else 128

    def objective(model: nn.Module, batch: Any) -> Tensor:
        views = torch.cat([batch[0] + 0.1 * torch.randn_like(batch[0]), batch[0].flip(3)])
        found = F.normalize(model(views), dim=1)
        itself = torch.eye(len(views), dtype=torch.bool, device=views.device)
        likeness = (found @ found.T / 0.5).masked_fill(itself, -1e9)
        return F.cross_entropy(likeness, torch.arange(len(views), device=views.device).roll(len(views) // 2))

    loader = batches(size, numbers(16 * size, 3, 64, 64), drop_last=True)
    return Case(model, partial(Adam, lr=3e-4), loader, objective=objective)


def volumes(*, small: bool) -> Case:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        pairs = ((inputs, outputs), (outputs, outputs))
        return [
            layer
            for a, b in pairs
            for layer in (nn.Conv3d(a, b, 3, padding=1), nn.InstanceNorm3d(b), nn.LeakyReLU(0.1, inplace=True))
        ]

    up = nn.Upsample(scale_factor=2, mode="trilinear")
    model = nn.Sequential(*block(1, 16), nn.MaxPool3d(2), *block(16, 32), up, *block(32, 16), nn.Conv3d(16, 3, 1))
    count, side = (4, 8) if small else (64, 48)
    loader = batches(4, numbers(count, 1, side, side, side), choices(3, count, side, side, side))
    return Case(model, Adam, loader, nn.CrossEntropyLoss())


# Texts and sounds


def roberta(*, small: bool) -> Case:
    transformers = require("transformers")
    config = transformers.RobertaConfig(num_hidden_layers=1 if small else 6, vocab_size=WORDS)
    words = 5 + choices(WORDS - 5, 32 if small else 1024, 128)
    texts = Texts(input_ids=words, attention_mask=torch.ones_like(words), labels=words[:, 0] % 2)
    model = transformers.RobertaForSequenceClassification(config)
    return Case(model, partial(AdamW, lr=3e-5), DataLoader(texts, 32, shuffle=True))


def whisper(*, small: bool) -> Case:
    """Speech to text: its layers are dropped by numbers that are drawn on the host."""
    transformers = require("transformers")
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(vocab_size=WORDS, suppress_tokens=None, begin_suppress_tokens=None, **tokens)
    count = 2 if small else 64
    sounds = Texts(input_features=numbers(count, 80, 3000), labels=5 + choices(WORDS - 5, count, 48))
    model = transformers.WhisperForConditionalGeneration(config)
    return Case(model, partial(AdamW, lr=1e-4), DataLoader(sounds, min(8, count), shuffle=True))


class Translator(nn.Module):
    """PyTorch's own transformer with its masks, whose makers look at the data."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.transformer = nn.Transformer(width, 8, 3, 3, 4 * width, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        padding = source == 0
        found = self.transformer(
            self.embed(source) + self.places,
            self.embed(target) + self.places,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        scores: Tensor = self.head(found)
        return scores


def translation(*, small: bool) -> Case:
    count = 8 if small else 2048
    source = choices(WORDS - 1, count, 64) + 1
    source[:, 56:] = 0

    def objective(model: nn.Module, batch: Any) -> Tensor:
        source, target = batch
        return F.cross_entropy(model(source, target).flatten(0, 1), target.flatten())

    loader = batches(min(64, count), source, choices(WORDS - 1, count, 64) + 1)
    return Case(Translator(64 if small else 512), partial(Adam, lr=1e-4), loader, objective=objective)


class Ragged(Dataset[tuple[Tensor, int]]):
    """Texts of many lengths."""

    def __init__(self, count: int, longest: int) -> None:
        self.lengths = (20 + choices(longest - 20, count)).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, WORDS, (self.lengths[index],), generator=generator), self.lengths[index] % 2


class Packed(nn.Module):
    """A recurrent network over packed sequences."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 128, padding_idx=0)
        self.rnn = nn.GRU(128, width, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(2 * width, 2)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        embedded = self.embed(words)
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, last = self.rnn(packed)
        scores: Tensor = self.head(torch.cat([last[-2], last[-1]], 1))
        return scores


def packed(*, small: bool) -> Case:
    def collate(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
        words = nn.utils.rnn.pad_sequence([item for item, _ in items], batch_first=True)
        return words, torch.tensor([len(item) for item, _ in items]), torch.tensor([label for _, label in items])

    def objective(model: nn.Module, batch: Any) -> Tensor:
        words, lengths, labels = batch
        return F.cross_entropy(model(words, lengths), labels)

    count = 8 if small else 4096
    texts = Ragged(count, 30 if small else 200)
    loader = DataLoader(texts, min(64, count), shuffle=True, collate_fn=collate)
    return Case(Packed(8 if small else 256), Adam, loader, objective=objective)


def sounds(*, small: bool) -> Case:
    """A network of one-dimensional convolutions over raw sound."""
    layers: list[nn.Module] = []
    inputs = 1
    for outputs, size, stride in ((64, 80, 4), (64, 3, 1), (128, 3, 1), (256, 3, 1)):
        layers += [nn.Conv1d(inputs, outputs, size, stride), nn.BatchNorm1d(outputs), nn.ReLU(), nn.MaxPool1d(4)]
        inputs = outputs
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 35))
    count = 8 if small else 4096
    loader = batches(min(256, count), numbers(count, 1, 8000), choices(35, count))
    return Case(model, partial(Adam, lr=1e-3, weight_decay=1e-4), loader, nn.CrossEntropyLoss())


# Tables, graphs, equations


def table(*, small: bool) -> Case:
    model = nn.Sequential(
        *(nn.Linear(30, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1)),
    )

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])

    count = 512 if small else 20_000
    return Case(model, Adam, batches(256, numbers(count, 30), choices(2, count).float()), objective=objective)


class Recommender(nn.Module):
    """Tables of embeddings, and what each has to do with the others, as in DLRM."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 32, mode="sum") for _ in range(8))
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 32))
        self.top = nn.Sequential(nn.Linear(32 + 36, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        found = [self.bottom(dense), *(table(sparse[:, i : i + 1]) for i, table in enumerate(self.tables))]
        features = torch.stack(found, 1)
        above, below = torch.triu_indices(9, 9, 1, device=dense.device)
        between = (features @ features.transpose(1, 2))[:, above, below]
        scores: Tensor = self.top(torch.cat([features[:, 0], between], 1))
        return scores.squeeze(1)


def recommendation(*, small: bool) -> Case:
    count, rows = (256, 100) if small else (65_536, 50_000)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        dense, sparse, clicked = batch
        return F.binary_cross_entropy_with_logits(model(dense, sparse), clicked)

    loader = batches(min(2048, count), numbers(count, 13), choices(rows, count, 8), choices(2, count).float())
    return Case(Recommender(rows), partial(Adagrad, lr=0.01), loader, objective=objective)


class Autoencoder(nn.Module):
    """A variational one; it draws random numbers in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 40))
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * spread).exp()), mean, spread


def autoencoder(*, small: bool) -> Case:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        """A sum over the batch."""
        found, mean, spread = model(batch[0])
        away = -0.5 * torch.sum(1 + spread - mean.square() - spread.exp())
        return F.binary_cross_entropy(found, batch[0], reduction="sum") + away

    loader = batches(128, torch.rand(256 if small else 20_000, 784, generator=seeded()))
    return Case(Autoencoder(), partial(Adam, lr=1e-3), loader, objective=objective)


class GraphNetwork(nn.Module):
    """Sums over the neighbours of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 128), nn.Linear(128, 128), nn.Linear(128, 16)])

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            sums = torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]]) / 8
            nodes = F.dropout(F.relu(layer(sums)), 0.5, self.training)
        scores: Tensor = self.layers[-1](nodes)
        return scores


def graph(*, small: bool) -> Case:
    """One batch, the whole graph, in each epoch; a mask of which the result has as many rows as there are ones."""
    count = 100 if small else 20_000

    def objective(model: nn.Module, batch: Any) -> Tensor:
        nodes, edges, labels, known = batch
        return F.cross_entropy(model(nodes, edges)[known], labels[known])

    whole = (numbers(count, 256), choices(count, 2, 8 * count), choices(16, count), choices(3, count) == 0)
    optimize = partial(Adam, lr=0.01, weight_decay=5e-4)
    return Case(GraphNetwork(), optimize, [whole], objective=objective)


def equation(*, small: bool) -> Case:
    """A network that is to solve Burgers' equation: second derivatives in the loss."""
    layers = [each for inputs in (2, 64, 64, 64, 64) for each in (nn.Linear(inputs, 64), nn.Tanh())]

    def objective(model: nn.Module, batch: Any) -> Tensor:
        points = batch[0].requires_grad_()
        value = model(points)
        (slope,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        (curve,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        inside = slope[:, 1:] + value * slope[:, :1] - 0.01 / math.pi * curve[:, :1]
        start = model(points * torch.tensor([1.0, 0.0], device=points.device)) + (math.pi * points[:, :1]).sin()
        return inside.square().mean() + start.square().mean()

    count = 64 if small else 10_000
    loader = batches(min(2500, count), torch.rand(count, 2, generator=seeded()))
    return Case(nn.Sequential(*layers, nn.Linear(64, 1)), partial(Adam, lr=1e-3), loader, objective=objective)


class Field(nn.Module):
    """Colour and density at a point, as in NeRF."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [each for _ in range(6) for each in (nn.Linear(256, 256), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(63, 256), nn.ReLU(), *hidden, nn.Linear(256, 4))

    def forward(self, points: Tensor) -> Tensor:
        waves = [wave(points * 2**k) for k in range(10) for wave in (torch.sin, torch.cos)]
        return torch.sigmoid(self.layers(torch.cat([points, *waves], -1)))


def field(*, small: bool) -> Case:
    count, size = (256, 64) if small else (500_000, 16_384)
    loader = batches(size, torch.rand(count, 3, generator=seeded()), torch.rand(count, 4, generator=seeded()))
    return Case(Field(), partial(Adam, lr=5e-4), loader, nn.MSELoss())


CASES: dict[str, Callable[..., Case]] = {
    "mobilenet": partial(of_torchvision, "mobilenet_v3_small", 128),
    "efficientnet": partial(of_torchvision, "efficientnet_b0", 64),
    "resnet50": partial(of_torchvision, "resnet50", 64),
    "densenet": partial(of_torchvision, "densenet121", 32),
    "convnext": partial(of_timm, "convnext_tiny"),
    "swin": partial(of_timm, "swin_tiny_patch4_window7_224"),
    "mixer": partial(of_timm, "mixer_s16_224"),
    "digits": digits,
    "segmentation": segmentation,
    "contrastive": contrastive,
    "volumes": volumes,
    "roberta": roberta,
    "whisper": whisper,
    "translation": translation,
    "packed": packed,
    "sounds": sounds,
    "table": table,
    "recommendation": recommendation,
    "autoencoder": autoencoder,
    "graph": graph,
    "equation": equation,
    "field": field,
}


def on_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return [tensor.to(device) for tensor in batch]


def by_hand(case: Case, seconds: float, device: torch.device) -> tuple[float, list[float], Tensor]:
    """The tutorial's loop for so many seconds: those of a step, the losses of the first epoch, and the last."""
    optimizer = case.optimize(case.model.parameters())
    times: list[float] = []
    sums: list[list[float]] = []

    def is_over() -> bool:
        return len(times) > WARM + 1 and times[-1] - times[WARM] >= seconds

    while not is_over():
        sums.append([])
        for batch in case.loader:
            given = on_device(batch, device)
            optimizer.zero_grad()
            loss = case.compute(given)
            loss.backward()
            optimizer.step()
            sums[-1].append(loss.item())
            times.append(time.perf_counter())
            if is_over():
                break
    return (times[-1] - times[WARM]) / (len(times) - WARM - 1), sums[0], loss


def measured(name: str, seconds: float, device: torch.device, *, small: bool) -> Outcome:
    """Both loops, of which hotloop's takes the tutorial's about so many seconds."""
    torch.manual_seed(0)
    case = CASES[name](small=small)
    model = case.model.to(device)
    other = replace(case, model=copy.deepcopy(model))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(0)
    pace, losses, held = by_hand(case, SHARE * seconds / 2, device)  # as a notebook holds its last loss
    first = sum(losses) / len(losses) if len(losses) == len(case.loader) else None
    plain = _peak(device)
    model.zero_grad()
    model.load_state_dict(state)
    epochs = max(1, round(seconds / pace / len(case.loader)))
    torch.manual_seed(0)
    start = time.perf_counter()
    loop = hotloop.Loop(
        model, case.optimize(model.parameters()), case.loss, objective=case.objective, device=str(device)
    )
    report = loop.fit(case.loader, epochs=epochs, progress=False, monitor=False)
    synchronize(device)
    default = time.perf_counter() - start
    ours = _peak(device)
    trials = () if loop.tuning is None else loop.tuning.trials
    steps = epochs * len(case.loader)
    del held
    again, _, _ = by_hand(other, SHARE * seconds / 2, device)
    return Outcome(
        name,
        steps,
        steps * (pace + again) / 2,
        (pace, again),
        default,
        (first, report.epochs[0].loss),
        (plain, ours),
        str(loop.plan),
        {trial.lever: trial.why for trial in trials if trial.verdict == "dropped"},
    )


def _peak(device: torch.device) -> float:
    """Gigabytes in tensors since the last call, at most."""
    if device.type != "cuda":
        return 0.0
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def apart(name: str, arguments: argparse.Namespace) -> Outcome | str:
    """One in a process of its own; in words why there is none."""
    command = [sys.executable, __file__, name, "--here", "--seconds", str(arguments.seconds)]
    command += ["--device", arguments.device, *(["--quick"] if arguments.quick else [])]
    with tempfile.TemporaryDirectory() as folder:
        home = {**os.environ, "HOTLOOP_CACHE": folder, "HF_HUB_OFFLINE": "1"}
        try:
            ended = subprocess.run(  # noqa: S603
                command, env=home, capture_output=True, text=True, check=False, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return f"it took more than {LIMIT} s"
    if ended.returncode:
        return (ended.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    told = json.loads(ended.stdout.splitlines()[-1])
    return Outcome(**{name: tuple(value) if isinstance(value, list) else value for name, value in told.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description="The tutorial's loop and hotloop's default on what people bring.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--seconds", type=float, default=10, help="that a run takes the tutorial's loop (10)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="a GPU, where there is one"
    )
    parser.add_argument("--quick", action="store_true", help="few items and small models: does it work here?")
    parser.add_argument("--within", type=float, default=math.inf, help="begin none after so many seconds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every outcome here, as JSON")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose of {', '.join(CASES)}")
    if not arguments.seconds > 0:
        parser.error("--seconds: give more than 0")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.parent}")
    try:
        hotloop.pick(arguments.device)
    except hotloop.HotloopError as error:
        parser.error(f"--device: {error}")
    if arguments.here:
        warnings.simplefilter("ignore")
        device = torch.device(arguments.device)
        print(json.dumps(asdict(measured(arguments.cases[0], arguments.seconds, device, small=arguments.quick))))
        return
    console, begun = Console(), time.monotonic()
    about = facts([torch.device(arguments.device)])
    outcomes: list[Outcome] = []
    missing: dict[str, str] = {}
    for name in arguments.cases or CASES:
        late = time.monotonic() - begun > arguments.within
        found = "there was no time for it" if late else apart(name, arguments)
        if isinstance(found, str):
            missing[name] = found
            console.print(f"{name}: {found}", markup=False)
        else:
            outcomes.append(found)
            console.print(f"{name}: {found.times:.2f} times as fast; {found.plan}", markup=False)
        if arguments.out is not None:  # after each: a run that is ended has lost none
            write_json(arguments.out, about | {"outcomes": [asdict(each) for each in outcomes], "missing": missing})
    console.print(shown(outcomes))
    slow = [each.name for each in outcomes if each.times < LEAST]
    console.print(f"under {LEAST}: {', '.join(slow) or 'none'}")


def shown(outcomes: list[Outcome]) -> Table:
    table = Table("training", "steps", "tutorial", "default", "times", "loss, tutorial and default", "memory, GiB")
    for each in outcomes:
        first, ours = each.losses
        loss = f"{'–' if first is None else f'{first:.4g}'}, {ours:.4g}"
        memory = "{:.1f}, {:.1f}".format(*each.gigabytes)
        pace = (f"{each.tutorial:.2f} s", f"{each.default:.2f} s", f"{each.times:.2f}")
        table.add_row(each.name, f"{each.steps:,}", *pace, loss, memory)
    return table


if __name__ == "__main__":
    try:
        main()
    except MissingPackage as problem:
        sys.exit(f"{problem}")
