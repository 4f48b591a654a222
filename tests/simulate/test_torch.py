"""Where a version of PyTorch lacks a private part, what happens is what `_torch.py` says; simulations use all of them.

That private parts are used through that file alone is held by `tests/test_torch.py`.
"""

import importlib
import sys

import pytest
import torch
from torch.utils import _foreach_utils
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hotloop.apps.simulate
from hotloop.apps.simulate import _torch
from hotloop.apps.simulate.replaced import Patches
from hotloop.apps.simulate.shim import CannotSimulate


def test_a_pytorch_without_tensors_without_data_is_refused_with_a_word(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", None)
    monkeypatch.delitem(sys.modules, "hotloop.apps.simulate._torch")
    monkeypatch.delattr(hotloop.apps.simulate, "_torch")
    with pytest.raises(CannotSimulate, match=r"has no tensors without data.*\n.*2\.11 to 2\.15"):
        importlib.import_module("hotloop.apps.simulate._torch")


def test_weak_references_that_a_version_does_not_keep_are_not_forgotten():
    mode = _torch.Shapes()
    del mode.fake_tensor_converter
    mode.forget()


@pytest.mark.parametrize("lacking", [False, True])
def test_optimizers_take_tensors_without_data_where_there_is_a_list_of_types(lacking, monkeypatch):
    if lacking:
        monkeypatch.delattr(_foreach_utils, "_foreach_supported_types")
        monkeypatch.delattr(_torch._fake, "init_gpu_context")
    patches, kind = Patches(), _torch.FakeTensor
    _torch.accept_fakes(patches)
    assert lacking or kind in _foreach_utils._foreach_supported_types
    patches.restore()
    assert kind not in getattr(_foreach_utils, "_foreach_supported_types", ())


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


def test_names_that_a_version_does_not_know_are_none():
    assert _torch.overload("aten.add.Tensor") is torch.ops.aten.add.Tensor
    assert _torch.overload("aten.add") is None  # a packet of several
    assert _torch.overload("aten.no_such_operator.default") is None
    assert _torch._module("torch.no_such_module") is None


def test_an_operator_has_a_kernel_of_cuda_for_a_while():
    def there() -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA")

    before = there()
    with _torch.with_cuda_kernels(["_fused_rms_norm"], lambda *_: None):
        assert there()
    assert there() == before


def test_nodes_that_cannot_be_numbered_or_wrapped_are_left_as_they_are(monkeypatch):
    node = torch.ones(1, requires_grad=True).exp().grad_fn
    _torch.set_sequence_number(node, 7)
    assert _torch.sequence_number(node) == 7
    _torch.set_sequence_number(object(), 7)
    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    _torch.wrap_backward(Patches(), lambda run: run)
    assert not hasattr(torch.autograd, "_engine_run_backward")


def test_lifting_is_set_for_a_while_where_it_can_be(monkeypatch):
    before = torch._C._only_lift_cpu_tensors()
    with _torch.lifting_on_host():
        assert torch._C._only_lift_cpu_tensors()
    monkeypatch.delattr(torch._C, "_set_only_lift_cpu_tensors")
    with _torch.lifting_on_host():
        assert torch._C._only_lift_cpu_tensors() == before


def test_batches_of_loaders_are_seen_where_their_classes_are_known(monkeypatch):
    class Numbers(IterableDataset):
        def __iter__(self):
            return iter([1, 2, 3])

    for data, fetcher in zip((TensorDataset(torch.ones(3)), Numbers()), _torch.fetchers(), strict=True):
        batches = iter(DataLoader(data))
        assert isinstance(batches, _torch.loader_iterator())
        assert isinstance(batches._dataset_fetcher, fetcher)
    monkeypatch.delattr(torch.utils.data._utils.fetch, "_MapDatasetFetcher")
    monkeypatch.delattr(torch.utils.data.dataloader, "_BaseDataLoaderIter")
    assert (_torch.fetchers(), _torch.loader_iterator()) == ([], None)


def test_the_default_device_is_what_it_was_set_to_or_amounts_to(monkeypatch):
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
    known = (*vars(torch.cuda), *vars(torch.cuda.memory))
    assert not [name for name in answers if name not in known]
