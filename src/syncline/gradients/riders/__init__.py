"""Riders: each rider is a small fact that every rank sends behind its gradients.

To add a rider, write a subclass of Rider in a file of this folder. Add the class to `roster.py`, and the file to the
list below.

base.py              Rider, the interface of one rider; Riders, all riders of a reducer
coverage.py          which slice of a replica is compared in which step
differences.py       riders: the settings of optimizers, forwards without a backward, equal data
finite.py            search for NaN and infinity in tensors and in this rank's gradients
items.py             rider: the number of items that contributed to the gradients, under `normalize_by`
metrics.py           rider: means over ranks of the metrics given to `ddp.report`
missing.py           riders: parameters without a gradient; changes of a static graph
nonfinite.py         rider: gradients that are NaN or infinite; marks on gradients that must not be applied
nonfinite_notice.py  rider: one warning if gradients are not finite, the default
replica_look.py      rider: a comparison of all parameters in the steps 1, 2, 4, 8, ..., the default
replica_search.py    search for the values in which replicas differ
replica_watch.py     rider: the fingerprint of one slice of the replica in each step, which ranks compare
requests.py          riders: the vote on stopping; whether a process waits to join, in `sl.steps`
roster.py            all riders of a reducer, in order
"""
