"""hotloop runs the PyTorch loop you already have at the speed of the hardware you have.

Names are looked up on first use, so `import hotloop` costs nothing and starts no GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hotloop.version import __version__

if TYPE_CHECKING:
    from hotloop import metrics as metrics
    from hotloop.apps.leaks.growth import watch_growth as watch_growth
    from hotloop.apps.simulate.block import simulate as simulate
    from hotloop.checkpoint.weights import read_weights as read_weights
    from hotloop.data import stream as stream
    from hotloop.data.padding import pad_to as pad_to
    from hotloop.device import Choice as Choice
    from hotloop.device import pick as pick
    from hotloop.device.clock import measure as measure
    from hotloop.errors import DeviceMismatch as DeviceMismatch
    from hotloop.errors import HotloopError as HotloopError
    from hotloop.memory.release import release as release
    from hotloop.memory.usage import usage as usage
    from hotloop.metrics.evaluation import evaluate as evaluate
    from hotloop.monitor.watching import watch as watch
    from hotloop.placement import move as move
    from hotloop.placement import place as place
    from hotloop.placement import to_numpy as to_numpy
    from hotloop.placement.golden import golden_rule as golden_rule
    from hotloop.placement.waits import waits as waits
    from hotloop.plan import Plan as Plan
    from hotloop.ranks.group import world_size as world_size
    from hotloop.records import Report as Report
    from hotloop.run import Loop as Loop
    from hotloop.run.callbacks import Ema as Ema
    from hotloop.run.warmup import WarmupCosine as WarmupCosine
    from hotloop.run.weight_loading import load_weights as load_weights
    from hotloop.step.survive import survive_oom as survive_oom
    from hotloop.values.rng import seed as seed

_HOMES = {
    "Choice": "device",
    "DeviceMismatch": "errors",
    "Ema": "run.callbacks",
    "HotloopError": "errors",
    "Loop": "run",
    "Plan": "plan",
    "Report": "records",
    "WarmupCosine": "run.warmup",
    "evaluate": "metrics.evaluation",
    "golden_rule": "placement.golden",
    "load_weights": "run.weight_loading",
    "measure": "device.clock",
    "move": "placement",
    "pad_to": "data.padding",
    "pick": "device",
    "place": "placement",
    "read_weights": "checkpoint.weights",
    "release": "memory.release",
    "seed": "values.rng",
    "simulate": "apps.simulate.block",
    "stream": "data",
    "survive_oom": "step.survive",
    "to_numpy": "placement",
    "usage": "memory.usage",
    "waits": "placement.waits",
    "watch": "monitor.watching",
    "watch_growth": "apps.leaks.growth",
    "world_size": "ranks.group",
}

__all__ = [  # found by __getattr__
    "Choice",
    "DeviceMismatch",
    "Ema",
    "HotloopError",
    "Loop",
    "Plan",
    "Report",
    "WarmupCosine",
    "__version__",
    "evaluate",
    "golden_rule",
    "load_weights",
    "measure",
    "metrics",
    "move",
    "pad_to",
    "pick",
    "place",
    "read_weights",
    "release",
    "seed",
    "simulate",
    "stream",
    "survive_oom",
    "to_numpy",
    "usage",
    "waits",
    "watch",
    "watch_growth",
    "world_size",
]


def __getattr__(name: str) -> object:
    if name == "metrics":
        return import_module("hotloop.metrics")
    if name not in _HOMES:
        raise AttributeError(f"hotloop has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        value: object = getattr(import_module(f"hotloop.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("hotloop.apps"):
            raise
        from hotloop.errors import MissingApplication  # noqa: PLC0415

        raise MissingApplication(f"hotloop.{name}", str(error.name)) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
