"""`rollout.backend: scripted:d1`: fixed generations from a JSONL file through the whole real path (docs/scripted.md).

    python -m areal.inference.scripted.server --spec FILE

The proxy's side of it is chat/scripted.py, which reads the same file for its vocabulary. No torch.
"""
