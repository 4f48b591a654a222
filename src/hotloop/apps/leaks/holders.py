"""Who keeps an object alive: the variable, attribute or container of the person's code, found by walking backwards."""

import functools
import gc
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType, TracebackType
from typing import Any

from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer

from hotloop._torch import REGISTERED, module_hooks
from hotloop.placement.sites import Site, frames, short, user_frames, variables

DEPTH = 8  # of containers in containers
MANY_REFERRERS = 400  # referrers beyond which a thing is common property and tells nothing
_PUTTING = r"(\.(append|appendleft|extend|insert|add|update|setdefault)\s*\(|\s*\[[^\]]*\]\s*=(?!=)|\s*\+=)"


@dataclass(frozen=True)
class Holder:
    """A name that keeps something alive."""

    name: str
    container: str  # the type of what the name holds, "" where it is the thing itself
    where: str  # "a local of `train`", "a global of train.py", "an attribute of `Trainer`"
    site: Site | None  # the line that puts things there, where it was found
    hook: str | None = None  # the hook that fills the container
    frame: str | None = None  # the function whose variables an exception's traceback keeps
    optimizer: bool = False  # it is the state of one

    def __str__(self) -> str:
        named = f"{self.container} `{self.name}`" if self.container else f"`{self.name}`"
        return f"{named}, {self.where}"


@dataclass
class _Link:
    """A thing on the way from the object to a name, and what it keeps."""

    thing: Any
    keeps: "_Link | None"
    frame: str | None = None


def holder_of(thing: object, ignored: set[int]) -> Holder | None:
    """The nearest name that keeps `thing` alive; None where Python knows of none.

    `ignored` are the ids of what the search itself holds.
    """
    seen = {id(thing), *ignored}
    level = [_Link(thing, None)]
    for _ in range(DEPTH):
        above: list[_Link] = []
        if (holder := next(filter(None, map(_running, level)), None)) is not None:
            return holder
        for link in level:
            for referrer in _referrers(link, seen):
                if (holder := _named(referrer, link)) is not None:
                    return holder
                above.append(_Link(referrer, link, link.frame or _dead_frame(referrer)))
        level = above
    return None


def _referrers(link: _Link, seen: set[int]) -> Iterator[Any]:
    """What refers to the thing, apart from this search, running frames, classes and nodes of autograd graphs."""
    found = gc.get_referrers(link.thing)
    seen.add(id(found))
    running = {id(frame) for frame in frames()}
    for referrer in found if len(found) <= MANY_REFERRERS else ():
        if id(referrer) not in seen | running and not isinstance(referrer, _Link | type | BackwardCFunction):
            seen.add(id(referrer))
            yield referrer


def _running(link: _Link) -> Holder | None:
    """A variable of a function that runs now: the garbage collector does not see those."""
    for frame in user_frames():
        for name, value in variables(frame).items():
            if value is link.thing:
                if frame.f_code.co_name == "<module>":
                    return _held(link, name, f"a global of {short(frame.f_code.co_filename)}", frame.f_code)
                return _held(link, name, f"a local of `{frame.f_code.co_name}`", frame.f_code)
    return None


def _named(referrer: Any, link: _Link) -> Holder | None:
    """The name under which `referrer` keeps what the link stands for, if it is one that a person knows."""
    if isinstance(referrer, dict):
        return _in_dict(referrer, link)
    if isinstance(referrer, GeneratorType) and referrer.gi_frame is not None:
        name = _key(variables(referrer.gi_frame), link.thing)
        return _held(link, name, f"a local of the generator `{referrer.__name__}`", referrer.gi_code) if name else None
    if isinstance(referrer, CellType):
        return _in_closure(referrer, link)
    if hasattr(referrer, "__dict__") and not isinstance(referrer, ModuleType | FunctionType | BaseException):
        name = _key(vars(referrer), link.thing)
        return _attribute(referrer, name, link) if name else None
    return None


