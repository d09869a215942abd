"""Tools to compare. ``tools_for(case)`` of each module yields the module's tools for a case, or raises SkippedError."""
