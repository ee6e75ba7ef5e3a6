"""Data-parallel PyTorch whose synchronization you can read, choose and trust.

This module exports the public names. docs/architecture.md lists the packages in the order of their imports.
"""

from __future__ import annotations

from syncline import compression, debug, nn
from syncline.checkpoint.checkpointer import Checkpointer
from syncline.checkpoint.train_state import TrainState
from syncline.contract import Contract, Row
from syncline.data.sampler import DistributedSampler
from syncline.ddp.wrapper import DistributedDataParallel
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
from syncline.evolution.strategy import EvolutionStrategy
from syncline.gradients.replica_watch import ReplicaCheck
from syncline.records import (
    BackwardRecord,
    BucketRecord,
    BufferRecord,
    EvolutionRecord,
    NonFiniteRecord,
    RoundRecord,
)
from syncline.session.stop_request import EXIT_STOPPED
from syncline.session.world import World, init, shutdown, world
from syncline.sharded.sharing import share_, write_shared
from syncline.strategies import DiLoCo, EveryStep, Gossip, LocalSGD, Manual, ParameterServer
from syncline.torch_backend import register_backend
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