def _in_dict(mapping: dict[Any, Any], link: _Link) -> Holder | None:
    """A dict may be the variables of a module or of an object; any other one is a container like a list."""
    name = _key(mapping, link.thing)
    module = sys.modules.get(str(mapping.get("__name__")))
    if name and module is not None and vars(module) is mapping:
        return _held(link, name, f"a global of {short(getattr(module, '__file__', None) or module.__name__)}", module)
    if name is None:
        return None
    owner = next((each for each in gc.get_referrers(mapping) if getattr(each, "__dict__", None) is mapping), None)
    return None if owner is None or isinstance(owner, BaseException) else _attribute(owner, name, link)


def _in_closure(cell: CellType, link: _Link) -> Holder | None:
    for closure in gc.get_referrers(cell):
        if isinstance(closure, tuple):
            for function in gc.get_referrers(closure):
                if isinstance(function, FunctionType) and function.__closure__ is closure:
                    name = function.__code__.co_freevars[closure.index(cell)]
                    return _held(link, name, f"a variable that `{function.__name__}` closes over", function)
    return None


def _attribute(owner: Any, name: str, link: _Link) -> Holder:
    if name in REGISTERED and link.keeps is not None:  # where nn.Module puts attributes
        name = _key(link.thing, link.keeps.thing) or name
    holder = _held(link, name, f"an attribute of `{type(owner).__name__}`", type(owner), attribute=True)
    return replace(holder, optimizer=isinstance(owner, Optimizer))


def _held(link: _Link, name: str, where: str, source: Any, *, attribute: bool = False) -> Holder:
    inside = link.keeps is not None
    hook = _hook_that_fills(link.thing, name) if inside else None
    places = [hook, source] if hook is not None else [source]
    site = next(filter(None, (_line(place, name, attribute) for place in places)), None)
    container = type(link.thing).__name__ if inside else ""
    return Holder(name, container, where, site, None if hook is None else _function_name(hook), link.frame)


def _hook_that_fills(container: object, name: str) -> Callable[..., Any] | None:
    """The hook of a module that can reach the container by a variable or an attribute."""
    for module in [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]:
        for hook in module_hooks(module):
            if any(value is container for value in _reachable(hook, name)):
                return hook
    return None


def _reachable(hook: Any, name: str) -> Iterator[object]:
    """What a hook can reach in one step: what it closes over, its globals, what it is bound to."""
    while isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values())
        hook = hook.func
    if isinstance(hook, MethodType):
        yield from vars(hook.__self__).values() if hasattr(hook.__self__, "__dict__") else ()
        hook = hook.__func__
    if isinstance(hook, FunctionType):
        yield from inspect.getclosurevars(hook).nonlocals.values()
        if name in hook.__code__.co_names:
            yield hook.__globals__.get(name)
    elif hasattr(hook, "__dict__"):
        yield from vars(hook).values()


def _line(source: Any, name: str, attribute: bool) -> Site | None:
    """The line of a function, class or file that puts things under the name."""
    try:
        lines, first = inspect.getsourcelines(source)
        file = inspect.getsourcefile(source) or ""
    except (OSError, TypeError):
        return None
    if isinstance(source, CodeType) and source.co_name == "<module>":  # of which `inspect` gives the first block only
        lines, first = linecache.getlines(file), 1
    prefix = r"\." if attribute else r"(?<![\w.])"
    carried = rf"[^=(]*=(?!=).*\b{re.escape(name)}\b"  # such as `state = step(state)`
    for pattern in (_PUTTING, carried, r"\s*=(?!=)"):
        for number, text in enumerate(lines, max(first, 1)):
            if re.search(rf"{prefix}{re.escape(name)}\b{pattern}", text.split("#")[0]):
                return Site(file, number)
    return None


def _function_name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__name__", type(hook).__name__)


def _dead_frame(thing: Any) -> str | None:
    """The function of a frame that has ended: only a traceback keeps such a frame."""
    if isinstance(thing, TracebackType):
        thing = thing.tb_frame
    return thing.f_code.co_name if isinstance(thing, FrameType) else None


def _key(mapping: Any, value: object) -> str | None:
    return next((str(key) for key, each in list(mapping.items()) if each is value), None)
