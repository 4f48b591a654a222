"""How fast is it? Timing a GPU without fooling yourself, and when the CPU wins."""

import time

import torch

import hotloop
from hotloop.records import Timing
from hotloop.text import duration


def plain() -> None:
    print("--- Plain PyTorch ---")
    on_gpu = torch.cuda.is_available()
    n = 4096 if on_gpu else 1024
    a = torch.rand(n, n, device="cuda" if on_gpu else "cpu")
    a @ a  # the first call also loads libraries: never time it
    if on_gpu:
        torch.cuda.synchronize()

    start = time.perf_counter()
    a @ a
    print(f"a product of {n} x {n} on {a.device}, without waiting: {duration(time.perf_counter() - start)}")
    if on_gpu:
        torch.cuda.synchronize()

    start = time.perf_counter()
    a @ a
    if on_gpu:
        torch.cuda.synchronize()  # a GPU only queues the work: wait until it is done, then read the clock
    print(f"the same, waiting until it is done: {duration(time.perf_counter() - start)}")
    print("The first figure was only the queueing." if on_gpu else "A CPU queues nothing, so here both are right.")


def time_all(device: torch.device) -> dict[str, Timing]:
    """The same work on one device: tiny, middling, large."""
    timings = {}
    for n in (16, 128, 1024):
        a = torch.rand(n, n, device=device)
        timings[f"a @ a, {n} x {n}"] = hotloop.measure(lambda a=a: a @ a, device=device, repeats=7)
    for n in (1_000, 100_000, 5_000_000):
        x = torch.rand(n, device=device)
        timings[f"x * 2 + 1, {n:,} numbers"] = hotloop.measure(lambda x=x: x * 2 + 1, device=device, repeats=7)
    return timings


def with_hotloop() -> None:
    print("\n--- With hotloop ---")
    print("hotloop.measure warms up, waits for the device, repeats, and tells the spread (5 to 95% of the repeats)\n")
    choice = hotloop.pick()
    on_cpu = time_all(torch.device("cpu"))
    if choice.device.type == "cpu":
        print(f"{'work':28} {'cpu':>9} {'spread':>7}")
        for name, cpu in on_cpu.items():
            print(f"{name:28} {duration(cpu.median):>9} {cpu.spread:>7.0%}")
        print(f"\nThere is only a CPU column. {choice.reason}")
    else:
        on_gpu = time_all(choice.device)
        print(f"{'work':28} {'cpu':>9} {'spread':>7}  {choice.device!s:>9} {'spread':>7}  {'cpu/gpu':>8}")
        for name, cpu in on_cpu.items():
            gpu = on_gpu[name]
            print(
                f"{name:28} {duration(cpu.median):>9} {cpu.spread:>7.0%}"
                f"  {duration(gpu.median):>9} {gpu.spread:>7.0%}  {cpu.median / gpu.median:>7.1f}x"
            )
    print("\nSmall work is often faster on the CPU: telling a GPU what to do costs some microseconds each time.")


def brighten_by_pixel(image: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(image)
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            result[y, x] = min(float(image[y, x]) * 1.2, 1.0)
    return result


def brighten(image: torch.Tensor) -> torch.Tensor:
    return (image * 1.2).clamp(max=1)


def loops_and_vectors() -> None:
    print("\n--- A Python loop over pixels, or one operation on all of them ---")
    image = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    print("same picture:", torch.allclose(brighten_by_pixel(image), brighten(image)))
    slow = hotloop.measure(lambda: brighten_by_pixel(image), warmup=1, repeats=3)
    fast = hotloop.measure(lambda: brighten(image), repeats=7)
    ratio = slow.median / fast.median
    print(f"loop {duration(slow.median)}, one operation {duration(fast.median)}: {ratio:,.0f} times faster, on the CPU")


def main() -> None:
    plain()
    with_hotloop()
    loops_and_vectors()


if __name__ == "__main__":
    main()
