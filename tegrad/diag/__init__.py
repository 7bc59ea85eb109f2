"""Diagnosis: what a machine has, and what its kernel log says."""
