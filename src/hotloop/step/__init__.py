"""The training step, written once (`eager`), and what wraps it: OOM retry, CUDA graphs, compilation, inspection."""
