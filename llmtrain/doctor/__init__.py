"""What a run will stand on: this machine, and the way between machines."""
