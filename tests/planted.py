"""Small bugs, planted one by one into a copy of the source: the tests named beside each must catch it.

python tests/planted.py                 # those that a CPU can show
python tests/planted.py --gpu           # those of captures and streams, which need a CUDA GPU
python tests/planted.py --only scaler   # those whose name holds a word

A promise is held by a test only where breaking the promise fails the test. Run this before and after the core is
changed; a bug whose line has moved is named, and must be planted again where the line went.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ZOO = "tests/zoo/test_same_training.py::test_the_plain_plan_is_the_loop_by_hand"
KILLED = "tests/zoo/test_killing.py::test_a_killed_run_goes_on"
STARVED = "tests/zoo/test_out_of_memory.py"
GPU = "tests/zoo/test_same_training_gpu.py"
RESUMING = "tests/run/test_resuming.py"
RANKED = "tests/ranks/test_training.py::test_two_ranks_train_as_one_process_does"
KILLED_RANK = (
    "tests/ranks/test_training.py"
    "::test_a_run_that_is_killed_on_one_rank_ends_with_the_weights_of_one_that_was_not[ddp slowly-10]"
)
HOOKS = "tests/run/test_hooks.py"


@dataclass(frozen=True)
class Bug:
    """One line that is wrong, and the tests that must fail for it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    gpu: bool = False


