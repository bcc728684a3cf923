"""Composition: configuration, launchers and the command line."""
