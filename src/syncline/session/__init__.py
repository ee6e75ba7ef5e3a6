"""The session of a process: the process joins the other ranks, has a rank, and leaves the others.

`init` checks its arguments (session.py), then calls rendezvous.py and transports.py. One object of the class `Session`
in session.py holds all state of the process. world.py creates this object.

Imports: errors, faces, words, checks, environment, user_code, _torch, liveness, transport.

ending.py        the end of the process: report an exception to the launcher and the peers, end without a hang
listening.py     sockets that listen at one address, for stores; needs no torch
process.py       the error file of a rank for the launcher; the end of a rank when the launcher ends
ranks.py         World: the rank of a process, from a launcher's variables, from a process group, or alone
registry.py      objects that the library attaches to a user's modules, found by their class
rendezvous.py    ranks wait for each other at the store, compare arguments and agree on a backend
session.py       the session of this process: states, the arguments of `init`
stop_request.py  requests to stop this process, by a signal or by the program
transports.py    the transport of each process group, selected by all of its ranks together
world.py         init, shutdown, world, and the transport of a group
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.faces import hand_out

if TYPE_CHECKING:
    from syncline.session.process import end_with_parent as end_with_parent
    from syncline.session.process import record_failure as record_failure
    from syncline.session.registry import REGISTRY as REGISTRY
    from syncline.session.rendezvous import Presence as Presence
    from syncline.session.rendezvous import wait_for_all as wait_for_all
    from syncline.session.world import transport_of as transport_of

hand_out(__name__)
