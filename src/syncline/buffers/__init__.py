"""Keep buffers equal: before a forward, or when replicas meet.

Imports: records, transport, tensors, gradients.

policies.py  broadcast, average or none; a user's hook
pooling.py   the mean of buffers, and pooled running statistics
"""
