"""Repair this stopwatch.

`seconds_of(call)` tells how long a call takes on the GPU. It measures the
first call, which also loads libraries, and it does not wait until the GPU is
done. Repair both, with torch.cuda.synchronize() (it does nothing where there
is no GPU).
"""

import time

import torch


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(call):
    call()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
a = torch.rand(64, 64, device=device)
print(f"{seconds_of(lambda: a @ a) * 1e6:.0f} µs")
