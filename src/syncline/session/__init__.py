"""The session of a process, which begins when the process joins the other ranks and ends when it leaves them.

`init` checks its arguments in asked.py. Then it joins the ranks in rendezvous.py and selects the transport in
transports.py. One object of the class `Session` holds the state of the process. world.py creates this object.

Imports: errors, faces, tracebacks, words, checks, environment, user_code, launchers, _torch,
liveness, transport.

asked.py         the arguments of `init`, checked
ending.py        the end of the process: reports of an exception to the launcher and the peers; an end without a hang
listening.py     sockets for stores, which listen at one address only; this module needs no torch
process.py       the error file and other records of a rank for its launcher; its end when the launcher ends
ranks.py         World: the rank and the device of a process, and the number of ranks
registry.py      objects that the library attaches to a user's modules, found by their class
rendezvous.py    the ranks wait for each other at the store, compare their arguments, and agree on a backend
session.py       the session of this process
stop_request.py  requests to stop this process, which a signal or the program makes
transports.py    the transport of each process group, selected by all of its ranks together
world.py         the functions init, shutdown, is_joined, regroup, world and transport_of
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
    from syncline.session.world import begin_in_fork as begin_in_fork
    from syncline.session.world import transport_of as transport_of

hand_out(__name__)
