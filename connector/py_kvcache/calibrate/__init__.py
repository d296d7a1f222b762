"""Break-even of one node: asked, measure and verify have an engine, outputs writes, the rest is pure."""
