"""Pooling, resizing and padding of images."""

from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.families.base import Family, Kind, image_of, moving
from hotloop.apps.simulate.products import Tf32, WorkPart

_POOLS = ("max_pool", "avg_pool", "upsample")


def _work(operation: Operation, kind: Kind, _tf32: Tf32) -> tuple[WorkPart, ...]:
    pool = next((pool for pool in _POOLS if pool in kind.base), "")
    variant = f"{pool}-backward" if pool and kind.base.endswith("backward") else pool
    traits = image_of(max((*operation.inputs, *operation.outputs), key=lambda shape: shape.numel))
    return moving(operation, kind, variant=variant, traits=traits, image=True)


FAMILY = Family(
    members={
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
    },
    work={"pooling": _work},
)
