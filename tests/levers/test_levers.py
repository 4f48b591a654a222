"""Levers: each is one change of a plan, and says why it cannot be pulled where it cannot."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

from hotloop import Loop
from hotloop.errors import BadArgument, PlanWarning
from hotloop.levers import LEVERS, NAMED, Lever, LeverTarget, levers_of
from hotloop.levers.applied import AppliedPlan
from hotloop.levers.base import Cost, RunFacts
from hotloop.levers.checkpointing import repeated_blocks
from hotloop.levers.compile import compiled_forward
from hotloop.levers.tf32 import fp32_matmul_precision
from hotloop.plan import Plan, Tier

from ..warm import Warm

DOCS = Path(__file__).parents[2] / "docs"
CPU, CUDA = Plan("cpu"), Plan("cuda")
every_lever = pytest.mark.parametrize("lever", LEVERS, ids=NAMED)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.blocks = nn.TransformerEncoder(_block(), 2, enable_nested_tensor=False)


def _block() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8)


def scene(device: str = "cpu", model: nn.Module | None = None, optimizer: Any = Adam, **options: Any) -> LeverTarget:
    """A scene; that of a GPU can be set where there is none, as long as nobody asks the GPU."""
    model = model or Net()
    return LeverTarget(torch.device(device), model, [optimizer(model.parameters())], **options)


def why_not(name: str, where: LeverTarget, **settings: Any) -> str | None:
    return NAMED[name].why_not(where, Plan(str(where.device), **settings))


pulls = st.lists(st.sampled_from(LEVERS), max_size=8)


def after(pulled: list[Lever]) -> Plan:
    plan = CPU
    for lever in pulled:
        plan = lever.pull(plan)
    return plan


def test_names_and_pages_are_distinct() -> None:
    assert len({lever.name for lever in LEVERS}) == len({lever.page for lever in LEVERS}) == len(LEVERS)


@every_lever
def test_every_lever_is_described_and_changes_the_plain_plan(lever: Lever) -> None:
    assert lever.tier in get_args(Tier)
    assert lever.cost in get_args(Cost)
    assert lever.what
    assert lever.undo
    assert lever.page.startswith("levers/")
    assert " " not in lever.page
    assert lever.pull(CPU) != CPU
    assert lever.name in levers_of(lever.pull(CPU))
    assert lever.off(lever.pull(CPU)) == (replace(CPU, graph=1) if lever.name == "several steps" else CPU)


@settings(deadline=None)
@given(pulls, st.sampled_from(LEVERS), st.integers(1, 4), st.none() | st.floats(0.1, 2))
def test_levers_make_a_plan_and_leave_the_rest_of_it_alone(
    pulled: list[Lever], lever: Lever, accumulate: int, clip: float | None
) -> None:
    plan = after(pulled)
    assert after([NAMED[name] for name in levers_of(plan)]) == plan
    once = lever.pull(plan)
    assert lever.pull(once) == once
    assert lever.name in levers_of(once)
    assert lever.why_not(scene(model=nn.Linear(1, 1)), once) == "it is pulled already"
    without = lever.off(plan)
    assert lever.name not in levers_of(without)
    assert lever.off(without) == without
    assert without == plan or lever.name in levers_of(plan)
    own = Plan("cpu", accumulate=accumulate, clip_norm=clip)
    for each in pulled:
        own = each.pull(own)
    assert (own.device, own.accumulate, own.clip_norm) == ("cpu", accumulate, clip), "what a person has set"


def test_a_plan_without_levers() -> None:
    assert levers_of(CPU) == []
    assert levers_of(replace(CPU, stream="direct", accumulate=3, clip_norm=1.0)) == []


def test_more_of_a_thing_is_not_taken_back() -> None:
    assert NAMED["graph"].pull(replace(CUDA, graph=4)).graph == 4
    assert NAMED["several steps"].pull(replace(CUDA, graph=4)).graph == 4
    assert NAMED["compile"].pull(replace(CUDA, compile="max-autotune")).compile == "max-autotune"
    assert NAMED["compile"].pull(replace(CUDA, compile="blocks")).compile == "default"
    assert NAMED["workers"].pull(replace(CUDA, workers=2)).workers == 2


@every_lever
def test_what_needs_cuda_is_impossible_without_it(lever: Lever) -> None:
    plan = lever.pull(CPU)
    why = lever.impossible(scene(), plan)
    assert (NEEDS_CUDA in str(why)) == lever.needs_cuda
    assert lever.needs_cuda or why is None


NEEDS_CUDA = "needs a CUDA device, and this is cpu"
ON_CPU = {"workers": "changes the training", "bf16": "emulate", "fp16": NEEDS_CUDA, "checkpointing": "costs time"}


@every_lever
def test_what_a_cpu_can_do(lever: Lever, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    why, expected = lever.why_not(scene(), CPU), ON_CPU.get(lever.name, NEEDS_CUDA if lever.needs_cuda else None)
    assert (why is None) == (expected is None)
    assert (expected or "") in (why or "")


def test_a_cpu_with_bf16_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert why_not("bf16", scene()) is None


@every_lever
def test_deterministic_algorithms_leave_only_what_changes_no_number(lever: Lever) -> None:
    asked = "deterministic algorithms are asked for"
    if lever.tier == "B":
        assert lever.why_not(scene(only=asked), CPU) == asked
    else:
        assert lever.why_not(scene(only=asked), CPU) == lever.why_not(scene(), CPU)


@pytest.mark.parametrize(
    ("capability", "able"),
    [((6, 1), set()), ((7, 5), {"fp16"}), ((8, 0), {"bf16", "tf32"}), ((9, 0), {"bf16", "tf32"})],
)
def test_the_arithmetic_of_a_gpu(capability: tuple[int, int], able: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert {name for name in ("fp16", "bf16", "tf32") if why_not(name, scene("cuda")) is None} == able


def test_tf32_is_left_alone_where_it_means_nothing_or_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "matmuls are in bf16" in str(why_not("tf32", scene("cuda"), precision="bf16"))
    torch.set_float32_matmul_precision("high")
    try:
        assert "set by hand" in str(why_not("tf32", scene("cuda")))
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("pinned", [False, True])
def test_bf16_is_prepared_for_where_it_may_be_used(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[torch.device] = []
    monkeypatch.setattr("hotloop.kernels.preload.load_beside", lambda device, use: loaded.append(device), raising=False)
    for capability in ((7, 5), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, given=capability: given)
        for device in ("cpu", "cuda"):
            NAMED["bf16"].prepare(LeverTarget(torch.device(device), nn.Linear(2, 2), [], pinned_precision=pinned))
    assert loaded == [torch.device("cuda")] * (not pinned)


class Own(Optimizer):
    """An optimizer that a person wrote."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None: ...


