"""Each rule finds its pattern, says nothing of a script without it, and what it changes is gone afterwards."""

import sys
from pathlib import Path
from textwrap import indent

import pytest

import hotloop
from hotloop.apps.doctor.rules import RULES
from hotloop.data.worker_count import LoadingLimits
from hotloop.printing.text import plural

from .conftest import ScriptLook

HEAD = """
import gc
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)


class Items(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        import time
        time.sleep(SLEEP)
        return torch.full((3, 8, 8), index / 96), index % 4


SLEEP = 0.0
device = torch.device("DEVICE")
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)).to(device)
model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(Items(), batch_size=4)
"""
LOOP = """
for epoch in range(2):
    for images, labels in loader:
        images, labels = images.to(device).contiguous(memory_format=torch.channels_last), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
"""
GOOD = HEAD.replace("DEVICE", "cpu") + LOOP
EVALUATION = """
    for images, labels in loader:
        model(images)
"""
WORKERS = LoadingLimits.here().cores  # the items take many times as long as the step
# A script by its rule, and the lines that are there once it is repaired.
CPU = {
    "waits-for-items": (
        GOOD.replace("SLEEP = 0.0", f"SLEEP = {0.001 * (WORKERS + 1)}"),
        f"num_workers={WORKERS}, persistent_workers=True",
    ),
    "items-one-by-one": (
        GOOD.replace("Items(), batch_size=4", "TensorDataset(torch.rand(2048, 3, 8, 8), torch.arange(2048) % 4), 128"),
        "batches = hotloop.stream(loader, device)\nfor epoch in range(2):\n    for images, labels in batches:",
    ),
    "restarts-workers": (GOOD.replace("batch_size=4", "24, num_workers=1"), "num_workers=1, persistent_workers=True"),
    "collects-garbage": (GOOD + "        gc.collect()\n", "optimizer.step()\n"),
    "anomaly-mode": (
        GOOD.replace("SLEEP = 0.0", "torch.autograd.set_detect_anomaly(True)\nSLEEP = 0.0"),
        "set_detect_anomaly(False)",
    ),
    "evaluates-with-gradients": (
        GOOD.replace("range(2)", "range(9)")
        .replace("loader:\n", "list(loader)[:2]:\n")
        .replace("range(9):", "range(9):\n    model.train()")
        + f"    model.eval(){EVALUATION}",
        "    with torch.no_grad():\n        for images, labels in loader:\n            model(images)\n",
    ),
    "keeps-graphs": (
        GOOD.replace("for images", "total = 0.0\n    for images") + "        total += loss * 2\n",
        "total += (loss * 2).detach()",
    ),
    "writes-zeros": (GOOD.replace("zero_grad()", "zero_grad(set_to_none=False)"), "zero_grad(set_to_none=True)"),
    "unfused-optimizer": (GOOD.replace(", fused=True", ""), "lr=0.1, fused=True)"),
    "channels-first": (
        GOOD.replace("model = model.to(memory_format=torch.channels_last)\n", ""),
        "\nmodel.to(memory_format=torch.channels_last)\nfor epoch",
    ),
}
PINNED = "batch_size=4, pin_memory=True"
FAST = 'torch.set_float32_matmul_precision("high")\ntorch.backends.cudnn.benchmark = True\n\n\nclass'
ON_GPU = (
    (HEAD + LOOP)
    .replace("DEVICE", "cuda")
    .replace("batch_size=4", PINNED)
    .replace("to(device).contiguous", "to(device, non_blocking=True).contiguous")
    .replace("labels.to(device)", "labels.to(device, non_blocking=True)")
    .replace("class", FAST, 1)
    .replace("loss = criterion", 'with torch.autocast("cuda", torch.bfloat16):\n            loss = criterion')
)
# All faults of a GPU at once, and the lines that are there once each is repaired.
SLOW_GPU = (
    ON_GPU.replace(", pin_memory=True", "")
    .replace(", non_blocking=True", "")
    .replace("for images", "total = 0.0\n    for images")
    .replace('torch.set_float32_matmul_precision("high")\ntorch.backends.cudnn.benchmark = True\n', "")
    .replace('        with torch.autocast("cuda", torch.bfloat16):\n    ', "")
    + "        total += loss.item() * 4\n        torch.cuda.empty_cache()\n        torch.cuda.synchronize()\n"
)
GPU = {
    "pageable-copies": "labels.to(device, non_blocking=True)",
    "reads-each-step": "        total += loss.detach().double() * 4\n",
    "pauses": "        total += loss.item() * 4\n\n",
    "fp32-matmuls": 'torch.set_float32_matmul_precision("high")',
    "no-search": "torch.backends.cudnn.benchmark = True",
    "fp32-step": 'with torch.autocast("cuda", torch.bfloat16):\n            loss = criterion(model(images), labels)\n',
}
SLOW_MACHINE = {"waits-for-items", "items-one-by-one"}  # small steps: a busy machine may take long for a batch


