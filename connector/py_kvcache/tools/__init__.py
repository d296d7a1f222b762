"""What an operator runs against a root: doctor, inspect, verify. Nothing here imports vLLM or torch."""
