"""Losses as people write them, and how far their gradient in parts is from that of the whole batch.

python tests/training/losses.py docs/losses.md  # measure them all and write the table
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hotloop
from hotloop import Loop, Plan
from hotloop.errors import BadArgument, DoesNotFit, MemoryWarning, PlanWarning
from hotloop.memory.micro_batches import rows_of

ITEMS = 17  # a prime, so that every size leaves a tail
CLASSES = 5
COLUMNS = ("accumulate", "uneven tails", "OOM micro-batches", "micro_batch=", "bf16", "evaluate")
Objective = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Case:
    """A loss, with a model and a batch for it."""

    name: str
    batch: Callable[[], Any]
    model: Callable[[], nn.Module] = lambda: network()  # noqa: PLW0108  # it is defined below
    loss: Any = None
    objective: Objective | None = None
    couples: bool = False  # the samples of a batch, so that it must be refused or warned of
    norm: bool = False  # batch normalisation, which is warned of
    sums: bool = False

    def by_hand(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss as a plain loop computes it."""
        if self.objective is not None:
            returned = self.objective(model, batch)
            returned = returned[0] if isinstance(returned, tuple) else returned
            return sum(returned.values()) if isinstance(returned, dict) else returned
        if self.loss is not None:
            return self.loss(model(*batch[:-1]), batch[-1])
        return model(**batch).loss


def network(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(*shape: int, ignored: int | None = None, classes: int = CLASSES) -> Tensor:
    """Classes; with `ignored`, some of them are that number, the first few all of them."""
    drawn = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(2))
    if ignored is not None:
        drawn[torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.4] = ignored
        drawn[:6] = ignored
    return drawn


def classified(**options: Any) -> Callable[[], Any]:
    return lambda: (numbers(ITEMS, 6), labels(ITEMS, **options))


def regressed(*shape: int) -> Callable[[], Any]:
    return lambda: (numbers(ITEMS, 6), numbers(ITEMS, *(shape or (CLASSES,)), seed=4))


def chances() -> Any:
    return numbers(ITEMS, 6), numbers(ITEMS, CLASSES, seed=4).softmax(1)


def switches() -> Any:
    return numbers(ITEMS, 6), (numbers(ITEMS, CLASSES, seed=4) > 0).float()


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Logs(nn.Module):
    """Log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).log_softmax(1)


class Chances(Logs):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sigmoid()


class Tokens(nn.Module):
    """Logits for each token, and the mask of those that there are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 12), nn.Linear(12, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).cumsum(1).tanh())


def sequences() -> dict[str, Tensor]:
    tokens = torch.randint(1, 11, (ITEMS, 9), generator=torch.Generator().manual_seed(5))
    lengths = torch.tensor([1 + (7 * i) % 9 for i in range(ITEMS)])
    return {"tokens": tokens, "mask": torch.arange(9) < lengths[:, None], "lengths": lengths}


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    each = F.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["tokens"], reduction="none")
    return (each * batch["mask"]).sum() / batch["mask"].sum()


def ragged_mean(model: nn.Module, batch: Any) -> Tensor:
    each = F.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["tokens"], reduction="none")
    kept = each.masked_fill(~batch["mask"], 0.0)
    return kept.sum() / batch["lengths"].sum().clamp(min=1)


def chosen_mean(model: nn.Module, batch: Any) -> Tensor:
    """The mean of the tokens that there are, picked by their mask."""
    output = model(batch["tokens"])[batch["mask"]]
    return F.cross_entropy(output, batch["tokens"][batch["mask"]])


def counted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return masked_mean(model, batch), batch["mask"].sum()


def padded() -> dict[str, Tensor]:
    """A batch of a language model: padded, the labels of the padding and of some prompts -100."""
    batch = sequences()
    labels = batch["tokens"].masked_fill(~batch["mask"], -100)
    labels[:5, :4] = -100
    return {"input_ids": batch["tokens"], "attention_mask": batch["mask"].long(), "labels": labels}


def causal() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )


def masked() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertForMaskedLM(config)


def penalised(model: nn.Module, batch: Any) -> Tensor:
    penalty = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=0) + 1e-2 * penalty


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        drawn = torch.randn_like(mean) * 0 + noise  # drawn, as always, and given, so that all can be compared
        return self.decoder(mean + drawn * (spread / 2).exp()), mean, spread


def evidence(model: nn.Module, batch: Any) -> Tensor:
    made, mean, spread = model(*batch)
    divergence = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
    return (F.mse_loss(made, batch[0], reduction="sum") + divergence) / len(batch[0])


def focal(model: nn.Module, batch: Any) -> Tensor:
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def speech() -> Any:
    return numbers(ITEMS, 12, 6), torch.randint(1, CLASSES, (ITEMS, 4), generator=torch.Generator().manual_seed(6))


