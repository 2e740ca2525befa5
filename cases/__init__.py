"""The published figures: one case in each file. harness/figures/case.py finds a case by its number."""
