"""Data-parallel PyTorch whose synchronization you can read, choose and trust.

This file lists the public names. docs/inside/architecture.md shows the packages of the library in import order.

`import syncline` imports only `faces.py`. A public name is imported when a program uses it for the first time. So
programs start faster, and `syncline --help` does not import torch. To add a public name, add one import below.
`__all__` consists of the names in these imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.faces import hand_out

if TYPE_CHECKING:
    from syncline import compression as compression
    from syncline import debug as debug
    from syncline import exporters as exporters
    from syncline import nn as nn
    from syncline.checkpoint.checkpointer import Checkpointer as Checkpointer
    from syncline.checkpoint.train_state import TrainState as TrainState
    from syncline.contract import Contract as Contract
    from syncline.contract import Row as Row
    from syncline.data import DistributedSampler as DistributedSampler
    from syncline.ddp.replacement import replace_torch_ddp as replace_torch_ddp
    from syncline.ddp.wrapper import DistributedDataParallel as DistributedDataParallel
    from syncline.errors import CheckpointCorrupt as CheckpointCorrupt
    from syncline.errors import CollectiveMismatch as CollectiveMismatch
    from syncline.errors import CollectiveTimeout as CollectiveTimeout
    from syncline.errors import ContractMismatch as ContractMismatch
    from syncline.errors import NonFiniteGradient as NonFiniteGradient
    from syncline.errors import PeerFailed as PeerFailed
    from syncline.errors import PeerLost as PeerLost
    from syncline.errors import ReplicaDivergence as ReplicaDivergence
    from syncline.errors import SameDataWarning as SameDataWarning
    from syncline.errors import SynclineError as SynclineError
    from syncline.errors import UnevenInputs as UnevenInputs
    from syncline.errors import UnreducedGradients as UnreducedGradients
    from syncline.events import Observer as Observer
    from syncline.evolution.strategy import EvolutionStrategy as EvolutionStrategy
    from syncline.gradients.riders.replica_watch import ReplicaCheck as ReplicaCheck
    from syncline.records import BackwardRecord as BackwardRecord
    from syncline.records import BucketRecord as BucketRecord
    from syncline.records import BufferRecord as BufferRecord
    from syncline.records import EvolutionRecord as EvolutionRecord
    from syncline.records import NonFiniteRecord as NonFiniteRecord
    from syncline.records import RoundRecord as RoundRecord
    from syncline.resilience.steps import steps as steps
    from syncline.session.ranks import World as World
    from syncline.session.stop_request import EXIT_STOPPED as EXIT_STOPPED
    from syncline.session.world import init as init
    from syncline.session.world import shutdown as shutdown
    from syncline.session.world import world as world
    from syncline.sharded.sharing import share_ as share_
    from syncline.sharded.sharing import write_shared as write_shared
    from syncline.strategies import DiLoCo as DiLoCo
    from syncline.strategies import EveryStep as EveryStep
    from syncline.strategies import Gossip as Gossip
    from syncline.strategies import LocalSGD as LocalSGD
    from syncline.strategies import Manual as Manual
    from syncline.strategies import ParameterServer as ParameterServer
    from syncline.tools.launch.function import launch as launch
    from syncline.torch_backend import register_backend as register_backend
    from syncline.tracing.trace import trace as trace
    from syncline.transport.statistics import Statistics as Statistics
    from syncline.verbs import all_reduce_ as all_reduce_
    from syncline.verbs import average_ as average_
    from syncline.verbs import barrier as barrier
    from syncline.verbs import broadcast_ as broadcast_
    from syncline.verbs import keep_best_ as keep_best_
    from syncline.verbs import mean as mean
    from syncline.verbs import sync_gradients_ as sync_gradients_
    from syncline.verbs.check_replicas import check_replicas as check_replicas
    from syncline.verbs.diverge import diverge as diverge
    from syncline.verbs.gather import gather as gather

__version__ = "0.2.0"

hand_out(__name__)
