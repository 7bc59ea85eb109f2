"""One oracle for PTX in software and on silicon.

A *form* is an instruction with all its modifiers (`form.py`); the tables `table_*.py` list them by family. Inputs are
seeded by the form's name (`inputs.py`). `kernels.py` puts many forms into one kernel, which runs on the engine
(`engine.py`) and, recorded once, on a GPU (tests/hardware/ptx_oracle.py, `record.py`). `judge.py` compares as the ISA
allows; `models.py` holds independent exact models of what can be written simply. A case is the input and output of one
lane, or of one warp or block where lanes work together.
"""
