"""Synchronization of buffers, before a forward or together with the parameters.

Imports: records, transport, tensors, gradients.

policies.py  broadcast, average or none; a user's hook
pooling.py   the mean of buffers, and pooled running statistics
"""
