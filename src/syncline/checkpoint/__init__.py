"""A training run on disk and back, the same on all ranks or not at all.

Imports: errors, words, checks, user_code, _torch, transport, session, optimizers, equality, gradients, sharded, data,
compression.

checkpointer.py  Checkpointer: save, load, stop
contents.py      the state of a rank as it is written, and the part of a save that one rank reads
dataloaders.py   warn of DataLoaders that a resumed run would read differently
directory.py     the saves in a directory: manifests; list, commit and prune saves
encoding.py      a state as JSON beside named tensors, and back
files.py         durable writes; safetensors files with checksums
load_torch.py    load a checkpoint that plain torch has written
objects.py       the state of modules, optimizers and random number generators
rollback.py      load on all ranks or on none: compare what was loaded, undo a failed load
stop.py          stop all ranks after the same step
store.py         the saves that all ranks make together: write one, read the newest intact one
torch_file.py    read what `torch.save` has written, without running it
train_state.py   TrainState: what belongs to a run, by name
"""
