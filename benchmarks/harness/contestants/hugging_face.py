"""The Trainer of Hugging Face on its own models, in bf16 where the GPU has it."""

import tempfile
import time
from typing import Any

import torch

from harness.contestants.protocol import DoesNotApply, Started, has_bf16
from harness.packages import require
from harness.workloads import TrainingParts
from hotloop.device.clock import synchronize


def trainer(parts: TrainingParts, device: torch.device) -> Started:
    """Its defaults, with everything off that does not train, and without clipping, so that the work is the same."""
    if parts.loss is not None or parts.objective is not None:
        raise DoesNotApply(
            f"the Trainer of Hugging Face trains its own models, and {parts.workload} is none",
            fix="choose bert, llama or gpt2, or leave the trainer out",
        )
    require("accelerate")  # without which the Trainer raises an error of its own
    transformers = require("transformers")
    clock = _clock(transformers, device)

    def run(count: int) -> float:
        with tempfile.TemporaryDirectory() as folder:  # it wants one, though nothing is saved
            made = _trainer(transformers, parts, device, count, folder)
            made.remove_callback(transformers.PrinterCallback)  # which prints a summary at the end
            made.add_callback(clock)
            made.train()
        # It leaves its autocast around `forward`, and the next Trainer would put another one around that.
        made.accelerator.unwrap_model(parts.model, keep_fp32_wrapper=False)
        seconds: float = clock.end - clock.start
        return seconds

    return Started(run, "bf16" if has_bf16(device) else "fp32")


def _trainer(transformers: Any, parts: TrainingParts, device: torch.device, epochs: int, folder: str) -> Any:
    loader, optimizer = parts.loader, parts.only_optimizer
    settings = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=loader.batch_size,
        dataloader_num_workers=loader.num_workers,
        bf16=has_bf16(device),
        use_cpu=device.type == "cpu",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return transformers.Trainer(
        model=parts.model,
        args=settings,
        train_dataset=loader.dataset,
        data_collator=loader.collate_fn,
        optimizers=(optimizer, transformers.get_constant_schedule(optimizer)),
    )


def _clock(transformers: Any, device: torch.device) -> Any:
    class TrainerTimer(transformers.TrainerCallback):  # type: ignore[misc]
        """From the start of the first epoch to the end of the last."""

        start = end = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.start = 0.0

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            if not self.start:
                synchronize(device)
                self.start = time.perf_counter()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            self.end = time.perf_counter()

    return TrainerTimer()
