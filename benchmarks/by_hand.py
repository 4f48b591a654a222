"""Two loops in which nothing is said: PPO that calls `loop.step` alone, and an LSTM language model in `fit`.

    python benchmarks/by_hand.py --out benchmarks/results/by_hand_h200.json

PPO: a loop over minibatches on the device, as a tutorial writes it, and `loop.step` on the same minibatches, in turns,
once the plan is there. LSTM: the wall clock of a whole `fit`, beside epochs of the tutorial's loop before and after it.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from harness.about import facts
from hotloop.records.files import write_json

ROWS, TURNS, WARM = 4096, 9, 1000  # of a rollout; pairs of measurements; steps by hand before them


class Policy(nn.Module):
    """Two layers of 64, with the logits of an action and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.action, self.value = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(seen)
        return self.action(hidden), self.value(hidden).squeeze(-1)


def ppo(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    seen, action, old, gain, reward = batch
    logits, value = model(seen)
    chances = torch.distributions.Categorical(logits=logits, validate_args=False)
    ratio = (chances.log_prob(action) - old).exp()
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    return (value - reward).square().mean() / 2 - surrogate - 0.01 * chances.entropy().mean()


class Language(nn.Module):
    """Two LSTM layers of 512, a vocabulary of 10,000."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(10_000, 512)
        self.layers = nn.LSTM(512, 512, 2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(512, 10_000)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.words(tokens))[0])
        return logits


def flat(logits: Tensor, words: Tensor) -> Tensor:
    """Every word of every sentence is one prediction: classes stand last, as PyTorch's softmax is fast."""
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def turned(logits: Tensor, words: Tensor) -> Tensor:
    """The same loss with classes in the middle, as some write it: softmax itself takes 17 ms of an H200's step."""
    return F.cross_entropy(logits.transpose(1, 2), words)


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def by_hand(size: int) -> dict[str, Any]:
    """Steps on minibatches of a rollout on the device."""
    device = torch.device("cuda")
    numbers = [torch.randn(ROWS, device=device) for _ in range(3)]
    rollout = (torch.randn(ROWS, 8, device=device), torch.randint(0, 4, (ROWS,), device=device), *numbers)

    def minibatches() -> Iterator[tuple[Tensor, ...]]:
        for rows in torch.randperm(ROWS, device=device).split(size):
            yield tuple(each[rows] for each in rollout)

    theirs, ours = Policy().to(device), Policy()
    optimizer = torch.optim.Adam(theirs.parameters(), 3e-4)
    loop = hotloop.Loop(ours, torch.optim.Adam(ours.parameters(), 3e-4), objective=ppo, clip_norm=0.5)

    def tutorial() -> None:
        for batch in minibatches():
            optimizer.zero_grad()
            ppo(theirs, batch).backward()
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            optimizer.step()

    def hot() -> None:
        for batch in minibatches():
            loop.step(batch)

    steps = ROWS // size
    rounds = max(1, 256 // steps)
    for _ in range(-(-WARM // steps)):
        hot()
    tutorial()
    pairs = [
        (seconds(lambda: [tutorial() for _ in range(rounds)]), seconds(lambda: [hot() for _ in range(rounds)]))
        for _ in range(TURNS)
    ]
    each = 1e3 / (rounds * steps)
    return {
        "case": f"PPO, loop.step alone, minibatches of {size}",
        "tutorial_ms": spread([one * each for one, _ in pairs]),
        "default_ms": spread([other * each for _, other in pairs]),
        "times": spread([one / other for one, other in pairs]),
        "plan": str(loop.plan),
    }


def language(dropout: float, length: float, criterion: Callable[[Tensor, Tensor], Tensor] = flat) -> dict[str, Any]:
    """A whole `fit` that takes the tutorial's loop so many seconds."""
    device = torch.device("cuda")
    tokens = torch.randint(0, 10_000, (64 * 40, 129))
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    theirs, ours = Language(dropout).to(device), Language(dropout)
    optimizer = torch.optim.Adam(theirs.parameters(), 1e-3)

    def tutorial() -> None:
        for given in DataLoader(data, 64, shuffle=True):
            x, y = (each.to(device) for each in given)
            optimizer.zero_grad()
            criterion(theirs(x), y).backward()
            nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()

    tutorial()
    taken = [seconds(tutorial) for _ in range(4)]
    epochs = max(1, round(length / statistics.median(taken)))
    begun = time.perf_counter()
    loop = hotloop.Loop(ours, torch.optim.Adam(ours.parameters(), 1e-3), criterion, clip_norm=1.0)
    loop.fit(DataLoader(data, 64, shuffle=True), epochs=epochs, progress=False)
    torch.cuda.synchronize()
    whole = time.perf_counter() - begun
    taken += [seconds(tutorial) for _ in range(4)]
    kind = f"LSTM language model, dropout {dropout}" + (", classes in the middle" if criterion is turned else "")
    return {
        "case": f"{kind}, a whole fit as long as {length:.0f} s of the tutorial's loop",
        "tutorial_ms": spread([each * 1e3 / 40 for each in taken]),
        "default_ms": whole * 1e3 / 40 / epochs,
        "times": spread([each * epochs / whole for each in taken]),
        "plan": str(loop.plan),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/by_hand.json"))
    out: Path = parser.parse_args().out
    if not torch.cuda.is_available():
        raise SystemExit("by_hand.py needs a CUDA GPU; `hotloop device` says why there is none")
    torch.manual_seed(0)
    found = [by_hand(64), by_hand(256), language(0.2, 30.0), language(0.0, 10.0), language(0.2, 10.0, turned)]
    write_json(out, {**facts([torch.device("cuda")]), "cases": found})
    for each in found:
        times = each["times"]
        print(f"{each['case']}: {times['median']:.2f} ({times['least']:.2f} to {times['most']:.2f})")


if __name__ == "__main__":
    main()
