"""Moving a model to a device, and the three things that do not come along by themselves."""

import warnings

import torch
from torch import nn

import hotloop


class Normalised(nn.Module):
    """A small model with a trap: PyTorch does not know about `self.mean`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.mean = torch.full((4,), 0.5)  # a plain attribute, neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x - self.mean)


class Fixed(Normalised):
    """The same without the trap: a buffer moves with the model."""

    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.full((4,), 0.5), persistent=False)


def somewhere_else() -> torch.device:
    """A device that is not the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda:0")
    print("There is no GPU here, so 'meta' plays its part: a device that keeps shapes but no numbers.\n")
    return torch.device("meta")


def train_one_step(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has already worked, so that it has a momentum to remember."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    return optimizer


def momentum_device(optimizer: torch.optim.Optimizer) -> torch.device:
    return next(iter(optimizer.state.values()))["momentum_buffer"].device


def plain(device: torch.device) -> None:
    print("--- Plain PyTorch ---")
    x = torch.ones(8, 4)
    x.to(device)  # a tensor is copied: this line alone does nothing useful
    print("after x.to(device)         x is on", x.device)
    x = x.to(device)
    print("after x = x.to(device)     x is on", x.device)

    model = Normalised()
    optimizer = train_one_step(model)
    model.to(device)  # a model moves in place: no `model =` needed
    print("after model.to(device)     model.layer.weight is on", model.layer.weight.device)
    print("  but the plain attribute  model.mean is on", model.mean.device)
    print("  and the older optimizer's momentum is on", momentum_device(optimizer))
    print("Both would fail in the next step, somewhere else, with a message about devices.")


def with_hotloop(device: torch.device) -> None:
    print("\n--- With hotloop ---")
    model = Normalised()
    optimizer = train_one_step(model)
    with warnings.catch_warnings(record=True) as caught:  # only so that we can print it in order
        warnings.simplefilter("always")
        hotloop.place(model, device, optimizer)  # the optimizer comes along
    for warning in caught:
        print(f"{warning.category.__name__}: {warning.message}")
    print("the optimizer's momentum is on", momentum_device(optimizer))
    print("with the fix, model.mean is on", hotloop.place(Fixed(), device, strict=True).mean.device)

    batch = {"pixels": torch.zeros(2, 3), "boxes": [torch.ones(4), torch.ones(4)], "names": ["gem", "sword"]}
    moved = hotloop.move(batch, device)  # any nesting; what is not a tensor stays as it is
    print("hotloop.move: pixels on", moved["pixels"].device, "and boxes on", moved["boxes"][0].device)


def back_to_numpy() -> None:
    print("\n--- And back to NumPy ---")
    x = torch.arange(3.0, device=hotloop.pick().device, dtype=torch.bfloat16).requires_grad_()
    try:
        x.numpy()
    except (RuntimeError, TypeError) as error:
        print("x.numpy() ->", error)
    print("hotloop.to_numpy(x) ->", hotloop.to_numpy(x), "from", x.device, "with a gradient, in bfloat16")


def main() -> None:
    torch.manual_seed(0)
    device = somewhere_else()
    plain(device)
    with_hotloop(device)
    back_to_numpy()


if __name__ == "__main__":
    main()
