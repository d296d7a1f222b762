"""Measurements of one machine and volume; nothing here is imported by the connector."""
