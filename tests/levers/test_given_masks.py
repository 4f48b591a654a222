"""The lever "given masks": transformers that are told nothing of their mask do not compare it, and compute the same."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.levers.given_masks import GivenMasksLever
from hotloop.placement.sites import HOTLOOP
from hotloop.placement.waits import Waits, waits
from hotloop.plan import Plan
from hotloop.step.inspection import Inspection, host_objection

WIDTH, LONG = 16, 6


class Translator(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, words: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        x = self.embed(words)
        output: Tensor = self.head(self.transformer(x, x, tgt_mask=causal))
        return output


class Speaker(Translator):
    """A language model, as in PyTorch's tutorial: an encoder and a mask by its place among the arguments."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2)

    def forward(self, words: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        output: Tensor = self.head(self.transformer(self.embed(words), causal))
        return output


both = pytest.mark.parametrize("kind", [Translator, Speaker])


def loss_of(model: nn.Module, words: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = F.cross_entropy(model(words).flatten(0, 1), words.flatten())
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@both
def test_it_computes_the_same_and_is_undone(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model, words = kind(), torch.randint(20, (3, LONG))
    looks: list[bool] = []
    detect = nn.modules.transformer._detect_is_causal_mask

    def counted(mask: Any, is_causal: Any = None, size: Any = None) -> bool:
        looks.append(is_causal is None and mask is not None)
        return detect(mask, is_causal, size)

    monkeypatch.setattr(nn.modules.transformer, "_detect_is_causal_mask", counted)
    expected, gradients = loss_of(model, words)
    assert any(looks)
    looks.clear()
    undo = list(GivenMasksLever().apply(model, [], Plan("cuda")))
    found, near = loss_of(model, words)
    assert looks
    assert not any(looks)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(near, gradients)
    for each in undo:
        each()
    assert not any("forward" in vars(layer) for layer in model.modules())
    assert torch.equal(loss_of(model, words)[0], expected)


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
def test_what_a_person_says_of_the_mask_stays(said: bool, by_name: bool) -> None:
    layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True), 1)
    x, mask = torch.randn(2, LONG, WIDTH), nn.Transformer.generate_square_subsequent_mask(LONG)
    call = (x, mask) if by_name else (x, mask, None, said)
    options = {"is_causal": said} if by_name else {}
    expected = layer(*call, **options)
    list(GivenMasksLever().apply(layer, [], Plan("cuda")))
    torch.testing.assert_close(layer(*call, **options), expected)


def test_a_layer_of_ones_own_is_left_alone() -> None:
    class Own(nn.TransformerEncoder):
        def forward(self, src: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(src, mask)

    model = Own(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), 1)
    assert not list(GivenMasksLever().apply(model, [], Plan("cuda")))


def test_a_compiler_sees_through_it() -> None:
    model, words = Speaker(), torch.randint(20, (3, LONG))
    expected, _ = loss_of(model, words)
    list(GivenMasksLever().apply(model, [], Plan("cuda")))
    torch.testing.assert_close(loss_of(torch.compile(model, backend="eager"), words)[0], expected)


@pytest.mark.parametrize("by", [HOTLOOP, "/home/somebody"], ids=["PyTorch's look", "a layer of one's own"])
def test_a_wait_is_known_for_a_look_at_a_mask(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Waits()
    waiting: dict[str, Any] = {"note": seen.note}
    exec(compile("def bool(answer): note(); return False", f"{by}/waiting.py", "exec"), waiting)  # noqa: S102
    monkeypatch.setattr(nn.modules.transformer, "bool", waiting["bool"], raising=False)
    Speaker()(torch.randint(20, (3, LONG)))
    assert (len(seen), seen.in_packages, seen.at_masks) == (1, 0, by == HOTLOOP)
    inspection = Inspection(waits=seen)
    assert host_objection(inspection) is not None
    assert (host_objection(inspection, looks_at_masks=False) is None) == (by == HOTLOOP)


@pytest.mark.gpu
def test_on_a_gpu_it_spares_the_wait() -> None:
    model, words = Speaker().cuda(), torch.randint(20, (3, LONG), device="cuda")
    loss_of(model, words)
    with waits() as seen:
        model(words)
    assert (len(seen), seen.in_packages, seen.at_masks) == (1, 0, 1)
    list(GivenMasksLever().apply(model, [], Plan("cuda")))
    with waits() as seen:
        model(words)
    assert len(seen) == 0


@pytest.mark.gpu
@both
def test_on_a_gpu_a_default_run_captures_the_step_and_trains_nearly_the_same(kind: type[nn.Module]) -> None:
    made = kind()
    data = [torch.randint(20, (8, 32)) for _ in range(40)]

    def objective(model: nn.Module, words: Tensor) -> Tensor:
        return F.cross_entropy(model(words).flatten(0, 1), words.flatten())

    losses: dict[str, list[float]] = {}
    for plan in ("auto", "plain"):
        model = copy.deepcopy(made)
        loop = hotloop.Loop(model, torch.optim.AdamW(model.parameters(), 1e-3), objective=objective, plan=plan)
        losses[plan] = [epoch.loss for epoch in loop.fit(data, epochs=8, progress=False, monitor=False).epochs]
        if plan == "auto":
            assert "given masks" in loop.plan.levers, str(loop.tuning)
            assert loop.plan.graph, str(loop.tuning)
    assert losses["auto"] == pytest.approx(losses["plain"], rel=0.02)
