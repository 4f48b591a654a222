"""`Examination`: looks at a script, tries each fix in turns with the unchanged script, then all that help together."""

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from hotloop.apps.doctor.diagnosis import LEAST_MEMORY, Diagnosis, Finding, Gain, Tier, Turn, Verdict
from hotloop.apps.doctor.edits import Edit, SourceText, applied, diff_of
from hotloop.apps.doctor.examined_script import ScriptRun
from hotloop.apps.doctor.looking import LOOK
from hotloop.apps.doctor.rules import RULES, Candidate, Script, ScriptRule
from hotloop.apps.doctor.seen import SeenScript
from hotloop.apps.doctor.timing import TURN
from hotloop.apps.doctor.turns import Turns
from hotloop.errors import BadArgument, HotloopError
from hotloop.placement.sites import short
from hotloop.printing.text import plural, printable
from hotloop.scripts.training_steps import TRAIN, WITHOUT_STEPS
from hotloop.version import versions

WARMUP = 4  # steps of a turn
SECONDS = 2.0  # of timed steps in a turn
FEWEST, LEAST = 4, 12  # timed steps: without which nothing is compared, and that are asked for …
LONG = 15.0  # … where they take no more seconds than this
PATIENCE, LONGEST = 4.0, 1800.0  # a turn may take so many times as long as the look; seconds for that
HOPELESS = 0.95  # times as fast at best: one turn that slow ends a trial
ROUNDING: dict[Tier, float] = {"A": 1e-5, "B": 0.02}  # mean relative difference of losses that a fix may make
COMPARED = 20  # losses of tier B: training amplifies rounding, and later ones may differ for nothing
REPEATABLE = 0.02  # the same between two unchanged runs, beyond which losses cannot be compared

Told = Callable[[str], None]  # what the run that begins is for


class ScriptFailed(HotloopError, RuntimeError):
    """The unchanged script failed."""

    exit_code = 1


@dataclass(frozen=True)
class _TriedFix:
    """A candidate, and what its turns gave so far."""

    rule: ScriptRule
    candidate: Candidate
    before: tuple[Turn, ...] = ()  # the same number of turns without the fix
    after: tuple[Turn, ...] = ()
    error: str = ""
    unreached: str = ""  # why its line did not run in any turn
    on_top: bool = False  # of the fixes that were confirmed before

    @property
    def gain(self) -> Gain | None:
        return Gain(self.before, self.after) if self.after else None

    @property
    def is_of_evaluation(self) -> bool:
        """Whether an evaluation is timed, which the steps do not reach."""
        return not self.candidate.has_run

    @property
    def is_promising(self) -> bool:
        gain = self.gain
        return not self.error and (gain is None or gain.most > HOPELESS or (gain.memory or 1) <= LEAST_MEMORY)

    @property
    def is_open(self) -> bool:
        """Whether more turns would decide it."""
        gain = self.gain
        return not self.error and gain is not None and gain.is_undecided


