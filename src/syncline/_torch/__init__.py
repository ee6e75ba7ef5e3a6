"""Access to torch's private names, and replacements of methods of torch's classes. Only this package has them.

Each file has one theme. It looks up each private name once, usually at import, and states the feature that needs the
name. If the installed torch lacks a name, `import syncline` still works. Either the file has a fallback, documented at
the name, or a program that uses the feature gets an error that states torch's version.

Imports: errors, environment.

autograd.py        the graph tasks of the autograd engine, which are its runs; ranges that torch.profiler shows
elastic.py         torch's elastic agent, on which the launcher is based
lookup.py          the lookup of a private name, and the error if the name is missing
modules.py         modules, joinables, torch's own DistributedDataParallel, torch.compile
optimizers.py      optimizers that step inside backward; hooks of optimizers' state dicts; GradScalers
process_groups.py  process groups, their backends and stores; Gloo groups whose ranks get all addresses from rank 0
tensors.py         operations on lists of tensors; tensor subclasses; the transforms of torch.func
"""

from __future__ import annotations

from syncline._torch.optimizers import is_scaler_in_use, note_scalers

__all__ = ["is_scaler_in_use", "note_scalers"]
