"""The upstream channel: any OpenAI-compatible address at which reward and judge models answer. No torch.

    async with Channel(config.api_gateway, config.model_routing) as channel:
        route = channel.find("reward_model")
        answer = await channel.complete(route, {"messages": [...]})        # a Chat Completions answer, or UpstreamError

client.py sends, repeats and reads; answers.py knows what is an answer and what is a failure, limits.py bounds each route, config/base_url.py
and proxies.py say where a call goes. Used by the gateway alone: whoever wants an upstream model asks the gateway for it.
"""