BUGS = [
    # The step
    Bug(
        "looks: a wait that was seen once is a reason",
        "step/inspection.py",
        "return in_all or difference(",
        "return True or difference(",
        ("tests/step/test_inspection.py",),
    ),
    Bug(
        "by hand: what a capture froze is not looked at",
        "step/frozen.py",
        "if (changed := self.check(strictly=True)) is not None:",
        "if (changed := None) is not None:",
        ("tests/step/test_captured.py",),
    ),
    Bug(
        "by hand: steps are not tuned",
        "run/training_data.py",
        "if done >= max(self._tuner.due, UNTIMED) and self._may_tune():",
        "if False:",
        ("tests/tune/test_by_hand.py",),
    ),
    Bug(
        "tuner: its own error ends a training",
        "tune/tuner.py",
        "if self._run.loop.ranks.size > 1:  # the others wait for this rank in the course that they are on",
        "if True:",
        ("tests/tune/test_tuner.py",),
    ),
    Bug(
        "device: a build with CUDA is taken for a GPU",
        "ranks/group.py",
        'there = backend_of("cuda").device_count()',
        "there = int(torch.version.cuda is not None)",
        ("tests/device/test_cuda_build.py",),
    ),
    Bug(
        "simulate: after a block CUDA is taken for initialised",
        "apps/simulate/shim.cpp",
        "if (!real_is_initialized) {",
        "if (false) {",
        ("tests/simulate/test_block.py",),
    ),
    Bug(
        "step: gradients pile up",
        "step/eager.py",
        "        if window.batches == 0:\n            trained.zero_grad()\n",
        "        if window.batches == 0:\n            pass\n",
        (ZOO,),
    ),
    Bug(
        "step: accumulation weighs every batch the same",
        "step/window.py",
        "weight = losses.mass / self.unit",
        "weight = 1.0",
        ("tests/run/test_losses.py", "tests/step/test_eager.py"),
    ),
    Bug(
        "weights: the gradient of the parts is not compared",
        "objective/comparison.py",
        "if self._fits_gradient(way) and not (self.within and self.within._strays(name, way))",
        "",
        ("tests/run/test_losses.py",),
    ),
    Bug(
        "weights: only the first size of micro-batches is compared",
        "objective/weighing.py",
        "(shapes_in(batch), size)\n        alike",
        "(shapes_in(batch), size and 1)\n        alike",
        ("tests/run/test_split.py::test_another_size_of_micro_batches_is_compared_again",),
    ),
    Bug(
        "step: accumulation is not divided",
        "step/eager.py",
        "if window.is_weighed:\n                window.average",
        "if False:\n                window.average",
        (ZOO, "tests/step/test_eager.py"),
    ),
    Bug(
        "step: a short window at the end of an epoch is dropped",
        "step/eager.py",
        "        if self.window.batches:\n",
        "        if self.window.batches > 1:\n",
        (ZOO, "tests/step/test_eager.py", "tests/run/test_loop.py"),
    ),
    Bug(
        "step: clipping to twice the norm",
        "step/eager.py",
        "alike, plan.clip_norm, norm)",
        "alike, 2 * plan.clip_norm, norm)",
        (ZOO, "tests/step/test_eager.py"),
    ),
    Bug(
        "step: an update that the scaler skipped counts",
        "step/eager.py",
        "self.counts.steps += stepped\n",
        "self.counts.steps += 1\n",
        ("tests/step/test_eager.py", "tests/run/test_loop.py"),
    ),
    Bug(
        "step: a loss leaves gradients on the weights of another objective",
        "step/eager.py",
        "inputs = None if self._is_alone else [p for p in trained.parameters if p.requires_grad]",
        "inputs = None",
        (ZOO, "tests/step/test_eager.py", "tests/run/test_loop.py"),
    ),
    Bug(
        "step: a zero_grad of one's own clears what was accumulated",
        "step/eager.py",
        "parameter.grad = None  # not by",
        "parameter.grad is None or parameter.grad.zero_()  # not by",
        ("tests/step/test_eager.py",),
    ),
    Bug(
        "step: a plan that fails halfway stays halfway",
        "run/plan_switch.py",
        "self.subject.exchange(new, self.step)",
        "pass",
        ("tests/run/test_plans.py",),
    ),
    Bug(
        "step: a schedule by step stands still",
        "step/eager.py",
        "if stepped and self._after is not None:",
        "if False:",
        (ZOO,),
    ),
    # Random numbers
    Bug(
        "rng: Python's state is not restored",
        "values/rng.py",
        "Rng(random.getstate, random.setstate)",
        "Rng(random.getstate, lambda state: None)",
        ("tests/test_rng.py", KILLED),
    ),
    Bug(
        "rng: the state of a device is not restored after a failure",
        "values/snapshot.py",
        "self._quick.set_state(self._rng_state)",
        "pass",
        ("tests/run/test_rewinding.py", STARVED),
    ),
    Bug(
        "rng: a resumed run draws anew",
        "run/state.py",
        'RngStates.from_state_dict(_with_arrays(state["random"]), self._device).restore()',
        "pass",
        (KILLED,),
    ),
    Bug(
        "rng: generators of a loader are not restored",
        "data/loader_rng.py",
        "for rng, own in zip(self._own, state.own, strict=False):",
        "for rng, own in ():",
        ("tests/data/test_position.py", KILLED),
    ),
    Bug(
        "rng: workers that persist are seeded in every epoch",
        "data/on_device.py",
        "persists = self._has_begun()",
        "persists = False",
        ("tests/data/test_stream.py", "tests/data/test_order.py"),
    ),
    # Checkpoints
    Bug(
        "checkpoint: optimizers begin anew",
        "run/state.py",
        "optimizer.load_state_dict(optimizer_sharded(optimizer, _with_own_settings(optimizer, values)))",
        "pass",
        (KILLED,),
    ),
    Bug(
        "checkpoint: schedulers begin anew",
        "run/state.py",
        "scheduler.load_state_dict(known)",
        "pass",
        (KILLED,),
    ),
    Bug(
        "checkpoint: the scale of fp16 is forgotten",
        "step/eager.py",
        "self.scaler.load_state_dict(state)",
        "pass",
        ("tests/run/test_state.py",),
    ),
    Bug(
        "checkpoint: buffers that no state_dict has are lost",
        "run/state.py",
        "self.missing += _load_buffers(module, values, resized, core.subject.device)",
        "pass",
        ("tests/run/test_state.py", KILLED),
    ),
    Bug(
        "checkpoint: changed bytes are not noticed",
        "checkpoint/reader.py",
        "if read is not None and hashlib",
        "if read is None and hashlib",
        ("tests/checkpoint/test_reading.py",),
    ),
    Bug(
        "checkpoint: one batch is trained on twice",
        "data/epochs.py",
        "skip = Skip(position.consumed,",
        "skip = Skip(max(0, position.consumed - 1),",
        ("tests/data/test_position.py", KILLED),
    ),
    # Streams and evaluation
    Bug(
        "stream: data that changed behind PyTorch's back is not seen",
        "data/on_device.py",
        "if any(now.get(name) != some for name, some in looked.items()):",
        "if False:",
        ("tests/data/test_stream.py",),
    ),
    Bug(
        "stream: indices of a part that change within an epoch are not seen",
        "data/on_device.py",
        "if not before or self.workers:",
        "if True:",
        ("tests/data/test_stream.py",),
    ),
    Bug(
        "effects: objects of a batch are not looked at",
        "values/snapshot.py",
        "if not (is_restored(leaf) or isinstance(leaf, Tensor))]",
        "if False]",
        ("tests/tune/test_counted_calls.py",),
    ),
    Bug(
        "effects: modules that functions import are not looked at",
        "values/reach.py",
        "for table in (function.__globals__, imported):",
        "for table in (function.__globals__,):",
        ("tests/tune/test_counted_calls.py",),
    ),
    Bug(
        "stream: a batch has the number of another",
        "data/loader_batches.py",
        "number, dataset = first, getattr",
        "number, dataset = first + 1, getattr",
        ("tests/data/test_stream.py", "tests/data/test_feed.py", "tests/run/test_loop.py"),
    ),
    Bug(
        "stream: draws come later than a loader with workers makes them",
        "data/on_device.py",
        "return _in_advance(draws, self.prefetched) if self.prefetched else draws",
        "return draws",
        ("tests/data/test_stream.py",),
    ),
    Bug(
        "evaluation: batches count the same, whatever their size",
        "metrics/evaluation.py",
        "self._fresh.append(_Share(name, value, items, items))",
        "self._fresh.append(_Share(name, value, 1, 1))",
        ("tests/test_evaluation.py", "tests/run/test_losses.py"),
    ),
    Bug(
        "evaluation: schedule-free optimizers stay in train mode",
        "run/loop.py",
        "with core.ranks.telling, core.modes.within(training=False):",
        "with core.ranks.telling:",
        ("tests/run/test_modes.py",),
    ),
    Bug(
        "evaluation: dropout stays on", "metrics/evaluation.py", "    model.eval()\n", "", ("tests/test_evaluation.py",)
    ),
    Bug(
        "optimizer: sparse gradients go to the fused kernel",
        "levers/flags.py",
        "            has_kernel = False\n",
        "            pass\n",
        ("tests/levers/test_flags.py",),
    ),
    Bug(
        "optimizer: any fused kernel is used",
        "levers/fused.py",
        "            _COMPARED[key] = None if away <= allowed else wrong\n",
        "            _COMPARED[key] = None\n",
        ("tests/levers/test_fused.py",),
    ),
    # The gate
    Bug(
        "gate: compiled code may have one scrambled gradient",
        "tune/gate.py",
        "                why = self.stray(eager, found, batch, random=compiles and work.draws)\n",
        "                why = Departure.between(eager, found).excess(later=True)\n",
        ("tests/tune/test_gate.py",),
    ),
    Bug(
        "gate: hotloop's own code may have one scrambled gradient",
        "tune/gate.py",
        "                why = self.stray(eager, found, batch, random=compiles and work.draws)\n",
        "                why = self.excess(eager, found, batch, shaken)\n",
        ("tests/tune/test_tuner.py::test_a_lever_that_does_not_work_here_is_left_out_and_remembered",),
    ),
    # Out of memory
    Bug(
        "memory: buffers are not restored",
        "values/snapshot.py",
        "            tensor.copy_(copy)\n",
        "            pass\n",
        ("tests/test_snapshot.py", STARVED),
    ),
    Bug(
        "memory: buffers that passes are known to change are not restored",
        "values/snapshot.py",
        "            self._copy_all(tensors, copies)\n",
        "            pass\n",
        ("tests/test_snapshot.py", STARVED),
    ),
    Bug(
        "memory: gradients of a failed attempt stay",
        "step/eager.py",
        "            self._earlier.restore()\n",
        "            pass\n",
        ("tests/step/test_survive.py", STARVED),
    ),
    Bug(
        "memory: micro-batches never grow back",
        "step/portion.py",
        "self.limit = 2 * self.limit",
        "self.limit = self.limit",
        ("tests/step/test_portion.py",),
    ),
    Bug(
        "memory: half an optimizer's step stays",
        "step/guard.py",
        "            before.restore()\n",
        "            pass\n",
        ("tests/step/test_guard.py",),
    ),
    Bug(
        "memory: labels that an attempt took out of the batch are gone",
        "values/snapshot.py",
        "refill(*self._outer)",
        "pass",
        (f"{STARVED}::test_memory_that_runs_out[labels_popped_from_a_list-3]",),
    ),
    # Ranks
    Bug(
        "ranks: a rank weighs as much as the others, whatever its batch",
        "step/across.py",
        "window.weight = mean if self.agreement.on_device else float(mean)",
        "pass",
        (RANKED,),
    ),
    Bug(
        "ranks: a batch that fills up the last step counts",
        "data/samplers.py",
        "self.fillers.add(number)",
        "pass",
        (RANKED,),
    ),
    Bug(
        "ranks: samples are dealt out twice",
        "data/samplers.py",
        "yield together[rank]",
        "yield together[rank // 2]",
        (RANKED,),
    ),
    Bug(
        "ranks: an evaluation counts padding",
        "metrics/evaluation.py",
        "if is_filler(batches.loader, batches.origin):",
        "if False:",
        (f"{RANKED}[sharded]",),
    ),
    Bug(
        "ranks: an evaluation is that of one rank",
        "metrics/evaluation.py",
        "        if ranks is not None:\n            self._parts",
        "        if False:\n            self._parts",
        (RANKED,),
    ),
    Bug(
        "ranks: a resumed rank draws the random numbers of the first",
        "run/parts/rank_states.py",
        'state["random"][ranks.group.rank]',
        'state["random"][0]',
        (KILLED_RANK,),
    ),
    Bug(
        "ranks: each draws an order of its own",
        "run/ranks_together.py",
        "self._group.share_rng_state([torch.default_generator, *generators_of(stream.loader)])",
        "pass",
        (RANKED,),
    ),
    Bug(
        "parts: the order that they declare is not kept",
        "run/part.py",
        "if waited_for.isdisjoint(part.after)",
        "if True",
        ("tests/run/test_parts.py",),
    ),
    Bug(
        "ranks: weights that drift apart are not seen",
        "run/alike.py",
        'return float(int.from_bytes(digest.digest()[:6], "big"))',
        "return 0.0",
        ("tests/ranks/test_failures.py::test_weights_that_drift_apart_end_the_run_with_the_names_of_the_ranks",),
    ),
    # Resuming
    Bug(
        "resume: a dataset that is iterated begins its epoch again",
        "data/origin.py",
        "and not isinstance(loader.dataset, IterableDataset)",
        "and True",
        (RESUMING,),
    ),
    Bug(
        "resume: the order of a dataset that is iterated is that of the first epoch",
        "data/loader_rng.py",
        "holders += [dataset] if isinstance(dataset, IterableDataset) else []",
        "pass",
        (RESUMING,),
    ),
    Bug(
        "resume: a save does not say that it would be refused",
        "run/parts/checkpoint.py",
        "                self.parts.check(tree)",
        "pass",
        (RESUMING,),
    ),
    Bug(
        "resume: the history of epochs begins anew",
        "run/parts/epoch_losses.py",
        "self.run.history[len(self._encoded) :]",
        "self.run.history[-1:]",
        (RESUMING,),
    ),
    # Hooks
    Bug(
        "hooks: the update of a short window is not told",
        "run/parts/hooks.py",
        "self._latest is not None and self._latest.step != self.run.loop.steps:",
        "self._latest is not None and False:",
        (HOOKS,),
    ),
    Bug(
        "hooks: an average takes in every batch of a window",
        "run/callbacks.py",
        "if record.step == self._step:",
        "if False:",
        (HOOKS,),
    ),
    Bug(
        "hooks: the best weights are those of the last epoch",
        "run/parts/best.py",
        "if self._restores and self._is_best(epoch):",
        "if self._restores:",
        (HOOKS,),
    ),
    Bug(
        "hooks: patience ends an epoch late",
        "run/callbacks.py",
        "last.number - best.epoch < patience:",
        "last.number - best.epoch <= patience:",
        (HOOKS,),
    ),
    # Captures
    Bug(
        "capture: a number of the host that decides something is left out",
        "step/draws.py",
        "            self.matter = True",
        "            pass",
        ("tests/step/test_draws.py",),
    ),
    Bug(
        "capture: draws of other generators are not seen beside those that decide nothing",
        "step/draws.py",
        "return all(same_state(then[name], now[name]) for name in host_rngs())",
        "return True",
        ("tests/step/test_draws.py", "tests/step/test_inspection.py"),
    ),
    Bug(
        "capture: a tensor that was replaced is not seen",
        "step/frozen.py",
        "self._values.hold_only(lambda tensor: id(tensor) in relied_on)",
        "self._values.hold_only(lambda tensor: False)",
        ("tests/step/test_captured.py",),
    ),
    Bug(
        "capture: hooks that were registered since are left out without a word",
        "step/frozen.py",
        "if state.hooks != self._hooks:",
        "if False:",
        ("tests/step/test_captured.py",),
    ),
    Bug(
        "capture: a comparison does not see numbers that have begun to decide",
        "step/inspection.py",
        "if self._where is None and self.draws.matter:",
        "if False:",
        ("tests/step/test_draws.py",),
    ),
    Bug(
        "capture: replays do not draw what the step draws",
        "step/captured.py",
        "        repeat(self._warm_up.looks.draws, steps)\n",
        "",
        ("tests/step/test_draws.py",),
        gpu=True,
    ),
    Bug(
        "capture: learning rates are frozen",
        "step/captured_graph.py",
        "if rates != self._there:",
        "if self._there is None:",
        ("tests/step/test_cuda_graph.py",),
    ),
    Bug(
        "capture: every batch is the first one",
        "step/captured.py",
        "copy_all(graph.static.buffers, [tensor for _, tensor in tensors_in(batch)])",
        "pass",
        ("tests/step/test_cuda_graph.py",),
    ),
    Bug(
        "capture: losses are those of the next replay",
        "step/several.py",
        "return losses.clone()",
        "return losses",
        ("tests/step/test_cuda_graph.py",),
    ),
    Bug(
        "capture: frozen layers and loaded weights are not seen",
        "step/frozen.py",
        "is_same = state == self._state",
        "is_same = True",
        ("tests/step/test_cuda_graph.py",),
    ),
    Bug(
        "capture: side effects are left out without a word",
        "step/inspection.py",
        "        if seen.effects:\n",
        "        if False:\n",
        ("tests/step/test_captured.py",),
    ),
    Bug(
        "capture: a comparison draws random numbers of the training",
        "step/frozen.py",
        "            finally:\n                before.restore()",
        "            finally:\n                pass",
        ("tests/step/test_captured.py",),
    ),
    # The doctor
    Bug(
        "doctor: the losses with a fix are not asked about",
        "apps/doctor/examination.py",
        'return ("confirmed", "", losses) if same else ("losses differ", f"{gain}, but {losses}", losses)',
        'return "confirmed", "", losses',
        ("tests/doctor/test_examination.py",),
    ),
    Bug(
        "doctor: noise is a gain",
        "apps/doctor/diagnosis.py",
        "return self.times >= LEAST and self._is_less(lambda turn: turn.step, self.before, self.after)",
        "return self.times >= LEAST",
        ("tests/doctor/test_record.py",),
    ),
    Bug(
        "doctor: a fix is timed without its change",
        "apps/doctor/examined_script.py",
        "request.sources or {}\n",
        "{}\n",
        ("tests/doctor/test_examination.py",),
    ),
    Bug(
        "saved: what a script removes is gone from the disk",
        "scripts/kept_files.py",
        "        elif os.path.lexists(entry):\n            self._gone.add(entry)",
        "        elif os.path.lexists(entry):\n            remove(path)",
        ("tests/cli/test_saving.py",),
    ),
]


