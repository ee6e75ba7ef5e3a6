"""Training without a backward pass.

members.py   a population on this rank: noise, evaluation, the estimated gradient
strategy.py  `EvolutionStrategy`: what the ranks agree on, what travels, and the step
"""
