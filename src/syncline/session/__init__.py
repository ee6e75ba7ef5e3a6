"""The session of a process: its rank, and how it joins and leaves the other ranks.

`init` calls these modules in order: arguments, rendezvous, transports, world.

Imports: errors, differences, checks, environment, _torch, liveness, transport.

arguments.py     checks the arguments of `sl.init`, and writes them as lines that ranks compare
process.py       writes the error file for the launcher, and ends the process when the launcher ends
rendezvous.py    ranks meet at the store, compare arguments and agree on a backend
stop_request.py  records requests to stop this process
transports.py    selects the engine, the same on all ranks
world.py         World, init, shutdown, and the transport of a group
"""
