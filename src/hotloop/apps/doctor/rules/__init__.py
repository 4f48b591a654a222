"""What the doctor knows: one function for each way to waste time or memory. They read, and change nothing."""

from hotloop.apps.doctor.rules.base import Candidate, Script, ScriptRule
from hotloop.apps.doctor.rules.graph import anomaly_mode, evaluates_with_gradients, keeps_graphs
from hotloop.apps.doctor.rules.host_work import collects_garbage, loops_over_values, pauses, reads_each_step
from hotloop.apps.doctor.rules.kernel_choice import (
    attention_by_hand,
    convolutions_channels_first,
    data_parallel,
    fp32_matmuls,
    fp32_step,
    searches_no_algorithms,
    unfused_optimizer,
    writes_zeros,
)
from hotloop.apps.doctor.rules.loading import items_one_by_one, pageable_copies, restarts_workers, waits_for_items

RULES = (
    ScriptRule("waits-for-items", "A", waits_for_items),
    ScriptRule("items-one-by-one", "A", items_one_by_one),
    ScriptRule("restarts-workers", "A", restarts_workers),
    ScriptRule("pageable-copies", "A", pageable_copies),
    ScriptRule("reads-each-step", "A", reads_each_step),
    ScriptRule("pauses", "A", pauses),
    ScriptRule("collects-garbage", "A", collects_garbage),
    ScriptRule("anomaly-mode", "A", anomaly_mode),
    ScriptRule("evaluates-with-gradients", "A", evaluates_with_gradients),
    ScriptRule("keeps-graphs", "A", keeps_graphs),
    ScriptRule("writes-zeros", "A", writes_zeros),
    ScriptRule("unfused-optimizer", "B", unfused_optimizer),
    ScriptRule("channels-first", "B", convolutions_channels_first),
    ScriptRule("fp32-matmuls", "B", fp32_matmuls),
    ScriptRule("fp32-step", "B", fp32_step),
    ScriptRule("no-search", "B", searches_no_algorithms),
    ScriptRule("attention-by-hand", "B", attention_by_hand),
    ScriptRule("data-parallel", "B", data_parallel),
    ScriptRule("loops-over-values", "A", loops_over_values),
)

__all__ = ["RULES", "Candidate", "Script", "ScriptRule"]
