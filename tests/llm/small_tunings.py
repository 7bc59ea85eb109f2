"""Tunings of the one-launch step that suit models as small as the tests'."""

from dataclasses import replace

from tegrad.llm.persistent import Tuning

SMALL = Tuning(consumers=4, per_tile=1, epilogue=2, pipeline_stages=3, polled=1, attention_warps=4, attention_rows=0)

LANES, TENSOR = (replace(SMALL, attention_pipeline=form, head_groups=1) for form in (1, 2))
"""Keys and values through the pipeline, attended by lanes and by tensor cores."""
