"""The trainings that predictions are tested on, their batches, and what both sides must agree on."""

from dataclasses import dataclass
from pathlib import Path

TRAININGS = Path(__file__).with_name("trainings")
GIB = 2**30
CAPS = (8, 16, 24)  # GiB that the allocator may reserve
STEPS = 3  # by then an optimizer has its state, and memory repeats itself


@dataclass(frozen=True)
class Training:
    """A script, two batches, and the caps in GiB under which its largest batch is looked for."""

    name: str
    batches: tuple[int, int]
    largest_under: tuple[int, ...] = ()

    @property
    def script(self) -> Path:
        return TRAININGS / f"{self.name}.py"


CASES = (
    Training("mlp", (6000, 80000), (24,)),
    Training("cnn", (1500, 9000), (8,)),
    Training("vgg16", (24, 140), (16,)),
    Training("resnet18_bf16", (96, 1000), (8,)),
    Training("resnet50", (48, 200), (24,)),
    Training("resnet50_bf16", (96, 420), (16,)),
    Training("convnext", (36, 180), (8,)),
    Training("accumulation", (96, 1200), (16,)),
    Training("unet", (6, 40), (16,)),
    Training("unet_fp16", (12, 80), (24,)),
    Training("diffusion", (24, 110), (16,)),
    Training("dcgan", (400, 5000), (8,)),
    Training("vae", (400, 4000), (16,)),
    Training("lstm", (96, 560), (8,)),
    Training("gru", (96, 600), (16,)),
    Training("vit_s", (48, 300), (16,)),
    Training("vit_b_bf16", (64, 260), (24,)),
    Training("gpt2", (3, 13), (24,)),
    Training("gpt2_bf16", (6, 18), (24,)),
    Training("bert", (9, 36), (16,)),
    Training("bert_bf16", (18, 48), (24,)),
    Training("llama", (3, 14), (16,)),
    Training("llama_checkpointed", (6, 26), (24,)),
    Training("t5", (12, 36), (24,)),
    Training("transformer", (24, 140), (8,)),
    Training("recommender", (8192, 400000), (8,)),
    Training("densenet", (48, 400), (16,)),
    Training("mobilenet_bf16", (128, 900), (8,)),
    Training("efficientnet_fp16", (64, 440), (24,)),
    Training("mixer", (64, 420), (16,)),
    Training("speech_bf16", (6, 44), (24,)),
    Training("seq2seq", (128, 900), (8,)),
    Training("volume_unet", (4, 28), (16,)),
    Training("mixture_of_experts", (8, 56), (24,)),
)
BY_NAME = {case.name: case for case in CASES}
# The others were measured once with other batches, and what missed then was looked into; these nobody had looked at.
FRESH = (
    *("densenet", "mobilenet_bf16", "efficientnet_fp16", "mixer", "speech_bf16", "seq2seq", "volume_unet"),
    "mixture_of_experts",
)


def chosen(names: list[str] | None) -> list[Training]:
    """Those that were asked for, all where none was; a name that is not known ends the program."""
    unknown = set(names or ()) - set(BY_NAME)
    if unknown:
        raise SystemExit(f"no training is called {', '.join(sorted(unknown))}; there are: {', '.join(BY_NAME)}")
    return [case for case in CASES if not names or case.name in names]
