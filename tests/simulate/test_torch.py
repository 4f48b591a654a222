"""PyTorch's private parts are used through one file, and where a version lacks one, what happens is what it says."""

import ast
import importlib
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hotloop.apps.simulate
from hotloop.apps.simulate import _torch
from hotloop.apps.simulate.replaced import Patches
from hotloop.apps.simulate.shim import CannotSimulate

PACKAGE = Path(hotloop.apps.simulate.__file__).parent
DOOR = "_torch.py"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != DOOR)
# Names with an underscore that are Python's, or of an object of the same class, and internals without one.
OURS = {"_getframe", "_exit", "_replace", "_fields", "_bootstrap_inner", "_actions", "_at"}
INTERNALS = {"fake_device", "fake_tensor_converter", "meta_converter", "tensor_memo"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "set", "import_module"}  # calls that name an attribute in words


def is_private(name: str) -> bool:
    return name in INTERNALS or (name.startswith("_") and not name.endswith("__") and not name.startswith("_hotloop"))


def private_uses(text: str) -> list[str]:
    """The private parts of PyTorch that a file touches, with their lines."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names if each.name.startswith("torch")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Attribute) and node.attr not in OURS:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if own else [node.attr]
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            words = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            names = [word for word in words if word not in OURS] if called in BY_NAME else []
        found += [f"{node.lineno}: {name}" for name in names if any(map(is_private, name.split(".")))]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_parts_of_pytorch_are_used_in_one_file_alone(path):
    assert not private_uses(path.read_text())


@pytest.mark.parametrize(
    "line",
    [
        "import torch._C",
        "from torch.utils import _pytree",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "torch._C._nn",
        "storage._cdata",
        "module._buffers['x']",
        "tensor.fake_device",
        "getattr(tensor, 'fake_device', None)",
        "patches.set(nn.Module, '_apply', moved)",
        "importlib.import_module('torch._dynamo')",
    ],
)
def test_a_private_part_is_noticed(line):
    assert private_uses(line)


def test_what_is_our_own_is_not_taken_for_pytorchs():
    assert not private_uses("self._buffers = {}\nstorage._hotloop_twin = 1\nsys._getframe(1)\nx.__dict__")
    assert private_uses((PACKAGE / DOOR).read_text())  # else nothing would be noticed anywhere


# Tensors without data


@pytest.fixture
def fake():
    with _torch.Shapes() as mode:
        yield mode, torch.empty(2, 3)


def test_tensors_without_data_are_known(fake):
    _, tensor = fake
    assert _torch.is_fake(tensor)
    assert _torch.any_fake((type(tensor),))
    assert not _torch.is_simulated(tensor)  # it is on the host
    assert _torch.device_of(tensor) == torch.device("cpu")
    with _torch.autograd_again():
        assert torch.is_grad_enabled()


def test_what_is_real_is_not_taken_for_one():
    assert not _torch.is_fake(torch.ones(1))
    assert not _torch.any_fake((torch.Tensor,))
    assert not _torch.is_simulated(torch.ones(1))
    assert _torch.device_of(torch.ones(1, device="meta")).type == "meta"


def test_a_swap_is_possible_once_weak_references_are_gone():
    mode, real = _torch.Shapes(), torch.ones(2)
    shape = mode.from_tensor(real)
    assert weakref.getweakrefs(shape)
    mode.forget()
    assert not weakref.getweakrefs(shape)
    del mode.fake_tensor_converter
    mode.forget()  # a PyTorch that keeps none


def test_results_without_a_shape_are_told_by_an_error(fake):
    with pytest.raises(_torch.SHAPE_UNKNOWN):
        torch.nonzero(fake[1])


def test_methods_of_tensors_without_data_come_and_go(fake):
    patches, before = Patches(), vars(type(fake[1])).get("tolist")
    _torch.teach_fakes(patches, {"tolist": lambda tensor: "taught"})
    assert fake[1].tolist() == "taught"
    patches.restore()
    assert vars(type(fake[1])).get("tolist") is before


def test_optimizers_take_tensors_without_data(fake, monkeypatch):
    from torch.utils import _foreach_utils

    patches = Patches()
    _torch.accept_fakes(patches)
    assert type(fake[1]) in _foreach_utils._foreach_supported_types
    patches.restore()
    assert type(fake[1]) not in _foreach_utils._foreach_supported_types
    monkeypatch.delattr(_foreach_utils, "_foreach_supported_types")
    monkeypatch.delattr(_torch._fake, "init_gpu_context")
    _torch.accept_fakes(patches)
    patches.restore()
    assert not hasattr(_foreach_utils, "_foreach_supported_types")


def test_a_copy_of_a_parameter_is_one(fake):
    parameter, copy, other = nn.Parameter(fake[1]), fake[1].clone(), fake[1].clone()
    _torch.mark_as_parameter(copy, parameter)
    _torch.mark_as_parameter(other, fake[1])
    assert isinstance(copy, nn.Parameter)
    assert not isinstance(other, nn.Parameter)


def test_code_for_tensors_without_data_has_a_folder():
    assert list(Path(_torch.fake_files()).glob("fake_tensor.py"))


def test_a_pytorch_without_them_is_refused_with_a_word(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", None)
    monkeypatch.delitem(sys.modules, "hotloop.apps.simulate._torch")
    monkeypatch.delattr(hotloop.apps.simulate, "_torch")
    with pytest.raises(CannotSimulate, match=r"has no tensors without data.*\n.*2\.11 to 2\.15"):
        importlib.import_module("hotloop.apps.simulate._torch")


# Memory and trees


@pytest.mark.parametrize("by_address", [True, False])
def test_views_have_the_storage_of_what_they_see(by_address, monkeypatch):
    monkeypatch.setattr(_torch, "_BY_ADDRESS", by_address)
    one, other = torch.ones(4), torch.ones(4)
    held = one.untyped_storage()
    assert _torch.storage_id(one) == _torch.storage_id(one[1:].view(3, 1)) == _torch.storage_id(held)
    assert _torch.storage_id(one) != _torch.storage_id(other)


def test_a_tensor_that_a_graph_holds_can_be_swapped():
    held = torch.ones(2, requires_grad=True)
    graph = held.exp()
    with _torch.sole_owners():
        torch.utils.swap_tensors(held, torch.zeros(2))
    assert held.sum() == 0
    assert graph.grad_fn is not None
    assert torch.ones(2)._use_count() == 1


# Operators


def test_operators_are_found_by_name():
    add = torch.ops.aten.add.Tensor
    assert _torch.overload("aten.add.Tensor") is add
    assert _torch.overload("aten.add") is None  # a packet of several
    assert _torch.overload("aten.no_such_operator.default") is None
    assert _torch.aten("_softmax")(torch.zeros(2), 0, False).tolist() == [0.5, 0.5]
    assert _torch.is_composite(torch.ops.aten.matmul.default)
    assert not _torch.is_composite(add)


def test_an_operator_has_a_kernel_of_cuda_for_a_while():
    def there() -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA")

    before = there()
    with _torch.with_cuda_kernels(["_fused_rms_norm"], lambda *_: None):
        assert there()
    assert there() == before


def test_functions_of_recurrent_layers_and_attention():
    assert all(hasattr(_torch.recurrent_functions(), name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
    query = torch.ones(1, 1, 2, 4)
    assert torch.equal(_torch.attention_on_host(query, query, query), query)
    assert _torch.negated_view(torch.ones(1)).is_neg()


# Autograd and dispatch


def test_the_backward_pass_tells_its_node():
    seen = []
    value = torch.ones(1, requires_grad=True)
    value.register_hook(lambda _: seen.append(_torch.current_node()))
    value.exp().backward()
    assert _torch.current_node() is None
    assert seen
    assert seen[0] is not None


def test_nodes_are_numbered_and_can_be_numbered_again(monkeypatch):
    following = _torch.next_sequence_number()
    node = torch.ones(1, requires_grad=True).exp().grad_fn
    assert _torch.sequence_number(node) == following
    _torch.set_sequence_number(node, 7)
    assert _torch.sequence_number(node) == 7
    _torch.set_sequence_number(object(), 7)  # a node that cannot be numbered


def test_backward_passes_are_wrapped(monkeypatch):
    calls, patches = [], Patches()

    def around(run):
        return lambda *args, **options: calls.append(1) or run(*args, **options)

    _torch.wrap_backward(patches, around)
    torch.autograd.grad(torch.ones(1, requires_grad=True).exp(), [torch.ones(1, requires_grad=True)], allow_unused=True)
    patches.restore()
    assert calls == [1]
    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    _torch.wrap_backward(patches, around)
    assert not hasattr(torch.autograd, "_engine_run_backward")


def test_autograd_works_below_itself():
    found = []

    class Below(_torch.OperationMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with _torch.autograd_again():
                leaf = torch.ones(1).requires_grad_()
                found.append(torch.autograd.grad(leaf * 3, [leaf])[0].item())
            return func(*args, **(kwargs or {}))

    with Below():
        torch.ones(1).neg()
    assert set(found) == {3.0}


def test_functions_are_not_seen():
    class Seen(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    value = torch.ones(1)
    with Seen() as seen:
        with _torch.without_functions():
            value.neg()
        assert seen.calls == 0
        value.neg()
    assert seen.calls == 1


def test_lifting_is_set_for_a_while(monkeypatch):
    before = torch._C._only_lift_cpu_tensors()
    with _torch.lifting_on_host():
        assert torch._C._only_lift_cpu_tensors()
    assert torch._C._only_lift_cpu_tensors() == before
    monkeypatch.delattr(torch._C, "_set_only_lift_cpu_tensors")
    with _torch.lifting_on_host():
        assert torch._C._only_lift_cpu_tensors() == before


# Modules and loaders


def test_moves_and_calls_of_modules_are_wrapped():
    said, patches = [], Patches()
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(1, 1)))
    _torch.wrap_moves(patches, lambda run: lambda module, fn, recurse=True: said.append("moved") or run(module, fn))
    _torch.wrap_calls(patches, lambda run: lambda module, *args: said.append("called") or run(module, *args))
    net.double()
    assert said[0] == "moved"
    assert net(torch.ones(1, 1).double()).dtype == torch.float64
    assert said.count("called") >= 2
    patches.restore()
    count = len(said)
    net.float()(torch.ones(1, 1))
    assert len(said) == count


def test_batches_of_loaders_are_seen(monkeypatch):
    class Numbers(IterableDataset):
        def __iter__(self):
            return iter([1, 2, 3])

    by_index, one_by_one = _torch.fetchers()
    for data, fetcher in ((TensorDataset(torch.ones(3)), by_index), (Numbers(), one_by_one)):
        batches = iter(DataLoader(data))
        assert isinstance(batches, _torch.loader_iterator())
        assert isinstance(batches._dataset_fetcher, fetcher)
    monkeypatch.delattr(torch.utils.data._utils.fetch, "_MapDatasetFetcher")
    assert _torch.fetchers() == []
    monkeypatch.delattr(torch.utils.data.dataloader, "_BaseDataLoaderIter")
    assert _torch.loader_iterator() is None


# The device


def test_the_default_device_is_what_it_was_set_to(monkeypatch):
    assert _torch.default_device() is None
    try:
        torch.set_default_device("meta")
        assert _torch.default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)
    monkeypatch.delattr(importlib.import_module("torch.utils._device"), "CURRENT_DEVICE")
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cpu"))
    assert _torch.default_device() == torch.device("cpu")


def test_answers_below_cuda_are_names_that_it_has():
    answers = _torch.answer_below_cuda(lambda device: 3, lambda words: None)
    assert answers["_exchange_device"](0) == answers["_maybe_exchange_device"](0) == 3
    known = (*vars(torch.cuda), *vars(torch.cuda.memory))
    assert not [name for name in answers if name not in known]


def test_cudnn_has_a_limit_of_its_benchmark():
    patches = Patches()
    before = hasattr(torch._C, "_cuda_get_cudnn_benchmark_limit")
    _torch.answer_for_cudnn(patches)
    assert torch._C._cuda_get_cudnn_benchmark_limit() >= 0
    patches.restore()
    assert hasattr(torch._C, "_cuda_get_cudnn_benchmark_limit") == before


def test_a_module_that_is_not_there_is_none():
    assert _torch._module("torch.no_such_module") is None
