"""Families of operations, by what PyTorch declares and by name, and how many kernels a list of tensors takes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.simulate import families
from hotloop.apps.simulate.families import ALL, FAMILIES, kind_of
from hotloop.apps.simulate.families.base import VIEW
from hotloop.apps.simulate.families.optimizers import launches


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("aten.addmm.default", "gemm"),
        ("aten.convolution.default", "conv"),
        ("aten.convolution_backward.default", "conv-backward"),
        ("aten._scaled_dot_product_flash_attention.default", "attention"),
        ("aten._scaled_dot_product_efficient_attention_backward.default", "attention-backward"),
        ("aten.native_layer_norm.default", "norm"),
        ("aten.cudnn_batch_norm_backward.default", "norm-backward"),
        ("aten._log_softmax.default", "norm"),
        ("aten.mean.dim", "reduction"),
        ("aten.relu_.default", "pointwise"),
        ("aten.erfinv.default", "pointwise"),  # listed nowhere here: PyTorch tags it
        ("aten.embedding.default", "gather"),
        ("aten.embedding_dense_backward.default", "scatter"),
        ("aten._foreach_addcdiv_.ScalarList", "optimizer-foreach"),
        ("aten._fused_adamw_.default", "optimizer-fused"),
        ("aten._fused_rms_norm.default", "norm"),  # fused, and no optimizer
        ("aten._cudnn_rnn.default", "rnn"),
        ("aten._to_copy.default", "copy"),
        ("aten.bernoulli_.float", "random"),
        ("aten.zero_.default", "fill"),
        ("aten.transpose.int", VIEW),
        ("aten.unbind.int", VIEW),
        ("aten.empty.memory_format", VIEW),
        ("aten._local_scalar_dense.default", VIEW),
    ],
)
def test_operations_have_a_family(name, family):
    kind = kind_of(name)
    assert kind.known
    assert kind.family == family


def test_an_operation_stands_in_one_family():
    members = [name for family in ALL for names in family.members.values() for name in names.split()]
    assert len(members) == len({*members})
    for what in ("work", "apart", "needs", "copied", "host", "shapes", "forwards", "backwards"):
        names = [name for family in ALL for name in getattr(family, what)]
        assert len(names) == len({*names}), what
    files = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - {"__init__", "base"}
    assert {name for name in files if getattr(families, name).FAMILY in ALL} == files


def test_the_unknown_counts_as_pointwise_and_is_known_to_be_unknown():
    kind = kind_of("somebodys.operation.default")
    assert (kind.family, kind.known) == ("pointwise", False)


def test_lists_are_counted_from_the_schema():
    assert kind_of("aten._foreach_addcdiv_.ScalarList").lists == 3
    assert kind_of("aten._fused_adam_.default").lists == 6
    assert kind_of("aten._foreach_mul_.Tensor").singles == 1
    assert kind_of("aten._foreach_mul_.Tensor").in_place
    assert not kind_of("aten._foreach_mul.Scalar").in_place


def test_every_family_has_a_curve_in_the_default_table():
    from hotloop.apps.simulate.table import default_table

    have = {key.split("/")[0] for key in default_table().curves}
    assert set(FAMILIES) <= have


@given(st.lists(st.integers(1, 10**8), max_size=200), st.integers(1, 6))
def test_more_tensors_or_larger_ones_never_take_fewer_kernels(numbers, lists):
    count = launches(numbers, lists)
    assert (count == 0) == (not numbers)
    assert launches([*numbers, 1], lists) >= count
    assert launches([2 * number for number in numbers], lists) >= count
    assert launches(numbers, lists + 1) >= count
