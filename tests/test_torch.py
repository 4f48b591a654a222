"""PyTorch's private parts have one door; what a version of PyTorch lacks is done without."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeGuard
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, SequentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, dataloader

from hotloop import _torch

PACKAGE = Path(__file__).parents[1] / "src" / "hotloop"
DOORS = ("_torch.py", "apps/simulate/_torch.py")
OTHERS = {  # private parts of Python and of other packages
    *("_fields", "_asdict", "_replace", "_getframe", "_current_frames", "_exit", "_bootstrap_inner", "_actions"),
    "_reset_state",  # of Accelerate
}
UNMISTAKABLE = {"_cdata", "_version", "_parameters", "_buffers", "_modules"}  # whatever a class of hotloop has
PRIVATE = re.compile(r"_[A-Za-z]\w*")
PRIVATE_PATH = re.compile(r"torch(\.\w+)*\._[A-Za-z][\w.]*")


@cache
def attributes_in_pytorch() -> frozenset[str]:
    """Private attributes of what a training has to do with."""
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    scheduler = SequentialLR(optimizer, [ConstantLR(optimizer), ConstantLR(optimizer)], [1])
    loader = DataLoader([1])
    workers = dataloader._MultiProcessingDataLoaderIter
    weight = module[0].weight
    things = [module, *module, module.state_dict(), optimizer, scheduler, loader, iter(loader), workers, weight]
    things += [weight.untyped_storage(), weight.sum().grad_fn, torch.ops.aten.add.Tensor, torch.amp.GradScaler("cpu")]
    found = {name for thing in things for name in dir(thing) if PRIVATE.fullmatch(name)}
    return frozenset(found | {"_opt_called", "_extra_state"})


@cache
def words_of_pytorch() -> frozenset[str]:
    """Those that mean an attribute wherever they stand: some others are also names of operators."""
    return frozenset(n for n in attributes_in_pytorch() if n in UNMISTAKABLE or not hasattr(torch.ops.aten, n))


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Everything in a file; several questions are asked of it."""
    return tuple(ast.walk(tree))


def owns(tree: ast.AST) -> Iterator[str]:
    """Names that the classes of a file give to their attributes and methods."""
    for node in nodes_of(tree):
        if isinstance(node, ast.ClassDef):
            yield from (each.name for each in node.body if isinstance(each, ast.FunctionDef))
            yield from (
                each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and is_name(each.target)
            )
            yield from (
                name.id for each in node.body if isinstance(each, ast.Assign) for name in each.targets if is_name(name)
            )
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def names_in(tree: ast.AST) -> Iterator[str]:
    """All names that a file gives."""
    yield from owns(tree)
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def is_name(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def is_self(node: ast.AST) -> bool:
    return is_name(node) and node.id in ("self", "cls", "other")


def private_parts(tree: ast.AST, ours: frozenset[str]) -> Iterator[str]:
    """Uses of PyTorch's private parts in a file; `ours` are the names that hotloop gives anywhere."""
    theirs, own = attributes_in_pytorch(), frozenset(owns(tree)) - UNMISTAKABLE
    for node in nodes_of(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [each.name for each in node.names if PRIVATE_PATH.match(each.name)]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{each.name}" for each in node.names]
            found = [path for path in found if PRIVATE_PATH.match(path)]
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            found = [node.attr] if is_private(node, theirs, ours, own) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value] if node.value in words_of_pytorch() or PRIVATE_PATH.fullmatch(node.value) else []
        yield from (f"line {node.lineno}: {each}" for each in found)


def is_private(node: ast.Attribute, theirs: frozenset[str], ours: frozenset[str], own: frozenset[str]) -> bool:
    """Whether an attribute with a leading underscore is PyTorch's rather than hotloop's or somebody else's."""
    if node.attr in OTHERS or node.attr.startswith("_hotloop"):
        return False
    if node.attr in ours and (node.attr not in theirs or is_self(node.value) or node.attr in own):
        return False
    return ast.unparse(node.value) not in ("aten", "torch.ops.aten")  # operators


def found_in_package() -> dict[str, list[str]]:
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    ours = frozenset(name for tree in trees.values() for name in names_in(tree))
    found = {name: sorted(private_parts(tree, ours)) for name, tree in trees.items() if name not in DOORS}
    return {name: parts for name, parts in found.items() if parts}


def test_private_parts_of_pytorch_are_used_through_the_door() -> None:
    assert not found_in_package(), "use or add a function of src/hotloop/_torch.py"


PRIVATE_CODE = """
import torch._dynamo
from torch import _C
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter
torch._foreach_add_(a, b)
torch.cuda.memory._snapshot()
tensor._version
module._buffers['a']
getattr(parameter, '_post_accumulate_grad_hooks', None)
sys.modules.get('torch._dynamo.utils')
vars(loader)['_iterator'] = None
class A(nn.Module): a = lambda self: self._parameters
"""
PUBLIC_CODE = """
from torch.utils.data import DataLoader
sys._getframe(1)
class A:
    def same(self, other):
        self._a = 1
        return self._a == other._a
'the word _version in a sentence, and torch._C'
torch.ops.aten._softmax
"""


def test_the_search_finds_what_is_private_and_leaves_the_rest_alone() -> None:
    for line in PRIVATE_CODE.strip().splitlines():
        assert list(private_parts(ast.parse(line), frozenset())), line
    public = ast.parse(PUBLIC_CODE)
    assert not list(private_parts(public, frozenset(names_in(public))))


@pytest.mark.parametrize("lacking", [False, True])
def test_operations_on_lists(lacking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking:
        for method in ("add_", "copy_", "div_"):
            monkeypatch.delattr(torch, f"_foreach_{method}")
    add, copy, divide = (_torch._foreach(method) for method in ("add_", "copy_", "div_"))
    tensors = [torch.ones(2), torch.ones(3)]

    add(tensors, [torch.full((2,), 1.0), torch.full((3,), 3.0)])
    divide(tensors, 2)
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.0], [2.0, 2.0, 2.0]]
    divide(tensors, torch.tensor(0.5))
    assert [tensor[0].item() for tensor in tensors] == [2.0, 4.0]
    copy(tensors, [torch.zeros(2), torch.ones(3)])
    assert [tensor[0].item() for tensor in tensors] == [0.0, 1.0]


