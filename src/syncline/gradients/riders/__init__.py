"""Riders: small facts of each rank that travel behind the gradients, a file each.

To add one: a subclass of Rider in a file here, and a line in `GradientSync._make_riders` (`../reducer.py`).

base.py           Rider: what each one says, hears and concludes; all riders of a reducer
coverage.py       which slice of a replica is compared in which step
discarded.py      gradients that must not be applied
forwards.py       rider: forwards in training mode that had no backward
items.py          rider: the items behind gradients, under `normalize_by`
metrics.py        rider: means over ranks of what `ddp.report` was given
missing.py        riders: parameters without a gradient; static graphs that changed
nonfinite.py      rider: gradients that are NaN or infinite
replica_watch.py  compare a slice of the replica in each step
replicas.py       rider: the fingerprint of that slice
same_data.py      rider: a hash of gradients, to warn if all ranks train on the same data
settings.py       rider: the settings of attached optimizers
stop.py           rider: was this process asked to stop?
"""
