"""Two runs beside each other, one that takes turns and one that does not: `areal compare`; docs/async.md.

side.py (what one run measured) · tasks.py (whether both trained the same) · report.py (the table and what to make of it) · __main__.py
(the command). Only looks: logs, metrics and stores are opened to be read, also while the runs go on. No torch.
"""