def own_beside_another() -> LeverTarget:
    model = Net()
    return LeverTarget(torch.device("cuda"), model, [Adam(model.conv.parameters()), Own(model.blocks.parameters())])


def with_step_hook(register: str) -> LeverTarget:
    target = scene("cuda")
    getattr(target.optimizers[0], register)(lambda *_: None)
    return target


RATE = partial(Adam, lr=torch.tensor(1e-3), foreach=False)
COMPLEX = torch.zeros(2, dtype=torch.complex64)
PINNED, SHARED = {"pinned_precision": True}, {"only": "a step changes steps, which could not be restored"}
Build = Callable[[], LeverTarget]
# Where a lever is to be pulled, settings of the plan, and what is in the way.
OBSTACLES: list[tuple[str, Build, dict[str, Any], str | None]] = [
    ("bf16", lambda: scene(**PINNED), {}, "precision='fp32' was asked for"),
    ("fp16", lambda: scene(**PINNED), {}, "precision='fp32' was asked for"),
    ("tf32", lambda: scene("cuda", **PINNED), {}, "precision='fp32' was asked for"),
    ("bf16", lambda: scene("meta"), {}, "it is not tried on meta"),
    ("bf16", lambda: scene("cuda", **SHARED), {}, SHARED["only"]),
    ("resident", lambda: scene(why_not_resident="it is made anew each time"), {}, "it is made anew each time"),
    ("prefetch", lambda: scene("cuda"), {}, None),
    ("prefetch", lambda: scene("cuda"), {"stream": "resident"}, "the data lives on the device"),
    ("pinned memory", lambda: scene("cuda"), {}, None),
    ("pinned memory", lambda: scene("cuda"), {"stream": "resident"}, "the data lives on the device"),
    ("pinned memory", lambda: scene("cuda", loader_pins=True), {}, "pins its batches already"),
    ("cudnn benchmark", lambda: scene("cuda"), {}, None),
    ("cudnn benchmark", lambda: scene("cuda", nn.Linear(2, 2)), {}, "no two-dimensional convolution"),
    ("channels last", lambda: scene("cuda"), {}, None),
    ("channels last", lambda: scene("cuda", nn.Linear(2, 2)), {}, "no two-dimensional convolution"),
    ("channels last", lambda: scene(model=Net().to(memory_format=torch.channels_last)), {}, "already"),
    ("channels last", lambda: scene(model=nn.Conv2d(4, 4, 1)), {}, None),  # its weights have both layouts at once
    *(("fused", partial(scene, optimizer=each), {}, None) for each in (Adam, AdamW, SGD, partial(Adam, foreach=True))),
    ("fused", lambda: scene(optimizer=Own), {}, "Own has no fused kernel"),
    ("fused", own_beside_another, {}, "Own"),
    ("fused", lambda: scene(optimizer=partial(Adam, fused=True)), {}, "fused already"),
    ("fused", lambda: scene(optimizer=partial(Adam, differentiable=True)), {}, "differentiable"),
    ("fused", lambda: scene(optimizer=lambda p: Adam([*p, COMPLEX])), {}, "not plain floating-point"),
    ("fused", lambda: scene(optimizer=torch.optim.RMSprop), {}, "no fused kernel"),
    ("fused", lambda: scene("meta"), {}, "there is no fused kernel for meta"),
    ("fused", lambda: scene("cuda", **SHARED), {}, None),  # whatever else is forbidden
    ("fused", lambda: scene("cpu", **SHARED), {}, SHARED["only"]),
    *(("graph", partial(scene, "cuda", optimizer=each), {}, None) for each in (Adam, AdamW, SGD)),
    ("graph", lambda: scene("cuda", optimizer=Own), {}, "Own cannot be captured"),
    ("graph", own_beside_another, {}, "Own"),
    ("graph", lambda: scene("cuda", optimizer=RATE), {}, "learning rate of Adam is a tensor"),
    ("graph", lambda: scene("cuda"), {"precision": "fp16"}, "scaler"),
    ("graph", lambda: with_step_hook("register_step_pre_hook"), {}, "Adam has hooks, which a captured step would skip"),
    ("graph", lambda: with_step_hook("register_step_post_hook"), {}, "Adam has hooks"),
    ("several steps", lambda: scene("cuda"), {"stream": "resident"}, "not captured"),
    ("several steps", lambda: scene("cuda"), {"graph": 1}, "does not live on the device"),
    ("several steps", lambda: scene("cuda"), {"graph": 1, "stream": "resident"}, None),
    ("max-autotune", lambda: scene("cuda"), {}, "was not kept"),
    ("max-autotune", lambda: scene("cuda"), {"compile": "default"}, None),
    ("compile", lambda: scene("meta"), {}, "it is not tried on meta"),
    ("compile blocks", lambda: scene("meta"), {}, "it is not tried on meta"),
    ("compile blocks", lambda: scene("cuda"), {}, None),
    ("compile blocks", lambda: scene("cuda"), {"compile": "default"}, "the whole step is compiled"),
    ("compile blocks", lambda: scene("cuda", nn.Linear(2, 2)), {}, "repeats no block"),
]


