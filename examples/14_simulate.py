"""Would it fit on a GPU that is not here, and what would go wrong there? By hand, then on a simulated GPU."""

import subprocess
import sys

import torch
from torch import nn
from torch.nn import functional

from hotloop.apps.simulate.cards import card
from hotloop.apps.simulate.running import Simulator
from hotloop.apps.simulate.shim import CannotSimulate
from hotloop.printing.text import duration, size

CARDS = ("t4", "rtx4090", "h200")
BATCH, LENGTH, WORDS, WIDTH = 96, 512, 8000, 512


class Writer(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 8, batch_first=True) for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1])  # a mistake: it should be made with device=text.device
        x = self.words(text) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train() -> None:
    """What a person would start on the GPU."""
    model = Writer().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(100):
        text = torch.randint(WORDS, (BATCH, LENGTH + 1)).to("cuda")
        scores = model(text[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.3f}")


def plain() -> None:
    print("--- Plain PyTorch: arithmetic by hand ---")
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Writer().parameters())
    print(f"{parameters:,} parameters in fp32: {size(4 * parameters)}")
    print(f"their gradients, and two moments for AdamW: {size(12 * parameters)}")
    print("Activations, workspaces, what the allocator keeps? For those you start it, and see where it dies.")


def with_hotloop() -> None:
    print("\n--- With hotloop: the same file on GPUs that are not here ---")
    try:
        with Simulator(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as simulator:
            told = [simulator.run(__file__, ["train"], card(name), steps=2) for name in CARDS]
    except CannotSimulate as error:  # no compiler, or not Linux
        print(error)
        return
    for found in told:
        step = found.step_ms
        fits = {True: "fits", False: "does not fit", None: "is too close to tell"}[found.fits]
        times = f"{duration(step.low / 1e3)} to {duration(step.high / 1e3)} for a step" if step else "no step is made"
        taken = size(found.peak.process if found.peak else None)
        print(f"{found.gpu:8} it {fits:13} {taken:>9} of {size(found.gpu_memory):>9}, {times}")

    largest = told[-1]
    print(f"\nWhat the process holds on {largest.gpu_name}, at the peak:")
    for name, amount in sorted(largest.categories.items(), key=lambda item: -item[1])[:5]:
        print(f"  {name:12} {size(amount):>10}")
    for note in (note for found in told for note in found.notes if note.startswith("memory runs out")):
        print(f"\nOn the smallest, {note}")
    print("\nWhat would go wrong, all of it in one run:")
    for finding in largest.findings:
        print(f"{finding.file}:{finding.line}: {finding.message.splitlines()[0]}\n  fix: {finding.fix}")
    for wait in largest.syncs:
        print(f"{wait.file}:{wait.line}: the host waits for the device ({wait.kind})")


def main() -> None:
    if sys.argv[1:] == ["train"]:
        train()
        return
    plain()
    with_hotloop()


if __name__ == "__main__":
    main()
