"""Riders: small facts that each rank sends behind its gradients. Each rider has one file.

To add a rider, write a subclass of Rider in a file here, and add it in `roster.py` and in the list below.

base.py              Rider, the interface of one rider; Riders, several of them
coverage.py          which slice of a replica is compared in which step
finite.py            search for NaN and infinity in tensors and in this rank's gradients
forwards.py          rider: forwards in training mode that had no backward
items.py             rider: the items behind gradients, under `normalize_by`
metrics.py           rider: means over ranks of the metrics given to `ddp.report`
missing.py           riders: parameters without a gradient; static graphs that changed
nonfinite.py         rider: gradients that are NaN or infinite; marks on gradients that must not be applied
nonfinite_report.py  the error or warning about such gradients
replica_search.py    search for the values in which replicas differ
replica_watch.py     rider: the fingerprint of one slice of the replica per step, and its comparison
roster.py            all riders of a reducer, in order
same_data.py         rider: a hash of gradients, to detect that all ranks train on the same data
settings.py          rider: the settings of attached optimizers
stop.py              rider: this rank's vote on stopping
"""
