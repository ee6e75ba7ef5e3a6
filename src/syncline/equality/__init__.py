"""Are tensors equal on all ranks, bit for bit, and if not, where?

Imports: errors, words, differences, transport, tensors.

fingerprint.py  64 bits for each tensor, compared between ranks
locate.py       find the tensors, the elements and the ranks that differ
"""
