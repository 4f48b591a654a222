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
    Training("mlp", (4096, 32768), (8, 24)),
    Training("cnn", (1024, 4096), (8, 16)),
    Training("vgg16", (16, 64), (8,)),
    Training("resnet18_bf16", (64, 256), (8, 16)),
    Training("resnet50", (32, 96), (8, 24)),
    Training("resnet50_bf16", (64, 192), (16,)),
    Training("convnext", (24, 96)),
    Training("accumulation", (64, 256)),
    Training("unet", (4, 16), (8, 16)),
    Training("unet_fp16", (8, 32), (16,)),
    Training("diffusion", (16, 64)),
    Training("dcgan", (256, 1024), (8,)),
    Training("vae", (256, 1024)),
    Training("lstm", (64, 256), (8, 16)),
    Training("gru", (64, 256)),
    Training("vit_s", (32, 128), (16,)),
    Training("vit_b_bf16", (48, 160), (24,)),
    Training("gpt2", (2, 6), (16,)),
    Training("gpt2_bf16", (4, 12), (16, 24)),
    Training("bert", (6, 18), (24,)),
    Training("bert_bf16", (12, 32)),
    Training("llama", (2, 8)),
    Training("llama_checkpointed", (4, 16), (16,)),
    Training("t5", (8, 24)),
    Training("transformer", (16, 64), (8,)),
    Training("recommender", (4096, 65536)),
    Training("densenet", (48, 192), (8, 16)),
    Training("mobilenet_bf16", (128, 512), (16,)),
    Training("efficientnet_fp16", (64, 256), (8, 24)),
    Training("mixer", (64, 256), (16,)),
    Training("speech_bf16", (6, 24), (16, 24)),
    Training("seq2seq", (128, 512), (8,)),
    Training("volume_unet", (4, 16), (8, 24)),
    Training("mixture_of_experts", (8, 32), (16,)),
)
BY_NAME = {case.name: case for case in CASES}


def chosen(names: list[str] | None) -> list[Training]:
    """Those that were asked for, all where none was; a name that is not known ends the program."""
    unknown = set(names or ()) - set(BY_NAME)
    if unknown:
        raise SystemExit(f"no training is called {', '.join(sorted(unknown))}; there are: {', '.join(BY_NAME)}")
    return [case for case in CASES if not names or case.name in names]
