"""Bit-for-bit comparison of tensors between ranks, and the location of differences.

Imports: errors, words, differences, transport, tensors.

fingerprint.py  64 bits per tensor, compared between ranks
locate.py       find the tensors, the elements and the ranks that differ
"""
