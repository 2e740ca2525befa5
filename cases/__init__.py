"""The published figures: one case in each file. papers/figures/case.py finds a case by its number."""