@pytest.mark.parametrize(("name", "build", "chosen", "says"), OBSTACLES)
def test_what_is_in_the_way_of_a_lever(name: str, build: Build, chosen: dict[str, Any], says: str | None) -> None:
    why = why_not(name, build(), **chosen)
    assert why is None if says is None else says in str(why)


@pytest.mark.parametrize(
    ("model", "heavy"),
    [
        (nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), False),
        (nn.Linear(1024, 1024), True),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.LazyLinear(2)), True),
        (nn.LazyLinear(2), False),
    ],
    ids=["small", "large", "convolution", "lazy"],
)
def test_layers_tell_whether_a_step_may_be_heavy(model: nn.Module, heavy: bool) -> None:
    assert LeverTarget(torch.device("cpu"), model, []).may_be_heavy is heavy


@pytest.mark.parametrize(
    ("changed", "proposed"),
    [
        ({}, True),
        ({"can_be_several": False}, False),
        ({"operations": 300}, False),
        ({"operations": 0}, False),
        ({"flops": 2e9}, False),
        ({"left": 0.2}, False),
        ({"left": None}, True),
    ],
)
def test_tiny_steps_go_into_one_graph_from_the_start(changed: dict[str, Any], proposed: bool) -> None:
    target = LeverTarget(torch.device("cuda"), nn.Linear(2, 2), [])
    tiny: dict[str, Any] = {"operations": 50, "flops": 1e7, "step": 5e-4, "left": 5.0, "can_be_several": True}
    lever = NAMED["several steps"]
    assert lever.rule.holds(RunFacts(target, **(tiny | changed))) is proposed


