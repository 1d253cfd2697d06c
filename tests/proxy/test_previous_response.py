"""`previous_response_id` and `thread`: chains within a session, rebuilt from the store, closed to everybody else."""

from __future__ import annotations

from typing import Any

PATH = "/v1/responses"
KIWI = {"pieces": ["kiwi", "<|im_end|>"]}


async def ask(service: Any, key: str, sent: Any, **more: Any) -> Any:
    status, body, _ = await service.post(PATH, {"input": sent, **more}, key)
    assert status == 200, body
    return body


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


OPENING = "<|im_start|>assistant\n"


async def test_T034_a_chain_keeps_every_input_and_every_token(make_service: Any) -> None:
    service = await make_service([KIWI, {"pieces": ["seven", "<|im_end|>"]}, {"pieces": ["bye", "<|im_end|>"]}])
    key = await service.start()
    first = await ask(service, key, [{"role": "user", "content": "weather?"}], store=True)
    second = await ask(service, key, "and now?", previous_response_id=first["id"])
    third = await ask(service, key, "thanks", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    whole = turn("user", "weather?") + turn("assistant", "kiwi") + turn("user", "and now?") + turn("assistant", "seven")
    assert (await service.prompts(key))[2] == whole + turn("user", "thanks") + OPENING
    one, two, three = await service.recorded(key)
    assert (two.token_parent, three.token_parent) == (one.id, two.id)
    sampled = [*two.prompt_ids.tolist(), *two.completion.token_ids.tolist()]
    assert three.prompt_ids.tolist()[: len(sampled)] == sampled


async def test_T034_a_call_and_its_output_stay_in_the_chain(make_service: Any) -> None:
    service = await make_service([KIWI])
    key = await service.start()
    call = {"type": "function_call", "call_id": "call1", "name": "w", "arguments": '{"c": "Oslo"}'}
    output = {"type": "function_call_output", "call_id": "call1", "output": '{"t":7}'}
    first = await ask(service, key, [{"role": "user", "content": "weather?"}, call, output])
    await ask(service, key, "thanks", previous_response_id=first["id"])
    last = (await service.prompts(key))[1]
    for said in ("weather?", '"name": "w"', "Oslo", '{"t":7}', "kiwi", "thanks"):
        assert last.count(said) == 1
    assert last.index("Oslo") < last.index('{"t":7}') < last.index("kiwi") < last.index("thanks")


async def test_T035_the_answer_stands_once_where_it_was_and_usage_is_true(make_service: Any) -> None:
    service = await make_service([KIWI])
    key = await service.start()
    first = await ask(service, key, "pick a word", instructions="You are terse.")
    second = await ask(service, key, "repeat it", previous_response_id=first["id"])
    one, two = await service.prompts(key)
    assert one == turn("system", "You are terse.") + turn("user", "pick a word") + OPENING
    assert two == turn("user", "pick a word") + turn("assistant", "kiwi") + turn("user", "repeat it") + OPENING
    recorded = (await service.recorded(key))[1]
    usage = second["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(recorded.prompt_ids), 2)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_instructions_that_come_again_continue_the_very_tokens(make_service: Any) -> None:
    service = await make_service([KIWI])
    key = await service.start()
    first = await ask(service, key, "pick a word", instructions="You are terse.")
    await ask(service, key, "repeat it", instructions="You are terse.", previous_response_id=first["id"])
    one, two = await service.recorded(key)
    assert two.token_parent == one.id
    assert (await service.prompts(key))[1].count("You are terse.") == 1


async def test_T038_an_unknown_and_a_foreign_id_are_the_same_404(make_service: Any) -> None:
    service = await make_service([KIWI])
    mine, other = await service.start("a"), await service.start("b")
    foreign = (await ask(service, other, "hi"))["id"]
    replies = [
        await service.post(PATH, {"input": "x", "previous_response_id": name, "stream": stream}, mine)
        for name in ("resp_nope", foreign)
        for stream in (False, True)
    ]
    assert {status for status, _, _ in replies} == {404}
    assert all(body == replies[0][1] for _, body, _ in replies)
    assert replies[0][1]["error"]["param"] == "previous_response_id"
    assert await service.recorded(mine) == ()
    assert service.calls()["calls"][1:] == []


async def test_T039_a_developer_item_keeps_its_place_in_the_chain(make_service: Any) -> None:
    service = await make_service([KIWI])
    key = await service.start()
    first = await ask(service, key, "pick a word")
    new = [{"role": "developer", "content": "Answer in French."}, {"role": "user", "content": "hello"}]
    await ask(service, key, new, previous_response_id=first["id"])
    expected = turn("assistant", "kiwi") + turn("system", "Answer in French.") + turn("user", "hello") + OPENING
    assert (await service.prompts(key))[1].endswith(expected)


async def test_a_chain_outlives_the_worker_that_began_it(make_service: Any) -> None:
    service = await make_service([KIWI])
    key = await service.start()
    first = await ask(service, key, "pick a word")
    again = await make_service([KIWI])  # another process's proxy over the same store
    await ask(again, key, "repeat it", previous_response_id=first["id"])
    one, two = await again.recorded(key)
    assert two.token_parent == one.id


async def test_a_chain_may_fork_and_goes_on_from_any_protocols_answer(make_service: Any) -> None:
    service = await make_service([KIWI])
    key = await service.start()
    first = (await service.chat(key, "pick a word"))["id"]
    for text in ("left", "right"):
        await ask(service, key, text, previous_response_id=first)
    assert [one.token_parent for one in await service.recorded(key)] == [None, first, first]


async def test_counting_knows_the_chain(make_service: Any) -> None:
    service = await make_service([KIWI])
    key = await service.start()
    first = await ask(service, key, "pick a word")
    more = {"previous_response_id": first["id"]}
    _, counted, _ = await service.post(f"{PATH}/input_tokens", {"input": "more", **more}, key)
    used = await ask(service, key, "more", **more)
    assert counted["input_tokens"] == used["usage"]["input_tokens"]
    unknown = {"input": "more", "previous_response_id": "resp_nope"}
    assert (await service.post(f"{PATH}/input_tokens", unknown, key))[0] == 404


async def test_a_messages_thread_sends_only_what_is_new(make_service: Any) -> None:
    service = await make_service([KIWI])
    key = await service.start()
    tool = {"name": "w", "input_schema": {"type": "object", "properties": {}}}
    said = {"max_tokens": 9, "messages": [{"role": "user", "content": "pick a word"}], "thread": {"type": "create"}}
    _, first, _ = await service.post("/v1/messages", {**said, "system": "Be terse.", "tools": [tool]}, key)
    more = {"type": "continue", "previous_message_id": first["id"]}
    new = {"max_tokens": 9, "messages": [{"role": "user", "content": "repeat it"}], "thread": more}
    _, counted, _ = await service.post("/v1/messages/count_tokens", new, key)
    status, second, _ = await service.post("/v1/messages", new, key)
    assert (status, second["usage"]["input_tokens"]) == (200, counted["input_tokens"])
    one, two = await service.recorded(key)
    assert two.token_parent == one.id
    assert (two.tools, len(two.messages)) == (one.tools, 4)
    lost = {**new, "thread": {**more, "previous_message_id": "msg_nope"}}
    status, answer, _ = await service.post("/v1/messages", lost, key)
    assert (status, answer["error"]["details"]) == (404, {"error_code": "thread_not_found"})


async def test_credit_runs_along_the_chain_where_its_set_up_was_another(make_service: Any) -> None:
    service = await make_service([KIWI])
    key = await service.start()
    tool = {"type": "function", "name": "w", "parameters": {"type": "object", "properties": {}}}
    first = await ask(service, key, "pick a word", tools=[tool])
    second = await ask(service, key, "repeat it", previous_response_id=first["id"])  # as the API has it: no tools now
    third = await ask(service, key, "again", previous_response_id=second["id"], instructions="Be terse.")
    assert (await service.reward(key, 1.0))[0] == 200
    one, two, three = await service.recorded(key)
    assert [one.branch_reason, two.branch_reason, three.branch_reason] == ["", "tools_changed", "system_changed"]
    assert [one.token_parent, two.token_parent, three.token_parent] == [None, None, None]
    assert [one.credit_parent, two.credit_parent, three.credit_parent] == [None, first["id"], second["id"]]
    _, exported, _ = await service.post("/rl/export_trajectories", {"session_id": "task", "discount": 0.5})
    assert [each["discounted_reward"] for each in exported["interactions"]] == [0.25, 0.5, 1.0]
    assert third["id"] == three.id


async def test_the_named_answer_is_continued_where_two_read_alike(make_service: Any) -> None:
    service = await make_service([KIWI, {"pieces": ["ki", "wi", "<|im_end|>"]}])
    key = await service.start()
    first = await ask(service, key, "pick a word")
    other = await ask(service, key, "pick a word")
    for named in (first, other):
        await ask(service, key, "repeat it", previous_response_id=named["id"])
    done = await service.recorded(key)
    assert [one.token_parent for one in done] == [None, None, first["id"], other["id"]]
