"""What works on elements, fills, draws random numbers, copies, or only looks at memory in another way."""

from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.families.base import POINTWISE, VIEW, Family, Kind, moving
from hotloop.apps.simulate.families.reduction import sorting
from hotloop.apps.simulate.products import Tf32, WorkPart, bytes_of

_CLEARED_FIRST = ("constant_pad_nd", "slice_backward", "select_backward", "diagonal_backward", "unfold_backward")
_SORTING = ("randperm", "multinomial")


def _fill(operation: Operation, kind: Kind, _tf32: Tf32) -> tuple[WorkPart, ...]:
    return moving(operation, kind, bytes_of(operation.outputs) or bytes_of(operation.inputs))


def _random(operation: Operation, kind: Kind, _tf32: Tf32) -> tuple[WorkPart, ...]:
    variant = "dropout" if "dropout" in kind.base else "drawn"
    if kind.base in _SORTING:
        return moving(operation, kind, *sorting(operation), variant=variant)
    size = bytes_of(operation.outputs) or bytes_of(operation.inputs) if kind.in_place else None
    return moving(operation, kind, size, variant=variant)


def _copy(operation: Operation, kind: Kind, _tf32: Tf32) -> tuple[WorkPart, ...]:
    variant = _copied(operation, kind.base)
    if kind.base in _CLEARED_FIRST:
        size = bytes_of(operation.inputs) + 2.0 * bytes_of(operation.outputs)
        return moving(operation, kind, size, 2, variant=variant)
    moved = 2.0 * bytes_of(operation.inputs[-1:]) if kind.base == "copy" and kind.in_place else None
    return moving(operation, kind, moved, variant=variant)


def _copied(operation: Operation, base: str) -> str:
    """Whether values are cast, or are read across the order in which they lie."""
    source, *others = operation.inputs
    target = operation.outputs[0] if operation.outputs else (others or [source])[0]
    if base == "copy" and others:
        source = others[0]
    if source.dtype != target.dtype and source.numel == target.numel:
        return "cast"
    across = base == "clone" and len(source.sizes) == 2 and operation.arguments.get("memory_format") is not None
    reordered = base in ("clone", "_to_copy", "copy") and source.channels_last != target.channels_last
    return "transposed" if across or reordered else "plain"


FAMILY = Family(
    members={
        VIEW: "empty empty_like empty_strided empty_permuted new_empty new_empty_strided _unsafe_view reshape"
        " _reshape_alias set resize resize_as lift lift_fresh _local_scalar_dense item record_stream"
        " is_pinned sym_size sym_stride sym_numel is_same_size _nested_view_from_buffer as_strided",
        "copy": "clone _to_copy copy cat stack contiguous constant_pad_nd slice_backward select_backward roll flip"
        " repeat tril triu diag_embed slice_scatter select_scatter diagonal_backward unfold_backward"
        " as_strided_scatter repeat_interleave _pin_memory split_with_sizes_copy tril_indices triu_indices rot90"
        " unfold_copy diagonal_copy _copy_from expand_copy permute_copy _to_dense",
        "random": "native_dropout bernoulli normal uniform random rand randn randint rand_like randn_like randint_like"
        " randperm multinomial exponential geometric log_normal cauchy poisson rrelu_with_noise _fused_dropout",
        "fill": "zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full fill zero arange linspace"
        " eye scalar_tensor logspace",
        # Pointwise, and not tagged so: their backward passes, and what works on elements in place.
        POINTWISE: "native_dropout_backward threshold_backward gelu_backward silu_backward tanh_backward"
        " sigmoid_backward elu_backward leaky_relu_backward hardtanh_backward hardswish_backward softplus_backward"
        " mish_backward log_sigmoid_backward log_sigmoid_forward glu glu_backward hardsigmoid_backward"
        " softshrink_backward logit_backward _prelu_kernel _prelu_kernel_backward addcmul addcdiv lerp where"
        " masked_fill clamp clamp_min clamp_max _fused_moving_avg_obs_fq_helper nan_to_num _conj_physical complex"
        " view_as_real_copy isin _masked_scale bitwise_and logical_not polar relu gelu silu alias_copy",
    },
    work={
        POINTWISE: lambda operation, kind, _: moving(operation, kind),
        "fill": _fill,
        "random": _random,
        "copy": _copy,
    },
    host={
        "copy_": {"self", "src"},
        "set_": {"self", "source"},
        "_has_compatible_shallow_copy_type": {"self", "from"},
        "is_same_size": {"self", "other"},
        "resize_as_": {"the_template"},
        "_resize_output_": {"self"},
    },
    strict="cat stack",
    idle="empty empty_like empty_strided new_empty new_empty_strided detach detach_ alias lift lift_fresh _unsafe_view"
    " resize_ resize_as_ set_ _reshape_alias is_same_size requires_grad_ record_stream rename as_strided_ sym_size"
    " sym_stride sym_numel sym_storage_offset",
    last_first="native_dropout",
    whole="silu_backward mish_backward",
)
