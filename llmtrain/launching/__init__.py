"""How processes are started, set up and ended."""
