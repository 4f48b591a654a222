"""What several GPUs would give: formulas for DDP and FSDP from the step of one rank, its gradients and a network.

Nothing here needs torch. `python -m harness --scaling` and `hotloop simulate --gpus N --parallel …` measure or simulate
one rank and ask here; docs/scaling.md has the formulas and their limits.
"""

from hotloop.apps.simulate.scaling.links import cluster as cluster
from hotloop.apps.simulate.scaling.links import interconnect as interconnect
from hotloop.apps.simulate.scaling.links import interconnects as interconnects
from hotloop.apps.simulate.scaling.links import usual_link as usual_link
from hotloop.apps.simulate.scaling.model import PARALLEL as PARALLEL
from hotloop.apps.simulate.scaling.model import GradientReady as GradientReady
from hotloop.apps.simulate.scaling.model import RankStep as RankStep
from hotloop.apps.simulate.scaling.model import ScaledStep as ScaledStep
from hotloop.apps.simulate.scaling.model import buckets as buckets
from hotloop.apps.simulate.scaling.model import scaled as scaled
from hotloop.apps.simulate.scaling.network import Cluster as Cluster
from hotloop.apps.simulate.scaling.network import CollectiveFit as CollectiveFit
from hotloop.apps.simulate.scaling.network import Interconnect as Interconnect
from hotloop.apps.simulate.scaling.network import MeasuredCluster as MeasuredCluster
from hotloop.apps.simulate.scaling.network import fitted as fitted
from hotloop.apps.simulate.scaling.rank_memory import RankMemory as RankMemory
from hotloop.apps.simulate.scaling.rank_memory import rank_memory as rank_memory
