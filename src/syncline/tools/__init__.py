"""What people run. Nothing in the library imports it.

Imports: environment, user_code, _torch, transport, torch_backend, session, gradients, verbs, ddp, debug.
"""
