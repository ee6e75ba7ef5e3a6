"""Strategies for frameworks that run the training loop. A file is imported only by programs that use its framework.

Imports: errors, trees, user_code, transport, session, nn, strategies, verbs, ddp.

lightning.py          strategies for `lightning`: of its Trainer and of its Fabric
lightning_fabric.py   the strategy for the package `lightning_fabric`
lightning_methods.py  the methods of these strategies; this module needs no Lightning
pytorch_lightning.py  the strategy for the package `pytorch_lightning`
"""