def test_products_whose_parts_were_set_one_by_one() -> None:
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = "tf32", "ieee"
    try:
        assert fp32_matmul_precision() != "highest"
    finally:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = before
    assert fp32_matmul_precision() == "highest"


def test_weights_that_share_their_memory_are_not_copied_out_of_it() -> None:
    def pair() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))

    slices, tied, shared = pair(), pair(), pair().share_memory()
    rows = iter(torch.zeros(2, 81))
    for layer in slices:
        layer.weight.data = next(rows).view(3, 3, 3, 3)
    tied[1].weight.data = tied[0].weight.data
    for model in (slices, tied, shared):
        assert why_not("channels last", scene(model=model)) == (
            "0.weight lies in memory that others read or write too, and would leave it"
        )
    one = pair()
    one[1].weight = one[0].weight
    assert why_not("channels last", scene(model=one)) is None, "one parameter in two places is converted for both"


def test_cudnn_that_tries_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert why_not("cudnn benchmark", scene("cuda")) == "it is on already"


def test_sparse_gradients_cannot_be_fused() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    assert why_not("fused", scene(model=model)) == "0 has sparse gradients"
    table = nn.ParameterList([torch.zeros(4, 2)])
    target = scene(model=table)
    assert why_not("fused", target) is None
    functional.embedding(torch.tensor([1]), table[0], sparse=True).sum().backward()
    assert why_not("fused", target) == "Adam is given sparse gradients"


def test_weights_that_kernels_would_read_in_the_wrong_places_cannot_be_fused() -> None:
    table = nn.ParameterList([torch.ones(4, 6).t(), torch.ones(4, 1, 2)[:, :, :1]])
    assert why_not("fused", target := scene(model=table)) == "Adam holds weights with gaps in memory, such as slices"
    table[1].data = torch.ones(4, 1, 1)
    assert why_not("fused", target) is None, "a weight may be transposed"
    table[0].grad = torch.ones(6, 4)
    assert why_not("fused", target) is None, "gradients get the strides of their weights before a step"


