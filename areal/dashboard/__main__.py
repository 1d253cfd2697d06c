"""python -m areal.dashboard --run DIR"""

from __future__ import annotations

from areal.dashboard.server import main

if __name__ == "__main__":
    raise SystemExit(main())
