"""The golden rule: one operation, one device. What breaking it looks like, and how to find the line to change."""

import torch
from torch import nn

import hotloop


def second_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda:0")
    print("There is no GPU here, so 'meta' plays its part: a device that keeps shapes but no numbers.\n")
    return torch.device("meta")


class Classifier(nn.Module):
    """Two layers, so that there is something to name."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).relu())


def forgot_the_batch(device: torch.device) -> torch.Tensor:
    model = Classifier().to(device)
    images = torch.rand(2, 4)  # made on the CPU, and never moved
    return model(images)


def forgot_cpu_before_numpy(device: torch.device) -> object:
    scores = torch.ones(3, device=device)
    return scores.numpy()


def plain(device: torch.device) -> None:
    print("--- Plain PyTorch ---")
    for mistake in (forgot_the_batch, forgot_cpu_before_numpy):
        try:
            mistake(device)
        except (RuntimeError, TypeError) as error:
            print(f"{mistake.__name__}: {type(error).__name__}: {error}\n")
    print("True, but which tensor, from which line? In a large model you now start printing devices.")


def with_hotloop(device: torch.device) -> None:
    print("\n--- With hotloop ---")
    for mistake in (forgot_the_batch, forgot_cpu_before_numpy):
        try:
            with hotloop.golden_rule():  # for debugging: it makes every operation a little slower
                mistake(device)
        except hotloop.DeviceMismatch as error:
            print(f"{mistake.__name__}: DeviceMismatch: {error}\n")


def fixed(device: torch.device) -> None:
    print("--- Fixed, as the last line of the message says ---")
    model = Classifier().to(device)
    images = torch.rand(2, 4)
    with hotloop.golden_rule():
        images = images.to(device)
        print("model(images) works: shape", tuple(model(images).shape), "on", images.device)

    scores = torch.ones(3, device=hotloop.pick().device)
    print("hotloop.to_numpy(scores) works:", hotloop.to_numpy(scores))


def main() -> None:
    device = second_device()
    plain(device)
    with_hotloop(device)
    fixed(device)


if __name__ == "__main__":
    main()
