"""Bit-for-bit comparison of tensors and numbers between ranks.

Imports: errors, words, events, transport, optimizers, tensors.

fingerprint.py  64-bit fingerprints of tensors and other values, and hashes of slices of tensors
leaves.py       the tensors and integers of modules and optimizers, by name
locate.py       the search for values, elements and ranks that differ; the error that names them, and the event
"""

from __future__ import annotations

from syncline.equality.fingerprint import SliceHash, hash_of, hash_of_sample

__all__ = ["SliceHash", "hash_of", "hash_of_sample"]
