"""One local page that shows a run while it runs: sessions, tokens with masks, log-probs and versions, queue, lag, reward, throughput.

    python -m areal.dashboard --run runs/areal/trial       # prints http://127.0.0.1:PORT/?token=...

It only reads: the store and metrics.jsonl. A process and a port of its own; nothing of the run waits for it. No torch.
"""
