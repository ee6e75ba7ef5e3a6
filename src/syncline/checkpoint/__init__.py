"""Save a training run to disk and load it again, on all ranks or on none.

Imports: errors, words, differences, checks, user_code, _torch, transport, session, optimizers, equality, gradients,
sharded, data, compression.

capture.py       copy this rank's state: tensors on the CPU, everything else as JSON values
checkpointer.py  Checkpointer: save, load, prune
dataloaders.py   warn about DataLoaders that would read differently in a resumed run
directory.py     the directory of all saves: list, commit and prune them
encoding.py      encode a state as JSON and named tensors, and decode it
files.py         durable writes and renames
load_torch.py    load a checkpoint that plain torch wrote
objects.py       take and load the state of modules and optimizers
on_all_ranks.py  raise a failure on one rank as the same error on all ranks
random_state.py  the state of random number generators
restore.py       read the part of a save that one rank needs
rollback.py      undo a load that failed
snapshot.py      one save: a manifest and tensor files
stop.py          stop all ranks after the same step
tensor_file.py   safetensors files with checksums
torch_file.py    read a `torch.save` file without running code from it
train_state.py   TrainState: the objects of a training run, by name
validation.py    check the content of a file before it is used
verify.py        check that loaded objects are equal on all ranks
"""
