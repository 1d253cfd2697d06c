"""Rewards that the run gives by itself, once a session has ended: by a model of the upstream channel, or by a Python function.

    async with Scorer(store, gate, source, tasks, settings, say=announce) as scorer: ...      # scorer.py: what waits, scored and written
    source = ModelSource(client, "judge_model", reading, ...)                                 # model_source.py: asks through the gateway
    source = FunctionSource(pool)                                                             # function_source.py: a pool of processes

case.py is what a source sees of a session, prompts.py and parsers.py are how a model is asked and understood, health.py is whether it
answers at all. Everything here lies in the controller's event loop; nothing waits for it but a batch that has too few groups.
docs/rewards.md is the page for users. No torch.
"""
