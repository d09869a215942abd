"""Bad input and hostile files: every mistake gets an error that helps, and nothing is changed by it."""