def transcribed(model: nn.Module, batch: Any) -> Tensor:
    log_probs = model(batch[0]).log_softmax(2).transpose(0, 1)
    lengths = torch.full((len(batch[0]),), 12), torch.tensor([1 + int(row[0]) % 4 for row in batch[1]])
    return F.ctc_loss(log_probs, batch[1], *lengths)


def triplets(model: nn.Module, batch: Any) -> Tensor:
    return F.triplet_margin_loss(*(model(each) for each in batch))


def pairs(model: nn.Module, batch: Any) -> Tensor:
    return F.cosine_embedding_loss(model(batch[0]), model(batch[1]), batch[2])


def several(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    output = model(batch[0])
    return {"fit": F.mse_loss(output, batch[1]), "size": 0.1 * output.abs().mean()}


def weighted_mean(model: nn.Module, batch: Any) -> Tensor:
    """Weights of samples that are made to add up to 1."""
    weights = batch[2] / batch[2].sum()
    return (weights * F.cross_entropy(model(batch[0]), batch[1], reduction="none")).sum()


def constant_scale(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum") / 1000


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    a, b = (F.normalize(model(each), dim=1) for each in batch)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def vicreg(model: nn.Module, batch: Any) -> Tensor:
    a, b = (model(each) for each in batch)
    spread = F.relu(1 - a.std(0)).mean() + F.relu(1 - b.std(0)).mean()
    return F.mse_loss(a, b) + spread + torch.cov(a.T).fill_diagonal_(0).square().sum()


def dice(model: nn.Module, batch: Any) -> Tensor:
    p, t = model(batch[0]).sigmoid(), batch[1]
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def dice_bare(model: nn.Module, batch: Any) -> Tensor:
    p, t = model(batch[0]).sigmoid(), batch[1]
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def root(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1]).sqrt()


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))


WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0])
CASES = (
    Case("cross entropy", classified(), loss=nn.CrossEntropyLoss()),
    Case("cross entropy, `ignore_index`", classified(ignored=-100), loss=nn.CrossEntropyLoss()),
    Case("cross entropy, class weights", classified(), loss=nn.CrossEntropyLoss(weight=WEIGHTS)),
    Case("cross entropy, label smoothing", classified(ignored=-100), loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
    Case(
        "cross entropy, weights, `ignore_index`, smoothing",
        classified(ignored=3),
        loss=nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=3, label_smoothing=0.2),
    ),
    Case("cross entropy, probabilities", chances, loss=nn.CrossEntropyLoss(weight=WEIGHTS)),
    Case(
        "cross entropy per pixel, `ignore_index`",
        lambda: (numbers(ITEMS, 2, 4, 4), labels(ITEMS, 4, 4, ignored=255)),
        Pixels,
        nn.CrossEntropyLoss(ignore_index=255),
    ),
    Case("`F.cross_entropy` itself", classified(ignored=-100), loss=F.cross_entropy),
    Case("NLL with class weights", classified(ignored=1), Logs, nn.NLLLoss(weight=WEIGHTS, ignore_index=1)),
    Case("BCE", switches, Chances, nn.BCELoss()),
    Case("BCE with logits, `pos_weight`", switches, loss=nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)),
    Case("MSE", regressed(), loss=nn.MSELoss()),
    Case("L1", regressed(), loss=nn.L1Loss()),
    Case("smooth L1", regressed(), loss=nn.SmoothL1Loss()),
    Case("Huber", regressed(), loss=nn.HuberLoss(delta=0.5)),
    Case("KL divergence, `batchmean`", chances, Logs, nn.KLDivLoss(reduction="batchmean")),
    Case("CTC", speech, objective=transcribed),
    Case("triplet margin", lambda: tuple(numbers(ITEMS, 6, seed=s) for s in (1, 2, 3)), objective=triplets),
    Case(
        "cosine embedding",
        lambda: (numbers(ITEMS, 6), numbers(ITEMS, 6, seed=2), 2.0 * labels(ITEMS, classes=2) - 1),
        objective=pairs,
    ),
    Case('`reduction="sum"`', regressed(), loss=nn.MSELoss(reduction="sum"), sums=True),
    Case(
        "a functional sum",
        classified(ignored=-100),
        objective=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
        sums=True,
    ),
    Case("a sum over a constant", regressed(), objective=constant_scale, sums=True),
    Case("masked mean by hand", sequences, Tokens, objective=masked_mean),
    Case("mean over ragged lengths", sequences, Tokens, objective=ragged_mean),
    Case("mean over what a mask picks", sequences, Tokens, objective=chosen_mean),
    Case("weights that add up to 1", lambda: (*classified()(), numbers(ITEMS, seed=7).exp()), objective=weighted_mean),
    Case("Hugging Face, causal, padded, -100", padded, causal),
    Case("Hugging Face, masked, -100", padded, masked),
    Case("`(loss, count)`", sequences, Tokens, objective=counted),
    Case("cross entropy + L2 of the weights", classified(ignored=0), objective=penalised),
    Case("named losses", regressed(), objective=several),
    Case("VAE", lambda: (numbers(ITEMS, 6), numbers(ITEMS, 4, seed=8)), Vae, objective=evidence),
    Case("focal", classified(), objective=focal),
    Case(
        "contrastive (InfoNCE)",
        lambda: (numbers(ITEMS, 6), numbers(ITEMS, 6, seed=2)),
        objective=contrastive,
        couples=True,
    ),
    Case("VICReg", lambda: (numbers(ITEMS, 6), numbers(ITEMS, 6, seed=2)), objective=vicreg, couples=True),
    Case("Dice over the batch", switches, objective=dice, couples=True),
    Case("Dice without a guard", switches, objective=dice_bare, couples=True),
    Case("root of a mean (RMSE)", regressed(), objective=root, couples=True),
    Case("BatchNorm, cross entropy", classified(), normalised, nn.CrossEntropyLoss(), norm=True),
)


