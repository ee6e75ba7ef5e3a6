"""Engines that move flat tensors between ranks.

base.py      the contract: `Transport`, `Work`, `Statistics`
c10d.py      any torch.distributed process group (Gloo, NCCL, MPI, UCC)
threads.py   ranks as threads of one process, deterministic; also a process that is alone
meeting.py   where those threads meet
opening.py   how a transaction on the main lane is opened, whatever it is about
faulty.py    another engine, failing on purpose
"""
