"""Models of other libraries with random data: what hotloop gives on networks that it was not developed with."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import Dataset, TensorDataset

from harness.packages import MissingPackage, require
from harness.workloads.parts import Scale, Workload

CLASSES = 10


def vit_workload(scale: Scale) -> Workload:
    """A tiny vision transformer at 224x224: timm's, or that of Hugging Face where timm is missing."""
    count, batch, side = scale.pick(2_048, 16, 8), scale.pick(128, 8, 4), scale.pick(224, 224, 32)
    layers = scale.pick(12, 12, 2)
    network: Any
    try:
        timm = require("timm")
        network = partial(
            timm.create_model,
            "vit_tiny_patch16_224",
            num_classes=CLASSES,
            img_size=side,
            depth=layers,
            pretrained=False,
        )
        origin = "timm"
    except MissingPackage:
        transformers = require("transformers")
        config = transformers.ViTConfig(
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=layers,
            num_attention_heads=3,
            image_size=side,
            num_labels=CLASSES,
        )
        network = partial(_Logits, transformers.ViTForImageClassification, config)
        origin = "transformers"
    return Workload(
        name="unseen-vit",
        unit="images",
        dataset=_random_pictures(count, side, scale.seed),
        items=count,
        batch=batch,
        network=network,
        optimize=partial(AdamW, lr=3e-4, weight_decay=0.05),
        loss=nn.CrossEntropyLoss(),
        note=f"of {origin}" + (f"; {count:,} images" if scale.note("small") else ""),
    )


class _Logits(nn.Module):
    """A classifier of Hugging Face that returns its scores alone."""

    def __init__(self, kind: Any, config: Any) -> None:
        super().__init__()
        self.classifier = kind(config)

    def forward(self, pictures: Tensor) -> Tensor:
        scores: Tensor = self.classifier(pixel_values=pictures).logits
        return scores


def shufflenet_workload(scale: Scale) -> Workload:
    """torchvision's ShuffleNet at 224x224."""
    models = require("torchvision").models
    count, batch, side = scale.pick(4_096, 32, 8), scale.pick(128, 8, 4), scale.pick(224, 224, 64)
    return Workload(
        name="unseen-shufflenet",
        unit="images",
        dataset=_random_pictures(count, side, scale.seed),
        items=count,
        batch=batch,
        network=partial(models.shufflenet_v2_x1_0, num_classes=CLASSES),
        optimize=partial(SGD, lr=0.05, momentum=0.9, weight_decay=4e-5),
        loss=nn.CrossEntropyLoss(),
        note=scale.note(f"{count:,} images"),
    )


def t5_workload(scale: Scale) -> Workload:
    """T5 small of Hugging Face, from 256 tokens to 64."""
    transformers = require("transformers")
    count, batch = scale.pick(512, 16, 8), scale.pick(16, 4, 4)
    source, target = scale.pick(256, 64, 12), scale.pick(64, 16, 6)
    small: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 600}
    config = transformers.T5Config(decoder_start_token_id=0, use_cache=False, **(small if scale.quick else {}))
    return Workload(
        name="unseen-t5",
        unit="sequences",
        dataset=_PairDataset(count, source, target, config.vocab_size, scale.seed),
        items=count,
        batch=batch,
        network=partial(transformers.T5ForConditionalGeneration, config),
        optimize=partial(AdamW, lr=3e-4),
        note=scale.note(f"{count:,} sequences of {source} and {target} tokens in batches of {batch}"),
    )


class _PairDataset(Dataset[dict[str, Tensor]]):
    """Random texts, and what each one's target is: its beginning."""

    def __init__(self, count: int, source: int, target: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.texts = torch.randint(2, vocabulary, (count, source), generator=generator)
        self.target = target

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index, : self.target]}


def _random_pictures(count: int, side: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 3, side, side, generator=generator), labels)
