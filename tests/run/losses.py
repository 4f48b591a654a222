"""Losses as people write them, and how far their gradient in parts is from that of the whole batch.

python tests/run/losses.py docs/losses.md  # measure them all and write the table
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
WARNINGS = (
    "batch normalisation",
    "not that of its micro-batches",
    "could not be compared",
    "nothing in it counts",
    "divided by a count that is kept above",
)
COLUMNS = ("accumulate", "uneven tails", "OOM micro-batches", "out of memory again", "micro_batch=", "bf16", "evaluate")
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
    told_of: tuple[str, ...] = ()  # columns that need a word: there the loss is more than a mean over the items

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


def root(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1]).sqrt()


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))


def each(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of each item."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def errors(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square()


def tokens(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of each token."""
    return F.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["tokens"], reduction="none")


def log_probabilities(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).log_softmax(1)


def chosen() -> Any:
    """Inputs, classes and a mask of which the first items have nothing."""
    mask = torch.rand(ITEMS, generator=torch.Generator().manual_seed(9)) < 0.6
    mask[:5] = False
    return numbers(ITEMS, 6), labels(ITEMS), mask


def weighted() -> Any:
    return numbers(ITEMS, 6), labels(ITEMS), numbers(ITEMS, seed=7).exp()


def latents(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The error of a VAE for each number of each item, and its divergence for each."""
    made, mean, spread = model(*batch)
    return (made - batch[0]).square(), -0.5 * (1 + spread - mean.square() - spread.exp())


def one_by_one(model: nn.Module, batch: Any) -> list[Tensor]:
    return [F.cross_entropy(model(x[None]), y[None]) for x, y in zip(batch[0], batch[1], strict=True)]


def sequence_means(model: nn.Module, batch: Any) -> Tensor:
    losses = [(loss * mask).sum() / mask.sum() for loss, mask in zip(tokens(model, batch), batch["mask"], strict=True)]
    return torch.stack(losses).mean()


def early(model: nn.Module, batch: Any) -> Tensor:
    if not batch[2].any():
        return model(batch[0]).sum() * 0
    return each(model, batch)[batch[2]].mean()


def read(model: nn.Module, batch: Any) -> Tensor:
    return (each(model, batch) * batch[2]).sum() / max(batch[2].sum().item(), 1)


class MaskedMean(torch.autograd.Function):
    """Its gradient is 0/0 where the mask is empty."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return (values * mask).sum() / mask.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradient * mask / mask.sum(), None


def penalty_of_gradient(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return F.cross_entropy(model(x), batch[1]) + (slope.norm(dim=1) - 1).square().mean()


def policy(model: nn.Module, batch: Any) -> Tensor:
    """The loss of PPO."""
    output = model(batch[0])
    ratio = (output.log_softmax(1).gather(1, batch[1][:, None]).squeeze(1) + 1.6).exp()
    gain = torch.minimum(ratio * batch[2], ratio.clamp(0.8, 1.2) * batch[2]).mean()
    entropy = torch.distributions.Categorical(logits=output).entropy().mean()
    return -gain + 0.5 * (output[:, 0] - batch[2]).square().mean() - 0.01 * entropy


def distilled(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0])
    soft = F.kl_div(
        (output / 2).log_softmax(1), (batch[2][:, None] * output.detach()).softmax(1), reduction="batchmean"
    )
    return 0.7 * soft * 4 + 0.3 * F.cross_entropy(output, batch[1])


def mixture(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0])
    return -torch.logsumexp(output.log_softmax(1) - (output - batch[1]).square() / 2, 1).mean()


def own_negatives(model: nn.Module, batch: Any) -> Tensor:
    output = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(output @ torch.eye(CLASSES) / 0.1, batch[1])


def item_dice(model: nn.Module, batch: Any) -> Tensor:
    p, t = model(batch[0]).sigmoid(), batch[1]
    return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


def detection(model: nn.Module, batch: Any) -> Tensor:
    """A loss over anchors, divided by the number of positive ones."""
    output, positive = model(batch[0]), batch[2]
    losses = F.binary_cross_entropy_with_logits(output[:, 0], positive.float(), reduction="none")
    return losses.sum() / positive.sum().clamp(min=1)


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    logs = log_probabilities(model, batch)
    return 0.9 * F.nll_loss(logs, batch[1]) - 0.1 * logs.mean(1).mean()


def token_classes() -> nn.Module:
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16, num_labels=11)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertForTokenClassification(config)


def balanced(model: nn.Module, batch: Any) -> Tensor:
    counts = torch.bincount(batch[1], minlength=CLASSES).clamp(min=1)
    return F.cross_entropy(model(batch[0]), batch[1], weight=len(batch[1]) / (CLASSES * counts))


