"""Modules shared by the commands of `experiments`."""