def test_tf32_cannot_be_set_where_parts_of_it_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.levers.tf32.fp32_matmul_precision", lambda: "mixed")
    assert "per backend" in str(NAMED["tf32"].impossible(scene("cuda"), CUDA))


HOOKS: dict[str, Callable[[Net], object]] = {
    "forward": lambda m: m.conv.register_forward_hook(lambda *_: None),
    "forward, with names": lambda m: m.conv.register_forward_hook(lambda *_: None, with_kwargs=True),
    "before": lambda m: m.conv.register_forward_pre_hook(lambda *_: None),
    "backward": lambda m: m.conv.register_full_backward_hook(lambda *_: None),
    "before backward": lambda m: m.conv.register_full_backward_pre_hook(lambda *_: None),
    "of a weight": lambda m: m.conv.weight.register_hook(lambda grad: None),
    "of a complete gradient": lambda m: m.conv.weight.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("name", ["graph", "compile", "compile blocks"])
def test_hooks_would_be_left_out(name: str, hook: Callable[[Net], object]) -> None:
    model = Net()
    assert why_not(name, scene("cuda", model)) is None
    hook(model)
    why = why_not(name, scene("cuda", model))
    assert why.startswith("conv")
    assert "has hooks" in why


def test_compiled_blocks_that_are_checkpointed_too() -> None:
    """The checkpoint is around the compiled forward; what is reverted is as it was."""
    model = Net()
    plan = replace(CPU, compile="blocks", checkpointing=True)
    applied = AppliedPlan(plan, model, [])
    applied.apply()
    for block in repeated_blocks(model):
        assert vars(block)["forward"].args[0].func is compiled_forward
    applied.revert()
    assert all("forward" not in vars(block) for block in repeated_blocks(model))


class Outer(nn.Module):
    """A block that repeats blocks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_the_blocks_of_a_transformer() -> None:
    model = Net()
    assert repeated_blocks(model) == list(model.blocks.layers)


def test_a_block_inside_a_block_goes_with_it() -> None:
    outer = [Outer(), Outer()]
    assert repeated_blocks(nn.Sequential(*outer)) == outer
    alone = Outer()
    assert repeated_blocks(alone) == list(alone.parts)


def test_stages_of_blocks() -> None:
    stages = [nn.Sequential(_block(), _block()) for _ in range(2)]
    model = nn.ModuleDict({"a": stages[0], "b": stages[1], "head": nn.Linear(4, 2)})
    assert repeated_blocks(model) == [*stages[0], *stages[1]]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(2, 2))),
        nn.ModuleList([_block(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())]),
    ],
    ids=["layer", "layers", "one block", "two kinds"],
)
def test_models_that_repeat_nothing(model: nn.Module) -> None:
    assert repeated_blocks(model) == []
    assert "repeats no block" in str(NAMED["checkpointing"].impossible(scene(model=model), CPU))


def test_a_block_that_is_used_twice_is_one_block() -> None:
    block = _block()
    assert repeated_blocks(nn.ModuleList([block, block, _block()]))[:1] == [block]
    assert len(repeated_blocks(nn.ModuleList([block, block, _block()]))) == 2


@every_lever
def test_the_page_of_a_lever_is_that_of_its_class(lever: Lever) -> None:
    assert (DOCS / lever.page).read_text() == lever.documentation, "run `python -m hotloop.levers docs`"


def test_a_name_that_no_lever_goes_by_is_refused() -> None:
    model = nn.Linear(1, 1)
    for name, says in (("turbo", "no lever of that name"), ("fused", "a setting of its own")):
        with pytest.raises(BadArgument, match=says):
            AppliedPlan(Plan("cpu", levers=(name,)), model, []).apply()
        with pytest.raises(BadArgument, match=f"the plan has {name}: .*{says}"):
            Loop(model, SGD(model.parameters()), nn.MSELoss(), plan=Plan("cpu", levers=(name,)))


def test_a_file_with_a_lever_that_is_not_here_runs_without_it(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(Plan("cpu", levers=("turbo",), fused=True).to_json()))
    with pytest.warns(PlanWarning, match="turbo, which is left out here"):
        loop = Loop(model, SGD(model.parameters()), nn.MSELoss(), plan=file, device="cpu")
    assert loop.plan == Plan("cpu", fused=True)


TOY = '''
from hotloop.levers.base import Lever, set_attribute


class ToyLever(Lever):
    """**What it does.** The model is not slow any more."""

    name = "toy"
    order = 45
    tier = "A"
    what = "the model is fast"
    cost = "nothing"
    undo = "the model is slow again"

    def obstacle(self, target, plan):
        return None if hasattr(target.model, "pause") else "the model is not slow"

    def apply(self, model, optimizers, plan):
        yield set_attribute(model, "pause", 0.0)
'''
WITH_TOY = """
import importlib.util, json, sys, time, warnings

warnings.simplefilter("error")
for name in [name for name in sys.modules if name.partition(".")[0] == "hotloop"]:
    del sys.modules[name]  # all of it is imported anew, with the lever

spec = importlib.util.find_spec("hotloop.levers")
spec.submodule_search_locations.append(sys.argv[1])  # as if the file were in the package's own folder
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])

