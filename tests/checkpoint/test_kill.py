"""A process that is killed while it saves leaves the checkpoint of before or the new one, whole."""

from pathlib import Path

from ..warm import Warm

PROGRAM = """
import os, random, signal, sys, time, warnings
import torch
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.checkpoint.store import Store

warnings.simplefilter("error", CheckpointWarning)
torch.set_num_threads(1)
folder, dice = sys.argv[1], random.Random(int(sys.argv[2]))


def tree(number):
    return {"weight": torch.full((1 << 18,), number, dtype=torch.int32), "number": number}


def save_until_killed(number, pipe):
    store = Store(folder, keep=2)
    while True:
        number += 1
        store.save(number // 2, tree(number), score=-number)  # each step twice: new, and in place of itself
        os.write(pipe, number.to_bytes(4, "little"))


number = 0
for _ in range(15):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        save_until_killed(number, writer)
    os.close(writer)
    confirmed = os.read(reader, 4)
    time.sleep(dice.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as rest:
        confirmed += rest.read()
    told = int.from_bytes(confirmed[-4:], "little")
    latest = Store(folder).load_latest()
    found = latest.tree["number"]
    assert told <= found <= told + 1, (told, found)
    assert latest.step == found // 2
    assert bool((latest.tree["weight"] == found).all())
    print(sorted(os.listdir(folder)), flush=True)
    number = found
Store(folder, keep=2).save(number, tree(number))
assert all(name.startswith("step-") for name in os.listdir(folder)), os.listdir(folder)
"""


def test_kills_at_any_moment(tmp_path: Path, warm: Warm) -> None:
    script = tmp_path / "saving.py"
    script.write_text(PROGRAM)
    done = warm.run(script, tmp_path / "run", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ".saving-" in done.stdout, "no kill came while something was being written"
