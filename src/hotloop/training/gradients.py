"""`GradientNorms`: the norm of the gradient in steps that are logged, by the names that a log has for it."""

from hotloop.step.norms import NormReader
from hotloop.training.core import Core


class GradientNorms(NormReader):
    """Norms of the gradient before it is clipped; what the host reads may be one entry of the log behind."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._is_alone = len(core.objectives) == 1

    def read(self) -> dict[str, float]:
        """What has come, once."""
        norms = super().read()
        return {"gradient norm" if self._is_alone else f"gradient norm/{name}": norm for name, norm in norms.items()}