def test_rules_have_names_of_their_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert len({rule.find for rule in RULES}) == len(RULES)
    advice = {"loops-over-values", "attention-by-hand", "data-parallel"}
    assert {*CPU, *GPU, *advice} == {rule.name for rule in RULES}


@pytest.mark.parametrize("how", ["batch_size=4, **{'num_workers': 0}", "4, False, None, None, 0"])
def test_an_argument_that_a_call_has_out_of_sight_is_not_given_again(look: ScriptLook, how: str) -> None:
    script, _ = CPU["waits-for-items"]
    looked = look(script.replace("batch_size=4", how))
    (found,) = looked.found["waits-for-items"]
    assert not any(found.by_file.values())
    assert f"{plural(WORKERS, 'worker process', 'worker processes')} that stay" in found.fix


def test_libraries_are_not_the_persons_code_wherever_they_lie(
    look: ScriptLook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path.parent / f"{tmp_path.name} beside"
    places = {"lib/python/site-packages": "one", "env/dist-packages": "two", beside: "three", ".": "mine"}
    for place, name in places.items():
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / f"{name}.py").write_text("value = 1\n")
        monkeypatch.syspath_prepend(tmp_path / place)
    looked = look(GOOD.replace("import gc", "import gc, one, two, three, mine"))
    assert {Path(file).name for file in looked.seen.files} == {"train.py", "mine.py"}
    for name in places.values():
        sys.modules.pop(name)


@pytest.mark.parametrize("rule", CPU)
def test_a_fault_is_found_and_gone_once_it_is_repaired(look: ScriptLook, rule: str) -> None:
    script, repaired = CPU[rule]
    looked = look(script)
    assert looked.rules - SLOW_MACHINE == {rule} - SLOW_MACHINE
    fixed = looked.fixed(rule)
    assert repaired in fixed
    assert fixed != script
    assert look(fixed).rules <= SLOW_MACHINE - {rule} | {"waits-for-items"}  # there may be no core for workers


def test_faults_of_a_gpu_are_found_on_a_simulated_one_and_gone_once_they_are_repaired(look: ScriptLook) -> None:
    """In fp32 all but one of them go; that one, which leaves fp32, goes last."""
    with hotloop.simulate("h200"):
        looked = look(SLOW_GPU)
        assert looked.rules - SLOW_MACHINE == set(GPU)
        for rule, repaired in GPU.items():
            assert repaired in f"{looked.fixed(rule)}\n", rule
        again = look(looked.fixed(*(rule for rule in GPU if rule != "fp32-step")))
        assert again.rules - SLOW_MACHINE == {"fp32-step"}
        assert look(again.fixed("fp32-step")).rules <= SLOW_MACHINE


def test_a_loop_over_values_is_named(look: ScriptLook) -> None:
    looked = look(
        GOOD.replace(
            "        loss = criterion(model(images), labels)",
            "        weights = torch.zeros(4)\n        for i in range(300):\n            weights[i % 4] += 0.001\n"
            "        loss = criterion(model(images), labels) + weights.sum()",
        )
    )
    (candidate,) = looked.found["loops-over-values"]
    assert "operations in a step" in candidate.what
    assert not candidate.edits


def test_an_evaluation_that_has_not_run_is_suspected(look: ScriptLook) -> None:
    looked = look(
        GOOD.replace("loader:\n", "iter(lambda: next(iter(loader)), None):\n") + f"    model.eval(){EVALUATION}"
    )
    (candidate,) = looked.found["evaluates-with-gradients"]
    assert not candidate.has_run
    assert "with torch.no_grad():\n        for" in looked.fixed("evaluates-with-gradients")


@pytest.mark.parametrize(
    "evaluation",
    [
        f"    model.eval()\n    with torch.inference_mode():{EVALUATION.replace('    ', '        ')}",
        "    model.eval()\n    for images, _ in loader:\n        with torch.no_grad():\n            model(images)\n",
        f"    torch.set_grad_enabled(False)\n    model.eval(){EVALUATION}",
    ],
)
def test_an_evaluation_without_gradients_is_left_alone(look: ScriptLook, evaluation: str) -> None:
    functions = (
        f"\n@torch.no_grad()\ndef test(model):\n    model.eval(){EVALUATION}\n\ndef evaluate(model):\n{evaluation}"
    )
    endless = LOOP.replace("loader:\n", "iter(lambda: next(iter(loader)), None):\n")
    script = HEAD.replace("DEVICE", "cpu") + functions + endless + "    test(model)\n    evaluate(model)\n"
    assert not look(script).found["evaluates-with-gradients"]


def test_a_teacher_in_evaluation_mode_is_not_the_training(look: ScriptLook) -> None:
    """Its graph is not needed either; the student's is."""
    looked = look(
        GOOD.replace("criterion =", "teacher = nn.Linear(192, 4).eval()\ncriterion =").replace(
            "        loss = criterion(model(images), labels)",
            "        hints = teacher(images.flatten(1))\n        loss = (model(images) - hints.detach()).abs().mean()",
        )
    )
    (candidate,) = looked.found["evaluates-with-gradients"]
    assert looked.text.splitlines()[candidate.place.line - 1].strip() == "hints = teacher(images.flatten(1))"
    assert "with torch.no_grad():\n            hints = teacher" in looked.fixed("evaluates-with-gradients")


