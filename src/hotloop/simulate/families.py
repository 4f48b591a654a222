"""Which family an operation belongs to, and what PyTorch itself declares of it: operations of a family cost alike."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

VIEW = "view"
POINTWISE = "pointwise"

_MEMBERS = {
    VIEW: "empty empty_like empty_strided empty_permuted new_empty new_empty_strided _unsafe_view reshape"
    " _reshape_alias set resize resize_as lift lift_fresh _local_scalar_dense item record_stream"
    " is_pinned sym_size sym_stride sym_numel is_same_size _nested_view_from_buffer as_strided",
    "gemm": "mm addmm bmm baddbmm linear matmul addbmm addmv mv dot vdot _scaled_mm _addmm_activation _int_mm",
    "conv": "convolution _convolution cudnn_convolution cudnn_convolution_transpose convolution_overrideable"
    " conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d _conv_depthwise2d conv_depthwise3d"
    " _slow_conv2d_forward cudnn_convolution_relu",
    "conv-backward": "convolution_backward _slow_conv2d_backward convolution_backward_overrideable",
    "attention": "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_cudnn_attention _flash_attention_forward _efficient_attention_forward"
    " _cudnn_attention_forward _scaled_dot_product_flash_attention_for_cpu"
    " _scaled_dot_product_fused_attention_overrideable",
    "attention-backward": "_scaled_dot_product_flash_attention_backward"
    " _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward"
    " _flash_attention_backward _efficient_attention_backward"
    " _cudnn_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward"
    " _scaled_dot_product_fused_attention_overrideable_backward",
    "rnn": "_cudnn_rnn",
    "rnn-backward": "_cudnn_rnn_backward",
    "norm": "native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm batch_norm_elemt batch_norm_stats"
    " _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training"
    " _batch_norm_with_update _batch_norm_no_update _fused_rms_norm rms_norm layer_norm miopen_batch_norm"
    " _softmax _log_softmax _masked_softmax _safe_softmax",
    "norm-backward": "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward"
    " cudnn_batch_norm_backward batch_norm_backward _fused_rms_norm_backward _softmax_backward_data"
    " _log_softmax_backward_data _masked_softmax_backward miopen_batch_norm_backward",
    "reduction": "sum mean prod amax amin aminmax max min argmax argmin any all var std var_mean std_mean norm nansum"
    " linalg_vector_norm logsumexp cumsum cumprod cummax cummin count_nonzero median nanmedian mode sort topk"
    " kthvalue unique_dim _unique2 unique_consecutive nonzero masked_select histc bincount equal bucketize"
    " searchsorted _foreach_norm _weight_norm_interface _weight_norm_interface_backward _cdist_forward"
    " _cdist_backward binary_cross_entropy mse_loss smooth_l1_loss huber_loss trace",
    "pooling": "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d adaptive_max_pool2d"
    " _adaptive_avg_pool2d _adaptive_avg_pool3d max_pool2d_with_indices_backward max_pool3d_with_indices_backward"
    " avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"
    " adaptive_max_pool2d_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d"
    " upsample_linear1d upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
    " upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward"
    " upsample_bilinear2d_backward upsample_linear1d_backward upsample_trilinear3d_backward"
    " upsample_bicubic2d_backward _upsample_nearest_exact2d _upsample_nearest_exact2d_backward grid_sampler_2d"
    " grid_sampler_2d_backward im2col col2im reflection_pad1d reflection_pad2d reflection_pad1d_backward"
    " reflection_pad2d_backward replication_pad2d replication_pad2d_backward pixel_shuffle pixel_unshuffle",
    "gather": "embedding index index_select gather take _embedding_bag nll_loss_forward nll_loss2d_forward"
    " _unsafe_index one_hot take_along_dim _index_put_impl",
    "scatter": "embedding_dense_backward index_put _unsafe_index_put index_add index_copy scatter scatter_add"
    " scatter_reduce index_fill masked_scatter nll_loss_backward nll_loss2d_backward index_reduce put"
    " embedding_backward _embedding_bag_dense_backward",
    "copy": "clone _to_copy copy cat stack contiguous constant_pad_nd slice_backward select_backward roll flip repeat"
    " tril triu diag_embed slice_scatter select_scatter diagonal_backward unfold_backward as_strided_scatter"
    " repeat_interleave _pin_memory split_with_sizes_copy tril_indices triu_indices rot90 unfold_copy"
    " diagonal_copy _copy_from expand_copy permute_copy _to_dense",
    "random": "native_dropout bernoulli normal uniform random rand randn randint rand_like randn_like randint_like"
    " randperm multinomial exponential geometric log_normal cauchy poisson rrelu_with_noise _fused_dropout",
    "fill": "zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full fill zero arange linspace eye"
    " scalar_tensor logspace",
    # Pointwise, and not tagged so: their backward passes, and what works on elements in place.
    POINTWISE: "native_dropout_backward threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward"
    " elu_backward leaky_relu_backward hardtanh_backward hardswish_backward softplus_backward mish_backward"
    " log_sigmoid_backward log_sigmoid_forward glu glu_backward hardsigmoid_backward softshrink_backward"
    " logit_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward"
    " binary_cross_entropy_with_logits _prelu_kernel _prelu_kernel_backward addcmul addcdiv lerp where masked_fill"
    " clamp clamp_min clamp_max _fused_moving_avg_obs_fq_helper _amp_update_scale _thnn_fused_lstm_cell"
    " _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell _thnn_fused_gru_cell_backward nan_to_num"
    " _conj_physical complex view_as_real_copy isin _masked_scale bitwise_and logical_not"
    " polar relu gelu silu alias_copy soft_margin_loss l1_loss",
}
_FAMILIES = {name: family for family, names in _MEMBERS.items() for name in names.split()}
_PARTS = "depthwise conv-backward-input conv-backward-weight depthwise-backward-input depthwise-backward-weight"
FAMILIES = tuple(
    sorted(set(_MEMBERS) - {VIEW, "conv-backward"} | {*_PARTS.split(), "optimizer-foreach", "optimizer-fused"})
)


@dataclass(frozen=True, slots=True)
class Kind:
    """What an operation is, by its name alone."""

    base: str  # without namespace, overload and the underscore of working in place: add, _foreach_mul
    family: str
    known: bool  # whether the family was known, not taken for want of a better one
    lists: int = 0  # of tensors among its arguments
    singles: int = 0  # tensors that it must be given beside the lists
    in_place: bool = False


@lru_cache(maxsize=4096)
def kind_of(name: str) -> Kind:
    """The kind of an operation.

    >>> kind_of("aten.addmm.default").family, kind_of("aten.view.default").family, kind_of("aten.mul_.Tensor").family
    ('gemm', 'view', 'pointwise')
    """
    _, _, rest = name.partition(".")
    packet = rest.partition(".")[0] or name
    base = packet.rstrip("_") or packet
    overload = _overload(name)
    types = [str(argument.type) for argument in overload._schema.arguments] if overload is not None else []
    lists = sum("List[Tensor]" in kind or "List[Optional[Tensor]]" in kind for kind in types)
    family = _family(base, overload)
    return Kind(base, family or POINTWISE, family is not None, lists, types.count("Tensor"), packet != base)


def _family(base: str, overload: Any) -> str | None:
    if base in _FAMILIES:
        return _FAMILIES[base]
    if base.startswith(("_foreach_", "_amp_foreach_")):
        return "optimizer-foreach"
    if base.startswith("_fused_"):
        return "optimizer-fused"
    if overload is None:
        return None
    if overload.is_view:
        return VIEW
    import torch  # noqa: PLC0415  # whoever reads a table does not need it

    if torch.Tag.pointwise in overload.tags:
        return POINTWISE
    reduction = getattr(torch.Tag, "reduction", None)  # younger than the oldest torch that is supported
    if reduction is not None and reduction in overload.tags:
        return "reduction"
    return "random" if torch.Tag.nondeterministic_seeded in overload.tags else None


def _overload(name: str) -> Any:
    """PyTorch's own record of an operation, or None where it knows none of that name."""
    import torch  # noqa: PLC0415

    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if isinstance(found, torch._ops.OpOverload) else None


_MOST_TENSORS = (110, 64, 48, 36, 30)  # that one launch of PyTorch's multi-tensor kernels takes, by the number of lists
_MOST_CHUNKS = 320  # of 65,536 elements each


def launches(numbers: list[int], lists: int) -> int:
    """How many kernels a foreach or fused operation launches on tensors of so many elements.

    >>> launches([1000] * 100, lists=4), launches([65_536 * 640], lists=2), launches([], lists=2)
    (3, 2, 0)
    """
    most = _MOST_TENSORS[min(max(lists, 1), len(_MOST_TENSORS)) - 1]
    chunks = sum(-(-number // 65_536) for number in numbers)
    return max(-(-len(numbers) // most), -(-chunks // _MOST_CHUNKS))