def class_means(model: nn.Module, batch: Any) -> Tensor:
    losses = each(model, batch)
    return torch.stack([losses[batch[1] == c].mean() for c in batch[1].unique()]).mean()


def hardest(model: nn.Module, batch: Any) -> Tensor:
    return each(model, batch).topk(max(len(batch[0]) // 2, 1)).values.mean()


def same_value(model: nn.Module, batch: Any) -> Tensor:
    """The value of twice the first loss, with a gradient that depends on the ratio of the two in the batch."""
    a, b = F.cross_entropy(model(batch[0]), batch[1]), model(batch[0]).square().mean()
    return a + b * (a.detach() / b.detach())


def two_masks(model: nn.Module, batch: Any) -> Tensor:
    losses = each(model, batch)
    others = losses.square() * ~batch[2]
    return (losses * batch[2]).sum() / batch[2].sum().clamp(min=1) + others.sum() / (~batch[2]).sum().clamp(min=1)


def barlow(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0])
    rows = (output - output.mean(0)) / (output.std(0) + 1e-3)
    return (rows.T @ rows / len(rows) - torch.eye(CLASSES)).square().sum()


def batch_hard(model: nn.Module, batch: Any) -> Tensor:
    distances = torch.cdist(model(batch[0]), model(batch[0]))
    same = batch[1][:, None] == batch[1]
    return F.relu((distances * same).max(1).values - (distances + 9 * same).min(1).values + 9).mean()


def pearson(model: nn.Module, batch: Any) -> Tensor:
    return 1 - torch.corrcoef(torch.stack([model(batch[0])[:, 0], batch[2]]))[0, 1]


def cox(model: nn.Module, batch: Any) -> Tensor:
    risk = model(batch[0])[:, 0][batch[2].argsort(descending=True)]
    return (risk.logcumsumexp(0) - risk).mean()


def similar(model: nn.Module, batch: Any) -> Tensor:
    """Supervised contrastive."""
    rows = F.normalize(model(batch[0]), dim=1)
    logs = (rows @ rows.T / 0.5).log_softmax(1)
    same = (batch[1][:, None] == batch[1]).float()
    return -((logs * same).sum(1) / same.sum(1)).mean()


def discrepancy(model: nn.Module, batch: Any) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (-torch.cdist(a, b).square()).exp().mean()

    output = model(batch[0])
    return kernel(output, output) + kernel(batch[1], batch[1]) - 2 * kernel(output, batch[1])


WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0])
OF_CHOSEN: dict[str, Objective] = {
    "mask, `clamp(min=1)`": lambda m, b: (each(m, b) * b[2]).sum() / b[2].sum().clamp(min=1),
    "mask, `+ 1e-8`": lambda m, b: (each(m, b) * b[2]).sum() / (b[2].sum() + 1e-8),
    "mask, `max(count.item(), 1)`": read,
    "mask, `torch.maximum(count, one)`": lambda m, b: (
        (each(m, b) * b[2]).sum() / torch.maximum(b[2].sum(), torch.tensor(1))
    ),
    "mask, `nonzero`": lambda m, b: each(m, b)[b[2].nonzero().flatten()].mean(),
    "mask, an early return": early,
    "mask, an autograd `Function`": lambda m, b: MaskedMean.apply(each(m, b), b[2]),
    "`(loss, int)`": lambda m, b: ((each(m, b) * b[2]).sum() / max(int(b[2].sum()), 1), int(b[2].sum())),
    "`torch.where`": lambda m, b: torch.where(b[2], each(m, b), 0.0).sum() / b[2].sum().clamp_min(1),
    "`nansum` over what is there": lambda m, b: (
        torch.where(b[2], each(m, b), torch.nan).nansum() / b[2].sum().clamp(min=1)
    ),
    "focal, over its targets": lambda m, b: (
        ((1 - (-each(m, b)).exp()) ** 2 * each(m, b) * b[2]).sum() / b[2].sum().clamp(min=1)
    ),
}
OF_VALUES: dict[str, Objective] = {
    "named losses": several,
    "`mean(0).sum()`": lambda m, b: errors(m, b).mean(0).sum(),
    "`(x.sum(0) / len(x)).mean()`": lambda m, b: (errors(m, b).sum(0) / len(b[0])).mean(),
    "`sum(1).mean()`": lambda m, b: errors(m, b).sum(1).mean(),
    "`sum() / shape[0]`": lambda m, b: errors(m, b).sum() / b[0].shape[0],
    "`0.5 * mean()`": lambda m, b: 0.5 * errors(m, b).mean(),
    "Gaussian": lambda m, b: F.gaussian_nll_loss(m(b[0]), b[1], torch.full_like(b[1], 0.5)),
    "quantiles": lambda m, b: torch.maximum(0.9 * (b[1] - m(b[0])), -0.1 * (b[1] - m(b[0]))).mean(),
    "norm of each item": lambda m, b: (m(b[0]) - b[1]).norm(dim=1).mean(),
    "mixture density": mixture,
}
OF_CLASSES: dict[str, Objective] = {
    "focal": focal,
    "`sum(list) / len(list)`": lambda m, b: sum(one_by_one(m, b)) / len(b[0]),
    "`torch.stack(list).mean()`": lambda m, b: torch.stack(one_by_one(m, b)).mean(),
    "NLL by `gather`": lambda m, b: -log_probabilities(m, b).gather(1, b[1][:, None]).mean(),
    "label smoothing by hand": smoothed,
    "negatives of its own": own_negatives,
    "L1 of the activations": lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.1 * m(b[0]).abs().mean(),
    "two heads": lambda m, b: F.cross_entropy(m(b[0])[:, :3], b[1] % 3) + F.mse_loss(m(b[0])[:, 3], b[0][:, 0]),
    "a loss over its own value": lambda m, b: each(m, b).mean() / each(m, b).mean().detach(),
}
OF_WEIGHTED: dict[str, Objective] = {
    "mask, `mean() / mask.mean()`": lambda m, b: (each(m, b) * b[2]).mean() / b[2].mean(),
    "mask, `torch.dot`": lambda m, b: torch.dot(each(m, b), b[2]) / b[2].sum(),
    "mask, `einsum`": lambda m, b: torch.einsum("n,n->", each(m, b), b[2]) / b[2].sum(),
    "weights over their mean": lambda m, b: (b[2] / b[2].mean() * each(m, b)).mean(),
    "weights times the loss, `mean()`": lambda m, b: (b[2] * each(m, b)).mean(),
    "margin ranking": lambda m, b: F.margin_ranking_loss(m(b[0])[:, 0], m(b[0])[:, 1], (b[2] - 1).sign(), margin=0.1),
    "distillation": distilled,
    "PPO": policy,
    "REINFORCE": lambda m, b: -(log_probabilities(m, b).gather(1, b[1][:, None])[:, 0] * b[2]).sum() / len(b[0]),
}
COUPLING: dict[str, Objective] = {
    "class weights of the batch": balanced,
    "mean over classes": class_means,
    "flooding": lambda m, b: (each(m, b).mean() - 1.6).abs() + 1.6,
    "the hardest half": hardest,
    "one value, another gradient": same_value,
    "exponential of a mean": lambda m, b: each(m, b).mean().exp(),
    "Barlow twins": barlow,
    "batch-hard triplets": batch_hard,
    "supervised contrastive": similar,
}
OF_TOKENS: dict[str, Objective] = {
    "masked mean by hand": masked_mean,
    "mean over ragged lengths": ragged_mean,
    "mean over what a mask picks": chosen_mean,
    "`(loss, count)`": counted,
    "one mean per sequence": sequence_means,
    "one mean per sequence, vectorised": lambda m, b: ((tokens(m, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean(),
    "tokens, `+ 1e-6`, times 0.5": lambda m, b: 0.5 * (tokens(m, b) * b["mask"]).sum() / (b["mask"].sum() + 1e-6),
    "log-probability of a sequence": lambda m, b: (tokens(m, b) * b["mask"]).sum(1).mean(),
}
OF_VAES: dict[str, Objective] = {
    "VAE": evidence,
    "VAE, `kl.mean(0).sum()`": lambda m, b: latents(m, b)[0].mean() + latents(m, b)[1].mean(0).sum(),
    "VAE, `sum(1).mean()`": lambda m, b: (latents(m, b)[0].sum(1) + latents(m, b)[1].sum(1)).mean(),
    "VAE, `mse + kl.sum() / N`": lambda m, b: latents(m, b)[0].mean() + latents(m, b)[1].sum() / len(b[0]),
}


def of(losses: dict[str, Objective], *given: Any, couples: bool = False) -> list[Case]:
    return [Case(name, *given, objective=objective, couples=couples) for name, objective in losses.items()]


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
    Case("weights that add up to 1", lambda: (*classified()(), numbers(ITEMS, seed=7).exp()), objective=weighted_mean),
    Case("Hugging Face, causal, padded, -100", padded, causal),
    Case("Hugging Face, masked, -100", padded, masked),
    Case("cross entropy + L2 of the weights", classified(ignored=0), objective=penalised, told_of=("evaluate",)),
    Case(
        "contrastive (InfoNCE)",
        lambda: (numbers(ITEMS, 6), numbers(ITEMS, 6, seed=2)),
        objective=contrastive,
        couples=True,
    ),
    Case("VICReg", lambda: (numbers(ITEMS, 6), numbers(ITEMS, 6, seed=2)), objective=vicreg, couples=True),
    Case("Dice over the batch", switches, objective=dice, couples=True),
    Case("root of a mean (RMSE)", regressed(), objective=root, couples=True),
    Case("BatchNorm, cross entropy", classified(), normalised, nn.CrossEntropyLoss(), norm=True),
    Case(
        "`mean((0, 2, 3)).sum()`",
        lambda: (numbers(ITEMS, 2, 4, 4),),
        Pixels,
        objective=lambda m, b: m(b[0]).square().mean((0, 2, 3)).sum(),
    ),
    Case("`sum() / 1000`", regressed(), objective=lambda m, b: errors(m, b).sum() / 1000, sums=True),
    Case("`sum()`", regressed(), objective=lambda m, b: errors(m, b).sum(), sums=True),
    Case(
        "`torch.stack(list).sum()`", classified(), objective=lambda m, b: torch.stack(one_by_one(m, b)).sum(), sums=True
    ),
    Case("positives of a detector", chosen, objective=detection, couples=True),
    Case("BCE, weights of elements", switches, loss=nn.BCEWithLogitsLoss(weight=torch.arange(1.0, CLASSES + 1))),
    Case("multi-label soft margin", switches, loss=nn.MultiLabelSoftMarginLoss()),
    Case("Poisson", lambda: (numbers(ITEMS, 6), numbers(ITEMS, CLASSES, seed=4).abs()), loss=nn.PoissonNLLLoss()),
    Case("KL divergence, `sum`", chances, Logs, nn.KLDivLoss(reduction="sum"), sums=True),
    Case(
        "CTC, `sum`",
        speech,
        objective=lambda m, b: F.ctc_loss(
            m(b[0]).log_softmax(2).transpose(0, 1),
            b[1],
            torch.full((len(b[0]),), 12),
            torch.full((len(b[0]),), 3),
            reduction="sum",
        ),
        sums=True,
    ),
    Case("Dice of each item", switches, objective=item_dice),
    Case("gradient penalty", classified(), objective=penalty_of_gradient, told_of=("evaluate",)),
    Case(
        "named, over the same targets",
        classified(ignored=-100),
        objective=lambda m, b: {"a": F.cross_entropy(m(b[0]), b[1]), "b": 0.3 * F.cross_entropy(-m(b[0]), b[1])},
    ),
    Case("Hugging Face, tokens", padded, token_classes),
    Case(
        "`clamp(min=8)` of a count",
        chosen,
        objective=lambda m, b: (each(m, b) * b[2]).sum() / b[2].sum().clamp(min=8),
        couples=True,
    ),
    Case("means over two masks", chosen, objective=two_masks, couples=True),
    Case("Pearson", weighted, objective=pearson, couples=True),
    Case("Cox", weighted, objective=cox, couples=True),
    Case("maximum mean discrepancy", regressed(), objective=discrepancy, couples=True),
    Case(
        "Tversky over the batch",
        switches,
        objective=lambda m, b: 1 - (m(b[0]).sigmoid() * b[1]).sum() / (m(b[0]).sigmoid() + b[1]).sum(),
        couples=True,
    ),
    *of(OF_CLASSES, classified()),
    *of(OF_VALUES, regressed()),
    *of(OF_CHOSEN, chosen),
    *of(OF_WEIGHTED, weighted),
    *of(OF_TOKENS, sequences, Tokens),
    *of(OF_VAES, lambda: (numbers(ITEMS, 6), numbers(ITEMS, 4, seed=8)), Vae),
    *of(COUPLING, classified(), couples=True),
)


class OutOfMemory(TorchDispatchMode):
    """Memory runs out once at an operation in the first forward pass, or in each with gradients of so many items."""

    def __init__(self, operation: int = 0, most: int | None = None) -> None:
        super().__init__()
        self.left, self.most = operation, most
        self._is_inside = False

    def enter(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._is_inside = True
        first = (*given, *named.values())[0]
        if self.most is not None and torch.is_grad_enabled() and len(first) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

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
        model.register_forward_pre_hook(memory.enter, with_kwargs=True)
    with memory or nullcontext():
        for batch in loop.batches(list(batches)):
            loop.step(batch)
    assert loop.out_of_memory or memory is None or memory.most
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
    elif column == "out of memory again":
        ours = trained(case, cut(case.batch(), (ITEMS,)), Plan("cpu"), OutOfMemory(most=5))
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
    if any(known in said for said in words for known in WARNINGS):
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
