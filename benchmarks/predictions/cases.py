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
    Training("mlp", (9000, 56000), (16,)),
    Training("cnn", (2200, 7000), (16,)),
    Training("vgg16", (40, 180), (24,)),
    Training("resnet18_bf16", (160, 760), (16,)),
    Training("resnet50", (60, 260), (16,)),
    Training("resnet50_bf16", (140, 520), (24,)),
    Training("convnext", (52, 230), (16,)),
    Training("accumulation", (200, 1500), (24,)),
    Training("unet", (9, 52), (24,)),
    Training("unet_fp16", (20, 96), (16,)),
    Training("diffusion", (36, 140), (24,)),
    Training("dcgan", (700, 6400), (16,)),
    Training("vae", (600, 5200), (24,)),
    Training("lstm", (140, 700), (16,)),
    Training("gru", (150, 760), (8,)),
    Training("vit_s", (72, 380), (24,)),
    Training("vit_b_bf16", (88, 320), (16,)),
    Training("gpt2", (5, 16), (16,)),
    Training("gpt2_bf16", (7, 22), (16,)),
    Training("bert", (12, 44), (24,)),
    Training("bert_bf16", (22, 60), (16,)),
    Training("llama", (5, 18), (24,)),
    Training("llama_checkpointed", (9, 32), (16,)),
    Training("t5", (9, 30), (16,)),
    Training("transformer", (36, 180), (16,)),
    Training("recommender", (12000, 300000), (16,)),
    Training("densenet", (72, 520), (24,)),
    Training("mobilenet_bf16", (180, 1100), (16,)),
    Training("efficientnet_fp16", (90, 560), (8,)),
    Training("mixer", (90, 540), (24,)),
    Training("speech_bf16", (10, 36), (16,)),
    Training("seq2seq", (180, 1100), (16,)),
    Training("volume_unet", (5, 24), (24,)),
    Training("mixture_of_experts", (12, 44), (16,)),
    Training("detector", (16, 128), (16,)),
    Training("wavenet", (4, 40), (8,)),
    Training("contrastive_bf16", (96, 512), (8,)),
    Training("wgan_gp", (256, 1600), (8,)),
    Training("graph_net", (64, 880), (24,)),
    Training("perceiver_fp16", (16, 180), (16,)),
)
BY_NAME = {case.name: case for case in CASES}
# The others were measured before with other batches, and what missed was looked into; these had not run on a GPU.
FRESH = ("detector", "wavenet", "contrastive_bf16", "wgan_gp", "graph_net", "perceiver_fp16")


def chosen(names: list[str] | None) -> list[Training]:
    """Those that were asked for, all where none was; a name that is not known ends the program."""
    unknown = set(names or ()) - set(BY_NAME)
    if unknown:
        raise SystemExit(f"no training is called {', '.join(sorted(unknown))}; there are: {', '.join(BY_NAME)}")
    return [case for case in CASES if not names or case.name in names]
