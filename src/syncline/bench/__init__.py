"""Measuring in turns: what `syncline bench` and the programs in benchmarks/ share.

rounds.py   competitors take turns; medians, ratios and their intervals
models.py   the models that are trained
"""
