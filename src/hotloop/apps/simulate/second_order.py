"""Gradients of gradients, in the order in which a GPU computes them.

Autograd runs first what was made last, by numbers that every thread counts for itself. Of a GPU the backward pass has a
thread of its own: what is made in it, to be differentiated again, has low numbers and is run after all else.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from hotloop.apps.simulate._torch import next_sequence_number, sequence_number, set_sequence_number, wrap_backward
from hotloop.apps.simulate.replaced import Patches

_CREATE_GRAPH = 3  # the number of that argument, after outputs, their gradients, and whether to keep the graph


class SecondOrder:
    """Counts what backward passes make, as the thread of a device would."""

    def __init__(self) -> None:
        self._count = 0

    def install(self, patches: Patches) -> None:
        wrap_backward(patches, self._around)

    def _around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **options: Any) -> Any:
            first = next_sequence_number()
            found = run(*args, **options)
            created = args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else options.get("create_graph")
            if created and found:
                self._renumber((t.grad_fn for t in found if isinstance(t, Tensor)), first)
            return found

        return backward

    def _renumber(self, ends: Iterable[Node | None], first: int) -> None:
        made = next_sequence_number()
        seen: set[Node] = set()
        waiting = [node for node in ends if node is not None]
        while waiting:
            node = waiting.pop()
            if node in seen or not first <= sequence_number(node) < made:
                continue
            seen.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
        for node in seen:
            set_sequence_number(node, self._count + sequence_number(node) - first)
        self._count += made - first
