"""Make this function one graph.

`normalise` divides by the largest value where that is above 1. The `if` needs
the number in Python, so that the graph of torch.compile breaks there and a GPU
is waited for. Write it without the `if`, with the same result.
"""

import torch


def normalise(x):
    x = x * 2
    largest = x.max()
    return torch.where(largest > 1, x / largest, x) - 0.5


torch.manual_seed(0)
x = torch.rand(16)
print(normalise(x).max())
