"""The contents of optimizers, and what ranks compare when an optimizer steps.

Imports: errors, words, checks, trees, user_code, _torch.

attached.py  an attached optimizer: its steps are counted, its settings compared
contents.py  the tensors and Python numbers of an optimizer, and the optimizers that users' functions make
"""

from __future__ import annotations

from syncline.optimizers.attached import AttachedOptimizer

__all__ = ["AttachedOptimizer"]
