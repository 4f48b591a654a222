"""A few metrics ready for `fit(metrics=…)` and `evaluate`: `(output, target) → a value for each item`.

Any function of that kind will do, and so does every metric of torchmetrics. These take the logits of models that return
more than that: `.logits`, `["logits"]`, `(logits, loss)`.
"""

from hotloop.metrics.item_metrics import absolute_error, accuracy, squared_error, top_k

__all__ = ["absolute_error", "accuracy", "squared_error", "top_k"]
