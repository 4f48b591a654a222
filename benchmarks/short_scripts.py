"""What a short script pays for hotloop on a CPU: whole processes, their imports included, written both ways.

    python benchmarks/short_scripts.py --out benchmarks/results/short_scripts_cpu.json

Each script is written as a tutorial has it, and with `Loop(…).fit(…)` and nothing else said. Both run in turns, alone,
with one thread and an empty cache; what counts is the CPU time of the whole process, as the system has it. Sizes are
such that a script takes some 3 to 10 s.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from harness.about import facts
from hotloop.records.files import write_json

IMPORTS = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
"""

PLAIN = """
for epoch in range(EPOCHS):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        held_out = sum(criterion(model(inputs), targets).item() * len(inputs) for inputs, targets in validation)
    print(epoch, loss.item(), held_out / len(validation.dataset))
"""

WITH_HOTLOOP = """
import hotloop
hotloop.Loop(model, optimizer, criterion).fit(loader, epochs=EPOCHS, validate=validation)
"""

SCRIPTS = {
    "pictures, two convolutions": """
EPOCHS = 3
images, labels = torch.rand(6000, 1, 28, 28), torch.randint(0, 10, (6000,))
loader = DataLoader(TensorDataset(images[:5000], labels[:5000]), 64, shuffle=True)
validation = DataLoader(TensorDataset(images[5000:], labels[5000:]), 500)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(400, 10),
)
criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters())
""",
    "a table, three layers": """
EPOCHS = 12
rows = torch.randn(12000, 30)
values = rows[:, :3].sum(1, keepdim=True)
loader = DataLoader(TensorDataset(rows[:10000], values[:10000]), 128, shuffle=True)
validation = DataLoader(TensorDataset(rows[10000:], values[10000:]), 1000)
model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
criterion, optimizer = nn.MSELoss(), torch.optim.Adam(model.parameters())
""",
    "texts, an LSTM": """
EPOCHS = 3
words = torch.randint(0, 2000, (2400, 32))
topics = (words[:, :8].float().mean(1) > 1000).long()
loader = DataLoader(TensorDataset(words[:2000], topics[:2000]), 50, shuffle=True)
validation = DataLoader(TensorDataset(words[2000:], topics[2000:]), 200)


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(2000, 32), nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 2)

    def forward(self, words):
        return self.head(self.layer(self.words(words))[0][:, -1])


model = Texts()
criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), 3e-3)
""",
    "letters, a transformer": """
EPOCHS = 2
letters = torch.randint(0, 60, (1200, 33))
loader = DataLoader(TensorDataset(letters[:1000, :-1], letters[:1000, 1:]), 32, shuffle=True)
validation = DataLoader(TensorDataset(letters[1000:, :-1], letters[1000:, 1:]), 100)


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
        self.letters, self.places = nn.Embedding(60, 64), nn.Parameter(torch.zeros(32, 64))
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 60)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, letters):
        return self.head(self.layers(self.letters(letters) + self.places, self.mask)).transpose(1, 2)


model = Letters()
criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), 1e-3)
""",
    "an autoencoder": """
EPOCHS = 4
images = torch.rand(5000, 784)
loader = DataLoader(TensorDataset(images[:4500], images[:4500]), 64, shuffle=True)
validation = DataLoader(TensorDataset(images[4500:], images[4500:]), 500)
model = nn.Sequential(
    nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 784),
)
criterion, optimizer = nn.MSELoss(), torch.optim.Adam(model.parameters(), 1e-3)
""",
    "a ladder of small steps, SGD": """
EPOCHS = 20
points = torch.randn(4000, 2)
sides = (points.prod(1) > 0).float().unsqueeze(1)
loader = DataLoader(TensorDataset(points[:3600], sides[:3600]), 32, shuffle=True)
validation = DataLoader(TensorDataset(points[3600:], sides[3600:]), 400)
model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
criterion, optimizer = nn.BCEWithLogitsLoss(), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
""",
}


def seconds(script: str, folder: Path) -> tuple[float, float]:
    """CPU and wall seconds of a script in a process of its own."""
    file = folder / "script.py"
    file.write_text(script)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        home = os.environ | {"OMP_NUM_THREADS": "1", "HOTLOOP_CACHE": cache, "CUDA_VISIBLE_DEVICES": ""}
        begin = os.times()
        ended = subprocess.run([sys.executable, str(file)], env=home, capture_output=True, text=True, check=False)  # noqa: S603
        end = os.times()
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return (
        end.children_user + end.children_system - begin.children_user - begin.children_system,
        end.elapsed - begin.elapsed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="of each script, after one that does not count")
    parser.add_argument("--quick", action="store_true", help="one epoch and one turn, to see that it runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures here")
    given = parser.parse_args()
    about: dict[str, Any] = facts([torch.device("cpu")])
    table, found = Table("script", "as in tutorials", "Loop.fit", "times", "range"), []
    with tempfile.TemporaryDirectory(prefix="hotloop-short-") as folder:
        for name, script in SCRIPTS.items():
            turns = []
            for _ in range(1 if given.quick else given.turns + 1):
                text = IMPORTS + script
                if given.quick:
                    text += "EPOCHS = 1\n"
                turns.append([seconds(text + tail, Path(folder)) for tail in (PLAIN, WITH_HOTLOOP)])
            counted = turns if given.quick else turns[1:]
            times = sorted(plain[0] / ours[0] for plain, ours in counted)
            plain, ours = (statistics.median(turn[which][0] for turn in counted) for which in (0, 1))
            found.append({"script": name, "cpu_and_wall_seconds": counted, "times": statistics.median(times)})
            table.add_row(
                name, f"{plain:.2f} s", f"{ours:.2f} s", f"{plain / ours:.2f}", f"{times[0]:.2f} to {times[-1]:.2f}"
            )
            if given.out:
                write_json(given.out, about | {"scripts": found})
    Console().print(table)


if __name__ == "__main__":
    main()
