"""The planner: how a net lies on N devices before anybody rents them. `areal plan`; docs/parallel_plan.md.

shape.py (what the model is) · presets.py (well-known ones) · devices.py · layout.py (what may be divided by what) · memory.py · traffic.py (bytes and
seconds of a step) · search.py (all layouts, ranked) · report.py · __main__.py (the command). Pure arithmetic: no torch, no numpy.
"""
