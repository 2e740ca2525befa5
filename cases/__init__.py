"""The published figures, one case per file; harness/figures/case.py finds a case by its number."""
