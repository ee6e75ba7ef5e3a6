"""Engines that move flat tensors between ranks.

base.py        the contract: `Transport`, `Work`, `Statistics`
opening.py     how a transaction on the main lane is opened, whatever it is about
calls.py       the words of errors: what was called, why a group is broken
deadlock.py    can the ranks still go on? (pure)
user_code.py   where in the user's code a thread is
faulty.py      another engine, failing on purpose

c10d.py        any torch.distributed process group (Gloo, NCCL, MPI, UCC)
c10d_work.py   one of its operations, and how it is waited for
long_wait.py   a wait that lasts: told to the peers, who are looked at
health.py      whether the group can still be used, and the errors if not
notices.py     what ranks tell each other through the group's store
publisher.py   the thread that tells where this rank is while it does not wait
store_line.py  a connection of our own to a store, and whether the store is still there

threads.py     ranks as threads of one process, deterministic; also a process that is alone
meeting.py     where those threads meet

hierarchy.py   several hosts with several ranks each: shared memory within a host, Gloo across
phases.py      operations that consist of several, and how they are driven on

backend.py              torch.distributed's backend "syncline"
backend_group.py        the process group that torch gets
backend_collectives.py  torch's collectives, built from a transport's operations
backend_reductions.py   those that reduce
backend_base.py         the state of a group, and how a call ends
backend_work.py         torch's works and futures
"""
