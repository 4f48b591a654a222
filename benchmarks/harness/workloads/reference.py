"""The workloads that experts have loops for too: an MLP, two CNNs, sprites and two GPTs."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import TensorDataset

from harness.data import TextDataset, images, rows, tokens
from harness.models import GPT, GPTSize, ResNet18, mlp, small_cnn
from harness.packages import require
from harness.workloads.parts import Scale, Workload
from hotloop.apps.sprites.drawing import guess_hidden
from hotloop.apps.sprites.making import CLASSES, make
from hotloop.apps.sprites.models import Drawer, Size


def mlp_workload(scale: Scale) -> Workload:
    count = scale.pick(1024, 1024, 256)
    return Workload(
        name="mlp",
        unit="rows",
        dataset=TensorDataset(*rows(count, scale.seed)),
        items=count,
        batch=64,
        network=mlp,
        optimize=partial(Adam, lr=1e-3),
        loss=nn.MSELoss(),
        epochs=scale.pick(20, 5, 2),
        workers=scale.pick(2, 2, 0),
        pinned=scale.device.type == "cuda",
    )


def cnn_workload(scale: Scale) -> Workload:
    count = scale.pick(50_000, 2_128, 80)
    return Workload(
        name="cnn",
        unit="images",
        dataset=TensorDataset(*images(count, scale.seed)),
        items=count,
        batch=scale.pick(256, 256, 32),
        network=small_cnn,
        optimize=partial(Adam, lr=1e-3),
        loss=nn.CrossEntropyLoss(),
        epochs=scale.pick(2, 1, 1),
        note=scale.note(f"{count:,} images"),
    )


def resnet18_workload(scale: Scale) -> Workload:
    count, batch, width = scale.pick(50_000, 176, 40), scale.pick(256, 32, 16), scale.pick(64, 64, 8)
    return Workload(
        name="resnet18",
        unit="images",
        dataset=TensorDataset(*images(count, scale.seed)),
        items=count,
        batch=batch,
        network=partial(ResNet18, width=width),
        optimize=partial(SGD, lr=0.05, momentum=0.9, weight_decay=5e-4),
        loss=nn.CrossEntropyLoss(),
        note=scale.note(f"{count:,} images in batches of {batch}"),
    )


def sprites_workload(scale: Scale) -> Workload:
    count, batch, width = scale.pick(32_768, 160, 48), scale.pick(256, 32, 16), scale.pick(64, 64, 8)
    return Workload(
        name="sprites",
        unit="sprites",
        dataset=make(count, seed=scale.seed).dataset(),
        items=count,
        batch=batch,
        network=partial(Drawer, Size(len(CLASSES), width)),
        optimize=partial(AdamW, lr=1e-3, weight_decay=0.01),
        objective=guess_hidden,
        note=scale.note(f"{count:,} sprites in batches of {batch}"),
    )


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The objective of a language model: how surprised it is by each token that follows."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def gpt_workload(scale: Scale) -> Workload:
    size = _small_gpt(scale) or GPTSize()
    count, batch = scale.pick(320, 32, 8), scale.pick(16, 4, 4)
    drawn = tokens(count, size.context + 1, size.vocabulary, scale.seed)
    return Workload(
        name="gpt",
        unit="tokens",
        units_per_item=size.context,
        dataset=TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()),
        items=count,
        batch=batch,
        network=partial(GPT, size),
        optimize=partial(AdamW, lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95)),
        objective=next_token,
        note=scale.note(_small(size, batch)),
    )


def gpt2_workload(scale: Scale) -> Workload:
    transformers = require("transformers")
    small = _small_gpt(scale)
    shape = (
        {"vocab_size": 50_257}
        if small is None
        else {
            "vocab_size": small.vocabulary,
            "n_layer": small.layers,
            "n_head": small.heads,
            "n_embd": small.width,
            "n_positions": small.context,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    )
    config = transformers.GPT2Config(**shape)
    count, batch, length = scale.pick(256, 32, 8), scale.pick(8, 4, 4), scale.pick(512, 128, 16)

    def network() -> nn.Module:
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # the default, of which it warns in every step
        return model

    return Workload(
        name="gpt2",
        unit="tokens",
        units_per_item=length,
        dataset=TextDataset(tokens(count, length, config.vocab_size, scale.seed)),
        items=count,
        batch=batch,
        network=network,
        optimize=partial(AdamW, lr=3e-4),
        note="" if small is None else _small(small, batch),
    )


def _small_gpt(scale: Scale) -> GPTSize | None:
    """What stands in where the full size would take days; None where it would not."""
    if scale.quick:
        return GPTSize(layers=2, heads=2, width=32, context=16, vocabulary=256)
    if scale.device.type == "cpu":
        return GPTSize(layers=4, heads=4, width=256, context=128, vocabulary=8_192)
    return None


def _small(size: GPTSize, batch: int) -> str:
    return f"a small one: {size.layers} layers, {size.width} wide, {batch}x{size.context} tokens"
