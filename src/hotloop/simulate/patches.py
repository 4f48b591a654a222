"""Attributes of other modules, replaced for a while."""

from typing import Any

_NOTHING = object()


class Patches:
    """Replaces attributes and puts them back, the last first."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Put a value in place; what was there before, None where nothing was."""
        before = vars(owner).get(name, _NOTHING)
        self._before.append((owner, name, before))
        setattr(owner, name, value)
        return None if before is _NOTHING else before

    def restore(self) -> None:
        while self._before:
            owner, name, before = self._before.pop()
            if before is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
