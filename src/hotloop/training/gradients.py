"""`GradientNorms`: gradient norms of logged steps, by their names in a log."""

from hotloop.step.norms import NormReader
from hotloop.training.core import Core


class GradientNorms(NormReader):
    """Gradient norms before clipping; they may be one log entry behind."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._is_alone = len(core.objectives) == 1

    def read(self) -> dict[str, float]:
        """The norms that have reached the host, once."""
        norms = super().read()
        return {"gradient norm" if self._is_alone else f"gradient norm/{name}": norm for name, norm in norms.items()}
