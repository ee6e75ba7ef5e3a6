"""What the engines can do on this machine, measured in turns: `syncline bench` and the programs in benchmarks/.

arguments.py   what the programs in benchmarks/ are told; --rounds, --quick, --json
rounds.py      competitors take turns; medians, ratios and their intervals
ranks.py       the program of each rank: measures, writes down what it saw
reductions.py  all_reduce by each engine
training.py    a training step by each wrapper
models.py      the models that are trained
mpi.py         an MPI as a competitor: another process tree, told when it is its turn
mpi_peer.py    the program of each rank of that tree; needs numpy and mpi4py, and nothing of ours
machine.py     what is measured on
summary.py     from rounds to figures; pure
tables.py      from figures to text; pure
frontier.py    loss against bytes, and time on a link; pure
plot.py        from figures to a picture
"""
