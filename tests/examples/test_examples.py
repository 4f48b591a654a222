"""Every example runs, and what it prints shows its lesson."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..thorough import THOROUGH
from ..warm import Warm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT = 240  # generous: a busy machine is not a failure

# What the output must hold on any device, as regular expressions.
LESSONS = {
    "12_watch.py": [
        r"(?s)[1-9][\d,]* items in \d\S* m?s on .*[1-9][\d,]* items; [1-9]\d* samples in",
        r"CPU of the host: \d+% of all cores",
        r"energy of the GPUs: (unknown|[\d,]+ J)",
    ],
    "13_profile.py": [
        r"a step: \S+ \S+ for the batch, \S+ \S+ for the rest",
        r"waiting for data +\d+\.\d%",
        r"all of a step +100\.0%",
        r"(?s)by your own line:\n.*%  \w+, (forward|backward): .*13_profile\.py:\d+  (x|return) ",
        r"the weights are as before: True",
    ],
    "14_simulate.py": [
        r"27,376,448 parameters in fp32: 104\.4 MiB",
        r"t4 +it does not fit .* no step is made\n(rtx4090 +it fits .* for a step\n)?h200 +it fits .* for a step\n",
        r"activations +1\d\.\d GiB",
        r"On the smallest, memory runs out at 14_simulate\.py:\d+: ",
        r"14_simulate\.py:\d+: .*on cpu and cuda:0.*\n  fix: .*device=",
        r"14_simulate\.py:\d+: the host waits for the device \(item\)",
    ],
}
# What it must hold where there is no GPU.
ON_CPU = {
    "12_watch.py": [r"energy of the GPUs: unknown\n"],
    "13_profile.py": [r"The loop waits \d+% of its time for data\.\n  fix: read it in processes of its own"],
}
# What each change is tried with takes less time: old text, which is there once → new text.
SHORTER = {
    "12_watch.py": ("SECONDS = 2.0", "SECONDS = 0.3"),
    "14_simulate.py": ('("t4", "rtx4090", "h200")', '("t4", "h200")'),
}
# And where there is one: signs that it was really used.
ON_CUDA = {
    "12_watch.py": [r"GPU \d+ \(.+\):\n  utilisation: \d+% in the mean", r"power: [\d,]+ W", r"J for 1,000 items"],
    "13_profile.py": [r"10 steps on cuda:0", r"compute +\d+\.\d%"],
    "14_simulate.py": [],  # the same with and without one
}


def environment(*, hide_gpu: bool = True) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k != "HOTLOOP_DEVICE"}
    plain |= {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    plain["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return plain | ({"CUDA_VISIBLE_DEVICES": ""} if hide_gpu else {})


def run_on_gpu(file: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(file)],
        cwd=cwd,
        env=environment(hide_gpu=False),
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT,
        check=False,
    )


def assert_teaches(done: subprocess.CompletedProcess[str], patterns: list[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert 0 <= done.stdout.find("--- Plain PyTorch") < done.stdout.find("--- With hotloop"), done.stdout
    for pattern in patterns:
        assert re.search(pattern, done.stdout), f"{pattern!r} is not in:\n{done.stdout}"


def test_every_example_has_its_lesson_and_a_line_in_the_readme() -> None:
    found = {file.name for file in EXAMPLES.glob("*.py")} - {"record.py"}
    assert found == set(LESSONS)
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+\.py)\)", readme)) == found
    assert all(40 <= len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 110 for name in found)


@pytest.mark.parametrize("name", sorted(LESSONS))
def test_runs_on_a_cpu_and_teaches(name: str, tmp_path: Path, warm: Warm) -> None:
    file, cwd = tmp_path / name, tmp_path / "empty"
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    if name in SHORTER and not THOROUGH:
        assert source.count(SHORTER[name][0]) == 1
        source = source.replace(*SHORTER[name])
    file.write_text(source, encoding="utf-8")
    cwd.mkdir()
    done = warm.run(file, cwd=cwd, environment=environment())
    assert_teaches(done, LESSONS[name] + ON_CPU.get(name, []))
    assert not list(cwd.iterdir()), "an example leaves nothing behind"


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(LESSONS))
def test_runs_on_a_gpu_and_uses_it(name: str, tmp_path: Path) -> None:
    done = run_on_gpu(EXAMPLES / name, tmp_path)
    assert_teaches(done, LESSONS[name] + ON_CUDA[name])


def a_copy_with(tmp_path: Path, example: str) -> Path:
    """The recorder beside one example of our own."""
    folder = tmp_path / "checkout" / "examples"
    folder.mkdir(parents=True)
    (folder / "01_mine.py").write_text(example, encoding="utf-8")
    return Path(shutil.copy(EXAMPLES / "record.py", folder))


def test_record_writes_one_page_and_hides_the_home_directory(tmp_path: Path, warm: Warm) -> None:
    home, out = tmp_path / "someone", tmp_path / "pages" / "record.md"
    recorder = a_copy_with(tmp_path, f"print('forward:', __file__, {str(home / 'photos')!r})\n")
    command = (recorder, out)
    done = warm.run(*command, cwd=tmp_path, environment={**environment(), "HOME": str(home)})
    assert done.returncode == 0, done.stderr
    page = out.read_text(encoding="utf-8")
    title = r"# The examples on .+ \(cpu\), \d+ CPU cores\n\ntorch \d.*, Python 3\.\d+\.\d+, \d{4}-\d\d-\d\d\."
    assert re.match(title, page)
    assert "## 01_mine.py\n\n```text\nforward: examples/01_mine.py ~/photos\n" in page
    assert str(tmp_path) not in page
    assert [file.name for file in out.parent.iterdir()] == ["record.md"]


def test_record_names_an_example_that_fails_and_keeps_the_old_page(tmp_path: Path, warm: Warm) -> None:
    recorder = a_copy_with(tmp_path, "print('half')\nraise SystemExit('the reason')\n")
    out = tmp_path / "record.md"
    out.write_text("the old page", encoding="utf-8")
    done = warm.run(recorder, out, cwd=tmp_path, environment=environment())
    assert done.returncode == 1
    assert "nothing was written: 01_mine.py ended with status 1:\nthe reason" in done.stderr
    assert out.read_text(encoding="utf-8") == "the old page"
