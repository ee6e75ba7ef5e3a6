"""The command line `syncline` and the packages behind it. No other package of the library imports this package.

Imports: environment, user_code, _torch, transport, torch_backend, session, gradients, verbs, ddp, debug.
"""