import hotloop, torch
from hotloop.levers import LEVERS, levers_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Slow(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
        self.pause = 0.02

    def forward(self, x):
        time.sleep(self.pause)
        return super().forward(x)


def loop_with(plan, model):
    return hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu", plan=plan)


told = {"names": [lever.name for lever in LEVERS]}
plan = hotloop.Plan("cpu", levers=("toy",))
told["page"] = next(lever for lever in LEVERS if lever.name == "toy").documentation

model = Slow()
loop = loop_with(plan, model)
told["applied"] = model.pause
told["levers"] = levers_of(loop.plan)
loop._core.switch.step.levers.revert()
told["reverted"] = model.pause

data = DataLoader(TensorDataset(torch.randn(32, 2), torch.randn(32, 1)), 8)
tuning = loop_with("auto", Slow()).tune(data, steps=1000, progress=False)
told["verdict"] = next(trial.verdict for trial in tuning.trials if trial.lever == "toy")
told["tuned"] = tuning.plan.levers
print(json.dumps(told))
"""


def test_a_new_lever_is_one_new_file(tmp_path: Path, warm: Warm) -> None:
    """It is listed in its order, documented, applied and reverted, and tried by the tuner."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "with_toy").write_text(WITH_TOY)
    ran = warm.run(tmp_path / "with_toy", str(tmp_path), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    names = [lever.name for lever in LEVERS]
    place = told["names"].index("toy")
    assert told["names"] == [*names[:place], "toy", *names[place:]]
    assert names.index("workers") < place <= names.index("graph"), "between `workers` (40) and `graph` (50)"
    assert told["page"].startswith(
        "# toy\n\n| tier | cost to pull | how it is undone |\n|---|---|---|\n| A | nothing |"
    )
    assert told["page"].endswith("**What it does.** The model is not slow any more.\n")
    assert (told["applied"], told["reverted"], told["levers"]) == (0.0, 0.02, ["toy"])
    assert told["verdict"] == "kept"
    assert "toy" in told["tuned"], "beside others without a field in `Plan` that a CPU can have"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler itself uses what PyTorch has deprecated
@pytest.mark.parametrize("name", ["kernels", "row kernels"])
def test_what_is_compiled_already_is_left_alone(name: str) -> None:
    lever = next(lever for lever in LEVERS if lever.name == name)
    plan = Plan("cuda", precision="bf16", channels_last=True, graph=1)
    inner, outer = (nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)) for _ in range(2))
    inner[1].compile()
    for model in (inner, torch.compile(outer)):
        target = LeverTarget(torch.device("cuda"), model, [])
        assert "compiled already" in str(lever.obstacle(target, plan))
