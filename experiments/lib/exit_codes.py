"""Exit codes of commands that were stopped by a signal."""

PREEMPTED = 75  # SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later"
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT, as shells report it
