"""Weights & Biases and MLflow as they are installed, offline: what a run logged is read back from their own files."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop


def trained(log: str) -> hotloop.Report:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), 8)
    model = nn.Linear(4, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.01), nn.MSELoss(), device="cpu", plan="plain")
    return loop.fit(data, epochs=2, validate=data, progress=False, monitor=False, log=log)


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file of W&B, which are those of LevelDB's log behind a head of seven bytes."""
    at, begun = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield begun
            begun = b""


def test_wandb_keeps_the_losses_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    report = trained("wandb")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({(item.key or "/".join(item.nested_key)): float(item.value_json) for item in items})
    losses = [entry["epoch/loss"] for entry in found if "epoch/loss" in entry]
    assert losses == pytest.approx([epoch.loss for epoch in report.epochs])
    assert [entry["step"] for entry in found if "epoch/loss" in entry] == [8, 16]


def test_mlflow_keeps_the_losses_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    place = (tmp_path / "mlruns").as_uri()
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    mlflow.set_tracking_uri(place)
    report = trained("mlflow")
    client = MlflowClient(tracking_uri=place)
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    history = client.get_metric_history(run.info.run_id, "epoch/loss")
    assert [entry.value for entry in history] == pytest.approx([epoch.loss for epoch in report.epochs])
    assert [entry.step for entry in history] == [8, 16]
    assert run.info.status == "FINISHED"
    assert all(math.isfinite(value) for value in run.data.metrics.values())
