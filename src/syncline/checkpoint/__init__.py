"""Save a training run to disk, and load it on all ranks or on none.

Imports: errors, words, checks, environment, regular_files, trees, user_code, events, _torch, transport,
session, optimizers, tensors, equality, gradients, sharded, data, compression.

checkpointer.py  Checkpointer: save, load, and stop all ranks after the same step
contents.py      the state that a rank writes, and the part of a save that a rank reads
directory.py     read and write manifests; list, commit and prune the saves in a directory
encoding.py      encode a state as JSON and named tensors, and decode it
files.py         write files that survive a crash; safetensors files with checksums
load_torch.py    load a checkpoint that plain torch has written
objects.py       the state of modules, optimizers and random number generators
rollback.py      load on all ranks or on none: compare the loaded values, undo a failed load
store.py         the saves that all ranks make together: write a save, read the newest intact save
train_state.py   TrainState: the objects of a training run, saved and loaded together
"""
