"""The only room that uses torch's private names, and that replaces methods of torch's classes.

Each file has one theme. It looks its names up once, when it is imported, and says what each is for. A name that this
torch lacks never stops `import syncline`: there is a fallback, named where the name is, or the feature that needs the
name raises an error with torch's version when it is used. Only `errors` is imported from the rest of Syncline.

Imports: errors.

autograd.py        graph tasks of the autograd engine
compilation.py     keep torch.compile out of code that must run as written
elastic.py         torch's elastic agent, on which the launcher runs
grad_scaler.py     is a GradScaler in use?
lookup.py          how a private name is looked up, and the error where it is missing
modules.py         modules, joinables, and torch's own DistributedDataParallel
optimizers.py      optimizers that step inside backward; hooks of their state
process_groups.py  process groups, their backends and stores
tensors.py         operations on lists of tensors; tensor subclasses
"""

from __future__ import annotations
