"""The session of a process: its rank, and how it joins and leaves the other ranks.

`init` calls these modules in order: arguments, rendezvous, transports, world.

Imports: errors, differences, checks, environment, _torch, liveness, transport.

arguments.py     check the arguments of `sl.init`, and write them as lines that ranks compare
listening.py     sockets that listen at one address, for stores; needs no torch
process.py       what a rank leaves for its launcher: an error file; and its end when the launcher ends
registry.py      what is attached to a user's modules, found by kind: the only such registry
rendezvous.py    how ranks meet at the store, compare arguments and agree on a backend
stop_request.py  was this process asked to stop?
transports.py    choose the engine, the same on all ranks
world.py         World, init, shutdown, and the transport of a group
"""
