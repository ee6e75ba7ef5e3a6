"""Carries out strategies: counts steps, asks what is due, and moves the tensors."""

from __future__ import annotations

from syncline.rounds.driver import Rounds

__all__ = ["Rounds"]
