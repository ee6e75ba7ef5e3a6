"""A training run on disk and back, the same on all ranks or not at all.

Imports: errors, words, differences, checks, user_code, _torch, transport, session, optimizers, equality, gradients,
sharded, data, compression.

capture.py       copy this rank's state: tensors, and what is not a tensor
checkpointer.py  Checkpointer: save, load, prune
dataloaders.py   warn of DataLoaders that a resumed run would read differently
directory.py     the directory of all saves: which are committed, which may be removed
encoding.py      a state as JSON beside named tensors, and back
files.py         durable writes and renames
load_torch.py    load a checkpoint that plain torch has written
objects.py       the state dictionaries of modules and optimizers
on_all_ranks.py  report a failure on one rank as the same error on all
random_state.py  the state of random number generators
restore.py       read what one rank needs of a save
rollback.py      undo a load that failed
snapshot.py      one save: a manifest and tensor files
stop.py          stop all ranks after the same step
tensor_file.py   safetensors files with checksums
torch_file.py    read what `torch.save` has written, without running it
train_state.py   TrainState: what belongs to a run, by name
validation.py    does a file say what we write?
verify.py        is what was loaded equal on all ranks?
"""
