"""Diagnosis: what a machine has, and (later) its kernel log and timelines."""
