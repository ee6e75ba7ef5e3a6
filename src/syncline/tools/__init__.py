"""The command line and the parts behind it. Nothing in the library imports this package.

Imports: environment, user_code, _torch, transport, torch_backend, session, gradients, verbs, ddp, debug.
"""
