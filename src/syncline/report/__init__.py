"""Plans and records, put into words. Nothing decides by these words.

Imports: words, records, contract, gradients.

explain.py  the rows of a contract, and the timeline of a step
"""
