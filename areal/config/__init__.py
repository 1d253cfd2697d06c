"""Configuration: pydantic sections (one file per folder they configure), the loader, the S2 names. No torch."""
