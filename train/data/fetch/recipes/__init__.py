"""Recipes that come along: which public data is taken, and what of it."""
