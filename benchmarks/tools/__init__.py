"""Tools to compare: each module's ``tools_for(case)`` yields its tools for a case, or raises SkippedError."""
