"""Knees and gains that keep what a model predicts, computed from a text."""
