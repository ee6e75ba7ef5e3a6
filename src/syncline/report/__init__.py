"""Plans and records as text. No decision depends on this text.

Imports: words, records, contract, gradients.

explain.py  the rows of a contract, and the timeline of a step
"""
