"""Loops of a script that only evaluate or sample: they end after a few rounds, since the rounds are alike."""

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import repeat
from typing import Any

from torch import nn

from hotloop.apps.simulate.dispatch import SimulatedGpu
from hotloop.apps.simulate.replaced import Patches
from hotloop.placement.sites import Site, is_users_file

ROUNDS, OPERATIONS = 3, 1000  # of which a loop has at least so many before it ends
_FOR, _WHILE = "__hotloop_for__", "__hotloop_while__"  # called by every loop of the script's own code


class Evaluations:
    """Watches the rounds of every `for` and `while` loop of the script's own code, and ends those that evaluate.

    One that evaluates calls modules in eval mode and without gradients, and has neither a backward pass nor an update;
    a loop within a forward pass does not count. It is asked whether a module is that of the training.
    """

    def __init__(self, gpu: SimulatedGpu, is_trained: Callable[[nn.Module], bool]) -> None:
        self._gpu, self._is_trained = gpu, is_trained
        self.calls = 0  # of modules that only evaluate
        self.ended: dict[Site, None] = {}
        self.known: set[tuple[str, int]] = set()  # lines of loops that were ended before: one round is enough
        self.whole = False  # whether every loop has all of its rounds

    def install(self, patches: Patches) -> None:
        """From now on, the script's own modules are read with their loops watched."""
        get = SourceFileLoader.get_code

        def code(loader: Any, name: str) -> Any:
            path = loader.get_filename(name)
            if self.whole or not is_users_file(path):
                return get(loader, name)
            return compile(watched(loader.get_data(path), path), path, "exec", dont_inherit=True)

        patches.set(builtins, _FOR, self._rounds)
        patches.set(builtins, _WHILE, lambda *place: partial(next, self._rounds(repeat(True), *place), False))
        patches.set(SourceFileLoader, "get_code", code)

    def called(self, module: nn.Module) -> None:
        """A module is called in eval mode without gradients, and no other around it."""
        if self._is_trained(module):
            self.calls += 1

    def _rounds(self, items: Iterable[Any], file: str, line: int) -> Iterator[Any]:
        """The same items, until a round has shown that they are enough; none of them is held here."""
        upcoming, gpu, rounds, calls = iter(items), self._gpu, 0, self.calls
        begun, trained = gpu.operations, gpu.trained
        while True:
            try:
                yield next(upcoming)
            except StopIteration:
                return
            if self.calls == calls:
                continue
            calls, rounds = self.calls, rounds + 1
            if gpu.trained != trained:
                begun, trained, rounds = gpu.operations, gpu.trained, 0
            many = rounds >= ROUNDS and gpu.operations - begun >= OPERATIONS
            if not self.whole and rounds and (many or (file, line) in self.known):
                self.ended[Site(file, line)] = None
                self.known.add((file, line))
                return


def watched(source: str | bytes, file: str) -> ast.Module:
    """The code of a file whose loops ask after each round whether there is another."""
    tree = ast.parse(source, file)
    _Watched(file).visit(tree)
    return ast.fix_missing_locations(tree)


class _Watched(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self._file = file

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """What numba and its like compile knows no function of ours."""
        if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            self.generic_visit(node)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        node.iter = self._call(_FOR, node, node.iter)
        return node

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        """`while test` becomes `while test and goes_on()`, where the latter is made before the loop."""
        self.generic_visit(node)
        name = f"__hotloop_{node.lineno}_{node.col_offset}__"
        made = ast.Assign([ast.Name(name, ast.Store())], self._call(_WHILE, node))
        node.test = ast.BoolOp(ast.And(), [node.test, ast.Call(ast.Name(name, ast.Load()), [], [])])
        return [ast.copy_location(made, node), node]

    def _call(self, name: str, loop: ast.For | ast.While, *items: ast.expr) -> ast.Call:
        place = (ast.Constant(self._file), ast.Constant(loop.lineno))
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [*items, *place], []), loop)
