"""The published figures: one file is one case. harness/figures/case.py finds them by number."""
