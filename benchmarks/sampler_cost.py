"""What a look at the hardware costs: `Sampler.read()`, its median and 95th percentile over 200 readings.

python benchmarks/sampler_cost.py --json benchmarks/results/sampler_cost.json
"""

import argparse
import statistics
import time
from pathlib import Path

import hotloop
from harness.about import facts
from hotloop.monitor.reading import Reading
from hotloop.monitor.sampler import Sampler
from hotloop.records.files import write_json


def cost(readings: int, interval: float) -> tuple[dict[str, float], Reading]:
    """Seconds of a reading, of the first one, and of the processor alone; and the last reading.

    The first one starts the driver's library and asks what never changes. The others come at the rhythm of a
    monitor: a driver answers more slowly to whom it has not answered for a while.
    """
    with Sampler() as sampler:
        begin = time.perf_counter()
        reading = sampler.read()
        first = time.perf_counter() - begin
        walls, processor = [], []
        for _ in range(readings):
            time.sleep(interval)
            begin, worked = time.perf_counter(), time.thread_time()
            reading = sampler.read()
            walls.append(time.perf_counter() - begin)
            processor.append(time.thread_time() - worked)
    return {
        "first": first,
        "median": statistics.median(walls),
        "p95": statistics.quantiles(walls, n=20, method="inclusive")[-1],
        "longest": max(walls),
        "processor_median": statistics.median(processor),
    }, reading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few readings only, to see that it runs")
    parser.add_argument("--interval", type=float, default=0.1, metavar="SECONDS", help="between two readings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    readings = 10 if arguments.quick else 200
    figures, reading = cost(readings, 0.01 if arguments.quick else arguments.interval)
    gpus = [gpu.name for gpu in reading.gpus]
    print(
        f"{readings} readings of {', '.join(gpus) or 'a machine without a GPU'}, driver {reading.driver or 'unknown'}"
    )
    print(
        f"a reading: {figures['median'] * 1e3:.2f} ms, 95% of them under {figures['p95'] * 1e3:.2f} ms,"
        f" the longest {figures['longest'] * 1e3:.2f} ms, the first {figures['first'] * 1e3:.0f} ms;"
        f" of the processor {figures['processor_median'] * 1e3:.2f} ms"
    )
    for note in reading.notes:
        print(f"note: {note}")
    if arguments.json:
        about = facts([hotloop.pick().device]) | {"gpus": gpus, "driver": reading.driver}
        settings = {"readings": readings, "interval": arguments.interval, "cores": reading.host.cores}
        write_json(arguments.json, about | settings | figures)


if __name__ == "__main__":
    main()
