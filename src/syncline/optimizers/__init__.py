"""Attached optimizers, and functions that read the contents of an optimizer.

Ranks compare the steps and the settings of attached optimizers.

Imports: errors, words, checks, trees, user_code, _torch.

attached.py  an attached optimizer, whose steps are counted and whose settings can be compared
contents.py  the tensors and Python numbers of an optimizer; checks of the optimizers that users' functions return
"""

from __future__ import annotations

from syncline.optimizers.attached import AttachedOptimizer

__all__ = ["AttachedOptimizer"]
