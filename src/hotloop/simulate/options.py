"""The option of a script's command line that is its batch, seen where the script reads it and changed on the way."""

import argparse
import importlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hotloop.simulate.patches import Patches
from hotloop.simulate.ways import rank

if TYPE_CHECKING:
    from hotloop.simulate.batches import Batches


class Options:
    """Sees what argparse, click and typer read."""

    def __init__(self, batches: "Batches") -> None:
        self._batches = batches

    def install(self, patches: Patches) -> None:
        parse = argparse.ArgumentParser.parse_known_args

        def parsed(parser: Any, args: Any = None, namespace: Any = None) -> Any:
            found, rest = parse(parser, args, namespace)
            self._parsed(parser, found)
            return found, rest

        patches.set(argparse.ArgumentParser, "parse_known_args", parsed)
        for package in self._batches.seen.parsers:
            for module in ("click.core", f"{package}._click.core"):  # typer has one of its own
                with suppress(ImportError):
                    self._click(importlib.import_module(module).Parameter, patches)

    def _parsed(self, parser: argparse.ArgumentParser, found: argparse.Namespace) -> None:
        likely: dict[int, dict[str, argparse.Action]] = {}
        for action in parser._actions:
            sure = self._rank([*action.option_strings, action.dest], action.help)
            if sure is not None and hasattr(found, action.dest):
                likely.setdefault(sure, {})[action.dest] = action
        if not likely:
            return
        best = likely[min(likely)]
        names = {dest: max(action.option_strings, key=len, default=dest) for dest, action in best.items()}
        owns = {f"argument:{name}": getattr(found, dest) for dest, name in names.items()}
        if len({str(own) for own in owns.values()}) > 1:
            self._batches.disagree("argument", owns)
            return
        for dest, (place, own) in zip(best, owns.items(), strict=True):
            if self._batches.notice(place, own[0] if isinstance(own, list) and own else own):
                setattr(found, dest, _like(own, self._batches.size))

    def _click(self, parameter: Any, patches: Patches) -> None:
        consume = parameter.consume_value

        def consumed(option: Any, context: Any, given: Any) -> Any:
            value, source = consume(option, context, given)
            if self._rank([*option.opts, option.name or ""], getattr(option, "help", None)) is None:
                return value, source
            set_now = self._batches.notice(f"argument:{max(option.opts, key=len)}", value)
            return (str(self._batches.size) if set_now else value), source

        patches.set(parameter, "consume_value", consumed)

    def _rank(self, names: list[str], about: str | None) -> int | None:
        """How surely an option is the batch; None where it is not, or another was pointed at."""
        if not self._batches.looks("argument", *names):
            return None
        if self._batches.way is not None and self._batches.way.name:
            return 0
        ranks = [found for name in names if (found := rank(name)) is not None]
        if not ranks and "-b" in names and "batch" in (about or "").lower():
            return 0
        return min(ranks, default=None)


def _like(own: Any, size: int | None) -> Any:
    """The batch in the type that the script's own is of."""
    if isinstance(own, list):
        return [size]
    return str(size) if isinstance(own, str) else size
