"""The agent's side: where its model is, and under which key. `--agent-config agent_config.py` tells the same to the run."""

AGENT_CONFIG = {
    # "model_base_url": "http://localhost:8080/v1",  # where the agent's model was before
    "model_base_url": "http://localhost:9000/gateway/v1",  # areal's gateway
    "model_name": "your-policy-model-id",  # any name means the model that is trained
    "api_key": "gateway-internal-token",  # works on loopback only; the gateway opens and closes the agent's sessions
    "max_turns": 10,  # model calls of one session
}
