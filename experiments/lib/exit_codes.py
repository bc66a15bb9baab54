"""Codes with which a command ends that was told to stop."""

PREEMPTED = 75  # "try again later", sysexits.h
INTERRUPTED = 130  # as a shell says of Ctrl-C