def test_a_step_has_no_name_for_profilers_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], 0.25)
    named = Mock(wraps=torch.autograd.profiler.record_function)
    monkeypatch.setattr(torch.autograd.profiler, "record_function", named)

    _torch.unprofiled_step(optimizer)()

    assert weight.item() == 0.75
    assert not named.called
    with torch.autograd.profiler.profile():
        assert _torch.unprofiled_step(optimizer) == optimizer.step
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        assert _torch.unprofiled_step(optimizer) == optimizer.step
        handle.remove()
    assert _torch.unprofiled_step(optimizer) != optimizer.step


def test_a_step_that_somebody_has_wrapped_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapped(step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def outer(*args: Any) -> Any:
            return step(*args)

        return outer

    scheduled, own, of_class = (torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1) for _ in range(3))
    ConstantLR(scheduled)
    monkeypatch.setattr(own, "step", wrapped(own.step))
    assert _torch.unprofiled_step(scheduled) == scheduled.step
    assert _torch.unprofiled_step(own) == own.step
    monkeypatch.setattr(torch.optim.SGD, "step", wrapped(torch.optim.SGD.step))
    assert _torch.unprofiled_step(of_class) == of_class.step


@pytest.mark.filterwarnings("error")
def test_a_scheduler_believes_that_the_optimizer_has_stepped() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    scheduler = ConstantLR(optimizer)

    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    scheduler = ConstantLR(optimizer)
    _torch.mark_stepped(optimizer)
    scheduler.step()

    assert _torch.SCHEDULER_NOTES & vars(optimizer).keys()


def test_without_word_of_workers_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader([1])
    monkeypatch.delitem(vars(loader), "_iterator", raising=False)
    monkeypatch.delattr(DataLoader, "_iterator", raising=False)

    assert not _torch.keeps_workers(loader)
    assert not _torch.ask_workers(loader, str)


def test_a_loader_that_waits_is_known_by_its_frames() -> None:
    def _try_get_data() -> bool:
        return _torch.waits_for_workers(sys._getframe())

    def other() -> bool:
        return _torch.waits_for_workers(sys._getframe())

    of_loader = {"__name__": _torch.LOADER, "sys": sys, "_torch": _torch}

    assert FunctionType(_try_get_data.__code__, of_loader)()
    assert not FunctionType(other.__code__, of_loader)()
    assert not _try_get_data()
    assert hasattr(dataloader._MultiProcessingDataLoaderIter, "_try_get_data"), "PyTorch has renamed it"


def seen_in_backward() -> tuple[int | None, int | None, int | None, Any]:
    """What is told in the backward pass of a product, and before it."""
    weight = torch.ones(2, requires_grad=True)
    first = _torch.next_node_number()
    seen: list[tuple[int | None, Any]] = []
    made = weight * 2
    made.register_hook(lambda gradient: None)
    made.grad_fn.register_prehook(lambda gradients: seen.append((_torch.backward_pass(), _torch.running_node())))
    assert _torch.backward_pass() is None
    assert _torch.running_node() is None
    made.sum().backward()
    ((number, node),) = seen
    return first, _torch.node_number(made.grad_fn), number, node