class OutOfMemory(TorchDispatchMode):
    """Memory runs out once, at an operation in the first forward pass."""

    def __init__(self, operation: int) -> None:
        super().__init__()
        self.left = operation
        self._is_inside = False

    def enter(self, *_: Any) -> None:
        self._is_inside = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= self._is_inside
        if self.left == 0:
            self.left = -1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return func(*args, **(kwargs or {}))


def cut(batch: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """A batch in batches of these sizes, as a loader would give them."""
    start = 0
    for size in sizes:
        yield rows_of(batch, ITEMS, slice(start, start + size))
        start += size


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def whole(case: Case, *, bf16: bool = False) -> Tensor:
    """The gradient of the whole batch, by hand."""
    model = case.model().train()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = case.by_hand(model, case.batch())
    loss.backward()
    return gradients(model)


def trained(case: Case, batches: Iterator[Any], plan: Plan, memory: OutOfMemory | None = None) -> Tensor:
    """The gradient that a `Loop` comes to."""
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    loop = Loop(model, optimizer, case.loss, objective=case.objective, device="cpu", plan=plan)
    if memory is not None:
        model.register_forward_pre_hook(memory.enter)
    with memory or nullcontext():
        for batch in loop.batches(list(batches)):
            loop.step(batch)
    assert loop.out_of_memory == (memory is not None)
    return gradients(model)


def distance(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def measure(case: Case, column: str) -> float:
    """The relative difference to the whole batch."""
    if column == "evaluate":
        return _evaluated(case)
    if column == "accumulate":
        ours = trained(case, cut(case.batch(), (6, 6, 5)), Plan("cpu", accumulate=3))
    elif column == "uneven tails":
        alone = (3,) if case.couples or case.norm else (2, 1)  # some of them cannot be computed of one
        ours = trained(case, cut(case.batch(), (7, 7, *alone)), Plan("cpu", accumulate=9))
    elif column == "OOM micro-batches":
        ours = trained(case, cut(case.batch(), (ITEMS,)), Plan("cpu"), OutOfMemory(2))
    elif column == "micro_batch=":
        ours = trained(case, cut(case.batch(), (ITEMS,)), Plan("cpu", micro_batch=5))
    else:
        ours = trained(case, cut(case.batch(), (ITEMS,)), Plan("cpu", micro_batch=5, precision="bf16"))
        return distance(ours, whole(case, bf16=True))
    return distance(ours, whole(case))


def _evaluated(case: Case) -> float:
    model = case.model().eval()
    given = {"loss": case.loss, "objective": case.objective}
    if case.loss is None and case.objective is None:
        given["objective"] = lambda model, batch: model(**batch).loss
    ours = hotloop.evaluate(model, list(cut(case.batch(), (4, 4, 4, 4, 1))), **given)["loss"]
    with torch.no_grad():
        theirs = case.by_hand(model, case.batch()).item() / (ITEMS if case.sums else 1)
    return abs(ours - theirs) / abs(theirs)


@contextmanager
def told(seen: list[str]) -> Iterator[None]:
    """What is said about a loss inside: refused, or warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except (DoesNotFit, BadArgument):
            seen.append("refused")
    names = (PlanWarning, MemoryWarning)
    words = [str(each.message) for each in caught if issubclass(each.category, names)]
    if any("batch normalisation" in said or "not that of its micro-batches" in said for said in words):
        seen.append("warned of")


def cell(case: Case, column: str) -> str:
    seen: list[str] = []
    value: float | None = None
    with told(seen):
        value = measure(case, column)
    if column == "evaluate" and case.couples:
        return "as by hand"
    if value is None or seen:
        return seen[0]
    return f"{value:.0e}" if value >= 5e-8 else "0"


def table() -> str:
    lines = [f"| loss | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    lines += [f"| {case.name} | {' | '.join(cell(case, column) for column in COLUMNS)} |" for case in CASES]
    return "\n".join(lines)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    before, _, rest = page.read_text().partition("| loss |")
    after = rest.partition("\n\n")[2]
    page.write_text(f"{before}{table()}\n\n{after}")
