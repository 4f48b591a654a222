"""Reports as the tests need them."""

from hotloop.records import Epoch, Report


def made_report() -> Report:
    """Three epochs of ten batches each, evaluated, on a device that does not tell its memory."""
    epochs = tuple(
        Epoch(
            number=number,
            loss=1.5 / number,
            items=1000,
            seconds=0.25,
            losses={},
            metrics={"accuracy": 1 - 0.5 / number, "loss": 1.4 / number},
        )
        for number in (1, 2, 3)
    )
    return Report(
        device="cpu",
        device_name="Test CPU",
        reason="You asked for cpu.",
        precision="fp32",
        parameters=1234,
        started="2026-01-02T03:04:05+00:00",
        seconds=1.0,
        steps=30,
        skipped=0,
        interrupted=False,
        epochs=epochs,
        curve=tuple((batch, 2.0 / batch) for batch in range(1, 31)),
        peak_memory=None,
        versions={"python": "3.11.0", "torch": "2.13.0"},
    )
