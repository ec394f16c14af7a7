"""Plugins for training tools that build the model themselves."""
