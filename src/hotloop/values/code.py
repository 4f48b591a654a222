"""What the code of functions tells: the names that it has, and a digest by which it is known."""

import inspect
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from types import CodeType
from typing import Any

from torch import nn

from hotloop.values.tree import form_of


def codes_in(code: CodeType) -> list[CodeType]:
    """The code of a function and of the functions inside it."""
    return [code, *(each for inner in code.co_consts if isinstance(inner, CodeType) for each in codes_in(inner))]


@lru_cache(4096)
def names_in(code: CodeType) -> tuple[list[str], list[str]]:
    """Names that code looks up and texts that it has, those of functions inside it included, in their order."""
    every = codes_in(code)
    texts = {const for each in every for const in each.co_consts if isinstance(const, str)}
    return sorted({name for each in every for name in each.co_names}), sorted(texts)


def digest_of(codes: Iterable[CodeType]) -> str:
    """A digest of code that does not depend on where it lies."""
    digest = blake2b(digest_size=16)
    for text in sorted(map(_code_text, codes)):
        digest.update(text.encode())
    return digest.hexdigest()


def code_of_modules(modules: Iterable[nn.Module]) -> str:
    """A digest of the code of all layers, those of libraries included."""
    kinds = {kind for module in modules for kind in type(module).__mro__ if kind not in (nn.Module, object)}
    functions = (value for kind in kinds for value in vars(kind).values())
    return digest_of({f.__code__ for f in map(inspect.unwrap, filter(callable, functions)) if hasattr(f, "__code__")})


def _code_text(code: CodeType) -> str:
    found = [(c.co_qualname, c.co_code.hex(), c.co_names, c.co_varnames, c.co_consts) for c in codes_in(code)]
    return str(form_of(found, _constant))


def _constant(value: Any) -> str:
    """A constant of code in words that are the same in every process, in which a set has no order of its own."""
    if isinstance(value, frozenset):
        return str(sorted(map(repr, value)))
    return "" if isinstance(value, CodeType) else repr(value)
