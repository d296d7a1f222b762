"""The worker process: from a plan to finished jobs."""
