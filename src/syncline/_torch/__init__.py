"""Access to torch's private names, and replacements of methods of torch's classes. No other package uses either.

Each file has one theme. It looks up each private name once, at import, and states for what the name is used. A name
that the installed torch lacks never breaks `import syncline`. Either the file has a fallback, documented at the name,
or the feature that needs the name raises an error with torch's version when a program uses the feature.

Imports: errors.

autograd.py        graph tasks of the autograd engine
elastic.py         torch's elastic agent, on which the launcher runs
lookup.py          the lookup of a private name, and the error if the name is missing
modules.py         modules, joinables, torch's own DistributedDataParallel, torch.compile
optimizers.py      optimizers that step inside backward; hooks of their state; GradScalers
process_groups.py  process groups, their backends and stores
tensors.py         operations on lists of tensors; tensor subclasses
"""

from __future__ import annotations

from syncline._torch.optimizers import is_scaler_in_use, note_scalers

__all__ = ["is_scaler_in_use", "note_scalers"]
