"""Synchronization of buffers, before a forward or together with the parameters.

Imports: errors, records, _torch, transport, tensors, gradients.

policies.py  synchronization by a policy (broadcast, average or none) or by a user's hook
pooling.py   the mean of buffers over ranks, with pooled running statistics
"""
