"""The command line, as users run it."""
