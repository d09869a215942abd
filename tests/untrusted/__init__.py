"""Invalid arguments and untrusted files: each raises a helpful error and changes nothing."""
