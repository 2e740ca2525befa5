"""The published figures: one file is one case. harness/case.py finds them by number."""
