"""From measured times to first token to break-even thresholds. Pure, but for outputs.py."""
