"""What several GPUs would give: formulas for DDP and FSDP from the step of one rank, its gradients and a network.

Nothing here needs torch. `hotloop bench --scaling` and `hotloop simulate --gpus N --parallel …` measure or simulate one
rank and ask here; docs/scaling.md has the formulas and their limits.
"""

from hotloop.scaling.links import cluster as cluster
from hotloop.scaling.links import interconnect as interconnect
from hotloop.scaling.links import interconnects as interconnects
from hotloop.scaling.links import usual_link as usual_link
from hotloop.scaling.memory import RankMemory as RankMemory
from hotloop.scaling.memory import rank_memory as rank_memory
from hotloop.scaling.model import PARALLEL as PARALLEL
from hotloop.scaling.model import GradientReady as GradientReady
from hotloop.scaling.model import RankStep as RankStep
from hotloop.scaling.model import ScaledStep as ScaledStep
from hotloop.scaling.model import buckets as buckets
from hotloop.scaling.model import scaled as scaled
from hotloop.scaling.network import Cluster as Cluster
from hotloop.scaling.network import CollectiveFit as CollectiveFit
from hotloop.scaling.network import Interconnect as Interconnect
from hotloop.scaling.network import MeasuredCluster as MeasuredCluster
from hotloop.scaling.network import fitted as fitted
from hotloop.scaling.record import DDP as DDP
from hotloop.scaling.record import LOOP as LOOP
from hotloop.scaling.record import MeasuredRanks as MeasuredRanks
from hotloop.scaling.record import ModelledRanks as ModelledRanks
from hotloop.scaling.record import Repeats as Repeats
from hotloop.scaling.record import ScalingBenchmark as ScalingBenchmark
