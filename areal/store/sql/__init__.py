"""The store in SQL, written once for every database (engine.py is the seam)."""
