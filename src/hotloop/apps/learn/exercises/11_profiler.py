"""Find the slow function.

Which function takes the most time in a step, once the program has warmed up?
Do not guess: measure, with a stopwatch around each call or with torch.profiler
and record_function. Then write the name into `slowest`, and leave the
functions as they are.
"""

import time

import torch

slowest = ""  # decode, augment, log or train


def decode(step):
    if step == 0:
        time.sleep(0.2)  # the first call loads a library
    return torch.rand(64, 64)


def augment(picture):
    for _ in range(150):
        picture = picture.roll(1, 0)
    return picture


def log(value):
    return f"{value:.3f}"


def train(step):
    picture = augment(decode(step))
    for _ in range(40):
        log(1.0)
    return (picture @ picture).sum()


for step in range(10):
    train(step)
print(f"slowest: {slowest or 'unknown'}")
