"""Unmodified scripts, run and ended: in this process, so that it is quick; `tests/cli` runs one in its own."""

import os
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest

from hotloop.profiling.profile_record import Profile
from hotloop.profiling.profiled_script import PROFILE, TRACE, ProfileRequest
from hotloop.profiling.profiled_script import run as run_profiled
from hotloop.scripts.exchange import Exchange

HEAD = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    def model():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def step(net, optimizer):
        optimizer.zero_grad()
        net(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Write a script and profile it: exit code, profile if there is one, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["python"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    leave, here = os._exit, os.getpid()

    def must_not_leave(code: int) -> None:
        if os.getpid() != here:  # a worker that was forked from here ends so
            leave(code)
        pytest.fail("the script had to be ended without its clean-up")

    monkeypatch.setattr(os, "_exit", must_not_leave)

    def call(body: str, *arguments: str, steps: int = 3, warmup: int | None = 6, head: str = HEAD, **options):
        (tmp_path / "train.py").write_text(dedent(head) + dedent(body))
        target, module, exchange = options.get("target", "train.py"), options.get("module", False), Exchange(tmp_path)
        exchange.ask(ProfileRequest(target, arguments, steps, warmup, module).to_json())
        code = run_profiled(exchange)
        found = (exchange.answered or {}).get(PROFILE)
        profile = None if found is None else Profile.from_json(found)
        return code, profile, *capfd.readouterr()

    return call


def test_the_tutorials_loop_names_its_waits_and_their_lines(run, tmp_path: Path) -> None:
    code, profile, out, err = run("""
        data = TensorDataset(torch.randn(400, 4), torch.randint(0, 2, (400,)))
        total = 0.0
        optimizer = torch.optim.Adam(net.parameters())
        for inputs, targets in DataLoader(data, batch_size=4, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print("never reached")
    """)
    assert code == 0, err
    assert profile.steps == 3
    assert profile.parts.total == pytest.approx(sum(profile.seconds), rel=0.02)
    (wait,) = profile.waits
    assert (wait.line.file, wait.line.code) == ("train.py", "total += loss.item()")
    codes = {operation.line.code for operation in profile.operations if operation.line}
    assert {"loss = nn.functional.cross_entropy(net(inputs), targets)", "optimizer.step()"} <= codes
    assert profile.data_known
    assert "never reached" not in out
    assert "hotloop: profiling 3 steps" in err
    assert "Traceback" not in err
    assert (tmp_path / TRACE).read_bytes()[:2] == b"\x1f\x8b"


def test_what_hotloop_reads_by_itself_is_not_laid_at_the_persons_door(run) -> None:
    code, profile, *_ = run(
        """
        import hotloop

        class Net(nn.Sequential):
            def forward(self, x):
                if x.sum() > 1e9:  # theirs
                    return x
                return super().forward(x)

        net = Net(nn.Linear(4, 2))
        loader = DataLoader(TensorDataset(torch.ones(64, 4), torch.zeros(64, 2)), batch_size=4)
        loop = hotloop.Loop(net, torch.optim.AdamW(net.parameters()), nn.MSELoss(), device="cpu", plan="plain")
        loop.fit(loader, epochs=2, progress=False)
        """,
        steps=3,
    )
    assert code == 0
    assert {wait.line.code for wait in profile.waits} == {"if x.sum() > 1e9:  # theirs"}
    assert not any("loop.fit" in advice.what for advice in profile.advice)


def test_a_script_sees_what_python_would_show_it(run, tmp_path: Path) -> None:
    code, profile, out, err = run(
        """
        import argparse, sys
        parser = argparse.ArgumentParser()
        parser.add_argument("--rounds", type=int)
        asked = parser.parse_args().rounds
        print(__name__, sys.argv, sys.path[0], sys.modules["__main__"].__file__, asked)
        for _ in range(asked):
            step(net, optimizer)
        """,
        "--rounds",
        "100",
    )
    assert (code, profile.steps) == (0, 3), err
    assert out.split()[0] == "__main__"
    assert "['train.py', '--rounds', '100']" in out
    assert f" {tmp_path} " in out
    assert out.endswith("train.py 100\n")


def test_clean_up_runs_and_nothing_is_printed_of_the_end(run) -> None:
    code, profile, out, err = run("""
        from contextlib import contextmanager

        @contextmanager
        def resource():
            try:
                yield
            finally:
                print("closed")

        try:
            with resource():
                while True:
                    try:
                        step(net, optimizer)
                    except Exception:
                        print("never reached")
        finally:
            print("finished")
    """)
    assert (code, profile.steps) == (0, 3)
    assert out == "closed\nfinished\n"
    assert "Enough" not in err


def test_a_script_that_catches_everything_is_ended(run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        monkeypatch.undo()
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended):
        run("""
            while True:
                try:
                    step(net, optimizer)
                except BaseException as error:
                    if type(error).__name__ == "Ended":
                        raise
        """)


ALTERNATING = """
    other = model()
    critic = torch.optim.SGD(other.parameters(), lr=0.01)
    while True:
        step(other, critic)
        step(net, optimizer)
"""
ACCUMULATING = """
    while True:
        for _ in range(3):
            net(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
CLAMPING = """
    while True:
        step(net, optimizer)
        for p in net.parameters():
            p.data.clamp_(-1, 1)
"""
WITH_WORKERS = """
    data = TensorDataset(torch.randn(400, 4))
    for (inputs,) in DataLoader(data, batch_size=4, num_workers=1):
        step(net, optimizer)
"""


@pytest.mark.parametrize(
    ("body", "calls"),
    [(ALTERNATING, 4), (ACCUMULATING, 6), (CLAMPING, 2), (WITH_WORKERS, 2)],
    ids=["a GAN", "accumulation", "what else writes to parameters", "workers, which end with the script"],
)
def test_what_a_step_is(run, body: str, calls: int) -> None:
    code, profile, _, err = run(body)
    assert (code, profile.steps) == (0, 3), err
    assert next(o for o in profile.operations if o.name == "addmm").calls == calls
    assert profile.data_known is (body == WITH_WORKERS)
    assert "Traceback" not in err


def test_each_optimizer_of_a_gan_has_its_own_lines(run) -> None:
    code, profile, _, err = run("""
        other = model()
        critic = torch.optim.SGD(other.parameters(), lr=0.01)

        def generate():
            return net(torch.ones(3, 4))

        def judge():
            return other(torch.ones(3, 4))

        while True:
            generate().sum().backward()
            optimizer.step()
            judge().sum().backward()
            critic.step()
    """)
    assert (code, profile.steps) == (0, 3), err
    calls = {operation.line.code: operation.calls for operation in profile.operations if operation.name == "addmm"}
    assert calls == {"return net(torch.ones(3, 4))": 2, "return other(torch.ones(3, 4))": 2}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "train.py came to its end without a training step"),
        ("raise SystemExit(7)", "train.py ended itself with 7 without a training step"),
        ("for _ in range(2): step(net, optimizer)", "after 2 training steps, and a profile needs at least 3"),
        (
            "idle = torch.optim.Adam(net.parameters())\nfor _ in range(5): step(net, optimizer)",
            "after 5 calls of step(), before all of its optimizers had stepped",
        ),
    ],
)
def test_a_script_without_enough_steps_is_told_what_was_looked_for(run, body: str, said: str) -> None:
    code, profile, _, err = run(body)
    assert (code, profile) == (2, None)
    assert said in err
    assert "fix:" in err


@pytest.mark.parametrize(
    ("body", "head", "told"),
    [
        (
            "def inner():\n    raise ValueError('broken <b>')\n\nstep(net, optimizer)\ninner()",
            HEAD,
            ("ValueError: broken <b>", "in inner", 'train.py", line'),
        ),
        ("step(net, optimizer)\ntorch.ones(2, 3) @ torch.ones(2, 3)", HEAD, ("mat1 and mat2",)),  # in a look
        ("def broken(:\n    pass\n", "", ("SyntaxError",)),
    ],
)
def test_an_error_of_the_script_is_shown_as_python_shows_it(run, body: str, head: str, told: tuple[str, ...]) -> None:
    code, profile, _, err = run(body, head=head)
    assert (code, profile) == (1, None)
    for words in told:
        assert words in err
    for foreign in ("hotloop/profiling", "runpy"):
        assert foreign not in err


@pytest.mark.parametrize(
    ("body", "warmup"),
    [
        ("for _ in range(5): step(net, optimizer)\nraise SystemExit(0)", None),
        ("for _ in range(9): step(net, optimizer)\nraise KeyboardInterrupt", 6),
        ("optimizer = torch.optim.Adam(net.parameters())\nfor _ in range(5): step(net, optimizer)", None),
    ],
    ids=["few steps", "Ctrl-C", "an optimizer that was dropped holds nothing up"],
)
def test_a_script_that_ends_early_gets_a_profile_of_what_there_was(run, body: str, warmup: int | None) -> None:
    code, profile, _, err = run(body, steps=20, warmup=warmup)
    assert (code, profile.steps) == (0, 2), err
    assert warmup or "warm-up" in profile.notes[0]


def test_a_module_runs_as_python_would_run_it(run, tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "learn.py").write_text("from train import step, net, optimizer\nwhile True: step(net, optimizer)\n")
    code, profile, _, err = run("", target="project.learn", module=True)
    assert (code, profile.name) == (0, "project.learn"), err
    assert "train.py" in {operation.line.file for operation in profile.operations if operation.line is not None}
    sys.modules.pop("train", None)


BY_HAND_HEAD = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    parameters = list(model.parameters())

    def loss():
        return model(torch.randn(3, 8)).pow(2).mean()
"""
UPDATES = {
    "data": "loss().backward()\nfor p in parameters:\n    p.data.add_(p.grad, alpha=-0.1)\n    p.grad = None",
    "operator": "loss().backward()\nwith torch.no_grad():\n    for p in parameters:\n        p -= 0.1 * p.grad",
    "other data": "loss().backward()\nfor p in parameters:\n    p.data = p.data - 0.1 * p.grad",
    "foreach": "loss().backward()\nwith torch.no_grad():\n"
    "    torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.1)",
    "two backward passes": "loss().backward()\nloss().backward()\nfor p in parameters:\n    p.data.sub_(p.grad)",
    "only the last layer": "loss().backward()\nfor p in model[1].parameters():\n    p.data.sub_(p.grad)",
    "gradients of their own": "gradients = torch.autograd.grad(outputs=loss(), inputs=parameters)\n"
    "with torch.no_grad():\n    for p, g in zip(parameters, gradients):\n        p.sub_(g)",
    "an optimizer of their own": "loss().backward()\nfor p in parameters:\n    p.requires_grad_(True)\n"
    "    p.grad.clamp_(-1, 1)\n    with torch.no_grad():\n        p.copy_(p - p.grad)\n    p.grad.zero_()",
}


@pytest.mark.parametrize("way", UPDATES)
def test_updates_by_hand_are_steps(run, way: str) -> None:
    body = "for _ in range(100):\n" + indent(f"{UPDATES[way]}\nprint('round')\n", "    ")
    code, profile, out, err = run(body, head=BY_HAND_HEAD)
    assert (code, profile.steps, profile.skipped) == (0, 3, 7), err
    assert out.count("round") in (9, 10)
    passes = 2 if way == "two backward passes" else 1
    assert next(o for o in profile.operations if o.name == "addmm").calls == 2 * passes
    assert any(o.line is not None and o.line.code.startswith("return model(") for o in profile.operations)


CAPTURED = """
    import torch
    from torch import nn

    net = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(1024, 1024), nn.ReLU()))).cuda()
    optimizer = torch.optim.Adam(net.parameters(), capturable=True)
    batch = torch.randn(2048, 1024, device="cuda")
"""
BY_HAND = """
    def step():
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for _ in range(100):
        graph.replay()
"""
WITHOUT_AN_OPTIMIZER = BY_HAND.replace(
    "optimizer.step()", "[p.data.sub_(p.grad, alpha=1e-4) for p in net.parameters()]"
)
BY_A_LOOP = """
    import hotloop
    loop = hotloop.Loop(
        net, optimizer, objective=lambda net, batch: net(batch).square().mean(), plan=hotloop.Plan("cuda", graph=1)
    )
    for batch in loop.batches([batch] * 100):
        loop.step(batch)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("body", [BY_HAND, WITHOUT_AN_OPTIMIZER, BY_A_LOOP], ids=["by hand", "without", "by a loop"])
def test_steps_that_a_cuda_graph_replays_are_steps(run, body: str) -> None:
    code, profile, _, _ = run(body, head=CAPTURED, steps=10, warmup=20)
    assert code == 0
    assert (profile.steps, profile.skipped >= 20) == (10, True)
    assert profile.replay_share > 0.9, profile
    assert not any("nothing to do" in each.what for each in profile.advice)
