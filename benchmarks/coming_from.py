"""The scripts of the pages "coming from", both sides of each: their losses and their seconds, on the best device here.

    python benchmarks/coming_from.py --out benchmarks/results/coming_from.json

The data of a page is so small that it runs in a moment; here there are 64 times as many items. Both sides take items in
the order of the data, since each library shuffles in its own way. Each script runs twice, and the second run counts:
libraries are loaded and the device is warm by then.
"""

import argparse
import importlib
import importlib.util
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hotloop
from harness.about import facts
from hotloop.records.files import write_json

PAGES = {  # and the packages of each
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "trainer": ("transformers", "accelerate"),
}
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "coming-from"
LARGER = (  # 16,384 items instead of 256, in as many epochs
    ("randn(320,", "randn(16448,"),
    ("256", "16384"),
    (", 12)", ", 768)"),
    ("updates = 2, 12", "updates = 2, 768"),
    (", shuffle=True", ""),
)


def scripts_of(page: str) -> tuple[str, str, str]:
    """What both sides begin with, the script of the other library, and that of hotloop with `fit`."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    for old, new in LARGER:
        text = text.replace(old, new)
    before, theirs, ours, _ = re.split(r"^## ", text, flags=re.MULTILINE)
    shared, other, own = (re.findall(r"^```python\n(.*?)^```", part, re.M | re.S) for part in (before, theirs, ours))
    if len(own) > 1:  # a loop of one's own first, then what `fit` makes of it
        own = [own[0].split("losses = []")[0] + own[1]]
    return shared[0], other[0], own[0]


def timed(shared: str, script: str) -> tuple[float, dict[str, Any]]:
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(shared, "<coming from>", "exec"), names)  # noqa: S102  # the page is our own
    start = time.perf_counter()
    exec(compile(script, "<coming from>", "exec"), names)  # noqa: S102
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, names


def loss_of(page: str, names: dict[str, Any]) -> float:
    """The training loss of the last epoch, as the other library tells it."""
    if page == "lightning":
        return float(names["trainer"].callback_metrics["train_loss"])
    if page == "accelerate":
        return float(names["losses"][-1])
    return float([each["loss"] for each in names["trainer"].state.log_history if "loss" in each][-1])


def keep_order() -> None:
    """Let the Trainer of Hugging Face take items in the order of the data."""
    transformers = importlib.import_module("transformers")

    def in_order(trainer: Any) -> Any:
        batch = trainer.args.per_device_train_batch_size
        return trainer.accelerator.prepare(torch.utils.data.DataLoader(trainer.train_dataset, batch))

    transformers.Trainer.get_train_dataloader = in_order


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the figures")
    given = parser.parse_args(arguments)
    out = given.out and given.out.absolute()
    rows = []
    for page, packages in PAGES.items():
        if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
            print(f"{page}: not installed: {', '.join(missing)}")
            continue
        if page == "trainer":
            keep_order()
        shared, other, own = scripts_of(page)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.chdir(folder)
            theirs, ours = [timed(shared, other) for _ in range(2)], []
            for turn in range(2):
                ours.append(timed(shared, own.replace('"runs/', f'"runs/{turn}/')))
            os.chdir("/")
        report = ours[-1][1]["report"]
        plan = str(ours[-1][1]["loop"].plan)
        row = {
            "page": page,
            "seconds": {"other": theirs[-1][0], "hotloop": ours[-1][0]},
            "first": {"other": theirs[0][0], "hotloop": ours[0][0]},
            "loss": {"other": loss_of(page, theirs[-1][1]), "hotloop": report.epochs[-1].loss},
            "plan": plan,
        }
        rows.append(row)
        print(json.dumps(row))
    if out:
        write_json(out, {**facts([hotloop.pick().device]), "rows": rows})


if __name__ == "__main__":
    main()
