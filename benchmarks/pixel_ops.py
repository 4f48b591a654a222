"""Time every pixel operation on a batch against the loop over pixels that it replaces, and against Pillow.

    python benchmarks/pixel_ops.py --json benchmarks/results/pixel_ops.json

The loop runs on a few sprites and its time is scaled to the batch; Pillow runs on every sprite, one call for each.
Neither is charged for the conversion of its input or output. That all three agree is checked before anything is timed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import psutil
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

import pixel_loops as loops
from harness.about import facts
from hotloop import measure
from hotloop.apps.sprites import pixels as ops
from hotloop.apps.sprites.making import make
from hotloop.device.machine import cpu_name
from hotloop.printing.text import count, duration
from hotloop.records import Record, Timing
from hotloop.records.files import write_json

COLUMNS, GAP, INK, SCALE = 64, 1, (34, 32, 52, 255), 4
Pictures = list[Image.Image]


@dataclass(frozen=True)
class Inputs:
    """One batch: sprites, the same as pictures that are a little off the palette, a palette, and a recolouring."""

    pixels: Tensor
    rgba: Tensor
    palette: Tensor
    mapping: Tensor

    def first(self, number: int) -> "Inputs":
        return Inputs(self.pixels[:number], self.rgba[:number], self.palette, self.mapping)

    def to(self, device: str) -> "Inputs":
        return Inputs(*(tensor.to(device) for tensor in vars(self).values()))

    def lists(self) -> Any:
        return argparse.Namespace(**{name: tensor.tolist() for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class Operation:
    """The same thing done three ways: on a batch, by the loop on lists, and by Pillow image by image."""

    name: str
    batch: Callable[[Inputs], Tensor]
    loop: Callable[[Any], list[Any]]
    pillow: Callable[[Inputs], Callable[[], Pictures]] | None = None  # prepared, and then timed
    pillow_equal: bool = True


@dataclass(frozen=True)
class Result(Record):
    """Seconds for the whole batch, by each way."""

    operation: str
    device: str
    sprites: int
    batch: Timing
    loop: Timing  # of loop_sprites
    loop_sprites: int
    loop_scaled: float  # its median, scaled to all sprites
    times_faster_than_loop: float
    pillow: Timing | None
    times_faster_than_pillow: float | None


def indexed(i: Inputs) -> Pictures:
    return [Image.fromarray(sprite) for sprite in i.pixels.cpu().numpy()]


def with_palette(i: Inputs) -> Pictures:
    images = [image.convert("P") for image in indexed(i)]
    for image in images:
        image.putpalette(i.palette.cpu().numpy().tobytes(), "RGBA")
    return images


def each(prepare: Callable[[Inputs], Pictures], change: Callable[[Image.Image], Image.Image]) -> Any:
    def prepared(i: Inputs) -> Callable[[], Pictures]:
        images = prepare(i)
        return lambda: [change(image) for image in images]

    return prepared


def pillow_nearest(i: Inputs) -> Callable[[], Pictures]:
    palette = Image.new("P", (1, 1))
    palette.putpalette(i.palette[1:, :3].cpu().numpy().tobytes())
    images = [Image.fromarray(picture).convert("RGB") for picture in i.rgba.cpu().numpy()]
    return lambda: [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]


def pillow_recolour(i: Inputs) -> Callable[[], Pictures]:
    table = [*i.mapping.tolist(), *range(len(i.mapping), 256)]
    images = indexed(i)
    return lambda: [image.point(table) for image in images]


def pillow_sheet(i: Inputs) -> Callable[[], Pictures]:
    images = [Image.fromarray(picture) for picture in i.rgba.cpu().numpy()]
    columns, step = min(COLUMNS, len(images)), 16 + GAP
    rows = -(-len(images) // columns)

    def lay_out() -> Pictures:
        sheet = Image.new("RGBA", (columns * step + GAP, rows * step + GAP), INK)
        for number, image in enumerate(images):
            sheet.paste(image, (GAP + number % columns * step, GAP + number // columns * step))
        return [sheet]

    return lay_out


def sheet_by_loop(lists: Any) -> list[Any]:
    return loops.contact_sheet(lists.rgba, min(COLUMNS, len(lists.rgba)), GAP, list(INK))


OPERATIONS = (
    Operation(
        "look_up",
        lambda i: ops.look_up(i.pixels, i.palette),
        lambda lists: loops.look_up(lists.pixels, lists.palette),
        each(with_palette, lambda image: image.convert("RGBA")),
    ),
    Operation(
        "nearest_colour",
        lambda i: ops.nearest_colour(i.rgba, i.palette),
        lambda lists: loops.nearest_colour(lists.rgba, lists.palette),
        pillow_nearest,
        pillow_equal=False,  # it knows no transparency, and its search is not exact
    ),
    Operation(
        "dither",
        lambda i: ops.dither(i.rgba, i.palette),
        lambda lists: loops.dither(lists.rgba, lists.palette),
    ),
    Operation(
        "flip",
        lambda i: ops.flip(i.pixels),
        lambda lists: loops.flip(lists.pixels),
        each(indexed, lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
    ),
    Operation(
        "rotate",
        lambda i: ops.rotate(i.pixels),
        lambda lists: loops.rotate(lists.pixels),
        each(indexed, lambda image: image.transpose(Image.Transpose.ROTATE_90)),
    ),
    Operation(
        "outline",
        lambda i: ops.outline(i.pixels, 1),
        lambda lists: loops.outline(lists.pixels, 1),
    ),
    Operation(
        "shift_hue",
        lambda i: ops.shift_hue(i.pixels, i.mapping),
        lambda lists: loops.shift_hue(lists.pixels, lists.mapping),
        pillow_recolour,
    ),
    Operation(
        f"upscale x{SCALE}",
        lambda i: ops.upscale(i.pixels, SCALE),
        lambda lists: loops.upscale(lists.pixels, SCALE),
        each(indexed, lambda image: image.resize((16 * SCALE, 16 * SCALE), Image.Resampling.NEAREST)),
    ),
    Operation(
        "contact_sheet",
        lambda i: ops.contact_sheet(i.rgba, COLUMNS, GAP, INK),
        sheet_by_loop,
        pillow_sheet,
    ),
)


def inputs(sprites: int) -> Inputs:
    made = make(sprites, seed=0)
    generator = torch.Generator().manual_seed(0)
    rgba = ops.look_up(made.pixels, made.palette)
    noise = torch.randint(-12, 13, (*rgba.shape[:3], 3), generator=generator, dtype=torch.int16)
    rgba[..., :3] = (rgba[..., :3] + noise).clamp(0, 255)
    mapping = torch.tensor([0, 1, *range(6, 14), *range(2, 6), *range(14, 17)], dtype=torch.uint8)
    return Inputs(made.pixels, rgba, made.palette, mapping)


def check(operation: Operation, some: Inputs, device: str) -> None:
    """Stop unless the loop, Pillow where it does the same, and the device agree to the last bit."""
    found = operation.batch(some.to(device)).cpu()
    if found.tolist() != operation.loop(some.lists()):
        sys.exit(f"{operation.name} on {device} differs from the loop")
    if operation.pillow is not None and operation.pillow_equal:
        images = np.stack([np.array(image) for image in operation.pillow(some)()])
        if not np.array_equal(images.reshape(found.shape), found.numpy()):
            sys.exit(f"{operation.name} on {device} differs from Pillow")


def time_all(everything: Inputs, loop_sprites: int, repeats: int, devices: Sequence[str]) -> list[Result]:
    some = everything.first(loop_sprites)
    results = []
    for operation in OPERATIONS:
        lists = some.lists()
        loop = measure(partial(operation.loop, lists), warmup=1, repeats=max(1, repeats // 4))
        pillow = None
        if operation.pillow is not None:
            pillow = measure(operation.pillow(everything), warmup=1, repeats=max(1, repeats // 4))
        for device in devices:
            check(operation, some, device)
            there = everything.to(device)
            batch = measure(partial(operation.batch, there), device=device, repeats=repeats)
            scaled = loop.median * len(everything.pixels) / len(some.pixels)
            results.append(
                Result(
                    operation=operation.name,
                    device=device,
                    sprites=len(everything.pixels),
                    batch=batch,
                    loop=loop,
                    loop_sprites=len(some.pixels),
                    loop_scaled=scaled,
                    times_faster_than_loop=scaled / batch.median,
                    pillow=pillow,
                    times_faster_than_pillow=pillow.median / batch.median if pillow else None,
                )
            )
    return results


def table(results: Sequence[Result]) -> Table:
    shown = Table(
        title=f"{count(results[0].sprites)} sprites of 16x16; median (5 to 95% range), "
        f"the loop scaled up from {results[0].loop_sprites}"
    )
    for name in ("operation", "device"):
        shown.add_column(name)
    for name in ("batch", "loop", "times faster", "Pillow", "times faster"):
        shown.add_column(name, justify="right")
    for r in results:
        scale = r.loop_scaled / r.loop.median
        shown.add_row(
            r.operation,
            r.device,
            spread(r.batch),
            spread(r.loop, scale),
            count(r.times_faster_than_loop),
            spread(r.pillow) if r.pillow else "has none",
            count(r.times_faster_than_pillow) if r.times_faster_than_pillow else "",
        )
    return shown


def spread(timing: Timing, scale: float = 1.0) -> str:
    low, high = duration(timing.low * scale), duration(timing.high * scale)
    return f"{duration(timing.median * scale)} ({low} to {high})"


def cpu_seconds_of_others() -> float:
    """The processor time that everything but this process has used: a busy core makes every parallel step wait."""
    used, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return float(used.user + used.system - own.user - own.system)


def about(devices: Sequence[str], taken: float) -> dict[str, Any]:
    return {
        "benchmark": "pixel_ops",
        **facts([torch.device(device) for device in devices]),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cores_taken_by_others": round(taken, 2),
        "gpu": torch.cuda.get_device_name() if "cuda" in devices else None,
        "pillow": PIL.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sprites", type=int, default=4096, help="in the batch")
    parser.add_argument("--loop-sprites", type=int, default=64, help="for the loop, whose time is scaled up")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument(
        "--quick", action="store_true", help="a few sprites, to see that it works; figures mean nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results too")
    options = parser.parse_args()
    if options.quick:
        options.sprites, options.loop_sprites, options.repeats = 64, 4, 2
    before, start = cpu_seconds_of_others(), time.perf_counter()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    results = time_all(inputs(options.sprites), min(options.loop_sprites, options.sprites), options.repeats, devices)
    taken = (cpu_seconds_of_others() - before) / (time.perf_counter() - start)
    told = about(devices, taken)
    screen = Console(width=None if sys.stdout.isatty() else 160)
    screen.print(table(results))
    screen.print(f"{told['cpu']}, {told['threads']} threads; GPU: {told['gpu'] or 'none'}; torch {torch.__version__}")
    if taken > 0.1:
        screen.print(f"other programs took {taken:.1f} cores meanwhile: time it again when the machine is quiet")
    slowest = min(results, key=lambda r: r.times_faster_than_loop)
    screen.print(f"least gain over the loop: {slowest.operation}, {count(slowest.times_faster_than_loop)} times")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, {**told, "results": [r.to_json() for r in results]})


if __name__ == "__main__":
    main()
