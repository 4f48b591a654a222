"""What the doctor knows: one function for each way to waste time or memory. They read, and change nothing."""

from hotloop.doctor.rules.base import Candidate, Case, Rule
from hotloop.doctor.rules.graph import anomaly_mode, evaluates_with_gradients, keeps_graphs
from hotloop.doctor.rules.host import collects_garbage, loops_over_values, pauses, reads_each_step
from hotloop.doctor.rules.kernels import (
    convolutions_channels_first,
    fp32_matmuls,
    fp32_step,
    searches_no_algorithms,
    unfused_optimizer,
    writes_zeros,
)
from hotloop.doctor.rules.loading import items_one_by_one, pageable_copies, restarts_workers, waits_for_items

RULES = (
    Rule("waits-for-items", "A", "the loop waits for its DataLoader", waits_for_items),
    Rule("items-one-by-one", "A", "tensors in memory are collated item by item", items_one_by_one),
    Rule("restarts-workers", "A", "workers start anew in every epoch", restarts_workers),
    Rule("pageable-copies", "A", "batches are copied from pageable memory, and the host waits", pageable_copies),
    Rule("reads-each-step", "A", "a value is read from the GPU in every step", reads_each_step),
    Rule("pauses", "A", "synchronize() or empty_cache() in every step", pauses),
    Rule("collects-garbage", "A", "gc.collect() in every step", collects_garbage),
    Rule("anomaly-mode", "A", "autograd checks every operation for NaN", anomaly_mode),
    Rule("evaluates-with-gradients", "A", "an evaluation records graphs for a backward pass", evaluates_with_gradients),
    Rule("keeps-graphs", "A", "a variable holds the graphs of earlier steps", keeps_graphs),
    Rule("writes-zeros", "A", "gradients are filled with zeros instead of freed", writes_zeros),
    Rule("unfused-optimizer", "B", "the optimizer launches several kernels for its weights", unfused_optimizer),
    Rule("channels-first", "B", "convolutions run on channels-first images", convolutions_channels_first),
    Rule("fp32-matmuls", "B", "matmuls leave the tensor cores idle", fp32_matmuls),
    Rule("fp32-step", "B", "the whole forward pass runs in fp32", fp32_step),
    Rule("no-search", "B", "cuDNN takes its first guess at an algorithm", searches_no_algorithms),
    Rule("loops-over-values", "A", "a Python loop starts an operation for each value", loops_over_values),
)

__all__ = ["RULES", "Candidate", "Case", "Rule"]
