"""Measurements: samples with their circumstances, and the figures computed from them. No tests here."""
