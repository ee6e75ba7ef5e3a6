"""The only room that uses torch's private names, and that replaces methods of torch's classes.

Each file has one theme. It looks its names up once, when it is imported, and says what each is for. A name that this
torch lacks never stops `import syncline`: there is a fallback, named where the name is, or the feature that needs the
name raises an error with torch's version when it is used. Only `errors` is imported from the rest of Syncline.

lookup.py          find a private name; the error for one that is missing
autograd.py        graph tasks of the engine, backwards inside of backwards, distributed autograd
compilation.py     torch.compile: is it loaded, and what it must not trace
elastic.py         the launcher: how it starts, polls and closes the processes of a host
grad_scaler.py     GradScalers in use
modules.py         modules, state dicts, torch's DistributedDataParallel, Join
optimizers.py      hooks of state dicts, optimizers that step inside backward
process_groups.py  process groups: make, list and forget them, and the calls that have no public name
tensors.py         tensors, their subclasses, and operations on lists of them
"""