def test_nodes_of_autograd_have_numbers() -> None:
    first, number, backward, node = seen_in_backward()

    assert first == number
    assert _torch.next_node_number() == first + 2
    assert backward is not None
    assert _torch.node_number(node) == number
    leaf = torch.ones(1, requires_grad=True).expand(2).grad_fn.next_functions[0][0]
    assert _torch.node_number(leaf) is None
    assert _torch.node_number(None) is None


def test_without_numbers_nothing_is_said_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    monkeypatch.delattr(torch._C._autograd, "_get_sequence_nr")

    assert seen_in_backward() == (0, None, None, None)


class Names(_torch.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(_torch.schema_of(func).name)
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_operations_unless_they_are_hidden() -> None:
    with Names() as names:
        torch.ones(2) + 1
        with _torch.without_dispatch():
            torch.ones(2) * 2

    assert names.seen == ["aten::ones", "aten::add"]
    assert _torch.schema_of(len) is None


def test_where_operations_cannot_be_hidden_they_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_DisableTorchDispatch")

    with Names() as names, _torch.without_dispatch():
        torch.ones(2)

    assert names.seen == ["aten::ones"]


def test_operators_that_a_version_lacks_are_left_out() -> None:
    assert _torch._operators("_unsafe_view", "_never_was") == (torch.ops.aten._unsafe_view,)
    assert _torch.CPU_ATTENTION
    assert _torch.CPU_ATTENTION_BACKWARD
    assert hasattr(torch, _torch.SHALLOW_COPY_CHECK)


def test_compilation_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch._dynamo")]:
        monkeypatch.delitem(sys.modules, name)
    assert not _torch.compiler_is_loaded()
    assert not _torch.has_compiled()

    utils = ModuleType("torch._dynamo.utils")
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    assert _torch.compiler_is_loaded()
    assert not _torch.has_compiled()  # it does not count any more

    utils.counters = {"frames": {"total": 1}}
    assert _torch.has_compiled()


def test_the_error_of_a_compiler_is_told_without_that_of_dynamo() -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no compiler today")

    with pytest.raises(Exception, match="no compiler today") as caught:
        torch.compile(lambda x: x + 1, backend=fails)(torch.ones(1))
    assert type(caught.value) is not RuntimeError
    assert str(_torch.compiler_error(caught.value)) == "no compiler today"
    own = ValueError()
    assert _torch.compiler_error(own) is own


def test_sizes_that_vary_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    compiled = torch.compile(lambda x: x * 2, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    first = torch.ones(5, 3)
    _torch.mark_dynamic(first, 0)
    torch._dynamo.utils.counters.clear()
    assert not _torch.has_compiled()
    for each in (first, torch.ones(7, 3), torch.ones(9, 3)):
        compiled(each)
    assert len(graphs) == 1
    assert _torch.has_compiled(), "Dynamo counts frames"
    monkeypatch.delattr(torch._dynamo, "maybe_mark_dynamic")
    _torch.mark_dynamic(first, 1)


def test_the_folder_of_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert _torch.compiler_cache() == str(tmp_path)
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.cache_dir_utils", None)
    assert _torch.compiler_cache() == "unknown"


def test_a_profiler_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _torch.profiler_runs()
    with torch.autograd.profiler.profile():
        assert _torch.profiler_runs()
        monkeypatch.delattr(torch._C._autograd, "_profiler_enabled")
        assert not _torch.profiler_runs()


def test_without_word_of_amx_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(_torch.has_amx(), bool)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert _torch.has_amx()
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert not _torch.has_amx()


def test_the_allocator_is_asked_and_told_in_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "max_split_size_mb:32", raising=False)
    assert _torch.allocator_settings() == "max_split_size_mb:32"
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    told = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: told)
    assert _torch.allocator_settings() == "max_split_size_mb:64"
    told.clear()
    assert _torch.allocator_settings() is None

    for name in _torch._ALLOCATOR_WRITERS:
        monkeypatch.delattr(torch._C, name, raising=False)
    with pytest.raises(NotImplementedError):
        _torch.set_allocator_settings("")
    monkeypatch.setattr(torch._C, _torch._ALLOCATOR_WRITERS[-1], written.append, raising=False)
    _torch.set_allocator_settings("max_split_size_mb:8")
    assert written == ["max_split_size_mb:8"]


def test_a_pool_that_cannot_be_ended_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[str, int, object]] = []
    cuda = torch.device("cuda", 1)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        told = partial(lambda name, index, pool: ended.append((name, index, pool)), name)
        monkeypatch.setattr(torch._C, name, told, raising=False)

    for version, calls in (("2.11.0", 2), ("2.13.0", 1)):
        monkeypatch.setattr(torch, "__version__", version)
        _torch.end_capture_pool(cuda, "pool")
        assert len(ended) == calls
        ended.clear()

    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    _torch.end_capture_pool(cuda, "pool")
    assert ended == []
