"""Ranks of one host exchange bytes through memory that they share."""
