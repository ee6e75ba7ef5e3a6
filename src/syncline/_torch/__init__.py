"""Access to torch's private names, and replacements of methods of torch's classes. No other package uses either.

Each file has one theme. It looks up its names once, at import, and states what each is used for. A name that this
torch lacks never breaks `import syncline`: either there is a fallback, documented at the name, or the feature that
needs the name raises an error with torch's version when it is used. Only `errors` is imported from Syncline.

Imports: errors.

autograd.py        graph tasks of the autograd engine
elastic.py         torch's elastic agent, on which the launcher runs
lookup.py          how a private name is looked up, and the error where it is missing
modules.py         modules, joinables, torch's own DistributedDataParallel, torch.compile
optimizers.py      optimizers that step inside backward; hooks of their state; GradScalers
process_groups.py  process groups, their backends and stores
tensors.py         operations on lists of tensors; tensor subclasses
"""

from __future__ import annotations

from syncline._torch.optimizers import is_scaler_in_use, note_scalers

__all__ = ["is_scaler_in_use", "note_scalers"]