class Examination:
    """Examines a script: runs it many times, each time in a process of its own and for a few steps.

    >>> diagnosis = Examination("train.py", ["--epochs", "1"]).run()  # doctest: +SKIP
    """

    def __init__(
        self,
        target: str,
        arguments: Sequence[str] = (),
        *,
        module: bool = False,
        turns: int = 3,
        steps: int | None = None,
        told: Told = lambda what: None,
    ) -> None:
        self._asked = ScriptRun(target, tuple(arguments), module)
        self._turns, self._steps, self._told = turns, steps, told
        self._paces: list[float] = []  # seconds of a step in unchanged runs
        self._ended = 0  # steps after which the last run ended by itself
        self._notes: list[str] = []
        self.changed: dict[Path, tuple[str, str]] = {}  # files with all confirmed fixes, each before and after

    def run(self) -> Diagnosis:
        """Look, suspect, try."""
        with Turns() as self._runs:
            return self._run()

    def _run(self) -> Diagnosis:
        seen = self._look()
        self._sources = self._sources_of(seen)
        script = Script(self._main(seen), seen, self._sources)
        self._timed = self._steps_of(seen)
        found: list[_TriedFix] = []
        for fix in (_TriedFix(rule, candidate) for rule in RULES for candidate in rule.find(script)):
            found += [] if fix in found else [fix]
        untried = [each for each in found if not self._with_fixes([each])]
        tried, adopted = self._try([each for each in found if each not in untried])
        together, losses, adopted = self._together(adopted)
        changed = self._with_fixes(adopted)
        self.changed = {Path(file): (self._sources[file].text, text) for file, text in changed.items()}
        return Diagnosis(
            script=self._asked.target,
            device=seen.device,
            device_name=seen.device_name,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(),
            warmup=WARMUP,
            steps=self._timed,
            step=median(self._paces) if self._paces else seen.step,
            waited=seen.waited,
            findings=tuple(sorted(map(self._finding, [*tried, *untried]), key=_rank)),
            checked=tuple(rule.name for rule in RULES),
            together=together,
            losses=losses,
            fixes=len(adopted),
            diff=self._diff(changed),
            notes=tuple(self._notes),
        )

    # Looking

    def _look(self) -> SeenScript:
        self._told("looking at its steps")
        begun = time.monotonic()
        answer = self._runs.run(replace(self._asked, seconds=SECONDS, limit=LONGEST))
        self._limit = max(120.0, PATIENCE * (time.monotonic() - begun))
        target, error = printable(self._asked.target), answer.get("error")
        seen = SeenScript.from_json(answer[LOOK]) if LOOK in answer else None
        if seen is None or (error and seen.steps < WARMUP + FEWEST):
            after = "" if seen is None else f" after {plural(seen.steps, 'training step')}"
            output = "".join(f"\n  | {line}" for line in answer["output"])
            raise ScriptFailed(f"{target} failed{after}: {printable(str(error))}{output}", fix="repair it first")
        if not seen.steps:
            raise BadArgument(f"{target} ended {WITHOUT_STEPS}", fix=TRAIN)
        if seen.steps < WARMUP + FEWEST:
            raise BadArgument(
                f"{target} ended after {plural(seen.steps, 'training step')}, and the doctor needs {WARMUP + FEWEST}",
                fix="let it train longer",
            )
        return seen

    def _main(self, seen: SeenScript) -> str:
        if not self._asked.module:
            return str(Path(self._asked.target).resolve())
        ending = os.sep + self._asked.target.replace(".", os.sep)
        return next((f for f in seen.files if f.endswith((f"{ending}.py", f"{ending}{os.sep}__main__.py"))), "")

    def _sources_of(self, seen: SeenScript) -> dict[str, SourceText]:
        """The person's own files, as they are now."""
        sources = {}
        for file in dict.fromkeys([self._main(seen), *seen.files]):
            try:
                sources[file] = SourceText(Path(file).read_bytes().decode())
            except (OSError, UnicodeDecodeError, SyntaxError, ValueError):  # nothing that could be changed
                continue
        return sources

    def _steps_of(self, seen: SeenScript) -> int:
        """How many steps of a turn are timed: as many as there are, where the script ends by itself."""
        step = max(seen.step, 1e-4)
        wanted = self._steps or max(math.ceil(SECONDS / step), min(LEAST, int(LONG / step)), FEWEST)
        return min(wanted, seen.steps - WARMUP) if seen.has_ended else wanted

    # Trying

    def _try(self, trials: list[_TriedFix]) -> tuple[list[_TriedFix], list[_TriedFix]]:
        """Every fix by itself; then what brought nothing, on top of those that make the script faster."""
        of_steps = [each for each in trials if not each.is_of_evaluation]
        of_evaluation = [each for each in trials if each.is_of_evaluation]
        trials = [*self._in_turns(of_steps, []), *self._in_turns(of_evaluation, [])]
        adopted = self._combined([each for each in trials if self._is(each, "confirmed")])
        if all(each.is_of_evaluation for each in adopted):
            return trials, adopted
        again = [
            each
            for each in trials
            if self._is(each, "no gain") and not each.is_of_evaluation and self._with_fixes([*adopted, each])
        ]
        on_top = self._in_turns([_TriedFix(each.rule, each.candidate, on_top=True) for each in again], adopted)
        helped = [each for each in on_top if self._is(each, "confirmed")]
        for before, after in zip(again, on_top, strict=True):
            if after in helped:
                trials[trials.index(before)] = after
        return trials, self._combined([*adopted, *helped]) if helped else adopted

    def _in_turns(self, trials: Sequence[_TriedFix], adopted: Sequence[_TriedFix]) -> list[_TriedFix]:
        """Turns without and with each fix, alternating.

        A fix that fails or brings nothing has a single turn. One that seems to be faster on a machine that is too busy
        to be sure has up to twice as many.
        """
        now = list(trials)
        for turn in range(2 * self._turns):
            again = [n for n, trial in enumerate(now) if (trial.is_promising if turn < self._turns else trial.is_open)]
            if not again:
                break
            if not now[0].is_of_evaluation:
                before = self._baseline(adopted)
            else:
                unchanged, error = self._turn("timing the evaluation", adopted, evaluation=True)
                if unchanged is None:
                    return [replace(trial, unreached=error) for trial in now]
                before = unchanged
            for number in again:
                now[number] = self._tried(now[number], before, adopted)
        return now

    def _tried(self, trial: _TriedFix, before: Turn, adopted: Sequence[_TriedFix]) -> _TriedFix:
        place = trial.candidate.place
        doing = f"trying {trial.rule.name} at {Path(place.file).name}:{place.line}"
        turn, error = self._turn(doing, [*adopted, trial], evaluation=trial.is_of_evaluation)
        if turn is None:
            return replace(trial, error=error)
        return replace(trial, before=(*trial.before, before), after=(*trial.after, turn))

    def _baseline(self, adopted: Sequence[_TriedFix] = ()) -> Turn:
        turn, error = self._turn("timing the fixes so far" if adopted else "timing the unchanged script", adopted)
        if turn is None and not self._paces and self._ended >= WARMUP + FEWEST:  # it was not looked at for so long
            self._timed = self._ended - WARMUP
            turn, error = self._turn("timing the unchanged script", ())
        if turn is None:
            raise ScriptFailed(
                f"{printable(self._asked.target)} did not make its {WARMUP + self._timed} steps again: {error}",
                fix="let it make the same steps each time that it runs; does it find files of its last run?",
            )
        if not adopted:
            self._paces.append(turn.step)
        return turn

    def _combined(self, confirmed: Sequence[_TriedFix]) -> list[_TriedFix]:
        """Fixes that can be made at once and run together, those that gain most first."""
        adopted: list[_TriedFix] = []
        for trial in sorted(confirmed, key=lambda each: (each.on_top, -each.gain.times if each.gain else 0.0)):
            if self._with_fixes([*adopted, trial]):
                adopted.append(trial)
            else:
                self._notes.append(f"{trial.rule.name} is not in the patch: it changes the same code as another fix.")
        while len(adopted) > 1:
            turn, error = self._turn("trying all fixes together", adopted)
            if turn is not None:
                break
            left = adopted.pop()
            self._notes.append(f"{left.rule.name} is not in the patch: together with the others, {error}.")
        return adopted

    def _together(self, adopted: list[_TriedFix]) -> tuple[Gain | None, str, list[_TriedFix]]:
        """All fixes at once, in turns with the unchanged script; only the best of them if that changes the losses."""
        if sum(not each.is_of_evaluation for each in adopted) < 2:
            return None, "", adopted
        before, after = [], []
        for _ in range(self._turns):
            before.append(self._baseline())
            turn, why = self._turn("timing all fixes together", adopted)
            if turn is None:
                break
            after.append(turn)
        else:
            gain = Gain(tuple(before), tuple(after))
            same, why = self._compared(gain, "B" if any(each.rule.tier == "B" for each in adopted) else "A")
            if same:
                return gain, why, adopted
        self._notes.append(f"Only the best fix is in the patch: with all of them, {why}.")
        return None, "", adopted[:1]

    def _turn(self, doing: str, fixes: Sequence[_TriedFix], *, evaluation: bool = False) -> tuple[Turn | None, str]:
        """One run with some fixes; or why there is none."""
        self._told(doing)
        sources = self._with_fixes(fixes) or None
        asked = replace(self._asked, warmup=WARMUP, steps=self._timed, limit=self._limit, sources=sources)
        answer = self._runs.run(replace(asked, evaluation=evaluation))
        if (turn := answer.get(TURN)) is not None:
            return Turn.from_json(turn), ""
        self._ended = answer.get("steps", 0)
        return None, printable(answer.get("error") or f"it ended after {plural(self._ended, 'step')}")

    def _with_fixes(self, fixes: Iterable[_TriedFix]) -> dict[str, str]:
        """The files that these fixes change, as they make them; empty where they are in each other's way."""
        edits: dict[str, dict[Edit, None]] = {}
        for fix in fixes:
            for file, each in fix.candidate.by_file.items():
                edits.setdefault(file, {}).update(dict.fromkeys(each))
        changed = {}
        for file, several in edits.items():
            if file not in self._sources:
                return {}
            try:
                text = applied(self._sources[file].text, list(several))
                compile(text, file, "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
                return {}
            if text != self._sources[file].text:
                changed[file] = text
        return changed

    # Judging

    def _finding(self, trial: _TriedFix) -> Finding:
        place = trial.candidate.place
        source = self._sources.get(place.file)
        verdict, why, losses = self._verdict(trial)
        return Finding(
            rule=trial.rule.name,
            tier=trial.rule.tier,
            file=short(place.file),
            line=place.line,
            code=source.line(place.line) if source else "",
            what=trial.candidate.what,
            fix=trial.candidate.fix,
            diff=self._diff(self._with_fixes([trial])),
            verdict=verdict,
            why=why,
            gain=trial.gain,
            losses=losses,
            on_top=trial.on_top,
            of_evaluation=trial.is_of_evaluation,
        )

    def _is(self, trial: _TriedFix, verdict: Verdict) -> bool:
        return self._verdict(trial)[0] == verdict

    def _verdict(self, trial: _TriedFix) -> tuple[Verdict, str, str]:
        """What the turns say, why, and how losses compare."""
        gain = trial.gain
        if trial.error:
            return "fails", f"with the fix, {trial.error}", ""
        if gain is None:
            if trial.unreached:
                return "not verified", f"its line did not run: {trial.unreached}", ""
            return "not verified", "the doctor cannot make this change for you", ""
        same, losses = self._compared(gain, trial.rule.tier, "outputs" if trial.is_of_evaluation else "losses")
        if not gain.helps:
            return "no gain", "", losses
        if same is None:
            return "not compared", f"{gain}, but {losses}", losses
        return ("confirmed", "", losses) if same else ("losses differ", f"{gain}, but {losses}", losses)

    def _compared(self, gain: Gain, tier: Tier, what: str = "losses") -> tuple[bool | None, str]:
        """Whether a fix leaves the losses as they are, in words too; None where they differ from run to run anyway."""
        noise = max(_apart(gain.before[0].losses, turn.losses) for turn in gain.before)
        if noise > REPEATABLE:
            return None, f"the {what} of two unchanged runs differ by {noise:.0%}"
        first = gain.before[0].losses
        most = len(first) if tier == "A" else COMPARED
        apart = max(_apart(first[:most], turn.losses[:most]) for turn in gain.after)
        if all(turn.losses == first for turn in gain.after):
            return True, f"all {len(first)} {what} are equal to the bit"
        if apart == 0:
            return True, f"the first {most} {what} are equal to the bit"
        return apart <= max(3 * noise, ROUNDING[tier]), f"{what} differ by {apart:.1g} of their size, on average"

    def _diff(self, changed: dict[str, str]) -> str:
        return diff_of({in_patch(file): (self._sources[file].text, text) for file, text in changed.items()})


def in_patch(file: str) -> str:
    """A file as a patch names it: from the folder of the person, or from the root where it lies elsewhere."""
    return Path(short(file)).as_posix().lstrip("/")


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The mean difference of two rows of losses, as a share of their size.

    >>> _apart([1.0, 3.0], [1.0, 3.5])
    0.125
    """
    if len(one) != len(other) or any(math.isfinite(a) != math.isfinite(b) for a, b in zip(one, other, strict=True)):
        return math.inf
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if math.isfinite(a)]
    size = sum(abs(a) for a, _ in pairs)
    apart = sum(abs(a - b) for a, b in pairs)
    return apart / size if size else float(apart > 0)


def _rank(finding: Finding) -> tuple[int, bool, float]:
    order: tuple[Verdict, ...] = ("confirmed", "losses differ", "not compared", "not verified", "fails", "no gain")
    return order.index(finding.verdict), finding.on_top, -(finding.gain.times if finding.gain else 0.0)
