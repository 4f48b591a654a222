"""`Saved[…]`: a field that checkpoints hold. Its type is its schema: it is saved, checked, loaded and undone by it."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

from hotloop.checkpoint.damage import unusable
from hotloop.errors import BadArgument, HotloopError
from hotloop.records import Record, is_of, restored

T = TypeVar("T")
Saved = Annotated[T, "saved"]  # the type of a field that a checkpoint holds
Count = Annotated[int, lambda number: 0 <= number < 1 << 62]
Positive = Annotated[int, lambda number: 0 < number < 1 << 62]
Amount = Annotated[float, lambda number: 0 <= number < math.inf]


class HasState:
    """Saves, checks and loads its fields of the type `Saved[…]`, each declared once, in the class.

    A field with a default may be missing in an older checkpoint. A class whose state is not in attributes of its own
    declares the fields too, and overrides `state_dict` and `load`. Loading several objects goes through all of them
    once for each of `check`, `load`, `load_weights` and `after_load`: what can fail comes before the weights.
    """

    name: ClassVar[str]
    _saved_fields: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        for name in vars(cls).get("__annotations__", ()):
            if isinstance(vars(cls).get(name), list | dict | set):
                raise TypeError(f"{cls.__name__}.{name}: all objects would share this default; set it in __init__")

    @classmethod
    def saved_fields(cls) -> dict[str, Any]:
        """The names and types of its fields that a checkpoint holds."""
        if "_saved_fields" not in vars(cls):
            hints = get_type_hints(cls, include_extras=True, localns={"TrainingRun": object})
            cls._saved_fields = {name: hint for name, hint in hints.items() if "saved" in get_args(hint)[1:]}
        return cls._saved_fields

    def state_dict(self) -> dict[str, Any]:
        """Its state as plain data and tensors."""
        return {name: _as_plain(hint, getattr(self, name)) for name, hint in self.saved_fields().items()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise for a state that is damaged or of another run, before anything has changed."""
        for name, hint in self.saved_fields().items():
            if name in state or not hasattr(type(self), name):
                try:
                    value = state[name]
                    is_sound = is_of(hint, value, finite=False) or is_of(hint, restored(hint, value), finite=False)
                except (TypeError, ValueError, LookupError, AttributeError, HotloopError):
                    is_sound = False
                if not is_sound:
                    raise not_saved_there(f"{self.name}.{name}")

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        """Load a state that was checked; `undo` is called where another object cannot load its own."""
        undo.callback(_restore, vars(self), dict(vars(self)))
        for name, hint in self.saved_fields().items():
            if name in state:
                setattr(self, name, restored(hint, state[name]))

    def load_weights(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        """Load what is too large to be undone, and was checked."""

    def after_load(self, state: Mapping[str, Any]) -> None:
        """Load what depends on the weights; nothing may fail any more."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check and load a state by itself, all of it or nothing."""
        with all_or_nothing() as undo:
            self.check(state)
            self.load(state, undo)
            self.load_weights(state, undo)
        self.after_load(state)


@contextmanager
def all_or_nothing() -> Iterator[ExitStack]:
    """A stack whose callbacks run, the last first, only where the block raises; other errors are explained."""
    with ExitStack() as undo:
        try:
            yield undo
        except HotloopError:
            raise
        except Exception as error:
            raise unusable(f"{type(error).__name__}: {error}") from error
        undo.pop_all()


def load_objects(objects: Mapping[str, Any], states: Mapping[str, Any], undo: ExitStack) -> list[str]:
    """Call `load_state_dict` of a person's objects; returns the names that are in one of both alone."""
    for name in objects.keys() & states.keys():
        try:
            undo.callback(objects[name].load_state_dict, copy.deepcopy(objects[name].state_dict()))
            objects[name].load_state_dict(states[name])
        except Exception as error:
            raise BadArgument(
                f"{name} cannot load its state from the checkpoint: {type(error).__name__}: {error}",
                fix="build it as it was, or choose another folder for a new run",
            ) from error
    return sorted(objects.keys() ^ states.keys())


def not_saved_there(where: str) -> HotloopError:
    """The error for a value that does not match its schema."""
    return unusable(f"{where} is not what a run of this loop saves there")


def _as_plain(hint: Any, value: Any) -> Any:
    """A value of a type whose records are plain data; a list is another one."""
    if _names_a_record(hint):
        return _without_records(value)
    return list(value) if type(value) is list else value


@cache
def _names_a_record(hint: Any) -> bool:
    is_record = isinstance(hint, type) and issubclass(hint, Record)
    return is_record or any(map(_names_a_record, get_args(hint)))


def _without_records(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, dict):
        return {key: _without_records(each) for key, each in value.items()}
    return type(value)(map(_without_records, value)) if isinstance(value, list | tuple) else value


def _restore(table: dict[str, Any], before: dict[str, Any]) -> None:
    table.clear()
    table.update(before)
