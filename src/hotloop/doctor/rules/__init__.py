"""What the doctor knows: one function for each way to waste time or memory. They read, and change nothing."""

from hotloop.doctor.rules.base import Candidate, Script, ScriptRule
from hotloop.doctor.rules.graph import anomaly_mode, evaluates_with_gradients, keeps_graphs
from hotloop.doctor.rules.host import collects_garbage, loops_over_values, pauses, reads_each_step
from hotloop.doctor.rules.kernels import (
    attention_by_hand,
    convolutions_channels_first,
    data_parallel,
    fp32_matmuls,
    fp32_step,
    searches_no_algorithms,
    unfused_optimizer,
    writes_zeros,
)
from hotloop.doctor.rules.loading import items_one_by_one, pageable_copies, restarts_workers, waits_for_items

RULES = (
    ScriptRule("waits-for-items", "A", "the loop waits for its DataLoader", waits_for_items),
    ScriptRule("items-one-by-one", "A", "tensors in memory are collated item by item", items_one_by_one),
    ScriptRule("restarts-workers", "A", "workers start anew in every epoch", restarts_workers),
    ScriptRule("pageable-copies", "A", "batches are copied from pageable memory, and the host waits", pageable_copies),
    ScriptRule("reads-each-step", "A", "a value is read from the GPU in every step", reads_each_step),
    ScriptRule("pauses", "A", "synchronize() or empty_cache() in every step", pauses),
    ScriptRule("collects-garbage", "A", "gc.collect() in every step", collects_garbage),
    ScriptRule("anomaly-mode", "A", "autograd checks every operation for NaN", anomaly_mode),
    ScriptRule(
        "evaluates-with-gradients", "A", "an evaluation records graphs for a backward pass", evaluates_with_gradients
    ),
    ScriptRule("keeps-graphs", "A", "a variable holds the graphs of earlier steps", keeps_graphs),
    ScriptRule("writes-zeros", "A", "gradients are filled with zeros instead of freed", writes_zeros),
    ScriptRule("unfused-optimizer", "B", "the optimizer launches several kernels for its weights", unfused_optimizer),
    ScriptRule("channels-first", "B", "convolutions run on channels-first images", convolutions_channels_first),
    ScriptRule("fp32-matmuls", "B", "matmuls leave the tensor cores idle", fp32_matmuls),
    ScriptRule("fp32-step", "B", "the whole forward pass runs in fp32", fp32_step),
    ScriptRule("no-search", "B", "cuDNN takes its first guess at an algorithm", searches_no_algorithms),
    ScriptRule("attention-by-hand", "B", "attention is written out as matmuls and a softmax", attention_by_hand),
    ScriptRule("data-parallel", "B", "one process feeds several GPUs", data_parallel),
    ScriptRule("loops-over-values", "A", "a Python loop starts an operation for each value", loops_over_values),
)

__all__ = ["RULES", "Candidate", "Script", "ScriptRule"]
