"""Record what PyTorch's allocator does in real trainings on a GPU, and hold hotloop's model of it to that.

    python benchmarks/record_allocations.py --out tests/simulate/traces

Each training runs in a process of its own, so that its allocator begins with nothing; its events are written as
compressed JSON and replayed at once. A difference is told by its event. It takes about a minute.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from allocation_traces import ACTIONS, Replayed, Trace, TraceEntry, read_trace, replay, write_trace
from harness.about import facts
from harness.models import GPT, GPTSize
from hotloop.errors import DeviceUnavailable, HotloopError
from hotloop.printing.text import count, size

TOGETHER = 4  # processes at once: most of their time is starting
LIMIT = 120  # seconds for one of them
ROWS = 2_000_000  # events that are kept
Step = Callable[[int], Tensor]  # number of the step → loss


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        same = stride == 1 and channels_in == channels
        self.around = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.around(x))


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = Block(3, width, 1)
        self.down = nn.ModuleList([Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)])
        self.up = nn.ModuleList([Block(6 * width, 2 * width, 1), Block(3 * width, width, 1)])
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.first(x)]
        for block in self.down:
            levels.append(block(levels[-1]))
        y = levels.pop()
        for block in self.up:
            y = block(torch.cat([F.interpolate(y, scale_factor=2), levels.pop()], 1))
        return self.last(y)


class VAE(nn.Module):
    """An image to a few numbers with noise, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 40))
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, -1)
        made = self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp())
        shape = -0.5 * (1 + spread - mean**2 - spread.exp()).sum()
        return F.binary_cross_entropy_with_logits(made, torch.sigmoid(x), reduction="sum") + shape


