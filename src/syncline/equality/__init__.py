"""Bit-for-bit comparison of tensors between ranks: leaves (tensors and numbers), fingerprints, and differences.

Imports: errors, words, transport, optimizers, tensors.

fingerprint.py  64 bits per tensor or other value, and hashes of slices
leaves.py       the tensors and integers of modules and optimizers, by name
locate.py       the values, the elements and the ranks that differ, and the error that names them
"""

from __future__ import annotations

from syncline.equality.fingerprint import SliceHash

__all__ = ["SliceHash"]
