"""Data-parallel PyTorch whose synchronization you can read, choose and trust.

Layout, low to high; imports point upwards in this list only (docs/architecture.md):

    errors                      the exception tree
    events, environment         records of what happened; the only reader of os.environ
    process, stopping           what a rank owes its launcher; whether it was asked to stop
    handshake                   how ranks meet
    contract, explain, plan/    pure: what is synchronized when, in rows, words and buckets
    transport/                  what moves tensors between ranks
    world                       who this process is
    sync/, data/, nn/           gradients, buffers, agreement; the sampler; layers
    compression/                encodings of what is averaged, so that fewer bytes travel
    strategy/                   pure: when and how parameters meet
    rounds/                     carries strategies out
    optim/                      optimizers of which each rank steps its share
    state/                      what belongs to a training run, on disk and back
    verbs, sharing, evolution/  synchronization without a wrapper; one copy of parameters for all ranks; training
                                without a backward pass
    parallel                    DistributedDataParallel
    launch/, bench/, debug/     ranks as processes; competitors that take turns; is a step the same, and if not, why
    cli/, testing/              `syncline run`, `bench`, `doctor`; ranks for tests
"""

from __future__ import annotations

from syncline import compression, debug, nn
from syncline.contract import Contract, Row
from syncline.data.sampler import DistributedSampler
from syncline.errors import (
    CheckpointCorrupt,
    CollectiveMismatch,
    CollectiveTimeout,
    ContractMismatch,
    NonFiniteGradient,
    PeerFailed,
    PeerLost,
    ReplicaDivergence,
    SameDataWarning,
    SynclineError,
    UnevenInputs,
    UnreducedGradients,
)
from syncline.events import (
    BackwardRecord,
    BucketRecord,
    BufferRecord,
    EvolutionRecord,
    NonFiniteRecord,
    RoundRecord,
)
from syncline.evolution.strategy import EvolutionStrategy
from syncline.parallel import DistributedDataParallel
from syncline.sharing import share_, write_shared
from syncline.state.checkpoint import Checkpointer
from syncline.state.train_state import TrainState
from syncline.stopping import EXIT_STOPPED
from syncline.strategy import DiLoCo, EveryStep, Gossip, LocalSGD, Manual, ParameterServer
from syncline.sync.replica_watch import ReplicaCheck
from syncline.transport.backend import register_backend
from syncline.transport.base import Statistics
from syncline.verbs import (
    all_reduce_,
    average_,
    barrier,
    broadcast_,
    check_replicas,
    diverge,
    keep_best_,
    mean,
    sync_gradients_,
)
from syncline.world import World, init, shutdown, world

__version__ = "0.1.0"

__all__ = [
    "EXIT_STOPPED",
    "BackwardRecord",
    "BucketRecord",
    "BufferRecord",
    "CheckpointCorrupt",
    "Checkpointer",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Contract",
    "ContractMismatch",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "EveryStep",
    "EvolutionRecord",
    "EvolutionStrategy",
    "Gossip",
    "LocalSGD",
    "Manual",
    "NonFiniteGradient",
    "NonFiniteRecord",
    "ParameterServer",
    "PeerFailed",
    "PeerLost",
    "ReplicaCheck",
    "ReplicaDivergence",
    "RoundRecord",
    "Row",
    "SameDataWarning",
    "Statistics",
    "SynclineError",
    "TrainState",
    "UnevenInputs",
    "UnreducedGradients",
    "World",
    "all_reduce_",
    "average_",
    "barrier",
    "broadcast_",
    "check_replicas",
    "compression",
    "debug",
    "diverge",
    "init",
    "keep_best_",
    "mean",
    "nn",
    "register_backend",
    "share_",
    "shutdown",
    "sync_gradients_",
    "world",
    "write_shared",
]