def planted(bug: Bug, folder: Path) -> bool:
    """Plant a bug into a copy of the source; False where its line is not there, or not once."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "src" / "hotloop" / bug.file
    source = file.read_text() if file.exists() else ""
    if source.count(bug.right) != 1:
        return False
    file.write_text(source.replace(bug.right, bug.wrong))
    return True


def caught_by(bug: Bug, folder: Path) -> str | None:
    """The first test that fails with the bug in the source; None where none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header"]
    if bug.gpu:
        command = [each for each in command if each not in ("-n", "0")]
        command += ["-m", "gpu", "-o", "addopts=--strict-markers --import-mode=importlib"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    for tests in bug.tests:
        run = subprocess.run([*command, tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        failed = [line.split()[1] for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if run.returncode == 1 and failed:
            return failed[0]
        if run.returncode not in (0, 1):
            raise SystemExit(
                f"{bug.name}: pytest ended with {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
            )
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the bugs that only a CUDA GPU shows")
    parser.add_argument("--only", default="", metavar="WORD", help="the bugs whose name holds this word")
    arguments = parser.parse_args()
    missed = []
    chosen = [bug for bug in BUGS if bug.gpu == arguments.gpu and arguments.only in bug.name]
    for bug in chosen:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            if not planted(bug, Path(folder)):
                missed.append(bug)
                print(f"MOVED   {bug.name}: its line is not in {bug.file}, or not once", flush=True)
                continue
            test = caught_by(bug, Path(folder))
        if test is None:
            missed.append(bug)
        print(
            f"{'caught' if test else 'MISSED':7} {bug.name} ({time.monotonic() - began:.0f} s) {test or ''}", flush=True
        )
    print(f"{len(chosen) - len(missed)} of {len(chosen)} bugs were caught")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
