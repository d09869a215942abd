"""The contestants: each module's ``enter(case)`` gives the contestants it has for a case, or raises SkippedError."""