class Tagger(nn.Module):
    """Words, a recurrent network over them, and a class for each."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8000, 256)
        self.cells = nn.LSTM(256, 512, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(512, 300)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.words(x))[0])


def images(model: nn.Module, batch: int, pixels: int, optimizer: str = "sgd", **ways: Any) -> Step:
    """A classifier of images."""

    def loss(number: int) -> Tensor:
        x = torch.randn(batch, 3, pixels, pixels).cuda()
        return F.cross_entropy(model(x).float(), torch.randint(0, 10, (batch,)).cuda())

    return trained(model, loss, optimizer, **ways)


def trained(model: nn.Module, loss: Callable[[int], Tensor], optimizer: str, cast: torch.dtype | None = None) -> Step:
    """A plain training step, in the precision that was asked for."""
    kinds = {"sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), "adam": torch.optim.Adam}
    kinds["adamw"] = lambda p: torch.optim.AdamW(p, fused=True)
    chosen = kinds[optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=cast is torch.float16)

    def step(number: int) -> Tensor:
        chosen.zero_grad()
        with torch.autocast("cuda", dtype=cast, enabled=cast is not None):
            found = loss(number)
        scaler.scale(found).backward()
        scaler.step(chosen)
        scaler.update()
        return found.detach()

    return step


def convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10)).cuda()


def resnet() -> nn.Module:
    shape = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    blocks = [block for a, b, stride in shape for block in (Block(a, b, stride), Block(b, b, 1))]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)).cuda()


def gpt(batch: int, **ways: Any) -> Step:
    shape = GPTSize(layers=6, heads=8, width=512, context=256, vocabulary=8192)
    model = GPT(shape).cuda()

    def loss(number: int) -> Tensor:
        tokens = torch.randint(0, shape.vocabulary, (batch, shape.context + 1)).cuda()
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    return trained(model, loss, **ways)


def lstm() -> Step:
    model = Tagger().cuda()

    def loss(number: int) -> Tensor:
        words = torch.randint(0, 8000, (32, 40 + 16 * (number % 4))).cuda()  # sentences of several lengths
        return F.cross_entropy(model(words).flatten(0, 1), words.flatten() % 300)

    return trained(model, loss, "adam")


def vae() -> Step:
    model = VAE().cuda()
    return trained(model, lambda number: model(torch.randn(512, 784).cuda()), "adam")


def unet(capped: bool = False) -> Step:
    model = UNet().cuda()

    def loss(number: int) -> Tensor:
        batch = 8 * (1 + 5 * number % 7) if capped else 16
        x = torch.randn(batch, 3, 64, 64).cuda()
        return F.mse_loss(model(x), x)

    return trained(model, loss, "adam")


TRAININGS: dict[str, Callable[[], Step]] = {
    "cnn": lambda: images(convnet(), 256, 32),
    "resnet": lambda: images(resnet(), 32, 128),
    "gpt": lambda: gpt(8, optimizer="adam"),
    "lstm": lstm,
    "vae": vae,
    "unet": unet,
    "gpt-bf16": lambda: gpt(16, optimizer="adamw", cast=torch.bfloat16),
    "resnet-fp16": lambda: images(resnet(), 64, 128, "adam", cast=torch.float16),
    "unet-capped": lambda: unet(capped=True),
}
CAPS = {"unet-capped": 400 * 2**20}  # bytes: batches of changing sizes, so that it releases, retries and runs out


def record(name: str, steps: int) -> Trace:
    """Train, in this process, from an allocator that has nothing; and read what it did."""
    torch.manual_seed(0)
    torch.cuda.init()
    room, total = torch.cuda.mem_get_info()
    cap = None
    if name in CAPS:
        fraction = CAPS[name] / total
        torch.cuda.set_per_process_memory_fraction(fraction)
        cap = int(fraction * torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=ROWS)
    step = TRAININGS[name]()
    for number in range(steps):
        try:
            step(number)
        except torch.OutOfMemoryError:
            if name not in CAPS:
                raise
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    rows = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    events = tuple(
        TraceEntry(row["action"], int(row.get("addr", 0)), int(row["size"]), int(row["stream"]))
        for row in rows
        if row["action"] in ACTIONS
    )
    if len(rows) >= ROWS:
        raise HotloopError(f"{name} has more than {ROWS:,} events, so the first are lost", fix="ask for fewer --steps")
    return Trace(name, room, cap, peak, events, {"steps": steps, **facts([torch.device("cuda")])})


def in_own_process(name: str, out: Path, steps: int) -> str | None:
    """Record one training; what went wrong, or None."""
    command = [sys.executable, __file__, "--one", name, "--out", str(out), "--steps", str(steps)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"{name}: not done after {LIMIT} s"
    last = (done.stderr.strip().splitlines() or ["no word"])[-1]
    return None if done.returncode == 0 else f"{name}: {last}"


def table_of(found: list[Replayed]) -> Table:
    table = Table(title="the allocator's model beside the real one")
    for column in ("training", "events", "peak allocated", "real", "peak reserved", "real", "differences"):
        table.add_column(column, justify="left" if column == "training" else "right")
    for each in found:
        real = each.real_peak or (0, 0)
        figures = (size(each.peak[0]), size(real[0]), size(each.peak[1]), size(real[1]))
        table.add_row(each.name, count(len(each.figures)), *figures, str(each.first or "none"))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/simulate/traces"), help="folder for the traces")
    parser.add_argument("--steps", type=int, default=8, help="of each training")
    parser.add_argument("--quick", action="store_true", help="two steps of each")
    parser.add_argument("--one", choices=sorted(TRAININGS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise DeviceUnavailable(
            "there is no CUDA GPU here whose allocations could be recorded",
            fix="run this on a machine with one; `hotloop device` says why torch sees none",
        )
    steps = 2 if arguments.quick else arguments.steps
    if arguments.one:
        write_trace(arguments.out / f"{arguments.one}.json.gz", record(arguments.one, steps))
        return 0
    with ThreadPoolExecutor(TOGETHER) as pool:
        failures = list(pool.map(lambda name: in_own_process(name, arguments.out, steps), TRAININGS))
    paths = [arguments.out / f"{name}.json.gz" for name, wrong in zip(TRAININGS, failures, strict=True) if not wrong]
    found = [replay(read_trace(path)) for path in paths]
    console = Console(width=160)
    console.print(table_of(found))
    for wrong in filter(None, failures):
        console.print(wrong, markup=False)
    return 0 if all(each.exact for each in found) and not any(failures) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HotloopError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
