"""The lever "rms norm": which layers it finds, what they compute then, and that it is undone."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.levers.rms_norm import RMSNormLever, written_out
from hotloop.plan import Plan


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds, and each worker collects this file

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))


class Own(nn.Module):
    """Written as in many repositories."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Squared(Own):
    """The same as long as the weights are one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight


class Counted(Own):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Noisy(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class Centred(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


def test_the_layers_of_transformers_are_found() -> None:
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    t5 = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    assert [type(layer).__name__ for layer, _ in written_out(t5)] == ["T5LayerNorm"] * 7
    assert [(type(layer), eps) for layer, eps in written_out(llama())] == [(LlamaRMSNorm, "variance_epsilon")] * 5


def test_an_own_layer_is_known_by_what_it_computes_and_not_by_its_name() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    assert [eps for _, eps in written_out(Own(8))] == ["eps"]
    others = [Squared(8), Centred(8), GemmaRMSNorm(8), nn.RMSNorm(8), nn.LayerNorm(8), nn.Linear(8, 8), Own(8).half()]
    hooked = Own(8)
    hooked.register_forward_hook(lambda *_: None)
    before = torch.get_rng_state()
    assert not list(written_out(nn.ModuleList([*others, hooked])))
    assert torch.equal(torch.get_rng_state(), before)


class Shifted(Own):
    def __init__(self, width: int, shift: float) -> None:
        super().__init__(width)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def test_layers_of_one_class_are_known_by_their_settings_too() -> None:
    model = nn.Sequential(Shifted(8, 0.0), Shifted(8, 1.0), Shifted(8, 0.0))
    assert [layer for layer, _ in written_out(model)] == [model[0], model[2]]


@pytest.mark.parametrize("layer", [Counted(8), Noisy(8)])
def test_a_layer_that_does_more_is_left_alone_and_as_it_was(layer: Own) -> None:
    names, before = set(vars(layer)), torch.get_rng_state()
    assert not list(written_out(layer))
    assert set(vars(layer)) == names
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of matmuls in bf16 that a CPU does in other ways
@pytest.mark.parametrize("half", [False, True])
def test_a_model_computes_the_same_with_it_and_after_it(half: bool) -> None:
    model = llama()
    words = torch.randint(100, (2, 12), generator=torch.Generator().manual_seed(0))

    def loss_and_gradients() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(input_ids=words, labels=words).loss
        loss.backward()
        return loss.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected, gradients = loss_and_gradients()
    undo = list(RMSNormLever().apply(model, [], Plan("cuda")))
    assert len(undo) == 5
    found, near = loss_and_gradients()
    torch.testing.assert_close(found, expected, rtol=1e-2 if half else 1e-6, atol=0)
    for mine, theirs in zip(near, gradients, strict=True):
        assert torch.nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) > (
            0.99 if half else 1 - 1e-5
        )
    for each in undo:
        each()
    assert not any("forward" in vars(layer) for layer in model.modules())
    assert torch.equal(loss_and_gradients()[0], expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::hotloop.errors.PlanWarning")  # transformers makes its masks otherwise in a capture
def test_a_default_run_on_a_gpu_uses_it_and_trains_nearly_the_same() -> None:
    data = [{"input_ids": (words := torch.randint(100, (8, 64))), "labels": words} for _ in range(40)]
    losses: dict[Any, list[float]] = {}
    for plan in ("auto", "plain"):
        model = copy.deepcopy(llama())
        loop = hotloop.Loop(model, torch.optim.AdamW(model.parameters(), 1e-3), plan=plan)
        losses[plan] = [epoch.loss for epoch in loop.fit(data, epochs=6, progress=False, monitor=False).epochs]
        assert ("rms norm" in loop.plan.levers) == (plan == "auto"), str(loop.tuning)
    assert losses["auto"] == pytest.approx(losses["plain"], rel=0.02)