def test_a_frozen_model_that_is_trained_in_evaluation_mode_is_left_alone(look: ScriptLook) -> None:
    looked = look(GOOD.replace("criterion =", "model.eval()\ncriterion ="))
    assert not looked.found["evaluates-with-gradients"]


def test_a_value_that_is_needed_in_each_step_is_the_persons_to_decide(look: ScriptLook) -> None:
    uses = "        total += loss.item()\n        if total > 100:\n            break\n        print(loss.item())\n"
    with hotloop.simulate("h200", values=True):
        looked = look(ON_GPU.replace("for images", "total = 0.0\n    for images") + uses)
    assert [bool(candidate.edits) for candidate in looked.found["reads-each-step"]] == [False, False]


def test_a_loader_that_is_an_attribute_is_streamed_too(look: ScriptLook) -> None:
    script = CPU["items-one-by-one"][0].replace(LOOP, "")
    method = indent(LOOP.replace(" loader:", " self.loader:"), " " * 8)
    looked = look(
        f"{script}\n\nclass Trainer:\n    def __init__(self, loader):\n        self.loader = loader\n\n"
        f"    def train(self):\n{method}\n\n"
        "Trainer(loader).train()\n"
    )
    fixed = looked.fixed("items-one-by-one")
    assert "batches = hotloop.stream(self.loader, device)\n" in fixed
    assert "in batches:" in fixed


def test_a_loader_over_a_stream_gets_no_workers(look: ScriptLook) -> None:
    """Each worker would give all of it."""
    looked = look(
        GOOD.replace("class Items(Dataset)", "class Items(torch.utils.data.IterableDataset)")
        .replace(
            "    def __len__(self):\n        return 96\n\n    def __getitem__(self, index):", "    def __iter__(self):"
        )
        .replace(
            "        return torch.full",
            "        for index in range(96):\n          time.sleep(0.002)\n          yield torch.full",
        )
    )
    (candidate,) = looked.found["waits-for-items"]
    assert not candidate.edits


def test_attention_by_hand_is_named(look: ScriptLook) -> None:
    by_hand = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x.flatten(1, 2)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(1, 2), -1)
        return (weights @ v).mean((1, 2), keepdim=True)

    def unused(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v


"""
    script = GOOD.replace("SLEEP = 0.0", by_hand + "SLEEP = 0.0").replace(
        "criterion =", "attention = Attention()\ncriterion ="
    )
    looked = look(script.replace("loss = criterion(", "loss = attention(images).sum() + criterion("))
    (candidate,) = looked.found["attention-by-hand"]
    assert "weights = torch.softmax" in looked.text.splitlines()[candidate.place.line - 1]


def test_two_optimizers_of_one_line_are_fused_both(look: ScriptLook) -> None:
    built = "optimizer, other = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD([torch.ones(1)], 0.1)"
    looked = look(GOOD.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)", built))
    assert looked.fixed("unfused-optimizer").count("0.1, fused=True)") == 2


def test_data_parallel_is_advised_against(look: ScriptLook) -> None:
    with hotloop.simulate("h200"):
        looked = look(ON_GPU.replace("criterion =", "model = nn.DataParallel(model, [0])\ncriterion ="))
    (candidate,) = looked.found["data-parallel"]
    assert "hotloop launch" in candidate.fix


def test_what_a_script_that_has_ended_let_go_is_known_even_so(look: ScriptLook) -> None:
    functions, run = GOOD.split("SLEEP = 0.0\n")
    body = "".join(f"    {line}\n" for line in run.replace("range(2)", "range(1)").splitlines())
    script = f"{functions.replace('return 96', 'return 40')}SLEEP = 0.0\n\n\ndef main():\n{body}\n\nmain()\n"
    looked = look(script.replace(", fused=True", ""))
    assert (looked.seen.has_ended, looked.seen.steps) == (True, 10)
    assert [loader.name for loader in looked.seen.loaders] == ["loader"]
    assert "fused=True" in looked.fixed("unfused-optimizer")


def test_a_loader_that_is_made_for_each_epoch_is_one(look: ScriptLook) -> None:
    made = "loader = DataLoader(Items(), batch_size=4)\n"
    looked = look(
        GOOD.replace(made, "").replace("return 96", "return 20").replace("range(2):\n", f"range(9):\n    {made}")
    )
    (loader,) = looked.seen.loaders
    assert loader.epochs > 1


def test_what_a_library_collects_is_its_own_affair(look: ScriptLook) -> None:
    looked = look(GOOD + "        exec('gc.collect()', {'gc': gc, '__file__': 'x'})\n")
    assert not looked.found["collects-garbage"]


def test_slow_steps_are_looked_at_for_fewer(look: ScriptLook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.apps.doctor.looking.LONG", 0.05)
    assert (
        look(GOOD.replace("        loss.b", "        __import__('time').sleep(0.02)\n        loss.b")).seen.steps == 8
    )
