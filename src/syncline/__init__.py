"""Data-parallel PyTorch whose synchronization you can read, choose and trust.

The public names. docs/architecture.md shows the rooms of the house, in the order of their imports.

`import syncline` imports only faces.py: `sl.Checkpointer` imports the module of `Checkpointer` when it is asked for the
first time. So a program waits only for what it uses, and `syncline --help` does not wait for torch. Type checkers and
editors read the imports below; `tests/architecture` holds them, `_NAMES` and `__all__` against each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.faces import hand_out

if TYPE_CHECKING:
    from syncline import compression, debug, nn
    from syncline.checkpoint.checkpointer import Checkpointer
    from syncline.checkpoint.train_state import TrainState
    from syncline.contract import Contract, Row
    from syncline.data import DistributedSampler
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
    from syncline.gradients.riders.replica_watch import ReplicaCheck
    from syncline.records import (
        BackwardRecord,
        BucketRecord,
        BufferRecord,
        EvolutionRecord,
        NonFiniteRecord,
        RoundRecord,
    )
    from syncline.session.ranks import World
    from syncline.session.stop_request import EXIT_STOPPED
    from syncline.session.world import init, shutdown, world
    from syncline.sharded.sharing import share_, write_shared
    from syncline.strategies import DiLoCo, EveryStep, Gossip, LocalSGD, Manual, ParameterServer
    from syncline.torch_backend import register_backend
    from syncline.transport.statistics import Statistics
    from syncline.verbs import (
        all_reduce_,
        average_,
        barrier,
        broadcast_,
        keep_best_,
        mean,
        sync_gradients_,
    )
    from syncline.verbs.check_replicas import check_replicas
    from syncline.verbs.diverge import diverge

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

_NAMES = {
    "syncline": ("compression", "debug", "nn"),
    "syncline.contract": ("Contract", "Row"),
    "syncline.data": ("DistributedSampler",),
    "syncline.errors": (
        "CheckpointCorrupt",
        "CollectiveMismatch",
        "CollectiveTimeout",
        "ContractMismatch",
        "NonFiniteGradient",
        "PeerFailed",
        "PeerLost",
        "ReplicaDivergence",
        "SameDataWarning",
        "SynclineError",
        "UnevenInputs",
        "UnreducedGradients",
    ),
    "syncline.records": (
        "BackwardRecord",
        "BucketRecord",
        "BufferRecord",
        "EvolutionRecord",
        "NonFiniteRecord",
        "RoundRecord",
    ),
    "syncline.evolution.strategy": ("EvolutionStrategy",),
    "syncline.ddp.wrapper": ("DistributedDataParallel",),
    "syncline.sharded.sharing": ("share_", "write_shared"),
    "syncline.checkpoint.checkpointer": ("Checkpointer",),
    "syncline.checkpoint.train_state": ("TrainState",),
    "syncline.session.stop_request": ("EXIT_STOPPED",),
    "syncline.strategies": ("DiLoCo", "EveryStep", "Gossip", "LocalSGD", "Manual", "ParameterServer"),
    "syncline.gradients.riders.replica_watch": ("ReplicaCheck",),
    "syncline.torch_backend": ("register_backend",),
    "syncline.transport.statistics": ("Statistics",),
    "syncline.verbs": (
        "all_reduce_",
        "average_",
        "barrier",
        "broadcast_",
        "keep_best_",
        "mean",
        "sync_gradients_",
    ),
    "syncline.verbs.check_replicas": ("check_replicas",),
    "syncline.verbs.diverge": ("diverge",),
    "syncline.session.ranks": ("World",),
    "syncline.session.world": ("init", "shutdown", "world"),
}
hand_out(__name__, _NAMES)
