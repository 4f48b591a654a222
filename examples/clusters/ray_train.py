"""`train.py` on a Ray cluster: Ray starts the processes and joins them, `hotloop.Loop` trains as it does elsewhere.

python ray_train.py --workers 8 --storage /shared/ray
"""

import argparse
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from train import train


def train_loop(settings: dict[str, Any]) -> None:
    """Runs in every worker. Ray has set RANK, WORLD_SIZE and LOCAL_RANK, and made the process group."""
    report = train(save=settings["save"], epochs=settings["epochs"])
    ray.train.report({"loss": report.epochs[-1].loss if report.epochs else None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--storage", default="/tmp/ray", help="a folder that every node sees")  # noqa: S108
    parser.add_argument("--cpu", action="store_true", help="workers without a GPU")
    given = parser.parse_args()
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})  # workers import train.py from there
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"save": str(Path(given.storage, "hotloop-checkpoints")), "epochs": given.epochs},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=not given.cpu),
        run_config=RunConfig(name="hotloop", storage_path=given.storage, failure_config=FailureConfig(max_failures=3)),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
