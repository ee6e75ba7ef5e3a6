"""What an optimizer consists of, and what is compared between ranks when it steps.

Imports: errors, words, trees, _torch.

attached.py      an attached optimizer: its settings are compared, its steps counted
contents.py      the tensors and Python numbers of an optimizer
weak_methods.py  methods put on an object that do not keep it alive
"""
